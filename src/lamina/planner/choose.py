"""Which way to run: rules of thumb in order of simplicity, each with its numbers.

A search over all settings finds a layout that nobody can explain. Here the ladder is what a person would try, simplest
first: one GPU, ddp, zero1, zero2, zero3, hsdp, then the same again with a loss in chunks (where the loss is the
planner's own, and so can be another), then with recomputation. On a CPU, where peers were asked for and what they read
does not fit beside the masters, the same with masters in halves, which GPUs have anyway. The first rung that fits with
a margin and is within 5 % of the fastest that fits is taken, and every rung says in numbers why it was or was not.

Pure: no communication, no device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lamina.core import expandable
from lamina.errors import UsageError
from lamina.planner.machine import Machine
from lamina.planner.measure_data import Measured
from lamina.planner.memory import MARGIN, MemoryForecast, forecast_memory
from lamina.planner.time import StepTime, forecast_time
from lamina.planner.transports import can_be_halved, settled
from lamina.planner.workload import Choice

CLOSE = 0.95  # of the fastest rung's tokens a second: near enough to be taken for its simplicity
MOST_GPUS = 1 << 20
MOST_DOUBLINGS = 10  # of the GPUs there are, in search of a number that suffices
RECOMPUTE = ("none", "selective", "full")
Measures = Callable[[str | int], Measured]  # by recomputation


@dataclass(frozen=True)
class Rung:
    """One way to run, and what it would need."""

    title: str
    choice: Choice
    memory: MemoryForecast
    time: StepTime

    @property
    def fits(self) -> bool:
        return self.memory.fits


@dataclass(frozen=True)
class Decision:
    """The ladder, and the rung that was taken."""

    rungs: tuple[Rung, ...]  # simplest first
    taken: Rung
    fastest: Rung  # of those that fit

    def why_not(self, rung: Rung) -> str:
        """Why a rung was passed over; empty for the one that was taken."""
        if rung is self.taken:
            return ""
        if not rung.fits:
            more, device = size_text(rung.memory.missing_bytes), gib(rung.memory.device_bytes)
            if rung.memory.device_bytes < 2**30:
                device = size_text(rung.memory.device_bytes)
            return f"needs {more} more than {MARGIN:.0%} of {device}"
        share = rung.time.tokens_per_s / self.fastest.time.tokens_per_s
        if share < CLOSE:
            return f"{min(0.99, 1 - share):.0%} fewer tokens a second than {self.fastest.title}"
        return f"fits; {self.taken.title} is simpler"


def gib(size_bytes: float) -> str:
    return in_units(size_bytes, 2**30)


def in_units(size_bytes: float, unit_bytes: int) -> str:
    return f"{size_bytes / unit_bytes:.2f}" if size_bytes < 10 * unit_bytes else f"{size_bytes / unit_bytes:.1f}"


def size_text(size_bytes: float) -> str:
    """With its unit, which small models want smaller."""
    if size_bytes >= 2**30:
        return f"{gib(size_bytes)} GiB"
    unit, word = next(((u, w) for u, w in ((2**20, "MiB"), (2**10, "KiB")) if size_bytes >= u), (1, "B"))
    return f"{size_bytes / unit:.3g} {word}"


def choose(
    measures: Measures,
    gpus: int,
    machine: Machine,
    template: Choice,
    budget_bytes: int | None = None,
    chunked: Callable[[str | int], Measured | None] | None = None,
) -> Decision:
    """Climb the ladder.

    Args:
        measures: the model under a kind of recomputation; asked only for what is needed.
        template: what all rungs share: slots, accumulation, dtypes.
        budget_bytes: of one device, instead of the machine's.
        chunked: the same model with its loss in chunks; gives None where that is not possible or saves nothing.

    Raises:
        UsageError: no rung fits; says the smallest that would do.
    """
    check_gpus(gpus)
    rungs: list[Rung] = []
    for recompute in RECOMPUTE:
        shared = replace(template, recompute=recompute)
        rungs += rungs_in_order(measures(recompute), gpus, machine, shared, budget_bytes)
        if any(rung.fits for rung in rungs):
            break  # recomputing costs time and gains nothing but memory
        in_chunks = None if chunked is None else chunked(recompute)
        if in_chunks is not None:
            rungs += rungs_in_order(in_chunks, gpus, machine, replace(shared, chunked_loss=True), budget_bytes)
            if any(rung.fits for rung in rungs):
                break
    fitting = [rung for rung in rungs if rung.fits]
    if not fitting:
        last = measures("full")
        in_chunks = None if chunked is None else chunked("full")
        shared = replace(template, recompute="full", chunked_loss=in_chunks is not None)
        more = _more_gpus(in_chunks or last, gpus, machine, shared, budget_bytes)
        raise UsageError(_nothing_fits(rungs, budget_bytes, machine, last, more))
    fastest = max(fitting, key=lambda rung: rung.time.tokens_per_s)
    taken = next(r for r in fitting if r.time.tokens_per_s >= CLOSE * fastest.time.tokens_per_s)
    return Decision(tuple(rungs), taken, fastest)


def check_gpus(gpus: int) -> None:
    if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1:
        raise UsageError(f"gpus={gpus!r}: a run needs at least one; type --gpus 1")
    if gpus > MOST_GPUS:
        raise UsageError(f"gpus={gpus}: more than any machine has; up to {MOST_GPUS} can be asked for")


def rungs_in_order(
    measured: Measured, gpus: int, machine: Machine, template: Choice, budget_bytes: int | None
) -> list[Rung]:
    suffix = "" if template.recompute == "none" else f", recompute {template.recompute}"
    suffix += ", chunked loss" if template.chunked_loss else ""
    rungs = []
    for title, choice in _ways(measured, gpus, machine, template):
        rungs.append(rung_of(title + suffix, measured, choice, machine, budget_bytes))
        halved = replace(choice, halved=True)
        is_asked = template.transport == "peer" == choice.transport
        is_open = template.halved is None and not choice.halved
        if is_asked and is_open and not rungs[-1].fits and can_be_halved(halved, measured):
            rungs.append(rung_of(f"{title}{suffix}, halved masters", measured, halved, machine, budget_bytes))
    return rungs


def _ways(measured: Measured, gpus: int, machine: Machine, template: Choice) -> Iterator[tuple[str, Choice]]:
    """Strategies that these GPUs can run, with their transport."""
    yield "one GPU", settled(replace(template, strategy="zero3", world=1), measured, machine)
    titles = {name: name for name in ("ddp", "zero1", "zero2", "zero3")} if gpus > 1 else {}
    node = machine.gpus_per_node
    if gpus > node > 1 and gpus % node == 0:
        titles["hsdp"] = f"hsdp over {node}"
    for name, title in titles.items():
        choice = replace(template, strategy=name, world=gpus, shard_size=node if name == "hsdp" else None)
        if template.halved and not can_be_halved(choice, measured):
            continue
        with contextlib.suppress(UsageError):  # peers beyond a node
            yield title, settled(choice, measured, machine)


def rung_of(title: str, measured: Measured, choice: Choice, machine: Machine, budget_bytes: int | None = None) -> Rung:
    memory = forecast_memory(measured, choice, machine, budget_bytes)
    return Rung(title, choice, memory, forecast_time(measured.workload, choice, machine))


def _more_gpus(
    measured: Measured, gpus: int, machine: Machine, template: Choice, budget_bytes: int | None
) -> int | None:
    """Twice as many as there are, or twice that, ...: the first that suffice; None: no number does."""
    for times in range(1, MOST_DOUBLINGS + 1):
        choice = replace(template, strategy="zero3", world=gpus << times)
        try:
            choice = settled(choice, measured, machine)
        except UsageError:  # peers beyond a node
            return None
        if forecast_memory(measured, choice, machine, budget_bytes).fits:
            return gpus << times
    return None


def _nothing_fits(
    rungs: Sequence[Rung], budget_bytes: int | None, machine: Machine, measured: Measured, gpus: int | None
) -> str:
    least = min(rungs, key=lambda rung: rung.memory.used_bytes)
    wanted = least.memory.used_bytes / MARGIN
    size_bytes = least.memory.device_bytes
    given = size_text(size_bytes)
    what = f"a budget of {given}" if budget_bytes is not None else f"{machine.name} ({given})"
    parts = sorted(least.memory.parts().items(), key=lambda item: -item[1])[:2]
    most = ", ".join(f"{name} {size_text(size)}" for name, size in parts)
    unit, word = (2**30, "GiB") if wanted >= 2**30 else (2**20, "MiB")
    ways = [] if gpus is None else [f"--gpus {gpus}, where zero3 with full recomputation fits"]
    if least.choice.transport == "peer" and not least.choice.halved:
        ways.append("--transport c10d, which publishes no weights")
    if not machine.is_cpu and not least.choice.expandable:
        ways.append(expandable.request())
    if measured.workload.batch > 1:
        ways.append(f"a smaller batch than {measured.workload.batch} and --accumulate")
    ways += ["a shorter --seq", f"GPUs of more memory (--budget {-(-int(wanted) // unit)}{word} or more)"]
    return (
        f"nothing fits {what}: the smallest is {least.title}, which needs {size_text(wanted)} a GPU "
        f"(most of it {most}). What may help: {'; '.join(ways)}"
    )
