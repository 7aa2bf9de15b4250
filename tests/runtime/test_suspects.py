"""Which parameter was written to is said, although those of a unit have one version counter between them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks

WIDTH = 8


class Two(nn.Module):
    """Writes to its second weight in the forward: to all of it, or to what is another rank's."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            rows = self.second.weight if self.whole else self.second.weight[-1 if dist.get_rank() == 0 else 0]
            rows.mul_(2.0)
        return self.second(self.first(x))


def message(whole: bool, strategy: str) -> str:
    model = lamina.shard(nn.Sequential(Two(whole)), strategy, units=["0"])
    with pytest.raises(lamina.StateError) as raised:
        model(torch.ones(2, WIDTH))
    return str(raised.value)


@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
def test_who_was_written_to_is_named(strategy: str) -> None:
    said = run_ranks(2, message, True, strategy)
    assert "`0.second.weight`" in said[1], said  # its range lies in that weight
    assert all("in place inside the forward" in each and "`0.second.weight`" in each for each in said), said
    assert "`0.first.weight`" not in said[1], said


def test_all_are_named_where_it_could_be_any() -> None:
    for said in run_ranks(2, message, False, "zero3"):
        assert "`0.second.weight`" in said and "in place inside the forward" in said


def late(shapes: str) -> str:
    """A backward to weights that are not there, past the outputs: the one of that shape, or both."""
    sizes = {"two": (WIDTH, 2 * WIDTH), "alike": (WIDTH, WIDTH)}[shapes]
    left: list[Tensor] = []

    class Leaving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Linear(WIDTH, size, bias=False) for size in sizes)

        def forward(self, x: Tensor) -> Tensor:
            left.append(self.second(x))
            return self.first(x) + 0.0 * left[-1].detach().sum()

    model = lamina.shard(nn.Sequential(Leaving(), Leaving(), Leaving()), units=["0", "1", "2"], slots=1)
    model(torch.ones(2, WIDTH, requires_grad=True))
    with pytest.raises(lamina.StateError) as raised:
        left[1].sum().backward()
    return str(raised.value)


@pytest.mark.parametrize("shapes", ["two", "alike"])
def test_weights_that_are_not_there_are_told_apart_by_their_shape(shapes: str) -> None:
    for said in run_ranks(2, late, shapes):
        assert "`1.second.weight`" in said, said
        assert ("`1.first.weight`" in said) == (shapes == "alike"), said
