"""One root forward or one backward: the stretch of a step over which ranks follow one program.

A program is known by what is the same on all ranks when the phase begins (its kind, whether gradients are recorded, the
entry point, which units are gathered). The first time, ranks agree on every step over the control group; what they
agreed on, with gathers moved ahead, is the program from then on.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lamina.core.program import Op, Step

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lamina.runtime.unit import Unit
    from lamina.runtime.uses import Use


class Kind(enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    KEEP = "keep"


@dataclass(frozen=True)
class Key:
    """What tells one program from another; equal on all ranks."""

    kind: Kind
    grad: bool
    entry: str
    resident: frozenset[int]


@dataclass(frozen=True)
class Recorded:
    """A program, and the units that hold weights when it has ended."""

    steps: tuple[Step, ...]
    resident: frozenset[int]
    is_open: bool = False  # it leaves out a unit that some rank may come to use
    clean_ends: int = 0  # at which ranks have met and nobody had left it


@dataclass
class Phase:
    """Where this rank is in the phase."""

    number: int
    key: Key
    recorded: Recorded | None  # None: lockstep
    owner: object  # the module whose forward it is, or the graph task
    cursor: int = 0  # steps before it are issued or passed
    log: list[Step] = field(default_factory=list)  # what lockstep agreed on
    ready: set[int] = field(default_factory=set)  # units whose gradients lie ready for their reduction
    reduced: set[int] = field(default_factory=set)
    tasks: dict[int, list[Use]] = field(default_factory=dict)  # active backward uses by graph task
    deviated: bool = False
    parted: bool = False  # some rank has left the program, and ranks meet at its end
    keeps_graph: bool = False  # retain_graph

    def __post_init__(self) -> None:
        self.steps: tuple[Step, ...] = () if self.recorded is None else self.recorded.steps

    def find(self, op: Op, unit: int) -> int | None:
        """Index of the next such step that is not behind the cursor."""
        steps = self.steps
        for index in range(self.cursor, len(steps)):
            if steps[index].unit == unit and steps[index].op is op:
                return index
        return None


def leaves_out(phase: Phase, units: Iterable[Unit]) -> bool:
    """Whether what was agreed on lacks a unit's use in the forward, or its reduction; see Note [One order] 5."""
    if phase.key.kind is Kind.FORWARD:
        used = {step.unit for step in phase.log if step.op is Op.FORWARD}
        return any(not unit.plain and unit.index not in used for unit in units)
    reduced = {step.unit for step in phase.log if step.op is Op.REDUCE}
    return any(unit.trainable and not unit.kept and unit.index not in reduced for unit in units)
