"""Units that stand inside one another on some ranks only: slots fall free at other moments there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import lamina
from harness import run_ranks
from parity.reference import TOLERANCE, gradient_deviation

WIDTH, WORLD = 8, 4


class Block(nn.Module):
    """Calls a block that is not its child, in the middle of its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, inner: nn.Module | None = None) -> Tensor:
        hidden = self.up(x).tanh()
        if inner is not None:
            hidden = hidden * inner(x).mean()
        return x + self.down(hidden)


class Nests(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Tensor, nested: bool) -> Tensor:
        x = self.first(x)
        for outer, inner in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = outer(x, inner) if nested else inner(outer(x))
        return self.last(x)


def built() -> Nests:
    torch.manual_seed(0)
    return Nests().double()


def loss_of(model: nn.Module, rank: int, micro: int, nests: Sequence[int]) -> Tensor:
    x = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + micro))
    return model(x, rank in nests).square().mean()


def deviation(strategy: Any, nests: Sequence[int], options: dict[str, Any]) -> float:
    """Largest relative difference of the gradients of three steps, each of two micro-batches."""
    plain = built()
    for rank in range(WORLD):
        for micro in range(2):
            (loss_of(plain, rank, micro, nests) / WORLD).backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if strategy == "hsdp" else None
    model = lamina.shard(built(), strategy, mesh=mesh, units=["blocks.*"], slots=1, **options)
    worst = 0.0
    for _ in range(3):  # the first two agree step by step, the third follows a program where there is one
        for micro in range(2):
            with lamina.accumulate(model, last=micro == 1):
                loss_of(model, dist.get_rank(), micro, nests).backward()
        worst = max(worst, gradient_deviation(model, expected))
        model.zero_grad()
    return worst


@pytest.mark.parametrize("transport", ["c10d", "peer"])
@pytest.mark.parametrize("strategy", ["zero3", "hsdp", lamina.Strategy(2, 2, 4), lamina.Strategy(2, 4, 4)], ids=str)
def test_units_nested_on_some_ranks_equal_one_process(strategy: Any, transport: str) -> None:
    for nests in ([2], [0, 3]):
        found = run_ranks(WORLD, deviation, strategy, nests, {"transport": transport})
        assert max(found) <= TOLERANCE, (nests, found)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_units_nested_on_some_ranks_equal_one_process(recompute: str) -> None:
    for strategy in ("hsdp", lamina.Strategy(2, 2, 4)):
        found = run_ranks(WORLD, deviation, strategy, [1, 2], {"recompute": recompute})
        assert max(found) <= TOLERANCE, (strategy, found)
