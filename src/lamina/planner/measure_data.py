"""What measuring a model leaves behind: plain data that forecasts read without the model.

Pure: no communication, no device.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamina.planner.state import UnitShape
from lamina.planner.workload import Workload


@dataclass(frozen=True)
class Moment:
    """A stretch of the step between two borders of units."""

    place: str  # "forward blocks.3", "loss", "backward blocks.3"
    activation_bytes: int  # largest sum of what lives in it and is neither parameter nor reduced gradient
    reduced: tuple[int, ...]  # units whose gradients have been taken by then


@dataclass(frozen=True)
class Measured:
    """One model with one input under one precision and one kind of recomputation."""

    workload: Workload
    units: tuple[UnitShape, ...]
    moments: tuple[Moment, ...]
    input_bytes: int
    kind: str  # of device: "cuda" or "cpu"
    recompute: str | int

    @property
    def numel(self) -> int:
        return sum(spec.numel for unit in self.units for spec in unit.params)

    @property
    def saved_bytes(self) -> int:
        return sum(unit.saved_bytes for unit in self.workload.units)
