"""Where memory ran out, and what would fit: with torch's own failures, on every rank, without a hang."""

from __future__ import annotations

import re
import resource
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lamina
from harness import RankFailure, run_ranks
from lamina import cli
from lamina.core.terminal import add_notes, words_of
from lamina.errors import OutOfMemory
from lamina.runtime.failing import Place, asked_bytes, ran_out
from lamina.train import out_of_memory
from lamina.train.config import Config
from lamina.train.gpt import Block
from lamina.train.loop import Training
from lamina.train.out_of_memory import changes
from train.runs import changed, small, train, write_text

GIB = 1 << 30
HUGE_BYTES = 4 * GIB
ON_GPU = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.2 GiB is free"
)


class _Fails(torch.autograd.Function):
    """The identity; its backward finds no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise torch.OutOfMemoryError(ON_GPU)


def too_much() -> None:
    """torch's allocator for CPUs, at the limit of this process."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + GIB, before[1]))
    try:
        torch.empty(HUGE_BYTES, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fails(where: str, ranks: tuple[int, ...], config: Config, world: int) -> None:
    """A run whose second step finds no memory in the first block, on some ranks."""
    plain, one_step = Block.forward, Training._one_step
    calls, steps = [], []

    def forward(self: Block, x: Tensor, *more: Any) -> Tensor:
        calls.append(1)
        rank = dist.get_rank() if dist.is_initialized() else 0
        if len(steps) == 2 and len(calls) == 1 and rank in ranks:
            if where == "forward":
                too_much()
            x = _Fails.apply(x)
        return plain(self, x, *more)

    def step(self: Training) -> Any:
        calls.clear()
        steps.append(1)
        return one_step(self)

    Block.forward, Training._one_step = forward, step  # type: ignore[method-assign]
    try:
        train(world, config)
    finally:
        Block.forward, Training._one_step = plain, one_step  # type: ignore[method-assign]


def run_config(folder: Path, **changes: Any) -> Config:
    return small(write_text(folder), folder / "run", batch=8, evaluate_every=100, save_every=100, **changes)


def test_the_message_says_where_and_what_fits(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory) as failed:
        fails("forward", (0,), run_config(tmp_path), 1)
    head, moment, needs, *commands = str(failed.value).splitlines()
    assert head == "out of memory in step 2, forward of `layers.0`; torch asked for 4.0 GiB more"
    assert re.fullmatch(
        r"the plan has .* KiB there \(weights .* KiB, .*activations .* KiB\); its peak is .* KiB at .*", moment
    )
    assert "the smallest changes that fit" in needs and len(commands) == 2
    words = [shlex.split(line, comments=True) for line in commands]
    assert all(
        w[:5] == ["lamina", "train", str(tmp_path / "run/run.toml"), "--output", str(tmp_path / "1")] for w in words
    )
    assert [w[5:] for w in words] == [["--recompute", "selective"], ["--accumulate", "2"]]
    assert cli.main([*words[0][1:], "--print-config", "--device", "cpu"]) == 0, "what is said can be typed"
    assert isinstance(failed.value.__cause__, RuntimeError) and failed.value.code == "LAM-M"


def test_other_ranks_do_not_hang(tmp_path: Path) -> None:
    """One rank runs out in its backward; the others end with an error that names it."""
    with pytest.raises(RankFailure) as failed:
        run_ranks(2, fails, "backward", (1,), run_config(tmp_path, strategy="ddp"), 2, timeout=40)
    errors = failed.value.errors
    assert {rank: error.type_name for rank, error in errors.items()} == {0: "Disagreement", 1: "OutOfMemory"}
    assert "backward of `layers.0`; torch asked for 2.5 GiB more" in str(errors[1])


class _Chain(torch.nn.Sequential):
    fails_in = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        return self[1](_Fails.apply(x) if self.fails_in == "backward" else x)


def own_loop(fails_in: str, units: list[Any]) -> None:
    """Nobody catches it; in a launched rank it goes to the launcher."""
    model = lamina.shard(_Chain(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), "zero2", units=units)
    model.fails_in = fails_in  # type: ignore[assignment]
    if fails_in == "forward":
        model[1].register_forward_pre_hook(lambda *_: too_much())
    model(torch.ones(2, 8)).sum().backward()


def noted(fails_in: str, units: list[Any]) -> tuple[str, list[str]]:
    """On a rank: the type of the error, and its notes once a terminal would show it."""
    with pytest.raises(RuntimeError) as failed:
        own_loop(fails_in, units)
    add_notes(failed.value)
    add_notes(failed.value)
    assert "recompute=" in words_of(failed.value), "what a terminal shows"
    return type(failed.value).__name__, failed.value.__notes__


@pytest.mark.parametrize(("units", "unit"), [(["0", "1"], "1"), ([["0", "1"]], "0-1")])
@pytest.mark.parametrize("fails_in, kind", [("forward", "RuntimeError"), ("backward", "OutOfMemoryError")])
def test_a_loop_of_ones_own_gets_a_note(fails_in: str, kind: str, units: list[Any], unit: str) -> None:
    for name, notes in run_ranks(2, noted, fails_in, units):
        (note,) = notes
        assert name == kind, "it stays torch's"
        where = f"{fails_in} of `{unit}`" if fails_in == "forward" else fails_in  # nothing is gathered in this backward
        assert f"memory ran out in {where}" in note and "or 'full', strategy='zero3')" in note


def test_what_does_not_run_out_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), out_of_memory.explained(None, False):  # type: ignore[arg-type]
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="shapes"), out_of_memory.explained(None, False):  # type: ignore[arg-type]
        raise RuntimeError("shapes do not match")


