"""Backwards in every order, graphs kept and used twice, losses that use part of the outputs: equal to one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lamina
from harness import expect_error, run_ranks
from parity.reference import TOLERANCE, gradient_deviation, parameter_deviation
from parity.structures import WIDTH, Chain

Path = Callable[[nn.Module, Callable[[int], Tensor]], None]  # model, data(number) -> gradients in p.grad


class Stack(Chain):
    """A chain of blocks under torch's checkpoint, or none."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x) if self.checkpointing == "none" else self._checkpoint(block, x)
        return self.last(x)

    def _checkpoint(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")


class TwoHeads(Chain):
    """Two outputs, from units of their own; a middle that both read."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.first(x))
        return self.blocks[0](x), self.blocks[1](torch.tanh(self.blocks[2](x)))


def two_in_order(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    one, two = model(data(0)).pow(2).mean(), model(data(1)).pow(2).mean()
    one.backward()
    two.backward()


def two_reversed(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    one, two = model(data(0)).pow(2).mean(), model(data(1)).pow(2).mean()
    two.backward()
    one.backward()


def two_summed(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    (model(data(0)).pow(2).mean() + 2 * model(data(1)).pow(2).mean()).backward()


def chained(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    """The output of one forward is part of the input of the next."""
    y = model(data(0))
    model(torch.cat([y, data(1)[:, : WIDTH - y.shape[1]]], dim=1)).pow(2).mean().backward()


def retained(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    loss = model(data(0)).pow(2).mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    (3 * loss).backward()


def retained_then_another(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    loss = model(data(0)).pow(2).mean()
    loss.backward(retain_graph=True)
    model(data(1)).pow(2).mean().backward()
    loss.backward()


def forgotten(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    """A forward whose backward never comes, then one whose backward does."""
    model(data(0))
    loss = model(data(1)).pow(2).mean()
    with torch.no_grad():
        model(data(2))
    loss.backward()


def input_gradient(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    """The inputs want gradients too, and are used again afterwards."""
    x = data(0).requires_grad_()
    model(x * 2).pow(2).mean().backward()
    assert x.grad is not None
    model(data(1) + x.grad).pow(2).mean().backward()


PATHS: dict[str, Path] = {
    path.__name__: path
    for path in (
        two_in_order,
        two_reversed,
        two_summed,
        chained,
        retained,
        retained_then_another,
        forgotten,
        input_gradient,
    )
}


def data_of(rank: int, step: int) -> Callable[[int], Tensor]:
    def data(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * rank + number)
        return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)

    return data


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def compare(
    build: Callable[[], nn.Module], path: Path, steps: int = 2, world: int | None = None, **options: Any
) -> float:
    """Largest difference of gradients and parameters over a few steps of SGD, on this rank."""
    world = world or dist.get_world_size()
    plain = seeded(build)
    model = lamina.shard(seeded(build), units=["blocks.*"], **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    worst = 0.0
    for step in range(steps):
        for rank in range(world):
            path(plain, data_of(rank, step))
        for param in plain.parameters():
            if param.grad is not None:
                param.grad /= world
        path(model, data_of(dist.get_rank(), step))
        worst = max(worst, gradient_deviation(model, {n: p.grad for n, p in plain.named_parameters()}))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        worst = max(worst, parameter_deviation(model, {n: p.detach() for n, p in plain.named_parameters()}))
    return worst


def run_paths(checkpointing: str, debug: bool) -> dict[str, float]:
    lamina.debug(debug)
    found = {}
    for number, (name, path) in enumerate(PATHS.items()):
        for strategy in ("zero3", "zero2" if number % 2 else "ddp"):
            try:
                found[f"{name} {strategy}"] = compare(
                    lambda: Stack(checkpointing), path, strategy=strategy, slots=1 + number % 3
                )
            except Exception as error:
                error.add_note(f"in {name} {strategy} slots={1 + number % 3}")
                raise
    return found


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_forwards_and_backwards_in_any_order(checkpointing: str, debug: bool) -> None:
    for found in run_ranks(2, run_paths, checkpointing, debug):
        assert max(found.values()) <= TOLERANCE, found


def two_heads() -> nn.Module:
    return TwoHeads(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


class FirstThenSecond:
    """One output in the first step, the other in the second, then both, then each on another rank."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, data: Callable[[int], Tensor]) -> None:
        one, two = model(data(0))
        step = self.calls // 3  # the reference on two ranks, then this rank itself
        self.calls += 1
        loss = {0: one, 1: two, 2: one + two}[step]
        loss.pow(2).mean().backward()


def run_heads(slots: int) -> float:
    return compare(two_heads, FirstThenSecond(), steps=3, slots=slots)


@pytest.mark.parametrize("slots", [1, 3])
def test_first_output_then_the_other(slots: int) -> None:
    assert max(run_ranks(2, run_heads, slots)) <= TOLERANCE


def other_head_on_each_rank() -> float:
    plain, model = seeded(two_heads), lamina.shard(seeded(two_heads), units=["blocks.*"])
    worst = 0.0
    for step in range(2):
        for rank in range(2):
            plain(data_of(rank, step)(0))[rank].pow(2).mean().div(2).backward()
        model(data_of(dist.get_rank(), step)(0))[dist.get_rank()].pow(2).mean().backward()
        worst = max(worst, gradient_deviation(model, {n: p.grad for n, p in plain.named_parameters()}))
        for m in (plain, model):
            m.zero_grad()
    return worst


def test_each_rank_trains_another_head() -> None:
    assert max(run_ranks(2, other_head_on_each_rank)) <= TOLERANCE


def gathers_with_checkpoint() -> list[float]:
    counts = []
    for checkpointing in ("reentrant", "non-reentrant"):
        model = lamina.shard(seeded(lambda: Stack(checkpointing)), units=["blocks.*"], slots=1)  # noqa: B023
        for step in range(3):
            before = [unit.gathers for unit in lamina.report(model).units]
            two_in_order(model, data_of(dist.get_rank(), step))
        after = [unit.gathers for unit in lamina.report(model).units]
        counts.append(max(b - a for a, b in zip(before, after, strict=True)) / 2)
    return counts


def test_checkpointing_gathers_at_most_twice_a_forward_and_backward() -> None:
    for counts in run_ranks(2, gathers_with_checkpoint):
        assert max(counts) <= 2, counts


def modes_in_any_order() -> float:
    """Evaluations of all kinds between training steps change nothing, and give the right output."""
    plain, model = seeded(lambda: Stack("none")), lamina.shard(seeded(lambda: Stack("none")), units=["blocks.*"])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    worst, data = 0.0, data_of(0, 0)
    for step, mode in enumerate((torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode)):
        for m in (plain, model):
            m.eval()
        with mode():
            worst = max(worst, (model(data(step)) - plain(data(step))).abs().max().item())
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            m.train()
            m(data(step)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return max(worst, parameter_deviation(model, {n: p.detach() for n, p in plain.named_parameters()}))


def test_evaluation_in_any_mode_between_steps() -> None:
    assert max(run_ranks(2, modes_in_any_order)) <= TOLERANCE


def extra_use_on_one_rank() -> None:
    """Rank 1 uses a block twice more than agreed, after all have learned the program."""
    model = lamina.shard(seeded(lambda: Stack("none")), units=["blocks.*"], slots=1, transport="c10d")
    for step in range(3):
        model(data_of(dist.get_rank(), step)(0)).pow(2).mean().backward()
    if dist.get_rank() == 1:
        model.blocks[0](data_of(1, 3)(0))
    else:
        model(data_of(0, 3)(0)).pow(2).mean().backward()


def test_an_extra_forward_on_one_rank_is_named_on_every_rank() -> None:
    expect_error(2, extra_use_on_one_rank, error="Disagreement", contains=["rank 0", "rank 1", "forward"], timeout=12)


class Repeating(Chain):
    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        for _ in range(times - 1):
            x = torch.tanh(self.blocks[0](x))
        return self.last(x)


def extra_use_inside(slots: int) -> float:
    """An extra use inside the forward, on rank 1 only, once all have learned the program."""

    def build() -> nn.Module:
        return Repeating(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    plain, model = seeded(build), lamina.shard(seeded(build), units=["blocks.*"], slots=slots)
    worst = 0.0
    for step in range(4):
        times = [1, 1 if step < 2 else 2]
        for rank in range(2):
            plain(data_of(rank, step)(0), times[rank]).pow(2).mean().div(2).backward()
        model(data_of(dist.get_rank(), step)(0), times[dist.get_rank()]).pow(2).mean().backward()
        worst = max(worst, gradient_deviation(model, {n: p.grad for n, p in plain.named_parameters()}))
        for m in (plain, model):
            m.zero_grad()
    return worst


@pytest.mark.parametrize("slots", [4, 1])
def test_an_extra_use_on_one_rank_is_right_whether_or_not_its_weights_are_still_there(slots: int) -> None:
    """Once nobody waits at the program's end any more, it is named: test_late_use.py."""
    assert max(run_ranks(2, extra_use_inside, slots, timeout=20)) <= TOLERANCE
