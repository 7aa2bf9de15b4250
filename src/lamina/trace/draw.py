"""Pictures of a step: lanes over time, and the arena's bytes over the order of use.

A trace viewer needs a file, a browser and a real run. These functions turn spans (simulated or measured) and a
packing into a matplotlib figure that fits on a page. Each step says its name in its bar, so no legend is needed to
read it; colours stand for the kind of step.

matplotlib is imported inside the functions: `import lamina` does not pay for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.core.program import Conflicts, Op, Program
from lamina.errors import UsageError
from lamina.planner.timeline import COMPUTE, LANES, TYPICAL_DURATIONS_MS, Durations, Span, simulate
from lamina.trace.recording import OPTIMIZER, WAIT, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lamina.core.arena import Packing
    from lamina.trace.recording import Recording

# Told apart in print and by most colour-blind readers.
COLOURS = {Op.GATHER: "#56b4e9", Op.FORWARD: "#9fd3a4", Op.BACKWARD: "#f2c14e", Op.REDUCE: "#e08e79"}
OTHER_COLOUR, OPTIMIZER_COLOUR = "#c8c8c8", "#b9a3d0"
EXPOSED_COLOUR = "#d62728"  # compute stands still
LANE_TITLES = {"compute": "compute", "gather": "gather (AG)", "reduce": "reduce (RS)"}
BAR_HEIGHT = 0.72  # of a lane
LETTERS_UPRIGHT = 7  # as many of 8 points fit into the height of a bar where three lanes share a page
MIB_BYTES = 2**20
UNITS_NUMBERED = 24  # more than this and the bytes of the arena are drawn without names


def save_picture(figure: Figure, path: str | Path) -> None:
    """Raises `UsageError` for a place or a format that cannot be written."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as problem:
        raise UsageError(f"picture {path}: {problem.strerror}; give a file in a folder that exists") from None
    except ValueError as problem:  # matplotlib's word for a format that it does not know
        raise UsageError(f"picture {path}: {problem}. Type a name that ends in .png, .svg or .pdf") from None


def draw_program(
    program: Program,
    durations: Durations = TYPICAL_DURATIONS_MS,
    names: Sequence[str] | None = None,
    *,
    conflicts: Conflicts | None = None,
    title: str | None = None,
) -> Figure:
    """Timeline of a program by the simple rules of the planner.

    Args:
        program: a legal program.
        durations: milliseconds of each kind of step, or of each step.
        names: names of the units, by number; without them bars say `AG0`.
        conflicts: units that share bytes with a unit, so that gathers wait for a free place.
    """
    return draw_spans(simulate(program, durations, conflicts), names, title=title)


def draw_spans(spans: Sequence[Span], names: Sequence[str] | None = None, *, title: str | None = None) -> Figure:
    """Timeline of spans, one row a lane; known lanes first, others (an outer stage) in the order of appearance.

    Where compute stands still for a gather or a reduction, a red bar says so: where the spans hold such waits, and else
    between two uses while a collective runs.
    """
    figure, axes = _page(width_inches=10.0, height_inches=2.6)
    _draw_lanes(axes, spans, names)
    if title is not None:
        axes.set_title(title, loc="left", fontsize=10)
    return figure


def draw_recording(step: Recording, *, title: str | None = None) -> Figure:
    """One step as it ran: the lanes, and under them the memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 4.6), layout="constrained")
    lanes, memory = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    names = [name or "root" for name in step.units]
    _draw_lanes(lanes, step.spans, names)
    (row,) = step.summary()
    about = f"rank {step.rank} of {step.world}: {row}".replace(": compute", "\ncompute")
    lanes.set_title(title or f"{about}\nred: compute stands still for a gather or a reduction", loc="left", fontsize=8)
    lanes.set_xlabel("")
    if step.memory:
        times_ms, sizes = zip(*step.memory, strict=True)
        memory.step(times_ms, [size / MIB_BYTES for size in sizes], where="post", color="black", linewidth=1.0)
        memory.axhline(row.peak_bytes / MIB_BYTES, color=EXPOSED_COLOUR, linewidth=0.6, linestyle=":")
    memory.set_ylim(bottom=0)
    memory.set_ylabel("allocated, MiB")
    memory.set_xlabel("time, ms")
    for side in ("top", "right"):
        for axes in (lanes, memory):
            axes.spines[side].set_visible(False)
    return figure


def draw_compared(forecast: Sequence[Span], step: Recording, names: Sequence[str], titles: tuple[str, str]) -> Figure:
    """A forecast above one step as it ran, on one axis of time; `names` are those of the units of both."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 5.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    whole_ms = max(span.end_ms for span in (*forecast, *step.spans))
    for axes, spans, title in ((above, forecast, titles[0]), (below, step.spans, titles[1])):
        _draw_lanes(axes, spans, names, whole_ms)
        axes.set_title(title, loc="left", fontsize=10)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    above.set_xlabel("")
    below.set_xlabel("time, ms; red: compute stands still for a gather or a reduction")
    return figure


