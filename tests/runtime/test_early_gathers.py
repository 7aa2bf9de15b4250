"""Gathers wait for the last write to the masters they read, and for no more: lanes that note what they are asked."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

import lamina
from harness import run_ranks
from lamina.core.lanes import Lane
from lamina.runtime.assemble import RUNTIMES

Point = int
_points = itertools.count(1)


class Noting(Lane):
    """A null lane whose marks are numbers, in the order in which they were made."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.waited: list[Point] = []

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> Point:  # type: ignore[override]
        return next(_points)

    def wait(self, mark: Point | None) -> None:  # type: ignore[override]
        if mark is not None:
            self.waited.append(mark)


def gathers(change: str) -> None:
    model = lamina.shard(nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]), units=[nn.Linear], transport="c10d")
    runtime = RUNTIMES[model]
    lanes, units = runtime.engine.lanes, runtime.engine.units
    lanes.compute, lanes.gather, lanes.reduce = Noting(), Noting(), Noting()
    for number, unit in enumerate(units):
        unit.leads = number < 2
    optimizer = lamina.optim.AdamW(model.parameters(), lr=0.1)
    waits: dict[int, list[Point]] = {}
    await_written = runtime.engine.gatherer.await_written

    def note(lane: Noting, unit) -> None:
        before = len(lane.waited)
        await_written(lane, unit)
        waits.setdefault(unit.index, []).extend(lane.waited[before:])

    runtime.engine.gatherer.await_written = note  # type: ignore[method-assign]
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        begun = next(_points)
        optimizer.step()
        optimizer.zero_grad()
        if change == "edited":
            with torch.no_grad():
                model[1].weight.mul_(0.5)
        elif change == "other optimizer":
            torch.optim.SGD([model[1].weight], lr=0.1).step()  # has nothing to do, but may have written
        done = next(_points)
        waits.clear()
        with torch.no_grad():
            model(torch.ones(2, 4))
        assert sorted(waits) == [0, 1, 2, 3, 4, 5]
        for index, points in waits.items():
            if change != "none" and index == 1:
                assert points[0] > done, points
            else:
                assert begun < points[0] < done, (index, points)
        assert waits[0][0] < waits[2][0] == waits[5][0]


@pytest.mark.parametrize("change", ["none", "edited", "other optimizer"])
def test_a_gather_waits_for_the_last_write(change: str) -> None:
    run_ranks(2, gathers, change)


def step_through_aliases(strategy: str) -> tuple[float, float]:
    """An optimizer over other objects of the same memory: what it writes is gathered, too."""
    model = lamina.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), strategy, units=[nn.Linear])
    aliases = [p.detach() for p in model.parameters()]
    for alias in aliases:
        alias.grad = torch.ones_like(alias)
    optimizer = lamina.optim.AdamW(aliases, lr=0.5, weight_decay=0.0)
    ends = []
    with torch.no_grad():
        model(torch.ones(1, 4))
        for _ in range(2):
            optimizer.step()
            whole = torch.cat([p.full().view(-1) if isinstance(p, lamina.Shard) else p.view(-1) for p in aliases])
            plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            nn.utils.vector_to_parameters(whole, plain.parameters())
            ends = [float(m(torch.ones(1, 4)).sum()) for m in (model, plain)]
    return ends[0], ends[1]


@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
def test_what_is_written_through_an_alias_is_gathered(strategy: str) -> None:
    for found, wanted in run_ranks(2, step_through_aliases, strategy):
        assert abs(found - wanted) <= 1e-5, (found, wanted)
