"""From full gradients to gradient shards: one unit's reduction.

Note [Reduction]
    1. A reduction climbs the levels of sharding, innermost first; at each, every rank sends each member its part and
       sums what it got in float32 (or the master's dtype), in rank order: bitwise the same between runs.
    2. The last level writes or adds into the gradient range, decided per parameter: is its buffer valid?
    3. The division by the number of data ranks is ours, once, at the end; sums that wait are scaled where it changes.
    4. While micro-batches accumulate, only the levels that gradients are split over are climbed; the partial sums wait
       in `partial` until the last one.
    5. On the host, a reduction is finished at moments that its place in the program fixes (the next reduction, the end
       of the backward), never by what this rank happens to need: the levels above the first are collectives. Who needs
       the slot before, `vacate`s it: the first level, which is under way on all ranks, is summed elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lamina.core.control import Control
from lamina.core.groups import Group
from lamina.core.lanes import Lanes, Mark
from lamina.core.layout import UnitLayout
from lamina.core.slots import EMPTY, WEIGHTS, Slot, parameter_views
from lamina.runtime.direct import DirectRoute, find_route
from lamina.runtime.reduction_state import Inbox, Partial, Pending, Sending, Staging
from lamina.runtime.summing import Rows, add_rows
from lamina.runtime.unit import Unit
from lamina.runtime.unit_gradients import gradient_dtype
from lamina.transport.c10d import Transport, as_bytes
from lamina.transport.pulled import Pulls
from lamina.transport.symmetric import Pushes

GRADS_LEVEL = 2  # levels 0 and 1 split gradients; level 2 splits the optimizer state further
ALL_LEVELS = 3


class Reducer:
    """Issues reductions and finishes them in order."""

    def __init__(
        self, transport: Transport, control: Control, lanes: Lanes, use_inbox: bool, wire: torch.dtype | None = None
    ) -> None:
        self.transport, self.control, self.lanes = transport, control, lanes
        self._pulls = transport if isinstance(transport, Pulls) else None
        self.pushes = transport if isinstance(transport, Pushes) else None
        self.use_inbox = use_inbox or transport.pushes or self._pulls is not None
        self.wire = wire  # dtype in which gradients travel; None: the dtype they are computed in
        self.pending: Pending | None = None
        self.bytes_moved = 0
        self.partials: dict[int, Partial] = {}  # by unit
        self._buffers: dict[str, Tensor] = {}
        self._inboxes: dict[tuple[int, int, bool], Inbox] = {}  # by unit, segment, and whether it lies in its slot
        self._sendings: dict[tuple[int, int | None, bool], Sending] = {}  # by unit, level, and whether out of its slot
        self._stagings: dict[int, Staging] = {}  # by unit
        self._ways: dict[tuple[int, int], tuple[int | None, int, bool, bool]] = {}  # by unit and target
        self._routes: dict[int, tuple[UnitLayout, DirectRoute | None]] = {}  # by unit, of this layout
        self._held: Sequence[Tensor | None] = ()  # gradients that the lane reads
        self._collected: Mark | None = None  # when it has read them

    # ---- memory ------------------------------------------------------------------------------------------------

    def stage(self, unit: Unit) -> Staging:
        """A place beside the weights for a unit's gradients, written on the reduce lane."""
        self.finish()
        if unit.index not in self._stagings:
            with self.lanes.reduce.running():  # whose memory it is: a smaller one that it replaces may be in use there
                self._stagings[unit.index] = self._make_staging(unit)
        return self._stagings[unit.index]

    def _make_staging(self, unit: Unit) -> Staging:
        segments = [
            self._scratch(f"staging {number}", segment.numel, self.wire_dtype(segment.compute), unit.mesh.device)
            for number, segment in enumerate(unit.layout.segments)
        ]
        return Staging(segments, parameter_views(unit.layout, segments))

    def wire_dtype(self, compute: torch.dtype) -> torch.dtype:
        """What a gradient of a floating dtype travels in."""
        return compute if self.wire is None or not compute.is_floating_point else self.wire

    @property
    def buffer_bytes(self) -> int:
        """Bytes held for staging, inboxes or outboxes, and intermediate sums."""
        outboxes_bytes = 0 if self._pulls is None else self._pulls.peers.outboxes_bytes
        return sum(buffer.nbytes for buffer in self._buffers.values()) + outboxes_bytes

    def _bytes(self, role: str, size_bytes: int, device: torch.device) -> Tensor:
        held = self._buffers.get(role)
        if held is None or held.numel() < size_bytes:
            held = self._buffers[role] = torch.empty(size_bytes, dtype=torch.uint8, device=device)
            self._inboxes.clear()  # views of what is replaced
            self._sendings.clear()
            self._stagings.clear()
        return held[:size_bytes]

    def _scratch(self, role: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._bytes(role, numel * dtype.itemsize, device).view(dtype)

    # ---- one reduction -----------------------------------------------------------------------------------------

    def begin(self, unit: Unit) -> None:
        """The reduce lane goes on from what compute has done so far. Nothing is under way: `finish` precedes it."""
        unit.gradients.make()
        if self._held:
            self.let_go()
        self.lanes.reduce.wait(self.lanes.compute.mark())

    def hold(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep gradients that are being copied on the reduce lane: their memory is the compute lane's to give away."""
        if self.lanes.reduce is not self.lanes.compute:
            self._held, self._collected = gradients, self.lanes.reduce.mark()

    def forget_marks(self) -> None:
        """All lanes are idle."""
        self._held, self._collected = (), None

    def let_go(self) -> None:
        """Give back what was held; what compute does next with the memory comes after the copy."""
        if self._held:
            self.lanes.compute.wait(self._collected)
            self._held = ()

    def start(
        self, unit: Unit, sources: Sequence[Tensor], slot: Slot | None, last: bool, defer: bool, divisor: int
    ) -> None:
        """Reduce `sources`, the unit's gradients on this rank, one tensor a segment; frozen segments are ignored.

        Follows `begin`, after which the reduce lane has written the sources.

        Args:
            slot: the slot that `sources` are views of, in state GRADS; None where they lie in the staging buffer.
            last: the last micro-batch: gradients are complete afterwards.
            defer: until then, keep whole sums on this rank, whatever the strategy says.
            divisor: data ranks over which the gradient is a mean.
        """
        lane = self.lanes.reduce
        lane.run(self._start, unit, sources, slot, self._target(unit, last, defer), divisor)
        if lane is not self.lanes.compute:
            self.finish()  # everything is queued on the lane: the host has nothing to wait for

    def _start(self, unit: Unit, sources: Sequence[Tensor], slot: Slot | None, target: int, divisor: int) -> None:
        held, stable = self.partials.get(unit.index), True
        if target == 0 and held is not None and held.climbed:
            target = GRADS_LEVEL  # sums that began without defer=, perhaps of a step that was given up, go on there
        if target == 0 or (held is not None and held.climbed == 0):
            sources, stable = self._add_whole(unit, sources, divisor), False
            self._release(slot)
            slot = None
            if target == 0:
                return
            del self.partials[unit.index]
        unit.reduces += 1
        self.pending = Pending(unit, slot, target, ALL_LEVELS, divisor, [], [])
        self._send(self.pending, sources, stable)

    def route_of(self, unit: Unit, gradients: Sequence[Tensor | None], last: bool, defer: bool) -> DirectRoute | None:
        """How these gradients are reduced where they are; None: they are to be laid out. See direct.py."""
        if self.pushes is None or self.wire is not None or unit.index in self.partials:
            return None
        layout, route = self._routes.get(unit.index, (None, None))
        if layout is not unit.layout:
            route = find_route(unit, self.pushes)
            self._routes[unit.index] = unit.layout, route
        if route is None or self._target(unit, last, defer) != ALL_LEVELS or not route.takes(gradients):
            return None
        return route

    def start_direct(
        self, unit: Unit, route: DirectRoute, gradients: Sequence[Tensor | None], slot: Slot | None, divisor: int
    ) -> None:
        """Like `start`, for gradients that nobody has laid out; `slot` holds weights that are dead."""
        with self.lanes.reduce.running():
            if slot is not None and slot.state is WEIGHTS:
                slot.to(EMPTY)  # this lane has nothing to do with it: `freed` is when compute had read it
            unit.reduces += 1
            self.bytes_moved += route.size_bytes
            route.run(unit, gradients, 1.0 / divisor)
            unit.gradients.valid = [True] * len(unit.params)

    def finish(self) -> None:
        """Complete the reduction that is under way: sums, write or add, slot free."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        for work in pending.works:
            if work is not None:
                self.control.wait(work)
        self.lanes.reduce.run(self._complete, pending)

    def drop_pending(self) -> None:
        """Forget the reduction that is under way, once it has arrived: the next one uses the same memory."""
        pending, self.pending = self.pending, None
        if pending is not None:
            for work in pending.works:
                self.control.wait(work)

    def vacate(self) -> None:
        """Free the slot of the reduction that is under way. No collective is issued: see Note [Reduction] 5."""
        pending = self.pending
        if pending is None or pending.slot is None:
            return
        if not pending.goes_on:
            self.finish()
            return
        for work in pending.works:
            self.control.wait(work)
        pending.works.clear()
        with self.lanes.reduce.running():
            for number, segment in enumerate(pending.unit.layout.segments):
                if segment.trainable:
                    pending.rows[number] = (self._sum(pending.unit, number, pending.rows[number], f"sum of {number}"),)
            self._release(pending.slot)
            pending.slot = None

    def _target(self, unit: Unit, last: bool, defer: bool) -> int:
        factors = unit.mesh.factors
        complete = factors.grads == factors.world  # nothing is left above the gradients' level
        if last or factors.world == 1 or (complete and not defer):
            return ALL_LEVELS
        return 0 if defer or factors.grads == 1 else GRADS_LEVEL

    def _release(self, slot: Slot | None) -> None:
        if slot is not None:
            slot.freed = self.lanes.reduce.mark()
            slot.to(EMPTY)

    def _add_whole(self, unit: Unit, sources: Sequence[Tensor], divisor: int) -> list[Tensor]:
        sums = self._partial_sums(unit, 0, [source.numel() for source in sources], divisor)
        for segment, total, source in zip(unit.layout.segments, sums, sources, strict=True):
            if segment.trainable:
                total.add_(source)
        return sums

    def forget_sums(self, unit: Unit) -> None:
        """Begin a unit's partial sums anew."""
        with self.lanes.reduce.running():
            for total in self.partials[unit.index].sums:
                total.zero_()

    def _partial_sums(self, unit: Unit, climbed: int, numels: Sequence[int], divisor: int) -> list[Tensor]:
        """By segment, to be divided by `divisor`."""
        if unit.index not in self.partials:
            device = unit.mesh.device
            sums = [
                torch.zeros(numel if segment.trainable else 0, dtype=gradient_dtype(segment.master), device=device)
                for segment, numel in zip(unit.layout.segments, numels, strict=True)
            ]
            self.partials[unit.index] = Partial(climbed, divisor, sums)
        return self.partials[unit.index].over(divisor)

    # ---- levels ------------------------------------------------------------------------------------------------

    def _send(self, pending: Pending, sources: Sequence[Tensor], stable: bool) -> None:
        """The first exchange, which runs beside what compute does next."""
        unit, target = pending.unit, pending.target
        way = self._ways.get((unit.index, target)) or self._find_way(unit.index, target, pending)
        first, pending.climbed, pending.replicated, pending.goes_on = way
        key = unit.index, first, pending.slot is not None
        sending = self._sendings.get(key) if stable else None
        try:
            if sending is None or sending.layout is not unit.layout:
                self._send_segments(pending, first, sources, stable)
                if stable and first is not None:
                    self._keep_sending(pending, key)
            else:
                self.bytes_moved += sending.size_bytes
                pending.rows = sending.rows.copy()
                if target == ALL_LEVELS and not pending.goes_on:
                    pending.sending = sending
                for exchange in sending.exchanges:
                    pending.works.append(exchange())
        finally:
            self.transport.close()

    def _keep_sending(self, pending: Pending, key: tuple[int, int | None, bool]) -> None:
        """The next time the same is sent from and to the same places, if all of it arrives in inboxes."""
        unit, size_bytes = pending.unit, 0
        exchanges = []
        for number, segment in enumerate(unit.layout.segments):
            if segment.trainable:
                inbox = self._inboxes.get((unit.index, number, pending.slot is not None))
                if inbox is None:
                    return
                exchanges.append(inbox.exchange)
                size_bytes += segment.numel * self.wire_dtype(segment.compute).itemsize
        self._sendings[key] = Sending(unit.layout, exchanges, pending.rows.copy(), size_bytes)

    def _find_way(self, unit: int, target: int, pending: Pending) -> tuple[int | None, int, bool, bool]:
        """The level of the first exchange, the levels behind it, and whether more is exchanged afterwards."""
        mesh = pending.unit.mesh
        first = next((i for i, g in enumerate(mesh.reduce[:target]) if not g.is_trivial), None)
        climbed = ALL_LEVELS if first is None else first + 1
        replicated = first is None and not mesh.replicas.is_trivial
        goes_on = any(not group.is_trivial for group in mesh.reduce[climbed:target])
        goes_on = goes_on or (target == ALL_LEVELS and not (mesh.replicas.is_trivial or replicated))
        self._ways[unit, target] = first, climbed, replicated, goes_on
        return self._ways[unit, target]

    def _send_segments(self, pending: Pending, first: int | None, sources: Sequence[Tensor], stable: bool) -> None:
        unit, mesh = pending.unit, pending.unit.mesh
        for number, (segment, source) in enumerate(zip(unit.layout.segments, sources, strict=True)):
            rows: Rows = (source,)
            if segment.trainable and first is not None:
                key = (unit.index, number, pending.slot is not None) if stable else None
                group, tag = mesh.reduce[first], unit.index * len(sources) + number
                rows = self._exchange(group, source, f"inbox {number}", pending.works, key, number, tag)
            elif segment.trainable and pending.replicated:
                total, wide = source, gradient_dtype(segment.master)
                if source.dtype is not wide:
                    total = self._scratch(f"sum {number}", source.numel(), wide, source.device).copy_(source)
                self.bytes_moved += 2 * total.nbytes
                pending.works.append(self.transport.all_reduce(mesh.replicas, total))
                rows = (total,)
            pending.rows.append(rows)

    def _exchange(
        self,
        group: Group,
        source: Tensor,
        role: str,
        works: list[dist.Work | None],
        key: tuple[int, int, bool] | None = None,
        number: int | None = None,
        tag: int = 0,
    ) -> Rows:
        """Every member's part for this rank, (numel / members,) each, or their sum.

        Args:
            role: of the buffer in which the parts arrive.
            key: the source lies at the same place every time.
            number: of the segment, for which the transport may have an inbox of its own, instead of a buffer.
            tag: what is exchanged, the same on all ranks.
        """
        self.bytes_moved += source.nbytes
        if self.use_inbox or source.dtype.itemsize == 2:
            if self._pulls is not None and number is not None and self._pulls.takes(group, number, source.nbytes):
                work, rows = self._pulls.offer(number, source, tag, key)
                works.append(work)  # type: ignore[arg-type]
                return rows
            route = self._inboxes.get(key) if key is not None else None
            if route is None:
                own = None if number is None else self.transport.inbox(group, number, source.nbytes)
                route = self._inbox_for(group, source, role, own)
                if key is not None:
                    self._inboxes[key] = route
            works.append(route.exchange())
            return route.rows
        numel = source.numel() // group.size
        own = source[group.place * numel : (group.place + 1) * numel]
        works.append(self.transport.reduce_scatter(group, own, source))
        return (own,)

    def _inbox_for(self, group: Group, source: Tensor, role: str, inbox: Tensor | None) -> Inbox:
        if inbox is None:
            arrived = self._scratch(role, source.numel(), source.dtype, source.device)
            rows = list(arrived.view(group.size, -1).unbind())
            inbox = as_bytes(arrived)
        else:
            rows = list(inbox.view(source.dtype).view(group.size, -1).unbind())
            rows[group.place] = source.view(group.size, -1)[group.place]
        return Inbox(self.transport.exchange(group, inbox, as_bytes(source)), rows)

    def _complete(self, pending: Pending) -> None:
        unit, gradients, has_squares = pending.unit, pending.unit.gradients, False
        sending = None if self.partials or gradients.wants_squares else pending.sending
        if sending is None or not sending.write_means(gradients.ranges, gradients.valid, pending.divisor):
            has_squares = self._complete_segments(pending)
        if pending.target == ALL_LEVELS:
            self.partials.pop(unit.index, None)
            gradients.valid, gradients.has_squares = [True] * len(gradients.valid), has_squares
        self._release(pending.slot)

    def _complete_segments(self, pending: Pending) -> bool:
        """Whether the squares of all that was written are noted."""
        unit, climbed = pending.unit, pending.climbed
        held = self.partials.get(unit.index) if pending.target == ALL_LEVELS else None
        has_squares = unit.gradients.wants_squares
        for number, segment in enumerate(unit.layout.segments):
            if not segment.trainable:
                continue
            rows, level = pending.rows[number], climbed
            if pending.target == GRADS_LEVEL or held is not None:
                rows = self._climb(unit, number, rows, level, GRADS_LEVEL)
                numels = [each.numel // unit.mesh.factors.grads for each in unit.layout.segments]
                sums = self._partial_sums(unit, GRADS_LEVEL, numels, pending.divisor)
                add_rows(sums[number], rows, 1.0, accumulate=True)
                rows, level = (sums[number],), max(level, GRADS_LEVEL)
            if pending.target == ALL_LEVELS:
                if pending.goes_on or held is not None:
                    rows = self._climb(unit, number, rows, level, ALL_LEVELS)
                    if not unit.mesh.replicas.is_trivial and not pending.replicated:
                        rows = self._over_replicas(unit, number, rows)
                has_squares = self._deliver(unit, number, rows, pending.divisor) and has_squares
        return has_squares

    def _climb(self, unit: Unit, number: int, rows: Rows, level: int, target: int) -> Rows:
        for index in range(level, target):
            group = unit.mesh.reduce[index]
            if group.is_trivial:
                continue
            works: list[dist.Work | None] = []
            rows = self._exchange(group, self._sum(unit, number, rows, f"sum {index}"), f"outer {index}", works)
            for work in works:
                self.control.wait(work)
        return rows

    def _over_replicas(self, unit: Unit, number: int, rows: Rows) -> Rows:
        total = self._sum(unit, number, rows, "replicas")
        self.bytes_moved += 2 * total.nbytes
        self.control.wait(self.transport.all_reduce(unit.mesh.replicas, total))
        return (total,)

    def _sum(self, unit: Unit, number: int, rows: Rows, role: str) -> Tensor:
        dtype = gradient_dtype(unit.layout.segments[number].master)
        total = self._scratch(role, rows[0].numel(), dtype, rows[0].device)
        add_rows(total, rows, 1.0, accumulate=False)
        return total

    def _deliver(self, unit: Unit, number: int, rows: Rows, divisor: int) -> bool:
        """Write or add the mean into the gradient range, by parameter; whether the squares of all of it are noted."""
        grad = unit.gradients.ranges[number]
        squares = None
        for start, stop, valid in self._runs(unit, number):
            if stop - start == grad.numel():
                squares = unit.gradients.squares_of(number, (stop - start,))
                add_rows(grad, rows, 1.0 / divisor, valid, squares[0] if squares else None)
            else:
                add_rows(grad[start:stop], [row[start:stop] for row in rows], 1.0 / divisor, valid)
        return squares is not None

    def _runs(self, unit: Unit, number: int) -> list[tuple[int, int, bool]]:
        """Stretches of the gradient range whose content is all valid (add) or all not (write)."""
        segment, valid = unit.layout.segments[number], unit.gradients.valid
        if all(valid) or not any(valid):
            return [(0, segment.range_numel, valid[0])]
        before = sum(len(segment.params) for segment in unit.layout.segments[:number])
        valid = valid[before : before + len(segment.params)]
        if all(valid) or not any(valid):
            return [(0, segment.range_numel, valid[0])]
        runs, index = [], unit.mesh.range_index
        for i, is_valid in enumerate(valid):
            start, stop = segment.owned(i, index)
            offset = segment.offset_in_range(i, index)
            if stop > start:
                runs.append((offset, offset + stop - start, is_valid))
        return runs