def test_what_torch_says_is_read() -> None:
    on_cpu = (
        "[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"
    )
    assert asked_bytes(torch.OutOfMemoryError(ON_GPU)) == int(2.5 * GIB)
    assert asked_bytes(RuntimeError(on_cpu)) == 4096 and ran_out(RuntimeError(on_cpu))
    assert asked_bytes(MemoryError()) is None and ran_out(MemoryError())
    assert not ran_out(RuntimeError("memory format"))


def test_moments_of_a_plan() -> None:
    assert Place("backward").moments == ("backward loss", "backward loss")
    assert Place("evaluation", "layers.1").moments == ("forward layers.1",)
    assert str(Place("backward", "layers.1")) == "backward of `layers.1`" and str(Place("loss")) == "loss"


def test_what_peers_read_may_go() -> None:
    """Collectives need no published weights; masters in halves are no larger over peers than by them."""

    def flags(world: int = 4, **more: Any) -> list[str]:
        return [change.flags for change in changes(changed(Config(), batch=8, **more), world)]

    assert flags(strategy="zero3", transport="peer")[0] == "--transport c10d"
    for more in ({"transport": "c10d"}, {"transport": "peer", "halves": True}, {"transport": "peer", "world": 1}):
        assert "--transport c10d" not in flags(strategy="zero3", **more)
    assert "--transport c10d" not in flags(strategy="ddp", transport="peer")


def test_the_forecast_is_of_the_transport_that_ran(tmp_path: Path) -> None:
    """`auto` has taken peers, whose published weights are in the forecast."""
    config = run_config(tmp_path, strategy="zero3", transport="auto")
    with pytest.raises(RankFailure) as failed:
        run_ranks(2, fails, "backward", (0, 1), config, 2, timeout=150)
    message = str(failed.value.errors[0])
    assert "--transport c10d" in message and "slots" in message


@pytest.mark.parametrize(
    "strategy, recompute, batch", [("ddp", "none", 8), ("zero2", "selective", 3), ("zero3", "full", 1)]
)
def test_changes_compute_the_same_step(strategy: str, recompute: str, batch: int) -> None:
    config = changed(Config(), strategy=strategy, recompute=recompute, batch=batch)
    found = list(changes(config, 4))
    for change in found:
        batches = change.config.batches
        assert (batches.batch or 0) * batches.accumulate == batch * config.batches.accumulate
        assert change.config.optimisation == config.optimisation and change.flags
    assert len({change.flags for change in found}) == len(found)
    if (strategy, recompute) == ("zero3", "full"):
        assert not found
    singles = [change.flags for change in found if change.flags.count("--") == 1]
    assert [change.flags for change in found][: len(singles)] == singles, "one change comes before two"
