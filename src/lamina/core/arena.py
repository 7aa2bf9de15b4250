"""Which bytes of the arena each unit is gathered into.

A pool that allocates at each gather fragments and synchronises; one buffer a unit keeps the whole model. Here the
places are chosen once: units whose live windows overlap do not overlap in address, all others may share. Equal blocks
become a ring of `slots`; an embedding and a head, which never live together, get the same bytes.

Pure: no device. `check()` is the law.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.core.layout import SEGMENT_ALIGNMENT_BYTES, round_up


@dataclass(frozen=True)
class Demand:
    """What one unit asks of the arena, in order of use."""

    name: str
    size_bytes: int
    resident: bool  # lives all the time: the root's window, or parameters that are not sharded


@dataclass(frozen=True)
class Packing:
    """Offset of every unit, and the size of the arena that holds them all."""

    demands: tuple[Demand, ...]
    offsets_bytes: tuple[int, ...]
    total_bytes: int
    slots: int

    def conflicts(self, unit: int) -> tuple[int, ...]:
        """Units that share bytes with `unit`."""
        begin, end = self._span(unit)
        spans = [self._span(other) for other in range(len(self.demands))]
        return tuple(other for other, (b, e) in enumerate(spans) if other != unit and b < end and begin < e)

    def apart(self) -> Packing:
        """The same demands, of which no two share bytes."""
        sizes = [round_up(demand.size_bytes, SEGMENT_ALIGNMENT_BYTES) for demand in self.demands]
        ends = list(itertools.accumulate(sizes, initial=0))
        return Packing(self.demands, tuple(ends[:-1]), ends[-1], max(1, len(self.demands)))

    def _span(self, unit: int) -> tuple[int, int]:
        return self.offsets_bytes[unit], self.offsets_bytes[unit] + self.demands[unit].size_bytes

    def text(self) -> str:
        lines = [f"arena of {self.total_bytes} bytes, {self.slots} slots"]
        for demand, offset in zip(self.demands, self.offsets_bytes, strict=True):
            kind = "resident" if demand.resident else "gathered"
            lines.append(f"  [{offset}:{offset + demand.size_bytes}) {demand.name or 'root'} ({kind})")
        return "\n".join(lines)

    def check(self) -> None:
        """The law of a packing; AssertionError names what is broken."""
        turns = _turns(self.demands)
        for unit, demand in enumerate(self.demands):
            assert self.offsets_bytes[unit] % SEGMENT_ALIGNMENT_BYTES == 0, f"{demand.name} begins unaligned"
            assert self.offsets_bytes[unit] + demand.size_bytes <= self.total_bytes, f"{demand.name} leaves the arena"
            for other in self.conflicts(unit):
                assert not _live_together(turns[unit], turns[other], self.slots), (
                    f"{demand.name} and {self.demands[other].name} live together and share bytes"
                )


def pack(demands: Sequence[Demand], slots: int) -> Packing:
    """First fit, the largest first; ties keep the order of use, so that equal blocks form a ring.

    A unit is live beside the `slots - 1` units on either side of it (itself, what is being gathered, what is being
    reduced); a resident unit is live beside everything.
    """
    assert slots >= 1, f"{slots} slots hold no unit"
    turns = _turns(demands)
    offsets = [0] * len(demands)
    placed: list[int] = []
    for unit in sorted(range(len(demands)), key=lambda u: -demands[u].size_bytes):
        size = round_up(demands[unit].size_bytes, SEGMENT_ALIGNMENT_BYTES)
        taken = sorted(
            (offsets[other], round_up(offsets[other] + demands[other].size_bytes, SEGMENT_ALIGNMENT_BYTES))
            for other in placed
            if _live_together(turns[unit], turns[other], slots)
        )
        offset = 0
        for begin, end in taken:
            if offset + size <= begin:
                break
            offset = max(offset, end)
        offsets[unit] = offset
        placed.append(unit)
    total = max((offsets[u] + d.size_bytes for u, d in enumerate(demands)), default=0)
    return Packing(tuple(demands), tuple(offsets), total, slots)


def _turns(demands: Sequence[Demand]) -> list[int | None]:
    """Place of each unit among those that come and go; None for a resident one."""
    turns: list[int | None] = []
    turn = 0
    for demand in demands:
        turns.append(None if demand.resident else turn)
        turn += not demand.resident
    return turns


def _live_together(one: int | None, other: int | None, slots: int) -> bool:
    return one is None or other is None or abs(one - other) < slots
