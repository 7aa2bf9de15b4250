"""A step that is broken off by what is no `Exception` (Ctrl-C, `sys.exit()`), by another thread, or in a fork.

torch calls no hook of a forward that a `KeyboardInterrupt` ends: modules keep gathered weights, and the next forward
would take itself for a part of the one before.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from lamina.runtime.assemble import RUNTIMES

ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit, ZeroDivisionError)


def build(strategy: str = "zero3", transport: str = "c10d") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    if strategy:
        lamina.shard(model, strategy, units=["0", "2"], transport=transport)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def batch(number: int) -> Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int = 0, world: int = 1) -> None:
    model(batch(number)[rank::world]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    train(model, optimizer, number, dist.get_rank(), dist.get_world_size())


def plain(steps: int) -> nn.Module:
    model, optimizer = build("")
    for number in range(steps):
        train(model, optimizer, number)
    return model


def distance(model: nn.Module, steps: int) -> float:
    """From one process after so many steps."""
    found = [p.full() if isinstance(p, lamina.Shard) else p.detach() for p in model.parameters()]
    return max(float((a - b.detach()).abs().max()) for a, b in zip(found, plain(steps).parameters(), strict=True))


def break_off(model: nn.Module, end: type[BaseException], where: str) -> None:
    """`where`: before the weights of the last layer are gathered, while they are there, or in the backward."""

    def hook(*now: Any) -> None:
        raise end

    layer = model[2] if where != "backward" else model[1]
    register = layer.register_full_backward_hook if where == "backward" else layer.register_forward_pre_hook
    handle = register(hook, prepend=where == "before")
    try:
        model(batch(7)).square().mean().backward()
    except end:
        handle.remove()
        return
    raise AssertionError("it went through")


def saved(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> float:
    lamina.save(path, model, optimizer)
    other, own = build()
    lamina.load(path, other, own)
    return distance(other, 1)


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> float:
    with lamina.gathered(model):
        return distance(model, 1)


def read(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> float:
    return 0.0 if lamina.report(model).units and not lamina.check(model) else 1.0


def kept(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> float:
    expected = plain(1)(batch(3)).detach()
    with lamina.keep(model), torch.no_grad():
        return float((model(batch(3)) - expected).abs().max())


def a_part(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> float:
    return float((model[0](batch(3)) - plain(1)[0](batch(3))).detach().abs().max())


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> float:
    return 0.0


AFTERWARDS = (nothing, saved, gathered, read, kept, a_part)


def go_on(strategy: str, transport: str) -> float:
    """How far from one process a model is whose every other step was broken off."""
    model, optimizer = build(strategy, transport)
    broken = [(end, where) for end in ENDS for where in ("before", "inside", "backward")]
    for number, (end, where) in enumerate(broken):
        step(model, optimizer, number)
        break_off(model, end, where)
        optimizer.zero_grad()
    step(model, optimizer, len(broken))
    return distance(model, len(broken) + 1)


@pytest.mark.parametrize(
    ("strategy", "transport"), [("zero3", "c10d"), ("zero3", "peer"), ("zero1", "c10d"), ("ddp", "c10d")]
)
def test_a_step_that_was_broken_off_leaves_nothing(strategy: str, transport: str) -> None:
    assert max(run_ranks(2, go_on, strategy, transport)) < 1e-10


class SlowSums:
    """A transport's sums, the first of which lies in its place later than the second would, if nobody waited."""

    def __init__(self, transport: Any) -> None:
        self.all_reduce, self.calls = transport.all_reduce, 0
        transport.all_reduce = self

    def __call__(self, group: Any, tensor: Tensor) -> SlowSums.Work:
        self.calls += 1
        return SlowSums.Work(self.all_reduce(group, result := tensor.clone()), result, tensor, self.calls == 1)

    class Work:
        def __init__(self, work: Any, result: Tensor, target: Tensor, is_late: bool) -> None:
            self.work, self.result, self.target, self.is_late = work, result, target, is_late
            self.arrival = threading.Timer(0.2 * is_late, self.arrive)
            self.arrival.start()

        def arrive(self) -> None:
            self.work.wait()
            self.target.copy_(self.result)

        def wait(self, timeout: Any = None) -> None:
            self.arrival.join()
            time.sleep(0.3 * (not self.is_late))


def go_on_while_sums_arrive() -> float:
    model, optimizer = build("ddp")
    for number in range(2):
        step(model, optimizer, number)
    SlowSums(RUNTIMES[model].engine.reducer.transport)
    break_off(model, ZeroDivisionError, "backward")
    optimizer.zero_grad()
    step(model, optimizer, 2)
    return distance(model, 3)


