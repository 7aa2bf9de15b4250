"""An error in the middle of `lamina.adopt`, on all ranks or on one: every rank says by name what happened.

A model that is half changed must not compute: it would end in an error that names something else, or train apart.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lamina
from harness import RankFailure, run_ranks
from lamina.runtime import adopting
from parity.models import UNITS, WIDTH, LanguageModel
from parity.reference import language_loss_of
from runtime.test_adopt import LowRank, Way

WAYS = (Way("zero3"), Way("zero3", "peer", 1), Way("zero1", slots=2), Way("ddp"))
STEPS = (
    "put_to_rest",
    "build_units",
    "_wrap_new_modules",
    "move_buffers",
    "_hooks_now",
    "_place",
    "succeed",
    "_hook",
    "let_hooks_know",
)


def sharded(way: Way) -> nn.Module:
    torch.manual_seed(0)
    model = LanguageModel().double()
    return lamina.shard(model, way.strategy, units=UNITS, transport=way.transport, slots=way.slots)


def change(model: nn.Module) -> None:
    torch.manual_seed(1)
    model.requires_grad_(False)
    for block in model.blocks:
        block.up = LowRank(block.up)
    model.norm = nn.LayerNorm(WIDTH)
    model.double()


def failing(step: Callable[..., Any], before: bool, error: type[BaseException]) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        if not before:
            step(*args, **kwargs)
        raise error("no memory is left")

    return fail


def value_of(param: nn.Parameter) -> torch.Tensor:
    return param.full() if isinstance(param, lamina.Shard) else param.detach().clone()


def said_by(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def interrupted(way: Way, step: str, before: bool, ranks: list[int], start: str, folder: Path) -> list[tuple[str, str]]:
    """What is said by the adoption, and by every use of the model after it."""
    model = sharded(way)
    values = [(p, value_of(p)) for p in model.parameters()]
    language_loss_of(model, 0, dist.get_rank(), 0).backward()
    change(model)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() in ranks:
            patch.setattr(adopting, step, failing(getattr(adopting, step), before, RuntimeError))
        said = [said_by(lambda: lamina.adopt(model, model, start))]
    copied = copy.deepcopy(model)
    uses: list[Callable[[], object]] = [
        lambda: language_loss_of(model, 0, 0, 0),
        lambda: language_loss_of(copied, 0, 0, 0),
        lambda: model.blocks[0](torch.zeros(1, 2, WIDTH, dtype=torch.float64)),
        lambda: lamina.adopt(model, model),
        lambda: lamina.save(folder, model),
        lambda: lamina.load(folder, model),
        lambda: lamina.report(model),
        lambda: lamina.keep(model).__enter__(),
        lambda: lamina.accumulate(model, last=True).__enter__(),
    ]
    with torch.no_grad():
        said.append(said_by(lambda: language_loss_of(model, 0, 0, 0)))
    said += [said_by(use) for use in uses]
    assert all(torch.equal(value_of(p), value) for p, value in values)
    dist.barrier()
    fresh = sharded(way)  # the process goes on
    language_loss_of(fresh, 0, dist.get_rank(), 0).backward()
    return said


@pytest.mark.parametrize("ranks", [[0, 1], [1]])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_a_half_changed_model_says_so_on_every_rank(step: str, before: bool, ranks: list[int], tmp_path: Path) -> None:
    for way in WAYS:
        for said in run_ranks(2, interrupted, way, step, before, ranks, "check", tmp_path):
            for number, (kind, message) in enumerate(said):
                assert kind == "StateError", (way, number, kind, message)
                assert "lamina.adopt() ended in the middle" in message and "no memory is left" in message
                assert "lamina.load(path, model, strict=False)" in message
                assert ("on rank 1 of 2" in message) == (ranks == [1]), message


def stopped(way: Way, step: str) -> tuple[str, str]:
    """What is said after Ctrl-C on all ranks."""
    model = sharded(way)
    change(model)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(adopting, step, failing(getattr(adopting, step), True, KeyboardInterrupt))
        lamina.adopt(model, model)
    return said_by(lambda: language_loss_of(model, 0, 0, 0))


@pytest.mark.parametrize("step", ["build_units", "succeed"])
def test_an_interrupt_is_handed_on_and_said_afterwards(step: str) -> None:
    for way in WAYS:
        for kind, message in run_ranks(2, stopped, way, step):
            assert kind == "StateError" and "KeyboardInterrupt" in message, message


def broadcast_interrupted(way: Way) -> None:
    """One rank fails where the others wait for its part of the new values."""
    model = sharded(way)
    change(model)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(adopting, "build_units", failing(adopting.build_units, True, RuntimeError))
        lamina.adopt(model, model, start="broadcast")


def test_ranks_that_wait_for_new_values_are_told() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, broadcast_interrupted, WAYS[0], timeout=60)
    assert set(caught.value.errors) == {0, 1}
    for error in caught.value.errors.values():
        assert error.type_name in ("StateError", "Disagreement"), error


def uninitialised(way: Way) -> list[tuple[str, str]]:
    """A buffer that nothing fills is refused before anything is changed; then it is filled."""
    model = sharded(way)
    model.extra = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    model.extra.register_buffer("table", torch.empty(3, device="meta"))
    said = [said_by(lambda: lamina.adopt(model, model.extra)), said_by(lambda: lamina.report(model))]
    model.extra.table = torch.zeros(3)
    said += [said_by(lambda: lamina.adopt(model, model.extra)), said_by(lambda: language_loss_of(model, 0, 0, 0))]
    return said


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_buffer_without_memory_is_refused_before_the_change(way: Way) -> None:
    for said in run_ranks(2, uninitialised, way):
        assert [kind for kind, _ in said] == ["InitialisationError", "nothing", "nothing", "nothing"], said
