"""`lamina.plan`: memory and time of a run, and which way to run it, before there is a GPU."""

from __future__ import annotations

import contextlib
import functools
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lamina.core import expandable
from lamina.core.layout import short_dtype
from lamina.core.strategy import Strategy, resolve
from lamina.errors import UsageError
from lamina.planner.choose import Decision, Rung, check_gpus, choose, in_units, rung_of, rungs_in_order, size_text
from lamina.planner.chunked import ChunkedLoss, find_head
from lamina.planner.gains import UNDER, gains
from lamina.planner.machine import Machine, load_machine
from lamina.planner.measure import Loss, check_sizes, measure
from lamina.planner.measure_data import Measured
from lamina.planner.memory import forecast_memory
from lamina.planner.transports import can_be_halved, check_transport, settled
from lamina.planner.workload import Choice
from lamina.runtime.precision import Precision, check_halves, resolve_precision

SUFFIX_NAMES = "B, KiB, MiB, GiB, TiB; kB, MB, GB, TB"
SUFFIXES = {"": 1, "b": 1} | {
    f"{letter}{end}": base**power for power, letter in enumerate("kmgt", 1) for end, base in (("ib", 1024), ("b", 1000))
}
CHUNKED = (
    "chunked loss is yours to write: call the output layer and the loss for a thousand tokens at a time, each in",
    "torch.utils.checkpoint, inside `with lamina.keep(head.weight):`, and plan it with loss=. `lamina train` does so.",
)
PEERS = "over transport='peer', which publishes weights: counted in the memory, under slots"
HALVED = "masters in halves: Precision(compute=torch.bfloat16, halves=True), with lamina.optim.AdamW(max_norm=...)"
FREE = f"over transport='peer', with {UNDER}; plan another optimizer with halves=False"
COMPILED = (
    "compiled: each unit's elementwise kernels count as fused; memory is that of the step without it, which takes more"
)
CAPTURED = (
    "captured: as one CUDA graph, by lamina.capture, so that nothing waits for the host; memory is that of the graph's",
    "own pool beside what lasts",
)
EXPANDABLE = (
    f"with torch's expandable segments: {expandable.VARIABLE}={expandable.SETTING}, which `lamina train` sets by itself"
)
WORTH_NAMING = 0.01  # of what is used
MOST_ROWS = 6  # moments of a step that are shown


