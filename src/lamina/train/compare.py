"""`lamina plan --compare RUN`: a step as it was forecast beside the step as it ran.

A forecast and a trace have the same lanes and the same labels, but nobody finds in two pictures which of sixty bars is
why a step took longer. Here both are summed by kind of unit (`layers.*`) on each lane. What lies on the compute lane
adds up to the step, so each difference is a share of the whole, and the largest are said first, in words.

The step that is shown is the one of median length: its parts add up, which medians of parts do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lamina.core.program import Op
from lamina.errors import UsageError
from lamina.planner.machine import OWN, Machine, load_machine
from lamina.planner.plan import Plan
from lamina.planner.rates import Reached
from lamina.planner.timeline import COMPUTE, LANES, Span
from lamina.trace.draw import draw_compared, exposed_gaps, save_picture
from lamina.trace.recording import OPTIMIZER, WAIT, Recording, load_trace, title_of
from lamina.train.config import Config, read_toml

WORDS = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.GATHER: "gathers", Op.REDUCE: "reductions"}
MOST_NAMED = 3  # differences
SMALL = 0.01  # of the step: nobody looks for less
MANY = 4.0  # times as much is said like that, not in percent
BETWEEN = "between: loss, clipping, data, host"


@dataclass(frozen=True)
class Row:
    """One sum of both; `adds` where it is a part of the step's length, which the busy time of a lane is not."""

    what: str
    observed_ms: float
    forecast_ms: float
    adds: bool = True

    @property
    def difference_ms(self) -> float:
        return self.observed_ms - self.forecast_ms

    @property
    def times(self) -> str:
        """`12.1 ms observed, 8.0 forecast (+51 %)`"""
        beside = f" ({_percent(self.observed_ms, self.forecast_ms)})" if self.forecast_ms else ""
        return f"{self.observed_ms:.1f} ms observed, {self.forecast_ms:.1f} forecast{beside}"


@dataclass(frozen=True)
class Comparison:
    """One rank's step; `str()` is what a person reads, `.as_dict()` plain values."""

    plan: Plan
    recording: Recording
    number: int  # of the step, from 1
    rows: tuple[Row, ...]
    observed_bytes: int  # see `_memory`
    forecast_bytes: int

    @property
    def step(self) -> Recording:
        return self.recording.steps[self.number - 1]

    @property
    def whole(self) -> Row:
        adding = [row for row in self.rows if row.adds]
        return Row("step", sum(r.observed_ms for r in adding), sum(r.forecast_ms for r in adding))

    @property
    def largest(self) -> tuple[Row, ...]:
        """The parts of the step that differ most, the largest first."""
        least_ms = SMALL * self.whole.observed_ms
        found = [row for row in self.rows if row.adds and abs(row.difference_ms) >= least_ms]
        return tuple(sorted(found, key=lambda row: -abs(row.difference_ms))[:MOST_NAMED])

    @property
    def memory_word(self) -> str:
        if self.recording.device == "cpu":  # malloc holds Python's own objects too
            return "memory, peak above the lowest moment"
        return "memory, allocated at the peak"

    def named(self) -> list[str]:
        """The largest differences, in words."""
        whole_ms = self.whole.difference_ms
        return [
            f"{row.what}: {row.times}, {row.difference_ms:+.1f} of {whole_ms:+.1f} ms of the whole difference"
            for row in self.largest
        ]

    def __str__(self) -> str:
        taken, recording = self.plan.taken, self.recording
        lines = [
            f"{self.plan.model}, {taken.title} on {recording.world} ranks, {taken.choice.accumulation} x "
            f"{self.plan.batch} sequences of {self.plan.seq} a rank; forecast for {self.plan.machine.name} "
            f"({self.plan.machine.device}), observed in step {self.number} of the {len(recording.steps)} traced "
            f"on rank {recording.rank}",
            "",
            f"step: {self.whole.times}",
            *(f"  {text}" for text in self.named() or ["no part of it differs by 1 % of the step"]),
            "",
            *self._table(),
            "",
            f"{self.memory_word}: {self.observed_bytes / 2**30:.3f} GiB observed, {self.forecast_bytes / 2**30:.3f} "
            f"forecast ({_percent(self.observed_bytes, self.forecast_bytes)})",
        ]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        width = max(len(row.what) for row in self.rows)
        lines = [f"  {'ms':<{width}} {'observed':>9} {'forecast':>9} {'more':>9}"]
        for title, adds in (("what the step is made of", True), ("what its lanes do beside it", False)):
            lines.append(title)
            lines += [
                f"  {r.what:<{width}} {r.observed_ms:>9.1f} {r.forecast_ms:>9.1f} {r.difference_ms:>+9.1f}"
                for r in self.rows
                if r.adds is adds
            ]
        return lines

    def as_dict(self) -> dict[str, Any]:
        whole = self.whole
        return {
            "machine": self.plan.machine.name,
            "strategy": self.plan.taken.title,
            "ranks": self.recording.world,
            "step": self.number,
            "observed_ms": whole.observed_ms,
            "forecast_ms": whole.forecast_ms,
            "rows": [asdict(row) for row in self.rows],
            "largest": self.named(),
            "memory": {
                "of": self.memory_word,
                "observed_bytes": self.observed_bytes,
                "forecast_bytes": self.forecast_bytes,
            },
        }

    def draw(self, path: Path) -> None:
        """Forecast above observed, on one axis."""
        titles = (
            f"forecast for {self.plan.machine.name}: {self.whole.forecast_ms:.1f} ms",
            f"step {self.number} as it ran on rank {self.recording.rank} of {self.recording.world}: "
            f"{self.whole.observed_ms:.1f} ms",
        )
        figure = draw_compared(forecast_spans(self.plan), self.step, self.plan.units, titles)
        save_picture(figure, path)