def _draw_lanes(axes: Axes, spans: Sequence[Span], names: Sequence[str] | None, whole_ms: float | None = None) -> None:
    """`whole_ms`: how much time the page shows; None: all of the spans."""
    spans = [span for span in spans if span.duration_ms > 0]  # one rank's collectives move nothing
    if not any(span.label.startswith(WAIT) for span in spans):
        spans = [*spans, *exposed_gaps(spans)]
    lanes = [lane for lane in LANES if any(span.lane == lane for span in spans)]
    lanes += sorted({span.lane for span in spans} - set(lanes), key=[span.lane for span in spans].index)
    whole_ms = whole_ms or max((span.end_ms for span in spans), default=0.0)
    for span in spans:
        _draw_bar(axes, span, row=lanes.index(span.lane), text=_bar_text(span.label, names), whole_ms=whole_ms)
    axes.set_yticks(range(len(lanes)), [LANE_TITLES.get(lane, lane) for lane in lanes])
    axes.set_ylim(max(len(lanes), 1) - 0.5, -0.5)
    axes.set_xlim(0, whole_ms or 1)
    axes.set_xlabel("time, ms")


def exposed_gaps(spans: Sequence[Span]) -> list[Span]:
    """Waits of a timeline that notes none: where compute has not begun, or is idle between two of its spans, and a
    collective runs."""
    compute = sorted((span for span in spans if span.lane == COMPUTE), key=lambda span: span.start_ms)
    collectives = [span for span in spans if span.lane != COMPUTE]
    gaps, idle_from_ms = [], 0.0
    for use in compute:
        running = [c for c in collectives if c.start_ms < use.start_ms and c.end_ms > idle_from_ms]
        if running and use.start_ms > idle_from_ms:
            begin_ms = max(idle_from_ms, min(c.start_ms for c in running))
            gaps.append(Span(COMPUTE, WAIT + running[-1].label, begin_ms, use.start_ms))
        idle_from_ms = max(idle_from_ms, use.end_ms)
    return gaps


def draw_packing(packing: Packing, names: Sequence[str] | None = None, *, title: str | None = None) -> Figure:
    """The arena: bytes upwards, units in order of use to the right.

    A gathered unit is drawn from the use before its own over `slots` uses: bars that overlap sideways live together,
    so the law of the arena is that no two bars overlap.
    """
    figure, axes = _page(width_inches=10.0, height_inches=3.6)
    gathered = sum(not demand.resident for demand in packing.demands)
    early = min(1, packing.slots - 1)  # one slot leaves no place for a gather ahead
    left, right = -early, max(gathered, 1) + packing.slots - 1 - early
    turn, numbered = 0, len(packing.demands) <= UNITS_NUMBERED
    for unit, (demand, offset_bytes) in enumerate(zip(packing.demands, packing.offsets_bytes, strict=True)):
        begin, width = (left, right - left) if demand.resident else (turn - early, packing.slots)
        turn += not demand.resident
        bottom_mib, height_mib = offset_bytes / MIB_BYTES, demand.size_bytes / MIB_BYTES
        colour = OTHER_COLOUR if demand.resident else COLOURS[Op.GATHER]
        axes.broken_barh([(begin, width)], (bottom_mib, height_mib), facecolor=colour, edgecolor="black", linewidth=0.8)
        name = names[unit] if names is not None else demand.name or "root"
        if demand.resident:  # may be too thin to write on: its name stands beside it
            axes.text(right, bottom_mib + height_mib / 2, f" {name} (resident)", ha="left", va="center", fontsize=8)
        elif numbered and demand.size_bytes:
            middle = (begin + width / 2, bottom_mib + height_mib / 2)
            axes.text(*middle, name, ha="center", va="center", fontsize=8)
    axes.set_xlim(left, right)
    axes.set_ylim(0, packing.total_bytes / MIB_BYTES or 1)
    axes.set_xticks(range(left, right + 1))
    axes.set_xlabel("uses of the forward")
    axes.set_ylabel("bytes of the arena, MiB")
    if title is not None:
        axes.set_title(title, loc="left", fontsize=10)
    return figure


def _page(width_inches: float, height_inches: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _draw_bar(axes: Axes, span: Span, *, row: int, text: str, whole_ms: float) -> None:
    axes.broken_barh(
        [(span.start_ms, span.duration_ms)],
        (row - BAR_HEIGHT / 2, BAR_HEIGHT),
        facecolor=_colour(span.label),
        edgecolor="black",
        linewidth=0.8,
    )
    if text and span.duration_ms * 60 > whole_ms:  # narrower bars would be all text
        middle_ms = (span.start_ms + span.end_ms) / 2
        rotation = 0 if span.duration_ms * 140 > whole_ms * len(text) else 90
        size = 8.0 if not rotation else min(8.0, 8.0 * LETTERS_UPRIGHT / len(text))
        axes.text(middle_ms, row, text, ha="center", va="center", fontsize=size, rotation=rotation)


def _colour(label: str) -> str:
    if label.startswith(WAIT):
        return EXPOSED_COLOUR
    if label == OPTIMIZER:
        return OPTIMIZER_COLOUR
    step = title_of(label)
    return OTHER_COLOUR if step is None else COLOURS[step.op]


def _bar_text(label: str, names: Sequence[str] | None) -> str:
    """Waits have their colour; their bars are mostly too thin to write on."""
    step = title_of(label)
    if label.startswith(WAIT):
        return ""
    return label if names is None or step is None else f"{step.op.value} {names[step.unit]}"
