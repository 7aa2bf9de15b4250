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
    3. On GPUs `lamina.optim.AdamW` writes the published range beside the master where the norm that it takes
       (`max_norm`) has met all who read it: their gathers are over before, and publishing has nothing left to cast.
    4. Where parameters are not split (F_p = 1) nothing is gathered but the outer levels, once a step: those units are
       left to `Gatherer`.
    5. A published range may be one half of the masters: see halved.py, and halving.py for when.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lamina.core import peer_memory
from lamina.core.control import Control
from lamina.core.lanes import Lane, Lanes, Mark
from lamina.core.layout import UnitLayout
from lamina.core.mesh import DataMesh
from lamina.core.peer_memory import AUTO_HOST_SHARE, AUTO_SHARE, inbox_bytes
from lamina.core.slots import Slot
from lamina.errors import TransportError
from lamina.runtime.gathering import Gatherer, Route
from lamina.runtime.halved import may_be_halved, take_apart
from lamina.runtime.halving import choose, leave_free, stay_whole
from lamina.runtime.precision import Precision
from lamina.runtime.unit import Unit
from lamina.transport.c10d import Transport
from lamina.transport.peer import Counter, Peers, connect
from lamina.transport.symmetric import GATHER_CHANNEL, REDUCE_CHANNEL, SymmetricPeers, connect_gpus, copy_each

FLAGS_PER_WORD = 62  # non-negative in an int64


def published_places(layouts: Sequence[UnitLayout], meshes: Sequence[DataMesh]) -> tuple[list[list[int]], int]:
    """See core/peer_memory.py."""
    return peer_memory.published_places(layouts, [mesh.factors for mesh in meshes])


def grant(control: Control, mesh: DataMesh) -> float:
    """Bytes of a GPU that `transport="auto"` may spend on peers, by the smallest of all ranks; CPUs have another rule.

    Collective.
    """
    if mesh.device.type != "cuda":
        return math.inf
    rows = control.exchange([torch.cuda.get_device_properties(mesh.device).total_memory])
    return AUTO_SHARE * min(row[0] for row in rows)


def why_not_peers(
    layouts: Sequence[UnitLayout], meshes: Sequence[DataMesh], precision: Precision, slots: int, granted_bytes: float
) -> str:
    """What `transport="auto"` goes by, peers being faster at the price of the published weights; "": they are tried."""
    if granted_bytes == math.inf:
        return "slots=1 asks for the least memory" if slots == 1 else ""
    extra_bytes = _extra_bytes(layouts, meshes, precision)
    if extra_bytes <= granted_bytes:
        return ""
    why = f"peers would take {extra_bytes / 2**30:.2f} GiB, more than {AUTO_SHARE:.0%} of the GPU"
    left_bytes = extra_bytes - _halvable_bytes(layouts, meshes)
    if precision.halves is not False and left_bytes < extra_bytes:
        why += f"; {left_bytes / 2**30:.2f} where lamina.optim.AdamW(max_norm=...) steps: "
        is_little = would_come_late(layouts, meshes, precision, granted_bytes)
        why += "they come with its first forward" if is_little else "type transport='peer' then"
    return why


def would_come_late(
    layouts: Sequence[UnitLayout], meshes: Sequence[DataMesh], precision: Precision, granted_bytes: float
) -> bool:
    """Whether peers take little, but only where masters lie in halves: see late_peers.py."""
    if precision.halves is not None:
        return False
    extra_bytes = _extra_bytes(layouts, meshes, precision)
    return extra_bytes - _halvable_bytes(layouts, meshes) <= granted_bytes < extra_bytes


def _extra_bytes(layouts: Sequence[UnitLayout], meshes: Sequence[DataMesh], precision: Precision) -> int:
    return published_places(layouts, meshes)[1] + sum(inbox_bytes(layouts, precision.wire))