def open_run(run: Path, config_file: Path | None) -> tuple[Recording, Config]:
    """The trace and the resolved settings of a run's folder, or of a trace and the file beside it.

    Raises `UsageError` where one of them is missing, or the trace holds no steps that can be compared.
    """
    file = run / "trace.json" if run.is_dir() else run
    if not file.is_file():
        raise UsageError(
            f"--compare {run}: there is no {file}. `lamina train --trace` writes one into its run's folder; of a loop "
            "of your own, lamina.trace() does"
        )
    settings = file.parent / "run.toml" if config_file is None else config_file
    if config_file is None and not settings.is_file():
        raise UsageError(
            f"--compare {run}: {settings} is missing, so nobody knows what was run. Type --config FILE, the file of "
            "lamina train that describes it"
        )
    recording, config = load_trace(file), read_toml(settings)
    if not any(span.lane == COMPUTE and title_of(span.label) is not None for span in recording.spans):
        why = "steps that lamina.capture replays call nothing, so only their optimizer is seen: trace without capture"
        raise UsageError(f"--compare {run}: no unit is used in the traced steps; {why}")
    return recording, config


def machine_for(recording: Recording, named: str | None) -> Machine:
    """The machine to forecast for: what `lamina doctor` has written, unless one is named.

    Raises `UsageError` for a GPU's rates beside steps of a CPU, and the other way round.
    """
    if named is None and not OWN.expanduser().is_file():
        also = "" if recording.device == "cpu" else ", or type --machine h100 (or what it ran on)"
        raise UsageError(f"--compare needs the rates of the machine that was traced: run `lamina doctor` there{also}")
    machine = load_machine(named or "here")
    device = "cpu" if machine.is_cpu else "cuda"
    if device != recording.device:
        kinds = {"cpu": "a CPU", "cuda": "a GPU"}
        raise UsageError(
            f"--compare: the trace is of {kinds[recording.device]}, and {machine.name} ({machine.device}) is "
            f"{kinds[device]}. Type --machine with what it ran on; `lamina doctor --save FILE` writes a file there"
        )
    return machine


def config_of_pass(config: Config, recording: Recording) -> Config:
    """The same settings with the batch of one micro-batch on one rank, as forecasts take them."""
    batches, world = config.batches, recording.world
    if config.sharding.strategy in (None, "auto"):
        raise UsageError("--compare needs the strategy that was run: set sharding.strategy in the file of --config")
    if batches.batch is None or batches.length is None:
        raise UsageError(
            "--compare needs the settings that a run was resolved to, with batches.batch and batches.length: the "
            "run.toml in its folder has them"
        )
    of_pass, rest = divmod(batches.batch, world * batches.accumulate)
    if rest or not of_pass:
        raise UsageError(
            f"--compare: batches.batch={batches.batch} cannot be dealt to the {world} ranks of this trace in "
            f"{batches.accumulate} passes: these are the settings of another run"
        )
    return replace(config, batches=replace(batches, batch=of_pass))


