"""Gathers that need nobody else: weights are published once a version, and read whenever they are needed.

`Gatherer` casts this rank's masters into a slot and meets the other ranks in an all-gather, each time. Here `publish()`
casts them once, into a region that the peers can read, and a gather is plain copies from all regions straight into the
slot. Only publishing waits for others, and only where something has changed (Note [Epochs] in transport/peer.py).

Note [Published]
    1. unit.published[s] (P,) is a view of this rank's region, for every unit whose parameters are split. It changes in
       `publish()` only, before the first gather of a root forward or of a `keep`. All gathers up to the next call,
       those of the backward too, read that one version, whatever happens to the masters meanwhile.
    2. Where optimizer state is split further than parameters, the range is filled by the outer all-gathers. Those are
       collective, so ranks first agree which units have changed anywhere.
    3. Where parameters are not split (F_p = 1) nothing is gathered but the outer levels, once a step: those units are
       left to `Gatherer`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lamina.core.control import Control
from lamina.core.lanes import Lanes
from lamina.core.layout import SEGMENT_ALIGNMENT_BYTES, UnitLayout, round_up
from lamina.core.mesh import DataMesh
from lamina.core.slots import Slot, SlotState
from lamina.runtime.gathering import Gatherer, Route
from lamina.runtime.unit import Unit
from lamina.transport.c10d import Transport
from lamina.transport.peer import Counter, Peers, connect

FLAGS_PER_WORD = 62  # non-negative in an int64


def published_places(layouts: Sequence[UnitLayout], meshes: Sequence[DataMesh]) -> tuple[list[list[int]], int]:
    """Offsets in bytes by unit and segment, the same in every rank's region, and its size in bytes."""
    places, end_bytes = [], 0
    for layout, mesh in zip(layouts, meshes, strict=True):
        own: list[int] = []
        for segment in layout.segments if mesh.factors.shards_parameters else ():
            own.append(end_bytes)
            part_bytes = segment.compute_bytes // mesh.factors.params
            end_bytes = round_up(end_bytes + part_bytes, SEGMENT_ALIGNMENT_BYTES)
        places.append(own)
    return places, end_bytes


def open_peers(
    control: Control, mesh: DataMesh, layouts: Sequence[UnitLayout], meshes: Sequence[DataMesh]
) -> Peers | None:
    """Regions for these units, one mesh each; None where no parameters are split. Changes no parameter. Collective.

    Raises:
        TransportError: see `connect`.
    """
    size_bytes = published_places(layouts, meshes)[1]
    return connect(control, mesh, size_bytes) if size_bytes else None


class PeerGatherer(Gatherer):
    """`Gatherer` over shared memory."""

    def __init__(
        self, peers: Peers, units: Sequence[Unit], transport: Transport, control: Control, lanes: Lanes
    ) -> None:
        """`transport` moves what is not one-sided: outer levels, and units whose parameters are not split."""
        super().__init__(transport, control, lanes)
        self.peers = peers
        self.epoch = 0  # calls of `publish`
        self._readable = 0  # the epoch that all peers are known to have published
        places, _ = published_places([unit.layout for unit in units], [unit.mesh for unit in units])
        self._places = dict(zip(units, places, strict=True))
        for unit, starts in self._places.items():
            if unit.sharded:
                unit.published = [
                    peers.own.data[start : start + segment.compute_bytes // peers.size].view(segment.compute)
                    for segment, start in zip(unit.layout.segments, starts, strict=True)
                ]

    def publish(self, units: Sequence[Unit]) -> None:
        """Let peers see what has changed in these units; called by every rank alike, before the first gather."""
        self.epoch += 1
        self.peers.announce(Counter.ARRIVED, self.epoch)
        self.control.position.verb, self.control.position.unit = "publishing", ""
        changed = self._changed([unit for unit in units if unit.sharded])
        if changed:
            self.peers.wait_for(Counter.ARRIVED, self.epoch)
            with torch.no_grad():
                for unit in changed:
                    self._run(self._publishing_route(unit))
                    unit.dirty.value = False
        self.peers.announce(Counter.PUBLISHED, self.epoch)

    def _changed(self, units: Sequence[Unit]) -> list[Unit]:
        here = [unit.dirty.value for unit in units]
        if units and not all(group.is_trivial for group in units[0].mesh.gather[1:]):
            here = self._anywhere(here)
        return [unit for unit, dirty in zip(units, here, strict=True) if dirty]

    def _anywhere(self, flags: Sequence[bool]) -> list[bool]:
        """Note [Published] 2: what any rank says yes to."""
        starts = range(0, len(flags), FLAGS_PER_WORD)
        words = [sum(flag << i for i, flag in enumerate(flags[s : s + FLAGS_PER_WORD])) for s in starts]
        rows = self.control.exchange(words)
        return [any(row[i // FLAGS_PER_WORD] >> (i % FLAGS_PER_WORD) & 1 for row in rows) for i in range(len(flags))]

    def start(self, unit: Unit, slot: Slot) -> None:
        """Copy a unit's weights into an EMPTY slot (or over the same weights), as soon as all peers have published."""
        if not unit.sharded:
            super().start(unit, slot)
            return
        assert self.epoch > 0, "publish() comes before the first gather"
        if self._readable < self.epoch:
            self.peers.wait_for(Counter.PUBLISHED, self.epoch)
            self._readable = self.epoch
        self.finish(slot)
        slot.take_memory()
        slot.to(SlotState.GATHERING)
        unit.gathers += 1
        route = self._routes.get(slot)
        if route is None:
            route = self._routes[slot] = self._copies(unit, slot)
        with torch.no_grad():
            self._run(route)

    def _copies(self, unit: Unit, slot: Slot) -> Route:
        """From each region its range, beginning with the next rank's: not all ranks read the same memory at once."""
        route, peers = Route(), self.peers
        for segment, whole, start in zip(unit.layout.segments, slot.segments, self._places[unit], strict=True):
            numel, size_bytes = segment.numel // peers.size, segment.compute_bytes // peers.size
            for step in range(1, peers.size + 1):
                place = (peers.place + step) % peers.size
                route.targets.append(whole[place * numel : (place + 1) * numel])
                route.sources.append(peers.data(place)[start : start + size_bytes].view(segment.compute))
            route.moved_bytes += whole.nbytes
        return route
