"""What the host queues on a GPU for a unit over peers has a bound: each thing costs it microseconds.

Counted on CPU ranks, with lanes that count.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import lamina
from harness import run_ranks
from lamina.core.lanes import Lane, Lanes
from lamina.runtime import direct
from lamina.runtime.assemble import RUNTIMES
from transport.test_symmetric import shard_symmetrically

BLOCKS = 6


class Point:
    """A mark of a lane that counts."""

    def __init__(self, lane: CountingLane, number: int) -> None:
        self.lane, self.number = lane, number


class CountingLane(Lane):
    """Waits as a stream does, no more than once for one mark or an earlier one of the same lane."""

    def __init__(self, device: torch.device, counts: Counter[str]) -> None:
        super().__init__(device)
        self.counts, self.made = counts, 0
        self.seen: dict[CountingLane, int] = {}

    def running(self) -> AbstractContextManager[None]:
        @contextmanager
        def noted() -> Any:
            self.counts["lane entered"] += 1
            yield

        return noted()

    def run(self, act: Any, *args: Any, **kwargs: Any) -> Any:
        with self.running():
            return act(*args, **kwargs)

    def mark(self) -> Any:
        self.counts["event recorded"] += 1
        self.made += 1
        return Point(self, self.made)

    def wait(self, mark: Any) -> None:
        if mark is not None and mark.lane is not self and self.seen.get(mark.lane, 0) < mark.number:
            self.seen[mark.lane] = mark.number
            self.counts["event awaited"] += 1


def count_a_step(is_direct: bool) -> tuple[Counter[str], int, int]:
    """Of a step whose programs are known; gathers of it; units."""
    counts: Counter[str] = Counter()

    def make(self: Lanes, device: torch.device) -> None:
        self.compute, self.gather, self.reduce = (CountingLane(device, counts) for _ in range(3))

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(BLOCKS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lanes, "__init__", make)
        patch.setattr(direct, "LEAST_PIECE_BYTES", 0 if is_direct else 1 << 40)
        model = shard_symmetrically(nn.Sequential(*blocks), "zero3", units=["[0-9]"], slots=3)
        runtime = RUNTIMES[model]
        assert len(runtime.units) == BLOCKS
        for _ in range(20):
            counts.clear()
            runtime.engine.gatherer.peers._handle.met.clear()
            before = sum(unit.gathers for unit in lamina.report(model).units)
            model(torch.ones(4, 32)).sum().backward()
            model.zero_grad()
        counts["barrier"] = len(runtime.engine.gatherer.peers._handle.met)
        return counts, sum(unit.gathers for unit in lamina.report(model).units) - before, BLOCKS


@pytest.mark.parametrize("is_direct", [True, False])
def test_what_a_unit_costs_the_host(is_direct: bool) -> None:
    for counts, gathers, units in run_ranks(2, count_a_step, is_direct):
        assert units < gathers < 2 * units
        assert counts["barrier"] == 2 * units + 3  # and publishing
        # ready; read in forward, read in backward, gradients there, gradients read; laid out, the slot is read later
        assert counts["event recorded"] <= gathers + (4 if is_direct else 5) * units + 8  # where phases begin and end
        assert counts["event awaited"] <= 2 * gathers + 2 * units + 6
        assert counts["lane entered"] <= gathers + (1 if is_direct else 3) * units + 4
