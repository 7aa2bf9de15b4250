"""`transport="auto"` on GPUs, of models that publish much: peers come with an optimizer under which that costs nothing.

CPUs take peers at once: here they are told that what is published is too much, and that halves pay.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lamina
from harness import run_ranks
from lamina.errors import TransportError
from lamina.optim import AdamW, capture
from lamina.runtime import api, late_peers
from lamina.runtime.access import runtime_of
from lamina.runtime.publishing import SymmetricGatherer
from optim.training import batch, groups_of
from runtime.test_halves import backward, bits_of
from runtime.test_halving import clipping, halved_units, halves_pay, make
from transport.test_symmetric import files_for_gpus

TOO_MUCH = "peers would take 9.00 GiB, more than 2% of the GPU; 0.10 where ... steps: they come with its first forward"


@contextmanager
def much_is_published() -> Iterator[None]:
    with (
        halves_pay(),
        patch.object(api, "why_not_peers", lambda *asked: TOO_MUCH),
        patch.object(api, "would_come_late", lambda *asked: True),
        patch.object(late_peers, "would_come_late", lambda *asked: True),
    ):
        yield


def transport_of(model: nn.Module) -> str:
    return lamina.report(model).transport


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    backward(model, number)
    optimizer.step()
    optimizer.zero_grad()


# ---- they come -----------------------------------------------------------------------------------------------------
# Each way of beginning a training gives the optimizer; what it has done is done by a model that has peers from the
# start, too, and after it both take steps.


def at_once(model: nn.Module) -> AdamW:
    return clipping(model)


def behind_evaluations(model: nn.Module) -> AdamW:
    for number in range(5):
        with torch.no_grad():
            model(batch(number, dist.get_rank(), torch.float32))
    return clipping(model)


def behind_two_forwards(model: nn.Module) -> AdamW:
    for number in range(2):
        backward(model, number)
    model.zero_grad()
    return clipping(model)


def in_micro_batches(model: nn.Module) -> AdamW:
    """They come in the first one."""
    optimizer = clipping(model)
    for number in range(3):
        with lamina.accumulate(model, last=number == 2, defer=True):
            output = model(batch(number, dist.get_rank(), torch.float32)).float()
            lamina.token_mean(output.pow(2).sum(), 1 + number + dist.get_rank()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def between_micro_batches(model: nn.Module) -> AdamW:
    """The first one's sums wait for the second."""
    with lamina.accumulate(model, last=False, defer=True):
        backward(model, 0)
    optimizer = clipping(model)
    with lamina.accumulate(model, last=True, defer=True):
        backward(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def between_a_forward_and_its_backward(model: nn.Module) -> AdamW:
    losses = [model(batch(0, dist.get_rank(), torch.float32)).float().sum()]
    optimizer = clipping(model)
    losses.append(model(batch(1, dist.get_rank(), torch.float32)).float().sum())
    sum(losses).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def while_weights_are_kept(model: nn.Module) -> AdamW:
    optimizer = clipping(model)
    with lamina.keep(model.blocks[0]):
        backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def kept_in_each_step(model: nn.Module) -> AdamW:
    """They come before it."""
    optimizer = clipping(model)
    for number in range(late_peers.FORWARDS + 1):
        with lamina.keep(model.blocks[0]):
            for part in range(2):
                backward(model, 2 * number + part)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def checkpointed_whole(model: nn.Module) -> AdamW:
    """Each forward is one without gradients, and its second run is inside the backward."""
    optimizer = clipping(model)
    for number in range(3):
        inputs = batch(number, dist.get_rank(), torch.float32).requires_grad_()
        checkpoint(model, inputs, use_reentrant=True).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def while_traced(model: nn.Module) -> AdamW:
    optimizer = clipping(model)
    before = transport_of(model)
    with tempfile.TemporaryDirectory() as folder, lamina.trace(Path(folder, "trace.json"), model):
        step(model, optimizer, 0)
    assert transport_of(model) == before, "what is traced stays what it is"
    return optimizer


def behind_an_error(model: nn.Module) -> AdamW:
    optimizer = clipping(model)
    try:
        model(batch(0, dist.get_rank(), torch.float32)[:, :4])
    except RuntimeError:
        pass
    return optimizer


def behind_an_adoption(model: nn.Module) -> AdamW:
    torch.manual_seed(3)
    model.blocks[1].more = nn.Linear(13, 13)
    lamina.adopt(model, model.blocks[1].more)
    return clipping(model)


def for_a_copy(model: nn.Module) -> AdamW:
    """The copy trains; the model itself is a reference that does not."""
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(1.5)
    twin = copy.deepcopy(model)
    twin(batch(0, dist.get_rank(), torch.float32))
    model.twin = [twin]  # no module of the model's
    return clipping(twin)


BEGINNINGS: list[tuple[Callable[[nn.Module], AdamW], dict[str, Any]]] = [
    (at_once, {}),
    (at_once, {"recompute": "full", "slots": 1}),
    (at_once, {"strategy": lamina.Strategy(2, 2, 2)}),
    (behind_evaluations, {}),
    (behind_two_forwards, {"slots": 2}),
    (behind_evaluations, {"precision": lamina.Precision(compute=torch.bfloat16, keep=("blocks.0.*",))}),
    (in_micro_batches, {}),
    (between_micro_batches, {}),
    (between_a_forward_and_its_backward, {}),
    (while_weights_are_kept, {}),
    (kept_in_each_step, {}),
    (checkpointed_whole, {}),
    (while_traced, {}),
    (behind_an_error, {}),
    (behind_an_adoption, {}),
    (for_a_copy, {}),
]


def come() -> list[str]:
    wrong = []
    for begin, options in BEGINNINGS if dist.get_world_size() == 2 else BEGINNINGS[2:3]:
        ends, forms, name = [], [], f"{begin.__name__} {options}"
        with much_is_published():
            late = make(**{"transport": "auto", **options})
            if transport_of(late) != "c10d" or TOO_MUCH not in lamina.report(late).notes[0]:
                wrong.append(f"{name}: {lamina.report(late).notes}")
            for model in (late, make(**options)):
                optimizer = begin(model)
                model = getattr(model, "twin", [model])[0]
                for number in range(7, 11):
                    step(model, optimizer, number)
                ends.append(bits_of(model))
                notes = lamina.report(model).notes
                is_open = runtime_of(model).engine.gatherer.late_peers is not None
                forms.append(halved_units(model))
                if transport_of(model) != "peer" or not any(forms[-1]) or "c10d" in "".join(notes) or is_open:
                    wrong.append(f"{name}: {transport_of(model)}, {forms}, {notes}")
        if not all(map(torch.equal, *ends)) or forms[0] != forms[1]:
            wrong.append(f"{name}: other numbers, {forms}")
    return wrong


def test_they_come_and_no_number_changes() -> None:
    assert run_ranks(2, come) == [[], []]
    assert run_ranks(4, come) == [[]] * 4


def come_on_gpus() -> list[str]:
    """The same lanes and barriers as on GPUs, over files."""
    ends, folders, wrong = [], [], []
    for transport in ("auto", "peer"):
        with much_is_published(), files_for_gpus(folders):
            model = make(transport=transport)
            optimizer = clipping(model)
            with torch.no_grad():
                model(batch(5, dist.get_rank(), torch.float32))
            for number in range(4):
                step(model, optimizer, number)
            if not isinstance(runtime_of(model).engine.gatherer, SymmetricGatherer) or not all(halved_units(model)):
                wrong.append(f"{transport}: {lamina.report(model)}")
            ends.append(bits_of(model))
    return wrong + ([] if all(map(torch.equal, *ends)) else ["other numbers"])


def test_they_come_as_on_gpus() -> None:
    assert run_ranks(2, come_on_gpus) == [[], []]


# ---- they do not ---------------------------------------------------------------------------------------------------


def with_torchs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model))


