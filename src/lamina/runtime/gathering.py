"""From masters to full parameters: one unit's gather.

The slot is the concatenation of the shards, so a gather is: cast the own range into its place, then fill the rest in
place, one all-gather for each level of sharding. No copy in, no copy out, no allocation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lamina.core.control import Control
from lamina.core.lanes import Lanes
from lamina.core.layout import Segment
from lamina.core.mesh import DataMesh
from lamina.core.slots import Slot, SlotState
from lamina.runtime.unit import Unit
from lamina.transport.c10d import Transport


def spans(segment: Segment, mesh: DataMesh) -> list[tuple[int, int]]:
    """Element ranges of this rank: the whole segment, then its range at each level, each inside the one before."""
    start, numel = 0, segment.numel
    found = [(0, numel)]
    for level in mesh.factors.levels:
        numel //= level.size
        start += level.place(mesh.rank) * numel
        found.append((start, start + numel))
    return found


class Gatherer:
    """Issues gathers and waits for them."""

    def __init__(self, transport: Transport, control: Control, lanes: Lanes) -> None:
        self.transport, self.control, self.lanes = transport, control, lanes
        self.bytes_moved = 0
        self._works: dict[int, list[dist.Work]] = {}  # by id of the slot

    def start(self, unit: Unit, slot: Slot) -> None:
        """Issue the gather of a unit into an EMPTY slot (or over the same weights: they come out equal)."""
        self.finish(slot)
        slot.take_memory()
        slot.to(SlotState.GATHERING)
        if unit.mesh.factors.uses_shards:
            unit.gathers += 1
        works: list[dist.Work] = []
        lane = self.lanes.gather
        lane.wait(slot.freed)
        with torch.no_grad(), lane.running():
            for number, segment in enumerate(unit.layout.segments):
                works += self._segment(unit, number, segment, slot.segments[number])
        unit.dirty.value = False
        slot.ready = lane.mark()
        self._works[id(slot)] = works

    def finish(self, slot: Slot) -> None:
        """Let compute continue once the weights are there; on the CPU the host waits."""
        if slot.state is not SlotState.GATHERING:
            return
        for work in self._works.pop(id(slot), ()):
            self.control.wait(work)
        self.lanes.compute.wait(slot.ready)
        slot.to(SlotState.WEIGHTS)

    def drop(self, slot: Slot) -> None:
        """An unused prefetch: its bytes arrive, nobody reads them."""
        self.finish(slot)

    def _segment(self, unit: Unit, number: int, segment: Segment, whole: Tensor) -> Sequence[dist.Work]:
        mesh = unit.mesh
        full, params, grads, own = spans(segment, mesh)
        if unit.published:
            published = unit.published[number]
            if unit.dirty.value:
                self._outer(unit, published, number, params[0], (params, grads, own))
            whole[params[0] : params[1]].copy_(published)
        else:
            self._outer(unit, whole, number, 0, (params, grads, own))
        if mesh.gather[0].is_trivial:
            return ()
        self.bytes_moved += whole.nbytes
        work = self.transport.all_gather(mesh.gather[0], whole, whole[params[0] : params[1]])
        return () if work is None else (work,)

    def _outer(self, unit: Unit, target: Tensor, number: int, origin: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Cast the master into `target` (which begins at element `origin`) and gather the outer levels around it."""
        params, grads, own = [(a - origin, b - origin) for a, b in ranges]
        target[own[0] : own[1]].copy_(unit.masters[number])
        for group, outside, inside in ((unit.mesh.gather[2], grads, own), (unit.mesh.gather[1], params, grads)):
            if not group.is_trivial:
                whole = target[outside[0] : outside[1]]
                self.bytes_moved += whole.nbytes
                self.control.wait(self.transport.all_gather(group, whole, target[inside[0] : inside[1]]))
