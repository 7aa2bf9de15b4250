"""When each step of a program runs, on which lane.

A profiler shows what a step did once it has run. Here the same picture comes from the program alone: three lanes
(compute, gather, reduce), a duration for each step, and the rules by which the runtime waits. It is a model: what it
leaves out is that ranks drift apart.

Note [Lane rules]
    1. A lane runs its steps one at a time, in the order of the program.
    2. A collective is issued when the last use before it in the program has begun.
    3. A gather waits for the uses and reductions before it of units that share bytes with it.
    4. A use waits for the last gather of its unit; a reduction for the last backward of its unit.
    5. A gather and a reduction that run at once share each link: where both together would fill it more than once, both
       go on more slowly by that factor. Without loads they do not disturb each other.

Pure: no communication, no device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lamina.core.program import Conflicts, Op, Program, Step

COMPUTE, GATHER, REDUCE = LANES = ("compute", "gather", "reduce")

Loads = tuple[float, float]  # shares of the link inside a node and of the network that a collective takes alone
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


class Schedule:
    """What each step of a program waits for, worked out once; then times for any durations.

    Args:
        program: a legal program.
        conflicts: units that share bytes with a unit; without it, gathers never wait for a free place.
    """

    def __init__(self, program: Program, conflicts: Conflicts | None = None) -> None:
        self.program = program
        self.lanes = [LANES.index(lane_of(step.op)) for step in program.steps]
        self._queues = [[p for p, lane in enumerate(self.lanes) if lane == number] for number in range(len(LANES))]
        self._awaited: list[tuple[int, ...]] = []
        self._issued_in: list[int] = []  # the last use before a collective; -1: none, and for uses
        use = -1
        last: dict[Step, int] = {}  # position of the last occurrence of each step so far
        for position, step in enumerate(program.steps):
            found = [last[other] for other in _awaited(step, conflicts) if other in last]
            by_lane = {self.lanes[index]: index for index in sorted(found)}  # a lane's later step ends later
            self._awaited.append(tuple(by_lane.values()))
            self._issued_in.append(use if self.lanes[position] else -1)
            use = use if self.lanes[position] else position
            last[step] = position

    def times(
        self, durations_ms: Sequence[float], loads: Sequence[Loads] | None = None
    ) -> tuple[list[float], list[float]]:
        """Starts and ends of the steps, in the order of the program; `loads` of each step, those of uses not read."""
        if loads is not None:
            return self._shared_times(durations_ms, loads)
        free_ms = [0.0] * len(LANES)
        starts_ms: list[float] = []
        ends_ms: list[float] = []
        begun_ms = 0.0  # start of the last use so far
        for lane, awaited, duration_ms in zip(self.lanes, self._awaited, durations_ms, strict=True):
            start_ms = free_ms[lane]
            for position in awaited:
                start_ms = max(start_ms, ends_ms[position])
            if lane:
                start_ms = max(start_ms, begun_ms)
            else:
                begun_ms = start_ms
            starts_ms.append(start_ms)
            ends_ms.append(start_ms + duration_ms)
            free_ms[lane] = ends_ms[-1]
        return starts_ms, ends_ms

    def _shared_times(self, durations_ms: Sequence[float], loads: Sequence[Loads]) -> tuple[list[float], list[float]]:
        """The same by events: how long a collective takes depends on what runs beside it."""
        count = len(self.lanes)
        starts_ms, ends_ms = [math.inf] * count, [math.inf] * count
        queues = self._queues
        heads, running, left_ms, now_ms = [0] * len(LANES), [-1] * len(LANES), [0.0] * len(LANES), 0.0
        while True:
            for lane, queue in enumerate(queues):
                if running[lane] < 0 and heads[lane] < len(queue):
                    position = queue[heads[lane]]
                    if self._may_start(position, starts_ms, ends_ms):
                        running[lane], left_ms[lane], starts_ms[position] = position, durations_ms[position], now_ms
            active = [lane for lane, position in enumerate(running) if position >= 0]
            if not active:
                return starts_ms, ends_ms
            slower = _sharing(loads[running[1]], loads[running[2]]) if running[1] >= 0 and running[2] >= 0 else 1.0
            factors = (1.0, slower, slower)
            step_ms = min(left_ms[lane] * factors[lane] for lane in active)
            now_ms += step_ms
            for lane in active:
                if left_ms[lane] * factors[lane] <= step_ms:
                    ends_ms[running[lane]] = now_ms
                    heads[lane], running[lane] = heads[lane] + 1, -1
                else:
                    left_ms[lane] -= step_ms / factors[lane]

    def _may_start(self, position: int, starts_ms: Sequence[float], ends_ms: Sequence[float]) -> bool:
        begun = self._issued_in[position]
        if begun >= 0 and starts_ms[begun] == math.inf:
            return False
        return all(ends_ms[other] != math.inf for other in self._awaited[position])

    def spans(self, durations_ms: Sequence[float], loads: Sequence[Loads] | None = None) -> tuple[Span, ...]:
        placed = zip(self.program.steps, self.lanes, *self.times(durations_ms, loads), strict=True)
        return tuple(Span(LANES[lane], str(step), start_ms, end_ms) for step, lane, start_ms, end_ms in placed)


def _sharing(one: Loads, other: Loads) -> float:
    """By how much both are slower than alone."""
    return max(1.0, one[0] + other[0], one[1] + other[1])


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
    return Schedule(program, conflicts).spans([duration_ms(step) for step in program.steps])


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