def compare(plan: Plan, recording: Recording) -> Comparison:
    """Sum both by kind of unit. Raises `UsageError` if they are of different models."""
    if plan.units != recording.units:
        other = sorted(set(plan.units) ^ set(recording.units))
        what = f"`{other[0]}` is in one only" if other else "the same units in another order"
        raise UsageError(
            f"--compare: the trace has {len(recording.units)} units, the settings describe a model of "
            f"{len(plan.units)}: {what}. Give the run.toml of the run that was traced"
        )
    for name, own, planned in zip(plan.units, recording.numels, plan.numels, strict=False):
        if own != planned:
            raise UsageError(
                f"--compare: `{name}` has {own:,} parameters in the trace and {planned:,} by the settings. Give the "
                "run.toml of the run that was traced"
            )
    lengths = sorted((row.wall_ms, number) for number, row in enumerate(recording.summary(), 1))
    _, number = lengths[(len(lengths) - 1) // 2]
    step = recording.steps[number - 1]
    return Comparison(plan, recording, number, _rows(plan, step), *_memory(plan, step))


def _rows(plan: Plan, step: Recording) -> tuple[Row, ...]:
    time, (seen,) = plan.taken.time, step.summary()
    count = plan.taken.choice.accumulation
    forecast = {key: count * ms for key, ms in _by_kind(time.spans, plan.units).items()}
    observed = _by_kind(step.spans, step.units)
    rows: dict[bool, list[Row]] = {True: [], False: []}
    for op in (Op.FORWARD, Op.BACKWARD, Op.GATHER, Op.REDUCE):
        kinds = dict.fromkeys(kind for found, kind in (*forecast, *observed) if found is op)
        rows[not op.is_collective] += [
            Row(
                f"{WORDS[op]} of {kind}",
                observed.get((op, kind), 0.0),
                forecast.get((op, kind), 0.0),
                not op.is_collective,
            )
            for kind in kinds
        ]
    gaps = [g for g in exposed_gaps(time.spans) if g.label.startswith(WAIT + Op.GATHER.value)]
    gathers_ms = min(time.exposed_ms, count * sum(gap.duration_ms for gap in gaps))
    once_ms = Reached().step_ms
    uses_ms = sum(row.observed_ms for row in rows[True])
    parts = [
        Row("waiting for gathers", seen.exposed_gather_ms, gathers_ms),
        Row("waiting for reductions", seen.exposed_reduce_ms, time.exposed_ms - gathers_ms),
        Row("optimizer", seen.optimizer_ms, time.optimizer_ms - once_ms),
        Row(BETWEEN, max(0.0, seen.wall_ms - uses_ms - seen.optimizer_ms - seen.exposed_ms), once_ms),
    ]
    return (*rows[True], *parts, *rows[False])


def kind_of(unit: str) -> str:
    """`layers.*`, of `layers.3` and of `layers.0-3`."""
    return re.sub(r"\d+(-\d+)?", "*", unit)


def _by_kind(spans: Iterable[Span], units: Sequence[str]) -> dict[tuple[Op, str], float]:
    """Milliseconds of each operation, units that differ in a number only taken together."""
    sums: dict[tuple[Op, str], float] = {}
    for span in spans:
        step = title_of(span.label)
        if step is not None:
            key = step.op, kind_of(units[step.unit])
            sums[key] = sums.get(key, 0.0) + span.duration_ms
    return sums


def _memory(plan: Plan, step: Recording) -> tuple[int, int]:
    """Observed and forecast. A trace reads memory at borders of uses, so what is freed inside a use is not in it."""
    sizes = [size for _, size in step.memory] or [0]
    moments = [moment.total_bytes for moment in plan.taken.memory.moments]
    if step.device == "cpu":
        return max(sizes) - min(sizes), max(moments) - min(moments)
    return max(sizes), max(moments)


def forecast_spans(plan: Plan) -> list[Span]:
    """The whole step: its micro-batches one behind the other, and the optimizer."""
    time, count = plan.taken.time, plan.taken.choice.accumulation
    pass_ms = (time.total_ms - time.optimizer_ms) / count
    spans = [
        Span(span.lane, span.label, span.start_ms + number * pass_ms, span.end_ms + number * pass_ms)
        for number in range(count)
        for span in time.spans
    ]
    spans.sort(key=lambda span: LANES.index(span.lane))
    return [*spans, Span(COMPUTE, OPTIMIZER, count * pass_ms, time.total_ms)]


def _percent(observed: float, forecast: float) -> str:
    if not forecast:
        return "none forecast"
    ratio = observed / forecast
    return f"{ratio - 1:+.0%}".replace("%", " %") if ratio < MANY else f"{ratio:.0f} times"
