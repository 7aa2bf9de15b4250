"""What stays the same when the masters of a unit change their form: memory, numbers, checkpoints, errors on the way."""

from __future__ import annotations

import copy
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from lamina.core.lanes import Lanes
from lamina.core.shard_tensor import Shard
from lamina.optim import AdamW, capture
from lamina.runtime import gradients, halved
from lamina.runtime.access import runtime_of
from lamina.runtime.halved import HalvedMaster
from optim.training import batch, groups_of
from runtime.test_halves import BF16, are_whole, backward, bits_of, publish_ties_away
from runtime.test_halving import HOLDERS, Pair, clipping, halved_units, halves_pay, log, make, train
from transport.test_symmetric import shard_symmetrically


def in_a_step(model: nn.Module, number: int) -> tuple[bool, int]:
    """Whether masters are whole when activations are there, and touched steps."""
    loss = model(batch(number, dist.get_rank(), torch.float32)).float().sum()
    seen = are_whole(model), sum(unit.halving.touched_steps for unit in runtime_of(model).units)
    loss.backward()
    return seen


def memory_of_the_other_form() -> list[str]:
    """It is gone before the forward in which the form changes, though the optimizer has stepped the old one."""
    wrong = []
    with halves_pay():
        model = make()
    optimizer = AdamW(groups_of(model))
    train(model, optimizer, range(2))
    optimizer.max_norm = 0.5
    for number in range(2, 4):
        if (seen := in_a_step(model, number)) != (False, 0):
            wrong.append(f"step {number}, on the way to halves: {seen}")
        optimizer.step()
        optimizer.zero_grad()
    masters = [weakref.ref(master) for unit in runtime_of(model).units for master in unit.halved.values()]
    for number in range(4, 8):
        in_a_step(model, number)
        optimizer.step()
        optimizer.zero_grad()
        log(model, optimizer, None, number)
        if number == 6:
            in_a_step(model, 7)
            left = sum(master() is not None for master in masters)
            if any(halved_units(model)) or left or not masters:
                wrong.append(f"{left} of {len(masters)} still there, {halved_units(model)}")
            optimizer.zero_grad()
    return wrong


def test_the_memory_of_the_other_form_is_gone_before_the_forward() -> None:
    assert run_ranks(2, memory_of_the_other_form) == [[], []]


def without_memory() -> list[str]:
    """There is none for whole masters when they are to be put together, or somebody interrupts: training goes on."""
    pair, wrong = Pair(clipping), []
    makes, calls = HalvedMaster.make_whole, []

    def fails_second(master: HalvedMaster) -> Tensor:
        calls.append(master)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return makes(master)

    for number in range(9):
        if number == 3:
            with patch.object(HalvedMaster, "make_whole", fails_second):
                try:
                    backward(pair.free, number)
                    wrong.append("memory was not asked for")
                except torch.OutOfMemoryError:
                    pass
        pair.each(train, range(number, number + 1))
        pair.each(log, None, number)
        if pair.differ():
            wrong.append(f"step {number}")
    with patch.object(halved, "join", side_effect=KeyboardInterrupt):
        master = HalvedMaster(torch.ones(3), torch.zeros(3, dtype=BF16), Lanes(torch.device("cpu")))
        master.make_halves(master.lanes.compute)
        try:
            master.make_whole()
        except KeyboardInterrupt:
            pass
    if (
        any(halved_units(pair.free))
        or pair.publish_differently()
        or not torch.equal(master.make_whole(), torch.ones(3))
    ):
        wrong.append(f"in the end: {halved_units(pair.free)}")
    return wrong


def test_a_change_of_form_that_fails_changes_no_number() -> None:
    assert run_ranks(2, without_memory) == [[], []]


def written_before_a_step() -> list[str]:
    """What a step does not write is published with the next forward, also where the step publishes what it writes."""
    wrong = []
    for shard in (lamina.shard, shard_symmetrically):
        pair = Pair(clipping, shard=shard)
        for number in range(5):
            for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
                backward(model, number)
                with torch.no_grad():
                    for param in (model.frozen.weight, model.blocks[0].norm.weight, model.blocks[1].up.weight):
                        param.local.mul_(0.9)
                optimizer.step()
                optimizer.zero_grad()
            if pair.differ():
                wrong.append(f"step {number}")
        with torch.no_grad():
            seen = [model(batch(7, dist.get_rank(), torch.float32)) for model in pair.models]
        if pair.differ() or not torch.equal(*seen):
            wrong.append("in the end")
    return wrong


def test_writes_between_a_backward_and_its_step_are_seen() -> None:
    assert run_ranks(2, written_before_a_step) == [[], []]


def ties() -> list[str]:
    """What is published is rounded as its masters lie: with every change of their form it is published anew."""
    wrong = []
    for shard in (lamina.shard, shard_symmetrically):
        with halves_pay():
            model = make(shard=shard)
        optimizer, x = clipping(model), batch(0, dist.get_rank(), torch.float32)
        optimizer.max_norm = None

        def published(model: nn.Module = model, x: Tensor = x) -> float:
            with torch.no_grad():
                model(x)
            return max(t.float().max().item() for u in runtime_of(model).units for t in u.published if t.dtype is BF16)

        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1 + 2.0**-8)  # between 1 and 1 + 2 ** -7
        seen = [published()]
        optimizer.max_norm = 0.5
        seen += [published(), published()]
        capture.keep_masters_whole()
        seen += [published(), published()]
        if seen != [1.0, 1 + 2.0**-7, 1 + 2.0**-7, 1.0, 1.0]:
            wrong.append(str(seen))
    return wrong


