"""Units that no rank uses at first: later some do, and the others, who follow a program without them, take part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from hangs.training import under_short_limits
from harness import expect_error, run_ranks
from lamina.runtime.programs import CLEAN_ENDS
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


def count_exchanges() -> list[list[int]]:
    """Exchanges of each step behind the first: with all units in use, with one left out, with a path that changed."""
    found = []
    for route, other in (((0, 1, 2), None), ((0, 1), None), ((0, 1, 2), (2, 1, 0, 2, 1, 0))):
        model = lamina.shard(Routed(), units=[Expert], slots=1, transport="c10d")
        control, counts = model_control(model), []
        for step in range(CLEAN_ENDS + 3):
            before = control.exchanges
            path = other if other is not None and step == 2 and dist.get_rank() == 0 else route
            model(torch.ones(1, WIDTH, dtype=torch.float64), path).sum().backward()
            model.zero_grad()
            counts.append(control.exchanges - before)
        found.append(counts[1:])
    return found


def model_control(model: nn.Module) -> Any:
    from lamina.runtime.assemble import RUNTIMES

    return RUNTIMES[model].control


def test_where_ranks_meet_at_the_ends_of_programs() -> None:
    for same, left_out, changed in run_ranks(2, count_exchanges):
        assert same == [2] * CLEAN_ENDS + [0, 0], same
        assert left_out == [2] * (CLEAN_ENDS + 2), left_out
        assert changed[0] == 2 < changed[1] and changed[-2:] == [2, 2], changed


def leave_a_program() -> None:
    model = lamina.shard(Routed(), units=[Expert], slots=1, transport="c10d")
    for step in range(CLEAN_ENDS + 2):
        path = (2, 1, 0, 2, 1, 0) if step == CLEAN_ENDS + 1 and dist.get_rank() == 0 else (0, 1, 2)
        model(torch.ones(1, WIDTH, dtype=torch.float64), path).sum().backward()
        model.zero_grad()


def test_leaving_a_program_at_whose_end_nobody_waits_is_named() -> None:
    words = ("rank 0", "leaves its program for `forward of experts.", "transport='peer'", "lamina.keep")
    expect_error(2, under_short_limits, leave_a_program, error="Disagreement", contains=words)