def unclipped(model: nn.Module) -> AdamW:
    return AdamW(groups_of(model))


def of_a_part(model: nn.Module) -> AdamW:
    return AdamW(model.blocks[0].parameters(), max_norm=1.0)


def too_late(model: nn.Module) -> AdamW:
    for number in range(late_peers.FORWARDS):
        backward(model, number)
    model.zero_grad()
    return clipping(model)


def recorded(model: nn.Module) -> AdamW:
    capture.keep_masters_whole()
    return clipping(model)


def recorded_on_one_rank(model: nn.Module) -> AdamW:
    if dist.get_rank():
        capture.keep_masters_whole()
    return clipping(model)


def recorded_behind_a_step(model: nn.Module) -> AdamW:
    optimizer = clipping(model)
    step(model, optimizer, 0)
    capture.keep_masters_whole()
    return optimizer


def averaged(model: nn.Module) -> AdamW:
    """Behind evaluations, which find nothing yet."""
    optimizer = clipping(model)
    for number in range(late_peers.TOUCHED_STEPS):
        step(model, optimizer, number)
        with torch.no_grad():
            model(batch(number, dist.get_rank(), torch.float32))
            model.average = [param.clone() for param in model.parameters()]
    return optimizer


def logged_on_one_rank(model: nn.Module) -> AdamW:
    """Not the same one in each step."""
    optimizer = clipping(model)
    for number in range(late_peers.TOUCHED_STEPS):
        backward(model, number)
        if dist.get_rank() == number % 2:
            model.blocks[0].up.weight.local.sum()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def with_a_kept_view(model: nn.Module) -> AdamW:
    """Masters stay whole as long as it is held."""
    optimizer = clipping(model)
    step(model, optimizer, 0)
    model.held = [model.blocks[0].up.weight.local]
    step(model, optimizer, 1)
    return optimizer


