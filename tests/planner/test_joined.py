"""Small blocks that share a unit: what a plan counts for them."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from lamina.planner.machine import load_machine
from lamina.planner.measure import measure
from lamina.planner.measure_data import Measured
from lamina.planner.time import forecast_time
from lamina.planner.workload import Choice

BLOCKS, WIDTH = 24, 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden @ self.words.weight.T


def measured(recompute: str | int, units: str | list[str] = "auto") -> Measured:
    return measure(Net(), 2, 16, kind="cpu", recompute=recompute, units=units)


@pytest.mark.parametrize("recompute", ["none", "full", 2, 3, 5])
def test_joined_units_do_the_work_of_their_blocks(recompute: str | int) -> None:
    joined, apart = measured(recompute), measured(recompute, ["blocks.*"])
    names = [unit.name for unit in joined.workload.units]
    assert names[-1] == "blocks.20-23" and len(names) == 7
    assert sum(unit.blocks for unit in joined.workload.units if unit.recomputable) == BLOCKS
    choice = Choice("zero3", 1, recompute=recompute, captured=True)  # hosts are counted by the unit
    machine = load_machine("h200")
    together, alone = (forecast_time(m.workload, choice, machine).compute_ms for m in (joined, apart))
    assert together == pytest.approx(alone, rel=1e-6)


def test_a_unit_less_is_time_of_the_host_less() -> None:
    machine, choice = load_machine("h200"), Choice("zero3", 2)
    joined, apart = (
        forecast_time(m.workload, choice, machine) for m in (measured("none"), measured("none", ["blocks.*"]))
    )
    assert joined.total_ms < 0.8 * apart.total_ms