def test_ties_are_rounded_as_masters_lie() -> None:
    assert run_ranks(2, ties) == [[], []]


# ---- beside training -----------------------------------------------------------------------------------------------


def beside(folder: str) -> list[str]:
    """Checkpoints, deep copies, adopted layers."""
    wrong = []
    with halves_pay():
        pair = Pair(clipping)
        pair.each(train, range(2))
        for model, optimizer, name in zip(pair.models, pair.optimizers, ("free", "whole"), strict=True):
            lamina.save(Path(folder) / name, model, optimizer)
        pair.each(train, range(2, 4))
        other = Pair(clipping)
        for model, optimizer, name in zip(other.models, other.optimizers, ("whole", "free"), strict=True):
            lamina.load(Path(folder) / name, model, optimizer)
        other.each(train, range(2, 4))
        if not all(map(torch.equal, bits_of(pair.free), bits_of(other.free))) or other.differ():
            wrong.append("saved and loaded")
        if not all(halved_units(pair.free)) or not all(halved_units(other.free)):
            wrong.append("a save is no reason to give up")
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
            lamina.save(Path(folder) / f"behind {model is pair.free}", model, optimizer, wait=False)
        pair.each(train, range(3, 4))
        if pair.differ() or are_whole(pair.free) or not all(halved_units(pair.free)):
            wrong.append("a save in the background holds no masters")
        lamina.checkpoint.finish()
        pair.each(train, range(4, 6))  # three touches in a row would be one too many
        twin, before = copy.deepcopy(pair.free), bits_of(pair.free)
        x = batch(7, dist.get_rank(), torch.float32)
        with torch.no_grad():
            twin(x)
        if any(halved_units(twin)) or not all(map(torch.equal, bits_of(twin), before)):
            wrong.append("a copy without an optimizer has whole masters")
        train(twin, clipping(twin), range(1))
        if not all(halved_units(twin)) or are_whole(twin):
            wrong.append("a copy with one has halves")
        pair.each(train, range(4, 5))
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
            torch.manual_seed(3)
            model.extra = nn.Linear(13, 3)
            optimizer.add_param_group({"params": lamina.adopt(model, model.extra, start="broadcast")})
        publish_ties_away(pair.whole, pair.free)
        pair.each(train, range(5, 8))
        if pair.differ() or not all(halved_units(pair.free)) or pair.publish_differently():
            wrong.append("adopted")
        lamina.check(pair.free)
        states = zip(pair.free.state_dict().items(), pair.whole.state_dict().values(), strict=True)
        wrong += [f"state_dict {name}" for (name, a), b in states if not torch.equal(a.full(), b.full())]
        values = {name: value.full() * 2 for name, value in pair.free.state_dict().items()}
        for model in pair.models:
            model.load_state_dict(values)
        pair.each(train, range(8, 9))
        if pair.differ() or not all(halved_units(pair.free)):
            wrong.append("load_state_dict")
    return wrong


def test_checkpoints_copies_and_adopted_layers() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(2, beside, folder) == [[], []]


def first_is_an_evaluation() -> list[str]:
    """In inference mode, with the optimizer there already; replicas beside shards."""
    wrong = []
    pair = Pair(clipping, strategy=lamina.Strategy(2, 2, 2))
    for model in pair.models:
        with torch.inference_mode():
            model(batch(0, dist.get_rank(), torch.float32))
    pair.each(train, range(3))
    for number in range(3, 8):  # one rank alone gives its halves up
        pair.each(train, range(number, number + 1))
        if dist.get_rank() == 1:
            for model in pair.models:
                for p in model.parameters():
                    assert isinstance(p, Shard)
                    float(p.local.sum())
        if dist.get_rank() != 1 and not all(halved_units(pair.free)):
            wrong.append("touched on another rank")
    if dist.get_rank() == 1 and any(halved_units(pair.free)):
        wrong.append("touched here")
    lamina.check(pair.free)
    if pair.differ():
        wrong.append("other numbers")
    return wrong


def test_ranks_decide_for_themselves() -> None:
    assert run_ranks(4, first_is_an_evaluation) == [[]] * 4


def room_of(optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]) -> list[float]:
    """What is asked for: parts of the gradients."""
    with halves_pay():
        model = make()
    own, asked = runtime_of(model).engine.gradients, []
    own.gives_back = True  # as on a GPU
    optimizer = optimizer_of(model)
    with patch.object(gradients, "make_room", lambda part, sizes_bytes, _: asked.append(part * sum(sizes_bytes))):
        train(model, optimizer, range(3))
    return asked


def rooms() -> list[bool]:
    return [bool(room_of(optimizer_of)) for optimizer_of in (clipping, HOLDERS["torch's"][0])]


def test_room_is_made_for_gradients_of_whole_masters() -> None:
    assert run_ranks(2, rooms) == [[False, True]] * 2
