"""What a rank did, as data: spans on lanes, memory, steps; its sums, and the file that trace viewers read.

The spans are those of planner/timeline.py, with the labels of the program: what was forecast and what was seen are the
same type, and are drawn and compared by the same code. The file is Chrome's trace format, which Perfetto
(https://ui.perfetto.dev) and chrome://tracing open; what they do not need stands under the key `lamina`.
"""

from __future__ import annotations

import bisect
import json
import math
import operator
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.core.program import Op, Program, Step
from lamina.errors import UsageError
from lamina.planner.timeline import COMPUTE, GATHER, LANES, REDUCE, Span, busy_ms

WAIT, OPTIMIZER, EVALUATION = "wait ", "optimizer", "evaluation"
FORMAT = 1
AGAIN = "Record one with `lamina train --trace` or lamina.trace()"
NEIGHBOURS = 4  # waits inside waits: how many may have begun before a span and still reach into it


def title_of(label: str) -> Step | None:
    """The step that a label names; None for the optimizer, waits, and spans of other makers."""
    try:
        (step,) = Program.parse(label).steps
    except ValueError:
        return None
    return step


@dataclass(frozen=True)
class StepSummary:
    """One step: from what first happens behind an optimizer and behind evaluations, to the end of its own optimizer."""

    wall_ms: float
    compute_ms: float  # uses
    gather_ms: float  # lane busy
    reduce_ms: float
    optimizer_ms: float
    exposed_gather_ms: float  # compute stood still for gathers
    exposed_reduce_ms: float
    gathers: tuple[int, ...]  # by unit
    peak_bytes: int

    @property
    def exposed_ms(self) -> float:
        return self.exposed_gather_ms + self.exposed_reduce_ms

    @property
    def hidden_share(self) -> float:
        """Share of the collectives' time that compute did not wait for; 1 if there are none."""
        moved_ms = self.gather_ms + self.reduce_ms
        return 1.0 if moved_ms <= 0 else max(0.0, 1.0 - self.exposed_ms / moved_ms)

    def __str__(self) -> str:
        if not any(self.gathers) and self.reduce_ms == 0:
            what = f"compute {self.compute_ms:.1f}, optimizer {self.optimizer_ms:.1f}, nothing gathered or reduced"
            return f"{self.wall_ms:.1f} ms: {what}, peak {self.peak_bytes / 2**30:.2f} GiB"
        return (
            f"{self.wall_ms:.1f} ms: compute {self.compute_ms:.1f}, optimizer {self.optimizer_ms:.1f}, exposed "
            f"{self.exposed_ms:.1f} of gathers {self.gather_ms:.1f} (exposed {self.exposed_gather_ms:.1f}) and "
            f"reductions {self.reduce_ms:.1f} (exposed {self.exposed_reduce_ms:.1f}): {self.hidden_share:.0%} hidden; "
            f"{sum(self.gathers) / max(1, len(self.gathers)):.1f} gathers a unit, peak "
            f"{self.peak_bytes / 2**30:.2f} GiB"
        )


