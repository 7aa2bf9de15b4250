"""One root forward or one backward: the stretch of a step over which ranks follow one program.

A program is known by what is the same on all ranks when the phase begins (its kind, whether gradients are recorded, the
entry point, which units are gathered). The first time, ranks agree on every step over the control group; what they
agreed on, with gathers moved ahead, is the program from then on.
"""

from __future__ import annotations

import enum
import sys
import threading
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

import torch

from lamina.core.program import Op, Step
from lamina.core.shard_optim import others_run_backward
from lamina.errors import StateError

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterable

    from lamina.runtime.hooks import Frame
    from lamina.runtime.unit import Unit
    from lamina.runtime.uses import Use


this_call = sys._getframe  # of the function that asks
current_task: Callable[[], int] = torch._C._current_graph_task_id  # -1: none is under way on this thread


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
    call: FrameType | None = None  # of Python, which runs as long as the phase; None: a backward, whose task does
    cursor: int = 0  # steps before it are issued or passed
    log: list[Step] = field(default_factory=list)  # what lockstep agreed on
    ready: set[int] = field(default_factory=set)  # units whose gradients lie ready for their reduction
    reduced: set[int] = field(default_factory=set)
    tasks: dict[int, list[Use]] = field(default_factory=dict)  # active backward uses by graph task
    frame: Frame | None = None  # the innermost forward that is under way
    uses: list[tuple[range, weakref.ref[Use]]] = field(default_factory=list)  # numbers of the nodes of its forwards
    deviated: bool = False
    parted: bool = False  # some rank has left the program, and ranks meet at its end
    keeps_graph: bool = False  # retain_graph

    def __post_init__(self) -> None:
        self.steps: tuple[Step, ...] = () if self.recorded is None else self.recorded.steps
        self.is_backward = self.key.kind is Kind.BACKWARD
        self.thread = threading.get_ident()

    def was_left(self) -> bool:
        """An error has ended it, and nobody was told: its call, or its graph task, does not run any more.

        torch calls no hook of a forward that Ctrl-C or `sys.exit()` ends. Python clears only frames that do not run any
        more. What is lost are the local variables of one of torch's calls.
        """
        if self.call is None:
            return current_task() == -1 and not others_run_backward()
        try:
            self.call.clear()
        except RuntimeError:
            return False
        return True

    def refuse_other_threads(self) -> None:
        """A step belongs to one thread: what is gathered and who comes next is known for one at a time."""
        if current_task() != -1:
            return
        if self.thread != threading.get_ident() if self.call is not None else others_run_backward():
            raise StateError(
                f"a forward begins while another thread is in a {self.key.kind.value} of the same sharded model: let "
                "one thread at a time use it, on every rank in the same order"
            )

    def find(self, op: Op, unit: int) -> int | None:
        """Index of the next such step that is not behind the cursor."""
        for index in range(self.cursor, len(self.steps)):
            step = self.steps[index]
            if step.unit == unit and step.op is op:
                return index
        return None


def leaves_out(phase: Phase, units: Iterable[Unit]) -> bool:
    """Whether what was agreed on lacks a unit's use in the forward, or its reduction; see Note [One order] 5."""
    if phase.key.kind is Kind.FORWARD:
        used = {step.unit for step in phase.log if step.op is Op.FORWARD}
        return any(not unit.plain and unit.index not in used for unit in units)
    reduced = {step.unit for step in phase.log if step.op is Op.REDUCE}
    return any(unit.trainable and not unit.kept and unit.index not in reduced for unit in units)
