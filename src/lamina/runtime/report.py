"""What a sharded model is made of and has done so far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lamina.core.layout import short_dtype
from lamina.core.uncompiled import uncompiled
from lamina.runtime.access import runtime_of
from lamina.runtime.assemble import Runtime
from lamina.runtime.halved import may_be_halved
from lamina.runtime.halving import NO_HOLDER
from lamina.runtime.unit import Unit


@dataclass(frozen=True)
class UnitReport:
    """One unit on this rank."""

    name: str
    parameters: int  # elements, whole
    bytes: int  # of its slot, whole, with padding
    gathers: int
    reduces: int
    overflows: int  # gathers that found their slot in use
    dtypes: str  # compute (master)


@dataclass(frozen=True)
class Report:
    """A sharded model on this rank; `str()` is a table."""

    strategy: str
    world: int
    transport: str
    units: tuple[UnitReport, ...]
    memory: dict[str, int]  # bytes on this rank by kind
    bytes_gathered: int
    bytes_reduced: int
    initialised: dict[str, str]  # parameter -> what gave it its value
    notes: tuple[str, ...] = ()  # what was chosen and may surprise, a line each

    @property
    def gathers(self) -> int:
        return sum(unit.gathers for unit in self.units)

    @property
    def reduces(self) -> int:
        return sum(unit.reduces for unit in self.units)

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    def __str__(self) -> str:
        width = max([len(unit.name) for unit in self.units] + [4])
        lines = [f"{self.strategy} over {self.world} ranks, transport {self.transport}"]
        lines += self.notes
        lines.append(f"{'unit':<{width}}  {'parameters':>12} {'slot':>10} {'gathers':>8} {'reduces':>8}  dtypes")
        lines += [
            f"{u.name:<{width}}  {u.parameters:>12,} {readable_bytes(u.bytes):>10} "
            f"{u.gathers:>8} {u.reduces:>8}  {u.dtypes}" + (f"  ({u.overflows} overflows)" if u.overflows else "")
            for u in self.units
        ]
        kinds = ", ".join(f"{kind} {readable_bytes(size)}" for kind, size in self.memory.items())
        lines.append(f"on this rank: {readable_bytes(self.memory_bytes)} ({kinds})")
        return "\n".join(lines)


@uncompiled
def report(model: nn.Module) -> Report:
    """Units, memory and counters of a sharded model on this rank. Local: no communication."""
    runtime = runtime_of(model)
    engine = runtime.engine
    memory = {
        "masters": sum(map(_master_bytes, runtime.units)),
        "gradients": sum(g.untyped_storage().nbytes() for unit in runtime.units for g in unit.gradients.ranges),
        "slots": runtime.arena.nbytes + (0 if runtime.adopted_arena is None else runtime.adopted_arena.nbytes),
        "published": sum(p.nbytes for unit in runtime.units for p in unit.published),
        "overflow": sum(s.buffer.untyped_storage().nbytes() for unit in runtime.units for s in unit.overflow),
        "reduction": engine.reducer.buffer_bytes,
        "accumulated": sum(s.nbytes for p in engine.reducer.partials.values() for s in p.sums),
    }
    return Report(
        runtime.strategy,
        runtime.mesh.world,
        runtime.transport,
        tuple(map(_unit_report, runtime.units)),
        {kind: size for kind, size in memory.items() if size},
        engine.gatherer.bytes_moved,
        engine.reducer.bytes_moved,
        {record.name: record.source for record in runtime.records},
        tuple(_notes(runtime)),
    )


def _notes(runtime: Runtime) -> Iterator[str]:
    if runtime.transport_note:
        yield f"transport c10d, for {runtime.transport_note}"
    peers = getattr(runtime.engine.gatherer, "peers", None)
    if trial := getattr(peers, "trial", ""):
        yield f"transport peer, for {trial}"
    if runtime.transport == "peer" and (masters := _forms_of_masters(runtime)):
        yield f"masters {masters}"
    if runtime.strategy == "hsdp" and runtime.mesh.world > 1 and not runtime.mesh.factors.uses_shards:
        yield (
            "hsdp shards inside a node, and here each has one rank: every rank holds a whole copy, as with ddp. Type "
            "strategy='zero3' to shard over all ranks"
        )


def _forms_of_masters(runtime: Runtime) -> str:
    """In halves or whole, and why; empty where there are none that could be halved."""
    units = [unit for unit in runtime.units if unit.sharded and any(map(may_be_halved, unit.layout.segments))]
    whole = [unit for unit in units if not unit.halved]
    found = []
    if len(whole) < len(units):
        is_asked = runtime.precision.halves is True
        why = "Precision(halves=True) asks for it" if is_asked else "lamina.optim.AdamW clips and updates both"
        found.append(f"in halves{_share(len(units) - len(whole), len(units))}, for {why}")
    for why in dict.fromkeys(unit.halving.why_whole or NO_HOLDER for unit in whole):
        count = sum((unit.halving.why_whole or NO_HOLDER) == why for unit in whole)
        found.append(f"whole{_share(count, len(units))}, for {why}")
    return "; ".join(found)


def _share(count: int, of: int) -> str:
    return "" if count == of else f" in {count} of {of} units"


def _master_bytes(unit: Unit) -> int:
    """Of halved ones without the half that is published."""
    return sum(unit.halved[i].nbytes if i in unit.halved else m.nbytes for i, m in enumerate(unit.masters))


def _unit_report(unit: Unit) -> UnitReport:
    dtypes = ", ".join(
        f"{short_dtype(s.compute)} ({short_dtype(s.master)})" + ("" if s.trainable else " frozen")
        for s in unit.layout.segments
    )
    return UnitReport(
        unit.name, unit.layout.numel, unit.layout.buffer_bytes, unit.gathers, unit.reduces, unit.overflows, dtypes
    )


def readable_bytes(size: float) -> str:
    """1536 -> "1.5 KiB"."""
    for word in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or word == "TiB":
            return f"{size:.0f} {word}" if word == "B" else f"{size:.1f} {word}"
        size /= 1024
    raise AssertionError