@dataclass(frozen=True)
class Recording:
    """One rank's trace; times in ms since it began."""

    device: (
        str  # "cuda": memory is what torch's allocator has given away; "cpu": what malloc has, Python's own included
    )
    rank: int
    world: int
    units: tuple[str, ...]  # names, by number
    spans: tuple[Span, ...]  # by start
    memory: tuple[tuple[float, int], ...]  # ms, bytes
    step_ends_ms: tuple[float, ...]
    numels: tuple[int, ...] = ()  # of parameters, by unit; none: the trace is older than that

    @property
    def steps(self) -> tuple[Recording, ...]:
        """Each step by itself, its times from its own begin; all of it as one where no optimizer stepped."""
        if not self.step_ends_ms:
            return (self,)
        begins_ms = (0.0, *self.step_ends_ms)
        return tuple(self._between(*bounds_ms) for bounds_ms in zip(begins_ms, self.step_ends_ms, strict=False))

    def _between(self, begin_ms: float, end_ms: float) -> Recording:
        spans = [s for s in self.spans if begin_ms <= s.start_ms < end_ms]
        evaluated_ms = max((s.end_ms for s in spans if s.label == EVALUATION), default=begin_ms)
        if any(s.start_ms >= evaluated_ms and title_of(s.label) is not None for s in spans):
            spans = [s for s in spans if s.start_ms >= evaluated_ms]
        if spans:  # what the loop did between its steps belongs to neither
            begin_ms = spans[0].start_ms
        moved = tuple(Span(s.lane, s.label, s.start_ms - begin_ms, s.end_ms - begin_ms) for s in spans)
        memory = tuple((at_ms - begin_ms, size) for at_ms, size in self.memory if begin_ms <= at_ms <= end_ms)
        return Recording(
            self.device, self.rank, self.world, self.units, moved, memory, (end_ms - begin_ms,), self.numels
        )

    def summary(self) -> tuple[StepSummary, ...]:
        return tuple(_summary(step) for step in self.steps)

    def __str__(self) -> str:
        rows = [f"rank {self.rank} of {self.world}, {self.device}"]
        return "\n".join(rows + [f"step {number}: {row}" for number, row in enumerate(self.summary(), 1)])

    # ---- the file ----------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """The file, and beside it a picture of the last step."""
        from lamina.trace.draw import draw_recording  # so that `import lamina` draws nothing

        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.to_chrome()))
        partial.replace(path)
        draw_recording(self.steps[-1]).savefig(path.with_suffix(".png"), dpi=150)

    def to_chrome(self) -> dict[str, Any]:
        """Chrome's trace format: a process a rank, a thread a lane, times in microseconds."""
        events: list[dict[str, Any]] = [_named("process_name", self.rank, 0, f"rank {self.rank}")]
        events += [_named("thread_name", self.rank, number, lane) for number, lane in enumerate(LANES)]
        for span in self.spans:
            times = {"ts": span.start_ms * 1e3, "dur": span.duration_ms * 1e3}
            place = {"pid": self.rank, "tid": LANES.index(span.lane)}
            name = name_of(span.label, self.units)
            events.append({"ph": "X", "name": name, "cat": span.lane, **times, **place, "args": {"step": span.label}})
        for at_ms, size in self.memory:
            counted = {"ph": "C", "name": "memory", "pid": self.rank, "ts": at_ms * 1e3, "args": {"bytes": size}}
            events.append(counted)
        ours = {"format": FORMAT, "device": self.device, "rank": self.rank, "world": self.world}
        lists = {"units": list(self.units), "numels": list(self.numels), "step_ends_ms": list(self.step_ends_ms)}
        return {"traceEvents": events, "displayTimeUnit": "ms", "lamina": {**ours, **lists}}


