"""Several sharded models in one graph, on ranks that take different paths through one of them, equal one process.

Each model issues its collectives in its own order on every rank; how those of two models interleave may differ.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
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
