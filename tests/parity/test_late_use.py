"""Units that no rank uses at first: later some do, and the others, who follow a program without them, take part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from parity.reference import TOLERANCE, Recipe, one_process, sharded

WIDTH = 5
ROUTES = (  # experts by step and rank
    ((), (), ()),
    ((), (), ()),
    ((0,), (), ()),
    ((), (1,), (0,)),
    ((), (), ()),
    ((2,), (), (0, 1)),
    ((1,), (1,), (1,)),
    ((), (), (2,)),
)


class Expert(nn.Module):
    """A frozen layer between two that train."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Expert() for _ in range(3))
        self.double()

    def forward(self, x: Tensor, route: tuple[int, ...]) -> Tensor:
        x = self.first(x)
        for number in route:
            x = x + self.experts[number](x)
        return self.last(x)


def loss_of(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    data = torch.randn(2, WIDTH, dtype=torch.float64, generator=generator)
    return model(data, ROUTES[step][rank] if micro == 0 else ()).pow(2).mean()


CASES: tuple[dict[str, Any], ...] = (
    {"strategy": "zero3"},
    {"strategy": "zero3", "slots": 1, "units": [nn.Linear]},  # frozen units as well
    {"strategy": "zero3", "recompute": "full", "debug": True},
    {"strategy": "zero3", "transport": "peer"},
    {"strategy": "zero2"},
    {"strategy": "zero1"},
    {"strategy": "ddp"},
)


def train(accumulation: str) -> list[tuple[str, float, int]]:
    world, found = dist.get_world_size(), []
    recipe = Recipe(accumulation=accumulation, steps=len(ROUTES))
    expected = one_process(Routed(), world, recipe, loss_of)
    for case in CASES:
        choices = {"units": [Expert], **case}
        lamina.debug(choices.pop("debug", False))
        model = lamina.shard(Routed(), **choices)
        lamina.debug(False)
        found.append((str(case), sharded(model, expected, recipe, loss_of)))
    return found


@pytest.mark.parametrize(("world", "accumulation"), [(2, "none"), (2, "defer"), (3, "each")])
def test_a_unit_that_comes_into_use_on_some_ranks(world: int, accumulation: str) -> None:
    for found in run_ranks(world, train, accumulation, timeout=90):
        assert all(worst <= TOLERANCE for _, worst in found), found


def count_exchanges() -> list[int]:
    """Exchanges of each step: with all units in use none, with one left out one for forward and backward each."""
    counts = []
    for route in ((0, 1, 2), (0, 1)):
        model = lamina.shard(Routed(), units=[Expert])
        control = model_control(model)
        for _ in range(4):
            before = control.exchanges
            model(torch.ones(1, WIDTH, dtype=torch.float64), route).sum().backward()
            model.zero_grad()
            counts.append(control.exchanges - before)
    return counts


def model_control(model: nn.Module) -> Any:
    from lamina.runtime.assemble import RUNTIMES

    return RUNTIMES[model].control


def test_only_programs_that_leave_units_out_cost_an_agreement() -> None:
    for counts in run_ranks(2, count_exchanges):
        assert counts[2:4] == [0, 0] and counts[6:8] == [2, 2], counts
