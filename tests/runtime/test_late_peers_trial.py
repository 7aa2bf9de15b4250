"""Peers that have come late: what ends their trial, what does not, and errors in the middle of coming and going."""

from __future__ import annotations

import copy
import itertools
import shutil
import tempfile
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from lamina.optim import AdamW
from lamina.runtime import halving, late_peers, succession
from lamina.runtime.access import runtime_of
from lamina.runtime.publishing import PeerGatherer
from optim.training import batch
from runtime.test_halves import bits_of
from runtime.test_halving import clipping, halved_units, make
from runtime.test_late_peers import much_is_published, step, transport_of

# ---- errors in the middle ------------------------------------------------------------------------------------------
# Where all ranks catch one, what comes next reads the weights that there are.


def failing(place: Any, name: str, calls: int) -> Any:
    """Interrupted in call number `calls` of a function, behind what it does."""
    function, count = getattr(place, name), itertools.count()

    def interrupted(*args: Any, **choices: Any) -> Any:
        found = function(*args, **choices)
        if next(count) == calls:
            raise KeyboardInterrupt
        return found

    return patch.object(place, name, interrupted)


STAGES = (
    (late_peers, "put_to_rest", 0),
    (halving, "put_together", 0),
    (halving, "put_together", 1),
    (late_peers, "forget_halves", 0),
    (succession, "build_engine", 0),
    (late_peers, "succeed", 0),
)


def interrupted() -> list[str]:
    wrong = []
    for moment in ("come", "go"):
        for place, name, calls in STAGES[-2:] if moment == "come" else STAGES:
            seen: list[list[Tensor]] = []
            with much_is_published():
                for transport in ("auto", "c10d"):
                    model = make(transport=transport)
                    optimizer = clipping(model)
                    for number in range(2 if moment == "go" else 0):
                        step(model, optimizer, number)
                        with torch.no_grad():
                            model.blocks[0].up.weight.mul_(1.25)
                    caught = 0
                    with failing(place, name, calls) if transport == "auto" else nullcontext():
                        try:
                            model(batch(5, dist.get_rank(), torch.float32))
                        except KeyboardInterrupt:
                            caught += 1
                    is_one_sided = isinstance(runtime_of(model).engine.gatherer, PeerGatherer)
                    if is_one_sided is not (transport_of(model) == "peer"):
                        wrong.append(f"{moment}, {name} {calls}: said to be {transport_of(model)}")
                    with torch.no_grad():
                        model.blocks[1].up.weight.mul_(1.25)
                        outputs = model(batch(6, dist.get_rank(), torch.float32))
                    for number in range(7, 10):
                        step(model, optimizer, number)
                    seen.append([outputs, *bits_of(model)])
                    if transport == "auto" and (not caught or runtime_of(model).engine.gatherer.late_peers is not None):
                        wrong.append(f"{moment}, {name} {calls}: caught {caught}, {lamina.report(model).notes}")
            if not all(map(torch.equal, *seen)):
                wrong.append(f"{moment}, {name} {calls}: other numbers")
    return wrong


def test_an_error_in_the_middle_leaves_the_weights_that_there_are() -> None:
    assert run_ranks(2, interrupted) == [[], []]


# ---- what is done once, behind the first step ----------------------------------------------------------------------


def log(model: nn.Module, optimizer: AdamW) -> None:
    if dist.get_rank():
        model.blocks[0].up.weight.local.sum()


def save_and_load(model: nn.Module, optimizer: AdamW) -> None:
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    lamina.save(f"{folders[0]}/checkpoint", model, optimizer)
    lamina.load(f"{folders[0]}/checkpoint", model, optimizer)
    dist.barrier()
    if not dist.get_rank():
        shutil.rmtree(folders[0])


def look_at_whole_weights(model: nn.Module, optimizer: AdamW) -> None:
    with lamina.gathered(model):
        model.state_dict()


def copy_it(model: nn.Module, optimizer: AdamW) -> None:
    copy.deepcopy(model)


def freeze_and_log(model: nn.Module, optimizer: AdamW) -> None:
    """What the optimizer does not write any more is no step's later."""
    model.blocks[0].requires_grad_(False)
    model.blocks[0].up.weight.norm()


def take_in_more(model: nn.Module, optimizer: AdamW) -> None:
    torch.manual_seed(3)
    model.blocks[1].more = nn.Linear(13, 13)
    optimizer.add_param_group({"params": lamina.adopt(model, model.blocks[1].more)})


ONCE = (log, save_and_load, look_at_whole_weights, copy_it, freeze_and_log, take_in_more)


def do_once() -> list[str]:
    wrong = []
    for act in ONCE:
        ends = []
        with much_is_published():
            for transport in ("auto", "peer"):
                model = make(transport=transport)
                optimizer = clipping(model)
                step(model, optimizer, 0)
                act(model, optimizer)
                for number in range(1, 5):
                    step(model, optimizer, number)
                ends.append(bits_of(model))
                is_open = runtime_of(model).engine.gatherer.late_peers is not None
                if transport_of(model) != "peer" or is_open or not any(halved_units(model)):
                    wrong.append(f"{act.__name__}: {transport_of(model)}, open {is_open}, {halved_units(model)}")
        if not all(map(torch.equal, *ends)):
            wrong.append(f"{act.__name__}: other numbers")
    return wrong


def test_they_stay_though_masters_are_touched_once() -> None:
    assert run_ranks(2, do_once) == [[], []]


# ---- what reads weights between steps -------------------------------------------------------------------------------
# What a step has written is published by whatever forward comes next, which may be none with gradients, or none between
# steps.


def evaluate(model: nn.Module, number: int) -> None:
    with torch.no_grad():
        model(batch(number, dist.get_rank(), torch.float32))


def infer(model: nn.Module, number: int) -> None:
    with torch.inference_mode():
        model(batch(number, dist.get_rank(), torch.float32))


def generate(model: nn.Module, number: int) -> None:
    with lamina.keep(model), torch.no_grad():
        model(batch(number, dist.get_rank(), torch.float32))


def hold_a_graph(model: nn.Module, number: int) -> None:
    """As what a generator has given to a discriminator, detached."""
    model.held = [model(batch(number, dist.get_rank(), torch.float32))]


def hold_a_graph_on_one_rank(model: nn.Module, number: int) -> None:
    hold_a_graph(model, number)
    if dist.get_rank():
        model.held.clear()


READS = (evaluate, infer, generate, hold_a_graph, hold_a_graph_on_one_rank)


def read_between() -> list[str]:
    wrong = []
    for read in READS:
        ends = []
        with much_is_published():
            for transport in ("auto", "peer"):
                model = make(transport=transport)
                optimizer = clipping(model)
                for number in range(4):
                    read(model, number)
                    step(model, optimizer, number)
                    read(model, number)
                ends.append(bits_of(model))
                is_open = runtime_of(model).engine.gatherer.late_peers is not None
                if transport_of(model) != "peer" or not all(halved_units(model)) or is_open:
                    wrong.append(f"{read.__name__}: {transport_of(model)}, open {is_open}, {halved_units(model)}")
        if not all(map(torch.equal, *ends)):
            wrong.append(f"{read.__name__}: other numbers")
    return wrong


def test_they_stay_though_each_step_is_evaluated() -> None:
    assert run_ranks(2, read_between) == [[], []]