def test_what_a_broken_backward_has_sent_does_not_meet_the_next() -> None:
    assert max(run_ranks(2, go_on_while_sums_arrive)) < 1e-10


def look_and_go_on(folder: str) -> dict[str, float]:
    found = {}
    for act in AFTERWARDS:
        for where in ("before", "inside"):
            model, optimizer = build()
            step(model, optimizer, 0)
            break_off(model, KeyboardInterrupt, where)
            seen = act(model, optimizer, f"{folder}/{where}")
            step(model, optimizer, 1)
            found[f"{act.__name__} {where}"] = max(seen, distance(model, 2))
    return found


def test_what_is_done_after_ctrl_c_sees_the_model_between_steps(tmp_path: Path) -> None:
    for found in run_ranks(2, look_and_go_on, str(tmp_path)):
        assert max(found.values()) < 1e-10, found


# ---- threads ----------------------------------------------------------------------------------------------------


def in_threads(*acts: Callable[[], Any]) -> list[str]:
    """What each of them raised, when they ran at once."""
    said = [""] * len(acts)

    def run(number: int) -> None:
        try:
            acts[number]()
        except lamina.StateError as error:
            said[number] = str(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return said


def forward_in_forward() -> tuple[list[str], float]:
    model, optimizer = build()
    step(model, optimizer, 0)
    inside, other_is_done = threading.Event(), threading.Event()

    def wait(*now: Any) -> None:
        inside.set()
        other_is_done.wait(10)

    def first() -> None:
        handle = model[1].register_forward_hook(wait)
        try:
            step(model, optimizer, 1)
        finally:
            handle.remove()

    def second() -> None:
        inside.wait(10)
        try:
            model(batch(5))
        finally:
            other_is_done.set()

    return in_threads(first, second), distance(model, 2)


def backward_in_backward() -> tuple[list[str], float, float]:
    model, optimizer = build()
    other, _ = build()
    inside, other_is_done = threading.Event(), threading.Event()
    loss = other(batch(5)).sum()
    unrelated = nn.Linear(6, 6).double()

    def wait(*now: Any) -> None:
        inside.set()
        other_is_done.wait(10)

    def first() -> None:
        handle = model[1].register_full_backward_hook(wait)
        try:
            step(model, optimizer, 0)
        finally:
            handle.remove()

    def second() -> None:
        inside.wait(10)
        try:
            unrelated(batch(5)).sum().backward()  # of no sharded model: as ever
            loss.backward()
        finally:
            other_is_done.set()

    said = in_threads(first, second)
    assert unrelated.weight.grad is not None
    return said, distance(model, 1), distance(other, 0)


@pytest.mark.parametrize("way", [forward_in_forward, backward_in_backward])
def test_a_second_thread_is_named_and_the_first_is_right(way: Callable[[], tuple[list[str], float]]) -> None:
    for (first, second), *distances in run_ranks(2, way):
        assert not first and "thread" in second, (first, second)
        assert max(distances) < 1e-10


# ---- forks ------------------------------------------------------------------------------------------------------


def from_a_fork() -> tuple[list[str], float]:
    """What is said in the child of a rank, and where the rank gets afterwards."""
    model, optimizer = build()
    step(model, optimizer, 0)
    acts: list[Callable[[], Any]] = [
        lambda: model(batch(1)),
        lambda: model[0].weight.full(),
        lambda: model[0].weight.norm(),
        lambda: lamina.total(1),
        lambda: lamina.clip_grad_norm_(model, 1.0),
        lambda: lamina.save("never", model),
        lambda: lamina.shard(nn.Linear(2, 2)),
    ]
    model(batch(4)[dist.get_rank() :: 2]).sum().backward()  # something to clip
    said = []
    for act in acts:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                act()
                os.write(writer, b"nothing")
            except BaseException as error:
                os.write(writer, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(0)
        os.close(writer)
        with open(reader, "rb") as answer:
            said.append(answer.read().decode())
        os.waitpid(child, 0)
    optimizer.zero_grad()
    step(model, optimizer, 1)
    return said, distance(model, 2)


def test_a_forked_process_is_told_and_the_rank_goes_on() -> None:
    for rank, (said, far) in enumerate(run_ranks(2, from_a_fork, timeout=30)):
        assert all(text.startswith(f"StateError: this process was forked from rank {rank}") for text in said), said
        assert far < 1e-10
