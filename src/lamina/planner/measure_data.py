"""What measuring a model leaves behind: plain data that forecasts read without the model.

Pure: no communication, no device.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from lamina.planner.state import UnitShape
from lamina.planner.workload import Workload


class Happens(enum.Enum):
    """What an `Event` is."""

    TAKE = "take"  # memory is asked for, `size_bytes`
    GIVE = "give"  # it is given back
    PRODUCT = "product"  # a matrix library is called; `number`: by the thread of forward (0) or backward (1)
    GRADIENT = "gradient"  # what was taken as `number` is a parameter's gradient
    REDUCE = "reduce"  # unit `number` has all its gradients


class Event(NamedTuple):
    """One entry of a step's list of allocations, in order."""

    what: Happens
    number: int  # of the allocation, counted from 0
    size_bytes: int = 0


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
    events: tuple[Event, ...] = ()  # of one micro-batch, on a GPU

    @property
    def numel(self) -> int:
        return sum(spec.numel for unit in self.units for spec in unit.params)

    @property
    def saved_bytes(self) -> int:
        return sum(unit.saved_bytes for unit in self.workload.units)
