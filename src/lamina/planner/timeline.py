"""When each step of a program runs, on which lane.

A profiler shows what a step did once it has run. Here the same picture comes from the program alone: three lanes
(compute, gather, reduce), a duration for each step, and the rules by which the runtime waits. It is a model: what it
leaves out is that lanes slow each other down and that ranks drift apart.

Note [Lane rules]
    1. A lane runs its steps one at a time, in the order of the program.
    2. A collective is issued when the last use before it in the program has begun.
    3. A gather waits for the uses and reductions before it of units that share bytes with it.
    4. A use waits for the last gather of its unit; a reduction for the last backward of its unit.

Pure: no communication, no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lamina.core.program import Conflicts, Op, Program, Step

COMPUTE, GATHER, REDUCE = LANES = ("compute", "gather", "reduce")

Durations = Mapping[Op, float] | Callable[[Step], float]

# Relative lengths of a large block: backward is two forwards, 16 bit in both directions. Milliseconds only by name.
TYPICAL_DURATIONS_MS: dict[Op, float] = {Op.GATHER: 0.6, Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.REDUCE: 0.8}


@dataclass(frozen=True)
class Span:
    """One step on one lane; `label` is the step's text (`AG0`)."""

    lane: str
    label: str
    start_ms: float
    end_ms: float

    @property
    def duration_ms(self) -> float:
        return self.end_ms - self.start_ms


def lane_of(op: Op) -> str:
    return {Op.GATHER: GATHER, Op.REDUCE: REDUCE}.get(op, COMPUTE)


def simulate(
    program: Program, durations: Durations = TYPICAL_DURATIONS_MS, conflicts: Conflicts | None = None
) -> tuple[Span, ...]:
    """Spans of the steps of `program`, in its order.

    Args:
        program: a legal program.
        durations: milliseconds of each kind of step, or of each step.
        conflicts: units that share bytes with a unit; without it, gathers never wait for a free place.
    """
    duration_ms = durations if callable(durations) else lambda step: durations[step.op]
    free_ms = dict.fromkeys(LANES, 0.0)
    ended_ms: dict[Step, float] = {}  # end of the last occurrence of each step so far
    begun_ms = 0.0  # start of the last use so far
    spans = []
    for step in program.steps:
        lane = lane_of(step.op)
        waits_ms = [free_ms[lane], *(ended_ms.get(other, 0.0) for other in _awaited(step, conflicts))]
        if step.op.is_collective:
            waits_ms.append(begun_ms)
        start_ms = max(waits_ms)
        span = Span(lane, str(step), start_ms, start_ms + duration_ms(step))
        if not step.op.is_collective:
            begun_ms = start_ms
        free_ms[lane] = ended_ms[step] = span.end_ms
        spans.append(span)
    return tuple(spans)


def _awaited(step: Step, conflicts: Conflicts | None) -> Iterable[Step]:
    """Steps whose end `step` waits for, besides the one before it on its lane."""
    if step.op is Op.REDUCE:
        return (Step(Op.BACKWARD, step.unit),)
    if step.op is not Op.GATHER:
        return (Step(Op.GATHER, step.unit),)
    sharing = () if conflicts is None else conflicts(step.unit)
    return (Step(op, unit) for unit in sharing for op in (Op.FORWARD, Op.BACKWARD, Op.REDUCE))


def busy_ms(spans: Iterable[Span], lane: str) -> float:
    return sum(span.duration_ms for span in spans if span.lane == lane)


def end_ms(spans: Iterable[Span]) -> float:
    return max((span.end_ms for span in spans), default=0.0)
