"""Several sharded models in one graph, on ranks that take different paths through one of them, equal one process.

Each model issues its collectives in its own order on every rank; how those of two models interleave may differ.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from hangs.training import under_short_limits
from harness import expect_error, run_ranks
from parity.reference import TOLERANCE, gradient_deviation, parameter_deviation
from parity.structures import WIDTH

STEPS = 3


class Stack(nn.Module):
    """Linear blocks; a rank may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, skipped: int | None = None) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number != skipped:
                x = torch.tanh(block(x))
        return x


def stacks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Stack().double() for _ in range(2)]


def loss_of(models: list[nn.Module], step: int, rank: int, way: str) -> Tensor:
    first, second = models
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).double()
    skipped = 1 if rank == 1 else None  # its reduction waits for the end of the backward, the other model's does not
    if way == "one after the other":
        return second(first(x), skipped).pow(2).mean()
    if way == "side by side":
        return (second(x, skipped) - first(x)).pow(2).mean()
    return first(second(first(x), skipped)).pow(2).mean()  # the first is used twice


def train(way: str, strategies: tuple[str, str], slots: int) -> float:
    world, rank = dist.get_world_size(), dist.get_rank()
    plain = stacks()
    models = [lamina.shard(m, s, units=["blocks.*"], slots=slots) for m, s in zip(stacks(), strategies, strict=True)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (*plain, *models)]
    worst = 0.0
    for step in range(STEPS):
        for other in range(world):
            (loss_of(plain, step, other, way) / world).backward()
        loss_of(models, step, rank, way).backward()
        for model, expected in zip(models, plain, strict=True):
            worst = max(worst, gradient_deviation(model, {name: p.grad for name, p in expected.named_parameters()}))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for model, expected in zip(models, plain, strict=True):
            worst = max(worst, parameter_deviation(model, {n: p.detach() for n, p in expected.named_parameters()}))
    return worst


@pytest.mark.parametrize("way", ["one after the other", "side by side", "twice"])
def test_two_models_in_one_graph_equal_one_process(way: str) -> None:
    for strategies, slots in ((("zero3", "zero3"), 1), (("zero3", "zero3"), 3), (("zero2", "ddp"), 2)):
        assert max(run_ranks(2, train, way, strategies, slots)) <= TOLERANCE, (way, strategies, slots)


class Joined(nn.Module):
    """Both as parts of one; each rank leaves out other blocks of each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = stacks()

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.second(self.first(x, 0 if rank == 0 else 2), 0 if rank == 1 else 1)


def train_on_paths(is_one: bool, strategy: str) -> float:
    world, rank, worst = dist.get_world_size(), dist.get_rank(), 0.0
    plain, model = Joined(), Joined()
    if is_one:
        lamina.shard(model, strategy, units=["*.blocks.*"])
    else:
        for part in (model.first, model.second):
            lamina.shard(part, strategy, units=["blocks.*"])
    for step in range(STEPS):
        x = [
            torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + r)).double() for r in range(world)
        ]
        for other in range(world):
            (plain(x[other], other).pow(2).mean() / world).backward()
        model(x[rank], rank).pow(2).mean().backward()
        worst = max(worst, gradient_deviation(model, {name: p.grad for name, p in plain.named_parameters()}))
        for each in (plain, model):
            each.zero_grad()
    return worst


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_ranks_that_wait_in_different_models_are_told_to_join_them(strategy: str) -> None:
    words = ("different models", "parts of one")
    expect_error(2, under_short_limits, train_on_paths, False, strategy, error="Disagreement", contains=words)
    assert max(run_ranks(2, train_on_paths, True, strategy)) <= TOLERANCE