def name_of(label: str, units: Sequence[str] | None) -> str:
    """`FWD layers.3` for `FWD4`; labels that name no step stay."""
    waits, word = label.startswith(WAIT), label.removeprefix(WAIT)
    step = title_of(word)
    if step is None or units is None or step.unit >= len(units):
        return label
    return f"{WAIT if waits else ''}{step.op.value} {units[step.unit] or 'root'}"


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def load_trace(path: str | os.PathLike[str]) -> Recording:
    """Read what `lamina.trace` has written.

    Raises:
        UsageError: there is no such file, or another program wrote it.
    """
    try:
        read = json.loads(Path(path).read_text())
        ours = read["lamina"]
        events = read["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        what = problem.strerror if isinstance(problem, OSError) else "lamina.trace did not write this file"
        raise UsageError(f"trace {path}: {what}. {AGAIN}") from None
    if not isinstance(ours, dict) or not isinstance(events, list):
        raise UsageError(f"trace {path}: lamina.trace did not write this file. {AGAIN}")
    if ours.get("format") != FORMAT:
        raise UsageError(f"trace {path} has format {ours.get('format')}, this lamina reads {FORMAT}: record it anew")
    try:
        return _read(ours, events)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        what = f"{type(problem).__name__}: {problem}"
        raise UsageError(f"trace {path} is damaged ({what}). {AGAIN}") from None


def _read(ours: dict[str, Any], events: list[Any]) -> Recording:
    """What `to_chrome` wrote. Raises whatever a damaged file leads to."""
    spans = [
        Span(LANES[LANES.index(e["cat"])], str(e["args"]["step"]), *_bounds_ms(e)) for e in events if e["ph"] == "X"
    ]
    memory = tuple((_finite(e["ts"]) / 1e3, int(e["args"]["bytes"])) for e in events if e["ph"] == "C")
    device, rank, world = ours["device"], operator.index(ours["rank"]), operator.index(ours["world"])
    if device not in ("cpu", "cuda") or not 0 <= rank < world:
        raise ValueError(f"rank {rank} of {world} on {device}")
    units = tuple(str(unit) for unit in ours["units"])
    numels = tuple(operator.index(numel) for numel in ours.get("numels", ()))
    if len(numels) not in (0, len(units)):
        raise ValueError(f"{len(numels)} numbers of parameters for {len(units)} units")
    ends_ms = tuple(map(_finite, ours["step_ends_ms"]))
    return Recording(device, rank, world, units, tuple(spans), memory, ends_ms, numels)


def _bounds_ms(event: dict[str, Any]) -> tuple[float, float]:
    begin_us, length_us = _finite(event["ts"]), _finite(event["dur"])
    return begin_us / 1e3, (begin_us + length_us) / 1e3


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} where a time is wanted")
    return value


# ---- sums ------------------------------------------------------------------------------------------------------


def _summary(step: Recording) -> StepSummary:
    waits = [span for span in step.spans if span.label.startswith(WAIT)]
    reductions = [span for span in waits if span.label.startswith(WAIT + Op.REDUCE.value)]
    uses = [span for span in step.spans if span.lane == COMPUTE and title_of(span.label) is not None]
    gathers = Counter(found.unit for s in step.spans if s.lane == GATHER and (found := title_of(s.label)) is not None)
    return StepSummary(
        wall_ms=step.step_ends_ms[-1] if step.step_ends_ms else max((s.end_ms for s in step.spans), default=0.0),
        compute_ms=_covered_ms(uses),
        gather_ms=busy_ms(step.spans, GATHER),
        reduce_ms=busy_ms(step.spans, REDUCE),
        optimizer_ms=_covered_ms(span for span in step.spans if span.label == OPTIMIZER),
        exposed_gather_ms=_covered_ms(span for span in waits if span not in reductions),
        exposed_reduce_ms=_covered_ms(reductions),
        gathers=tuple(gathers[unit] for unit in range(len(step.units))),
        peak_bytes=max((size for _, size in step.memory), default=0),
    )


def _covered_ms(spans: Iterable[Span]) -> float:
    """Time that lies in any of the spans."""
    total_ms, reached_ms = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start_ms):
        total_ms += max(0.0, span.end_ms - max(span.start_ms, reached_ms))
        reached_ms = max(reached_ms, span.end_ms)
    return total_ms


def without_waits(spans: Sequence[Span]) -> list[Span]:
    """The same spans, where those of compute that a wait falls into are cut into what is left of them."""
    waits = sorted((s for s in spans if s.label.startswith(WAIT)), key=lambda span: span.start_ms)
    starts_ms = [wait.start_ms for wait in waits]
    left: list[Span] = []
    for span in spans:
        if span.lane != COMPUTE or span.label.startswith(WAIT):
            left.append(span)
            continue
        reached_ms = span.start_ms
        first = max(0, bisect.bisect_left(starts_ms, span.start_ms) - NEIGHBOURS)
        for wait in waits[first : bisect.bisect_left(starts_ms, span.end_ms)]:
            if wait.end_ms > reached_ms:
                if wait.start_ms > reached_ms:
                    left.append(Span(span.lane, span.label, reached_ms, wait.start_ms))
                reached_ms = wait.end_ms
        if reached_ms < span.end_ms:
            left.append(Span(span.lane, span.label, reached_ms, span.end_ms))
    return left