def _halvable_bytes(layouts: Sequence[UnitLayout], meshes: Sequence[DataMesh]) -> int:
    """Published, and half of the masters where these lie in halves."""
    found = 0
    for layout, factors in zip(layouts, (mesh.factors for mesh in meshes), strict=True):
        if factors.shards_parameters and factors.optimizer == factors.params:
            found += sum(s.compute_bytes // factors.params for s in layout.segments if may_be_halved(s))
    return found


def open_peers(
    control: Control,
    mesh: DataMesh,
    layouts: Sequence[UnitLayout],
    meshes: Sequence[DataMesh],
    wire: torch.dtype | None = None,
    is_auto: bool = False,
) -> Peers | SymmetricPeers | None:
    """Memory for these units, one mesh each; None where no parameters are split. Changes no parameter. Collective.

    `is_auto`: nobody has asked for it, so it may take a part of what a host has left, and on GPUs must be faster.

    Raises:
        TransportError: see `connect` and `connect_gpus`.
    """
    size_bytes = published_places(layouts, meshes)[1]
    if not size_bytes:
        return None
    if mesh.device.type == "cuda":
        return connect_gpus(control, mesh, size_bytes, inbox_bytes(layouts, wire), is_to_be_faster=is_auto)
    return connect(control, mesh, size_bytes, inbox_bytes(layouts, wire), AUTO_HOST_SHARE if is_auto else 1.0)


def reason_of(error: TransportError) -> str:
    """Without what to type, as nobody has asked for peers."""
    return str(error).partition(";")[0].splitlines()[0]


class PeerGatherer(Gatherer):
    """`Gatherer` over shared memory."""

    is_done_by_host = True

    def __init__(
        self,
        peers: Peers | SymmetricPeers,
        units: Sequence[Unit],
        transport: Transport,
        control: Control,
        lanes: Lanes,
        halves: bool | None = None,
    ) -> None:
        """`transport` moves what is not one-sided: outer levels, and units whose parameters are not split."""
        super().__init__(transport, control, lanes)
        self.peers: Any = peers
        self.epoch = 0  # calls of `publish`
        self._readable = 0  # the epoch that all peers are known to have published
        places, _ = published_places([unit.layout for unit in units], [unit.mesh for unit in units])
        self._places = dict(zip(units, places, strict=True))
        for unit, starts in self._places.items():
            if unit.sharded:
                unit.published = [
                    peers.data(peers.place)[start : start + segment.compute_bytes // peers.size].view(segment.compute)
                    for segment, start in zip(unit.layout.segments, starts, strict=True)
                ]
                if halves or unit.halved:
                    take_apart(unit, lanes)
        leave_free(units, halves)

    def choose_forms(self, units: Sequence[Unit]) -> None:
        for unit in choose(units, self.lanes):
            self._publishing.pop(unit, None)

    def keep_whole(self, units: Sequence[Unit], why: str) -> None:
        """For good, the masters of units whose form is free."""
        for unit in units:
            if unit.halving.is_free:
                stay_whole(unit, why)
                self._publishing.pop(unit, None)

    def publish(self, units: Sequence[Unit]) -> None:
        """Let peers see what has changed in these units; called by every rank alike, before the first gather."""
        self.epoch += 1
        self.peers.announce(Counter.ARRIVED, self.epoch)
        self.control.position.verb, self.control.position.unit = "publishing", ""
        changed = self._changed([unit for unit in units if unit.sharded])
        if changed:
            self.peers.wait_for(Counter.ARRIVED, self.epoch)
            self._halve(changed, self.lanes.compute)
            self._cast(changed)
        self.peers.announce(Counter.PUBLISHED, self.epoch)

    def _halve(self, units: Sequence[Unit], lane: Lane) -> None:
        """Note [Published] 5; `lane` is running."""
        for unit in units:
            for master in unit.halved.values():
                master.make_halves(lane)

    def _cast(self, units: Sequence[Unit]) -> None:
        """Masters into the published ranges, but for those that are halved."""
        routes = [self._publishing_route(unit) for unit in units]
        alone = [route for route in routes if not route.outer]
        targets, sources = [t for r in alone for t in r.targets], [s for r in alone for s in r.sources]
        with torch.no_grad():
            if targets:  # one call for all of them
                torch._foreach_copy_(targets, sources)
            for route in routes:
                if route.outer:
                    self._run(route)
        for unit in units:
            unit.dirty.value = False

    def _changed(self, units: Sequence[Unit]) -> list[Unit]:
        here = [unit.dirty.value or unit.has_whole_masters for unit in units]
        if units and not all(group.is_trivial for group in units[0].mesh.gather[1:]):
            here = self._anywhere(here)
        return [unit for unit, dirty in zip(units, here, strict=True) if dirty]

    def _anywhere(self, flags: Sequence[bool]) -> list[bool]:
        """Note [Published] 2: what any rank says yes to."""
        starts = range(0, len(flags), FLAGS_PER_WORD)
        words = [sum(flag << i for i, flag in enumerate(flags[s : s + FLAGS_PER_WORD])) for s in starts]
        rows = self.control.exchange(words, "publish")
        return [any(row[i // FLAGS_PER_WORD] >> (i % FLAGS_PER_WORD) & 1 for row in rows) for i in range(len(flags))]

    def _fill(self, unit: Unit, slot: Slot) -> list[dist.Work | None]:
        """Copy a unit's weights into a slot, as soon as all peers have published."""
        if not unit.sharded:
            return super()._fill(unit, slot)
        assert self.epoch > 0, "publish() comes before the first gather"
        self._await_published(unit)
        return self._run(self._routes.get(slot) or self._route_of(unit, slot))  # nothing in it requires a gradient

    def _await_published(self, unit: Unit) -> None:
        if self._readable < self.epoch:
            self.peers.wait_for(Counter.PUBLISHED, self.epoch)
            self._readable = self.epoch

    def _route(self, unit: Unit, slot: Slot) -> Route:
        return self._copies(unit, slot) if unit.sharded else super()._route(unit, slot)

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


class SymmetricGatherer(PeerGatherer):
    """`PeerGatherer` over the memory of GPUs: what the host waits for there, a lane waits for here.

    Everything is queued when a root forward begins. The units that lead are cast on the gather lane; the others beside
    them on the reduce lane, which has nothing to do in a forward, so that compute waits for a small part only.
    """

    is_done_by_host = False

    def __init__(
        self,
        peers: SymmetricPeers,
        units: Sequence[Unit],
        transport: Transport,
        control: Control,
        lanes: Lanes,
        halves: bool | None = None,
    ) -> None:
        super().__init__(peers, units, transport, control, lanes, halves)
        self._late_ready: Mark | None = None

    def publish(self, units: Sequence[Unit]) -> None:
        """Cast what has changed, between barriers: Note [Symmetric] 3. Collective, even if nothing has changed."""
        self.epoch += 1
        gather, reduce = self.lanes.gather, self.lanes.reduce
        self.control.position.verb, self.control.position.unit = "publishing", ""
        changed = self._changed([unit for unit in units if unit.sharded])
        leading = [unit for unit in changed if unit.leads]
        others = [unit for unit in changed if not unit.leads]
        with gather.running():
            self.peers.meet(GATHER_CHANNEL)
        reduce.wait(gather.mark())
        self._publish_on(gather, leading, GATHER_CHANNEL)
        self._publish_on(reduce, others, REDUCE_CHANNEL)
        self._late_ready = reduce.mark()

    def _publish_on(self, lane: Lane, changed: Sequence[Unit], channel: int) -> None:
        for unit in changed:
            self.await_written(lane, unit)
            if unit.has_whole_masters:  # written or not, they were made on compute
                lane.wait(self._opened)
        with lane.running():
            self._halve(changed, lane)
            # outer levels are collectives: a rank without elements takes part, too
            self._cast([unit for unit in changed if not unit.dirty.published or self._publishing_route(unit).outer])
            self.peers.meet(channel)
        for unit in changed:
            unit.dirty.value = False

    def forget_marks(self) -> None:
        self._late_ready = None

    def _await_published(self, unit: Unit) -> None:
        if not unit.leads:
            self.lanes.gather.wait(self._late_ready)

    def _copy(self, route: Route) -> Callable[[], object]:
        return functools.partial(copy_each, route.targets, route.sources)