def without_memory(model: nn.Module) -> AdamW:
    def refuse(*args: Any, **choices: Any) -> None:
        raise TransportError("transport='peer' needs 9 GiB on rank 1, where 8 are free; type transport='c10d'")

    optimizer = clipping(model)
    with patch.object(late_peers, "open_peers", refuse):
        backward(model, 0)
        model.zero_grad()
    return optimizer


NOBODY = r"more than 2% of the GPU, and no lamina.optim.AdamW\(max_norm=...\) held all parameters"
REFUSALS: list[tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = [
    (with_torchs, NOBODY),
    (unclipped, NOBODY),
    (of_a_part, NOBODY),
    (too_late, NOBODY),
    (recorded, "lamina.capture records steps"),
    (recorded_on_one_rank, "another rank refuses peers|lamina.capture records steps"),
    (recorded_behind_a_step, "lamina.capture records steps"),
    (averaged, "something else than the optimizer touches"),
    (logged_on_one_rank, "something else than the optimizer touches"),
    (with_a_kept_view, "something else than the optimizer touches"),
    (without_memory, "needs 9 GiB on rank 1, where 8 are free"),
]


def stay_away() -> list[str]:
    wrong = []
    for begin, words in REFUSALS:
        ends = []
        with much_is_published():
            for transport in ("auto", "c10d"):
                model = make(transport=transport)
                optimizer = begin(model) if begin is not without_memory or transport == "auto" else clipping(model)
                for number in range(7, 12):
                    step(model, optimizer, number)
                ends.append(bits_of(model))
                gatherer, notes = runtime_of(model).engine.gatherer, "".join(lamina.report(model).notes)
                is_over = gatherer.late_peers is None and "published" not in lamina.report(model).memory
                if transport_of(model) != "c10d" or not is_over or any(halved_units(model)):
                    wrong.append(f"{begin.__name__}: {notes}")
                if transport == "auto" and not re.search(words, notes):
                    wrong.append(f"{begin.__name__}: {notes}")
        if not all(map(torch.equal, *ends)):
            wrong.append(f"{begin.__name__}: other numbers")
    return wrong


def test_they_stay_away_and_no_number_changes() -> None:
    assert run_ranks(2, stay_away) == [[], []]


def ranks_that_differ() -> list[str]:
    """One rank has another optimizer, or has its own before the others: all take the same way."""
    wrong = []
    for number_of_steps, transport in ((0, "c10d"), (2, "peer")):
        with much_is_published():
            model = make(transport="auto")
            optimizer = AdamW(groups_of(model), max_norm=None if dist.get_rank() else 0.5)
            for number in range(5):
                if number == number_of_steps:
                    optimizer.max_norm = 0.5 if number else optimizer.max_norm
                backward(model, number)
                model.zero_grad()
        if transport_of(model) != transport:
            wrong.append(f"{transport}: {lamina.report(model).notes}")
    return wrong


def test_all_ranks_take_the_same_way() -> None:
    assert run_ranks(2, ranks_that_differ) == [[], []]


def copied() -> list[str]:
    """The copy of a model whose peers have come waits for an optimizer of its own: a reference needs none."""
    wrong = []
    with much_is_published():
        model = make(transport="auto")
        optimizer = clipping(model)
        for number in range(3):
            step(model, optimizer, number)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            seen = [each(batch(0, dist.get_rank(), torch.float32)) for each in (model, twin)]
        if (transport_of(model), transport_of(twin)) != ("peer", "c10d") or not torch.allclose(*seen, atol=1e-2):
            wrong.append(f"{lamina.report(twin)}")
        twin.train()
        others = clipping(twin)
        for number in range(3, 6):
            step(model, optimizer, number)
            step(twin, others, number)
        if transport_of(twin) != "peer" or not all(halved_units(twin)):
            wrong.append(f"trained: {lamina.report(twin)}")
    return wrong


def test_a_copy_waits_for_its_own_optimizer() -> None:
    assert run_ranks(2, copied) == [[], []]


def with_more_parameters() -> str:
    """What notices parameters that nobody has adopted goes on doing so."""
    with much_is_published():
        model = make(transport="auto")
        optimizer = clipping(model)
        step(model, optimizer, 0)
        model.blocks[0].more = nn.Parameter(torch.ones(3))
        try:
            step(model, optimizer, 1)
        except lamina.LaminaError as error:
            return f"{transport_of(model)}: {error}"
    return "nothing was said"


def test_new_parameters_are_noticed_all_the_same() -> None:
    for said in run_ranks(2, with_more_parameters):
        assert said.startswith("peer: ") and "`blocks.0.more`" in said and "lamina.adopt" in said, said


def gone() -> tuple[str, Tensor]:
    """A model that is dropped while it is open leaves nothing behind."""
    with much_is_published():
        model = make(transport="auto")
        backward(model, 0)
        other = make(transport="auto")
        del model
        optimizer = clipping(other)
        step(other, optimizer, 0)
        return transport_of(other), other.head.weight.local.clone()


def test_a_model_may_go_before_they_come() -> None:
    assert {transport for transport, _ in run_ranks(2, gone)} == {"peer"}
