"""Blocks that return what they were given: views of a tensor that was there before all of them.

Backward comes to the node of that tensor when the blocks have ended, and none of them begins there once more: it would
be gathered for nothing, and all of them at once.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from parity.reference import TOLERANCE, gradient_deviation
from parity.structures import WIDTH

BLOCKS, STEPS = 5, 3
WAYS = ("as it came", "in a dict", "a part of it", "changed in place", "changed in the block", "by some ranks alone")


class HandsOn(nn.Module):
    """Returns the bias of the positions beside its own output, as some encoders' blocks do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(WIDTH, WIDTH), way

    def forward(self, x: Tensor, bias: Tensor, rank: int) -> Any:
        if self.way == "by some ranks alone" and rank % 2:
            return x, bias
        y = torch.tanh(self.linear(x) + bias[0])
        if self.way == "changed in the block":
            bias += torch.sin(self.linear(y)).mean(0)
        if self.way == "in a dict":
            return {"y": y, "rest": [bias]}
        return y, bias[:-1] if self.way == "a part of it" else bias


class HandedOn(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.positions, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks, self.way = nn.ModuleList(HandsOn(way) for _ in range(BLOCKS)), way

    def forward(self, x: Tensor, rank: int) -> Tensor:  # (samples, WIDTH) -> (samples, WIDTH)
        bias = self.positions(torch.ones(BLOCKS + 1, WIDTH, dtype=x.dtype)).view(-1, WIDTH)
        for block in self.blocks:
            found = block(x, bias, rank)
            x, bias = (found["y"], *found["rest"]) if isinstance(found, dict) else found
            if self.way == "changed in place":
                bias += 0.1
        return self.last(x + bias.mean(0))


def data_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def built(way: str) -> HandedOn:
    torch.manual_seed(0)
    return HandedOn(way).double()


def train(way: str, slots: int, transport: str) -> tuple[float, list[int]]:
    """The last also: gathers in each step."""
    world, plain, worst, gathers = dist.get_world_size(), built(way), 0.0, [0]
    model = lamina.shard(built(way), units=["blocks.*"], slots=slots, transport=transport)
    for step in range(STEPS):
        for rank in range(world):
            (plain(data_of(rank, step), rank).pow(2).mean() / world).backward()
        model(data_of(dist.get_rank(), step), dist.get_rank()).pow(2).mean().backward()
        worst = max(worst, gradient_deviation(model, {name: p.grad for name, p in plain.named_parameters()}))
        gathers.append(lamina.report(model).gathers)
    return worst, [after - before for before, after in itertools.pairwise(gathers)]


def train_all(way: str) -> dict[int, list[tuple[float, list[int]]]]:
    return {slots: [train(way, slots, transport) for transport in ("c10d", "peer")] for slots in (1, 3)}


@pytest.mark.parametrize("way", WAYS)
def test_what_blocks_hand_on_begins_none_of_them(way: str) -> None:
    for found in run_ranks(2, train_all, way):
        for slots, rows in found.items():
            for worst, gathers in rows:
                assert worst <= TOLERANCE, found
                assert max(gathers) <= 2 * BLOCKS - slots + 1, found  # and the root; ranks that use none may take less