@dataclass(frozen=True)
class Plan:
    """A forecast; `str()` is a table, `.as_dict()` plain values. Bytes and times are of one rank."""

    model: str
    numel: int
    gpus: int
    machine: Machine
    batch: int
    seq: int
    decision: Decision
    units: tuple[str, ...]  # names, by their number in a step's spans
    numels: tuple[int, ...]  # of their parameters
    gains: tuple[str, ...]  # what would gain most next, the largest first
    transport: str = "auto"  # that was asked for
    precision: Precision = field(default_factory=Precision)  # that was asked for
    expandable_saves: int = 0  # bytes of the way taken that torch's expandable segments would save

    @property
    def taken(self) -> Rung:
        return self.decision.taken

    @property
    def arguments(self) -> dict[str, Any]:
        """What to give `lamina.shard`."""
        choice = self.taken.choice
        given: dict[str, Any] = {
            "strategy": choice.strategy,
            "recompute": choice.recompute,
            "slots": choice.slots,
        }
        given |= {"transport": self.transport} if self.transport != "auto" else {}
        if (halves := self._halves) is not None:
            given["precision"] = replace(self.precision, halves=halves)
        return given | ({"compile": True} if choice.compiled else {})

    @property
    def _halves(self) -> bool | None:
        """What is to be asked for; None: what lamina chooses by itself is what was forecast."""
        if self.taken.choice.transport != "peer":
            return None
        if self.precision.halves is None and self.taken.choice.halved and self.machine.is_cpu:
            return True
        return self.precision.halves

    def as_dict(self) -> dict[str, Any]:
        rows = []
        for rung in self.decision.rungs:
            memory, time = rung.memory, rung.time
            rows.append(
                {
                    "title": rung.title,
                    "fits": rung.fits,
                    "why_not": self.decision.why_not(rung),
                    "allocated_bytes": memory.allocated_bytes,
                    "reserved_bytes": memory.reserved_bytes,
                    "used_bytes": memory.used_bytes,
                    "transport": rung.choice.transport,
                    "peak": memory.peak.place,
                    "parts_bytes": memory.parts(),
                    "step_ms": time.total_ms,
                    "exposed_ms": time.exposed_ms,
                    "tokens_per_s": time.tokens_per_s,
                }
            )
        taken = {k: asdict(v) if isinstance(v, Strategy) else v for k, v in self.arguments.items()}
        if "precision" in taken:
            compute = None if self.precision.compute is None else short_dtype(self.precision.compute)
            taken["precision"] = {"compute": compute, "halves": self._halves}
        return {
            "model": self.model,
            "parameters": self.numel,
            "gpus": self.gpus,
            "machine": self.machine.name,
            "batch": self.batch,
            "seq": self.seq,
            "taken": self.taken.title,
            "expandable_segments": self.taken.choice.expandable,
            "arguments": taken,
            "rungs": rows,
            "gains": list(self.gains),
        }

    def __str__(self) -> str:
        head = (
            f"{self.model}: {count_text(self.numel)} parameters, {self.batch} sequences of {self.seq} a GPU, "
            f"{self.gpus} x {self.machine.name}"
        )
        return "\n".join([head, "", *self._ladder(), "", *self._memory(), "", *self._time()])

    def _ladder(self) -> list[str]:
        width = max(len(rung.title) for rung in self.decision.rungs)
        unit_bytes, unit = self._unit
        lines = [f"  {'':<{width}} {f'used {unit}':>9} {'allocated':>9} {'ms a step':>10} {'tokens/s':>11}"]
        for rung in self.decision.rungs:
            mark = "*" if rung is self.taken else " "
            lines.append(
                f"{mark} {rung.title:<{width}} {in_units(rung.memory.used_bytes, unit_bytes):>9} "
                f"{in_units(rung.memory.allocated_bytes, unit_bytes):>9} {rung.time.total_ms:>10.1f} "
                f"{rung.time.tokens_per_s:>11,.0f}  {self.decision.why_not(rung)}".rstrip()
            )
        return lines

    @property
    def _unit(self) -> tuple[int, str]:
        """Of the memory that is shown."""
        most_bytes = max(rung.memory.used_bytes for rung in self.decision.rungs)
        return (2**30, "GiB") if most_bytes >= 2**30 else (2**20, "MiB")

    def _memory(self) -> list[str]:
        memory, (unit_bytes, unit) = self.taken.memory, self._unit
        parts = ", ".join(f"{name} {in_units(size, unit_bytes)}" for name, size in memory.parts().items())
        lines = [
            f"memory of {self.taken.title}: peak at {memory.peak.place}, {in_units(memory.used_bytes, unit_bytes)} of "
            f"{in_units(memory.device_bytes, unit_bytes)} {unit}",
            f"  {parts}",
        ]
        step = max(1, len(memory.moments) // MOST_ROWS)
        shown = memory.moments[::step]
        curve = ", ".join(f"{moment.place} {in_units(moment.total_bytes, unit_bytes)}" for moment in shown)
        lines.append(f"  through the step: {curve}")
        if self.taken.choice.expandable:
            lines.append(f"  {EXPANDABLE}")
        elif self.expandable_saves >= WORTH_NAMING * memory.used_bytes:
            saved = size_text(self.expandable_saves)
            lines.append(f"  {saved} less with {expandable.request()}, set before CUDA is used")
        return lines

    def _time(self) -> list[str]:
        lines = [f"time of {self.taken.title}: {self.taken.time.text()}"]
        if self.taken.choice.transport == "peer":
            halved = FREE if self._halves is None else HALVED
            lines.append(f"  {halved if self.taken.choice.halved else PEERS}")
        if self.taken.choice.compiled:
            lines.append(f"  {COMPILED}")
        lines += [f"  {text}" for text in CAPTURED] if self.taken.choice.captured else []
        if self.taken.choice.chunked_loss:
            lines += [f"  {text}" for text in CHUNKED]
        if self.gains:
            lines += ["  what would gain most next:", *(f"    {gain}" for gain in self.gains[:3])]
        return lines


def plan(
    model: nn.Module,
    gpus: int = 1,
    *,
    batch: int,
    seq: int,
    machine: str | Path | Machine = "h100",
    budget: int | str | None = None,
    strategy: str | Strategy | None = None,
    recompute: str | int = "none",
    precision: str | Precision | None = "bf16",
    units: str | Sequence[Any] = "auto",
    slots: int = 3,
    accumulation: int = 1,
    compile: bool = False,
    capture: bool = False,
    transport: str = "auto",
    inputs: Mapping[str, Tensor] | Sequence[Tensor] | None = None,
    loss: Loss | None = None,
    name: str | None = None,
) -> Plan:
    """Forecast memory and time of a training step, and choose the simplest way to run it. No GPU, no communication.

    Args:
        model: on any device, meta included; it is not changed.
        gpus: data ranks.
        batch, seq: sequences of a micro-batch on one GPU, and their length.
        machine: a shipped one ("a100-40", "a100-80", "h100", "h200"), a machine file, "here" after `lamina doctor`.
        budget: memory of one GPU instead of the machine's: bytes, or "40GiB".
        strategy: look at this one (with `recompute`) alone; None: the ladder.
        precision, units, slots, transport: as in `lamina.shard`; what "auto" would take there is what is forecast, and
            masters lie in halves where they do under `lamina.optim.AdamW(max_norm=...)`.
        accumulation: micro-batches of a step.
        compile: elementwise kernels of each unit are fused. Counts in the time; memory is that of the step without it.
        capture: the step is one CUDA graph (`lamina.capture`), on GPUs, with a pool of memory of its own.
        inputs: of the forward; None: token numbers.
        loss: of the model and its inputs; None: the model's own, or cross entropy of its logits.

    Raises:
        UsageError: no GPUs, sizes that are not positive, an unknown machine (the nearest named), a model that needs
            values to run, a budget that nothing fits (the smallest that would do).
    """
    check_gpus(gpus)
    check_sizes(batch, seq)
    check_transport(transport)
    where = machine if isinstance(machine, Machine) else load_machine(machine)
    if gpus > where.gpus_per_node and not where.network_bytes_per_s:
        raise UsageError(
            f"gpus={gpus}: {where.name} ({where.device}) has {where.gpus_per_node} a node, and its file knows of no "
            "network between nodes. `lamina doctor --ranks N` measures N together; or set gpus_per_node, "
            "network_bytes_per_s"
        )
    limit = parse_bytes(budget)
    kind = "cpu" if where.is_cpu else "cuda"
    if capture and where.is_cpu:
        raise UsageError(f"capture=True: {where.name} ({where.device}) has no CUDA graphs; leave it out")

    def run(recompute: str | int, its_loss: Loss | None, its_batch: int = batch) -> Measured:
        return measure(
            model,
            its_batch,
            seq,
            inputs=inputs,
            loss=its_loss,
            precision=precision,
            recompute=recompute,
            units=units,
            kind=kind,
        )

    @functools.cache
    def measured(recompute: str | int) -> Measured:
        return run(recompute, loss)

    @functools.cache
    def in_chunks(recompute: str | int) -> Measured | None:
        whole = measured(recompute)
        head = find_head(model, batch * seq, whole.workload.logits_bytes) if loss is None else None
        if head is None:
            return None
        try:
            found = run(recompute, ChunkedLoss(head))
        except UsageError:  # what the model does with its logits needs all of them
            return None
        return found if peak_bytes(found) < peak_bytes(whole) else None

    chosen = resolve_precision(precision)
    compute = chosen.compute or torch.float32
    if chosen.halves:
        check_halves(chosen, resolve("zero3" if strategy is None else strategy, gpus), transport)
    template = Choice(
        accumulation=accumulation,
        compiled=compile,
        captured=capture,
        slots=slots,
        compute_bytes=compute.itemsize,
        wire=chosen.wire,
        transport="peer" if chosen.halves else transport,
        halved=chosen.halves,
        expandable=kind == "cuda" and expandable.asked_for() is True,
        sums="exchange" if kind == "cpu" and slots > 1 else "auto",
    )
    if strategy is None:
        decision = choose(measured, gpus, where, template, limit, in_chunks)
    else:
        node = where.gpus_per_node if strategy == "hsdp" and gpus > where.gpus_per_node else None
        choice = replace(template, strategy=strategy, world=gpus, recompute=recompute, shard_size=node)
        choice = settled(choice, measured(recompute), where)
        rung = rung_of(str(strategy), measured(recompute), choice, where, limit)
        decision = Decision((rung,), rung, rung)
    model_name = name or type(model).__name__
    choice = decision.taken.choice
    taken = in_chunks(choice.recompute) if choice.chunked_loss else measured(choice.recompute)
    assert taken is not None
    names = tuple(unit.name for unit in taken.workload.units)
    numels = tuple(unit.trainable_numel + unit.frozen_numel for unit in taken.workload.units)
    others: tuple[tuple[str, float], ...] = ()
    if strategy is None and choice.recompute != "none" and batch % 2 == 0 and inputs is None:
        smaller = replace(template, accumulation=2 * accumulation)
        rungs = rungs_in_order(run("none", loss, batch // 2), gpus, where, smaller, limit)
        others = _in_smaller_batches(rungs, batch // 2)

    def fits(changed: Choice) -> bool:
        is_possible = not changed.halved or can_be_halved(changed, taken)
        return is_possible and forecast_memory(taken, changed, where, limit).fits

    def recorded(eager: Choice) -> Choice:
        whole = False if chosen.halves else chosen.halves
        return settled(replace(eager, transport=template.transport, captured=True, halved=whole), taken, where)

    gained = gains(decision.taken.time, taken.workload, choice, where, others, fits, chosen.halves, recorded)
    if not decision.taken.fits and not choice.halved and choice.transport == "peer":
        gained += _saved_by_halves(decision.taken, taken, where, limit)
    expanding = forecast_memory(taken, replace(choice, expandable=kind == "cuda"), where, limit)
    saved_bytes = decision.taken.memory.used_bytes - expanding.used_bytes
    return Plan(
        model_name,
        taken.numel,
        gpus,
        where,
        batch,
        seq,
        decision,
        names,
        numels,
        gained,
        transport,
        chosen,
        saved_bytes,
    )


def _saved_by_halves(rung: Rung, measured: Measured, machine: Machine, limit: int | None) -> tuple[str, ...]:
    """Where a way over peers does not fit."""
    halved = replace(rung.choice, halved=True)
    if not can_be_halved(halved, measured):
        return ()
    memory = forecast_memory(measured, halved, machine, limit)
    saved = size_text(rung.memory.used_bytes - memory.used_bytes)
    ending = "which fits" if memory.fits else f"{size_text(memory.missing_bytes)} too many are left"
    return (f"{saved} less: Precision(compute=torch.bfloat16, halves=True), {ending}",)


def _in_smaller_batches(rungs: Sequence[Rung], batch: int) -> tuple[tuple[str, float], ...]:
    """Instead of recomputation: the fastest way that fits, in words, and its tokens a second; empty if none does."""
    best = max((rung for rung in rungs if rung.fits), key=lambda rung: rung.time.tokens_per_s, default=None)
    if best is None:
        return ()
    words = f"--batch {batch} --accumulate {best.choice.accumulation}, where {best.title} fits without recomputation"
    return ((words, best.time.tokens_per_s),)


def count_text(numel: int) -> str:
    return f"{numel / 1e6:,.1f} M" if numel >= 100_000 else f"{numel:,}"


def peak_bytes(measured: Measured) -> int:
    """Of activations."""
    return max(moment.activation_bytes for moment in measured.moments)


def parse_bytes(text: int | str | None) -> int | None:
    """ "40GiB", "80 GB", a number of bytes.

    Raises `UsageError` for anything else, with the suffixes there are.
    """
    if text is None or (isinstance(text, int) and text > 0):
        return text
    word = str(text).strip().replace(" ", "")
    number = word.rstrip(string.ascii_letters)
    factor = SUFFIXES.get(word[len(number) :].lower())
    with contextlib.suppress(ValueError, OverflowError):  # no number, nan, or infinite
        if factor is not None and (size_bytes := int(float(number) * factor)) > 0:
            return size_bytes
    raise UsageError(f"budget={text!r}: a positive number of bytes, or text such as 40GiB ({SUFFIX_NAMES})")
