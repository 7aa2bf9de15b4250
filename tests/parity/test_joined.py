"""Small blocks share a unit: the same numbers, fewer gathers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lamina
from harness import run_ranks

BLOCKS, WIDTH = 13, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Of whose blocks a forward may leave some out, and run some twice or the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for number in order:
            x = self.blocks[number](x)
        return self.out(x)


ALL = list(range(BLOCKS))
ORDERS = {
    "all": [ALL] * 3,
    "some left out": [ALL, [0, 1, 2, 5, 6, 12], ALL],
    "backwards and twice": [ALL[::-1], [0, 1, 2, 1, 0, 12, 3], ALL],
    "one of each unit": [ALL[::2], ALL[1::2], [0, 2, 4]],
}


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)


def build() -> Net:
    torch.manual_seed(0)
    return Net().double()


def train(orders: list[list[int]], ways: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    found = []
    for way in ways:
        model = lamina.shard(build(), **way)
        optimizer = lamina.optim.AdamW(model.parameters(), lr=0.05, max_norm=1.0)
        names = [unit.name for unit in lamina.report(model).units]
        assert names == ["root", "blocks.0", *(f"blocks.{first}-{first + 1}" for first in range(1, BLOCKS, 2))]
        for step, order in enumerate(orders):
            model(batch(torch.distributed.get_rank(), step), order).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                model(batch(0, step), order[:3])
            model.train()
        with lamina.gathered(model):
            found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


def in_one_process(orders: list[list[int]], world: int) -> dict[str, Tensor]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step, order in enumerate(orders):
        model(torch.cat([batch(rank, step) for rank in range(world)]), order).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


WAYS: list[dict[str, Any]] = [
    {"transport": "c10d"},
    {"transport": "peer", "recompute": "full"},
    {"transport": "c10d", "recompute": 2, "slots": 1},
    {"strategy": "zero1"},
    {"strategy": "ddp", "recompute": "selective"},
]


@pytest.mark.parametrize(("name", "world"), list(zip(ORDERS, (3, 2, 3, 2), strict=True)))
def test_three_steps_equal_one_process(name: str, world: int) -> None:
    wanted = in_one_process(ORDERS[name], world)
    for found in run_ranks(world, train, ORDERS[name], WAYS):
        for values in found:
            for parameter, value in values.items():
                torch.testing.assert_close(value, wanted[parameter].detach(), rtol=0, atol=1e-10, msg=parameter)


def count(orders: list[list[int]]) -> list[int]:
    model = lamina.shard(build(), transport="c10d")
    for order in orders:
        before = [unit.gathers for unit in lamina.report(model).units]
        model(batch(0, 0), order).sum().backward()
    return [now.gathers - then for now, then in zip(lamina.report(model).units, before, strict=True)]


def test_a_unit_is_gathered_once_for_all_of_its_blocks() -> None:
    """Three slots hold the last units of the forward for the backward."""
    for gathers in run_ranks(2, count, [ALL] * 5):
        assert sum(gathers) == 8 + 4  # the root, with `out` in it, and seven units, of which three are held


def test_a_copy_has_the_same_units() -> None:
    for same in run_ranks(2, copied):
        assert same


def copied() -> bool:
    model = lamina.shard(build())
    other = copy.deepcopy(model)
    for one in (model, other):
        one(batch(0, 0), ALL).sum().backward()
    units = [[unit.name for unit in lamina.report(one).units] for one in (model, other)]
    return units[0] == units[1]
