"""From masters to full parameters: one unit's gather.

The slot is the concatenation of the shards, so a gather is: cast the own range into its place, then fill the rest in
place, one all-gather for each level of sharding. No copy in, no copy out, no allocation; which bytes go where is worked
out once for each slot.

Note [Early gathers]
    A gather reads masters, so it waits for their last write: an optimizer that says when each unit is done
    (`unit.dirty.mark(written)`) lets the first gathers of the next step run beside the rest of its update. After any
    other write they wait for all that compute had been given when the phase began. What is not dirty has been read on
    this lane since its last write.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lamina.core.control import Control
from lamina.core.groups import Group
from lamina.core.lanes import Lane, Lanes, Mark
from lamina.core.layout import Segment
from lamina.core.mesh import DataMesh
from lamina.core.slots import GATHERING, WEIGHTS, Slot
from lamina.errors import ParameterChanged
from lamina.runtime.unit import Unit
from lamina.transport.c10d import Exchange, Transport, as_bytes

if TYPE_CHECKING:
    from lamina.runtime.late_peers import LatePeers


def spans(segment: Segment, mesh: DataMesh) -> list[tuple[int, int]]:
    """Element ranges of this rank: the whole segment, then its range at each level, each inside the one before."""
    start, numel = 0, segment.numel
    found = [(0, numel)]
    for level in mesh.factors.levels:
        numel //= level.size
        start += level.place(mesh.rank) * numel
        found.append((start, start + numel))
    return found


@dataclass(slots=True)
class Route:
    """Everything one gather does: casts, then all-gathers of which each needs the one before."""

    targets: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)
    outer: list[Exchange] = field(default_factory=list)
    last: list[Exchange] = field(default_factory=list)  # one a segment, independent of each other
    moved_bytes: int = 0
    copy: Callable[[], object] | None = None  # the casts, made ready when they are first run


def cast_from_elsewhere(unit: Unit, slot: Slot) -> None:
    """Whole parameters that no longer lie in their masters: `p.data = value` has given them other memory."""
    for spec, param, address, view in zip(unit.layout.params, unit.params, unit.addresses, slot.views, strict=True):
        if param.data_ptr() != address:
            if param.shape != view.shape:
                raise ParameterChanged(
                    f"`{spec.name}` got the shape {tuple(param.shape)} after lamina.shard(), wanted {spec.shape}: give "
                    "`.data` values of the shape that was sharded, or shard a model with the other shape"
                )
            view.copy_(param.detach())


class Gatherer:
    """Issues gathers and waits for them."""

    is_done_by_host = False  # a gather is over when it has been issued: before its use is early enough

    def __init__(self, transport: Transport, control: Control, lanes: Lanes) -> None:
        self.transport, self.control, self.lanes = transport, control, lanes
        self.bytes_moved = 0
        self._works: dict[Slot, list[dist.Work | None]] = {}
        self._routes: dict[Slot, Route] = {}
        self._publishing: dict[Unit, Route] = {}
        self._opened: Mark | None = None  # what compute had been given when the phase began
        self.late_peers: LatePeers | None = None  # whose gatherer may take the place of this one

    def open(self) -> None:
        """A phase begins. Note [Early gathers]"""
        self._opened = self.lanes.compute.mark()
        if self.lanes.is_recording:
            self.lanes.gather.wait(self._opened)  # a stream takes part in a recording once it has waited for one

    def await_written(self, lane: Lane, unit: Unit) -> None:
        """What `lane` does next comes after the last write to a unit's masters. Note [Early gathers]"""
        dirty = unit.dirty
        if dirty.value:
            lane.wait(self._opened if dirty.written is None else dirty.written)

    def choose_forms(self, units: Sequence[Unit]) -> None:
        """Before `publish`: masters that have two forms change them here, see runtime/halving.py."""

    def publish(self, units: Sequence[Unit]) -> None:
        """Before the first gather after a change; where gathers are collectives there is nothing to do."""

    def start(self, unit: Unit, slot: Slot) -> None:
        """Issue the gather of a unit into an EMPTY slot (or over the same weights: they come out equal)."""
        if slot.state is GATHERING:
            self.finish(slot)
        slot.to(GATHERING)
        unit.gathers += unit.communicates
        lane = self.lanes.gather
        lane.wait(slot.freed)
        if unit.dirty.value:
            self.await_written(lane, unit)
        works = lane.run(self._fill, unit, slot)
        slot.ready = lane.mark()
        if works:
            self._works[slot] = works

    def _fill(self, unit: Unit, slot: Slot) -> list[dist.Work | None]:
        """Queue what brings a unit's weights into a slot; returns what is left to wait for on the host."""
        if unit.published and unit.dirty.value:
            self._run(self._publishing_route(unit))
        unit.dirty.value = False
        works = self._run(self._routes.get(slot) or self._route_of(unit, slot))
        if not unit.communicates:
            cast_from_elsewhere(unit, slot)
        return works

    def _route_of(self, unit: Unit, slot: Slot) -> Route:
        with torch.inference_mode(False), torch.no_grad():  # the first forward may be an evaluation
            route = self._routes[slot] = self._route(unit, slot)
        return route

    def finish(self, slot: Slot) -> None:
        """Let compute continue once the weights are there; on the CPU the host waits."""
        if slot.state is not GATHERING:
            return
        for work in self._works.pop(slot, ()):
            if work is not None:
                self.control.wait(work)
        self.lanes.compute.wait(slot.ready)
        slot.to(WEIGHTS)

    def _run(self, route: Route) -> list[dist.Work | None]:
        if route.copy is None:
            route.copy = self._copy(route)
        route.copy()
        self.bytes_moved += route.moved_bytes
        for gather in route.outer:
            self.control.wait(gather())
        works = []
        for gather in route.last:
            works.append(gather())  # a comprehension is a call
        return works

    def forget_marks(self) -> None:
        """All lanes are idle."""

    def _copy(self, route: Route) -> Callable[[], object]:
        """What makes all casts of a route."""
        if len(route.targets) == 1:
            return functools.partial(route.targets[0].copy_, route.sources[0])
        return functools.partial(torch._foreach_copy_, route.targets, route.sources)

    def _route(self, unit: Unit, slot: Slot) -> Route:
        route = Route()
        for number, segment in enumerate(unit.layout.segments):
            whole, span = slot.segments[number], spans(segment, unit.mesh)
            if unit.published:
                route.targets.append(whole[span[1][0] : span[1][1]])
                route.sources.append(unit.published[number])
            else:
                self._outer(route, unit, number, whole, 0, span)
            self._stage(route, route.last, unit.mesh.gather[0], whole, span[1])
        return route

    def _publishing_route(self, unit: Unit) -> Route:
        if unit not in self._publishing:
            route = self._publishing[unit] = Route()
            with torch.inference_mode(False), torch.no_grad():
                for number, segment in enumerate(unit.layout.segments):
                    span = spans(segment, unit.mesh)
                    if number not in unit.halved:
                        self._outer(route, unit, number, unit.published[number], span[1][0], span)
        return self._publishing[unit]

    def _outer(
        self, route: Route, unit: Unit, number: int, target: Tensor, origin: int, span: Sequence[tuple[int, int]]
    ) -> None:
        """Cast the master into `target`, which begins at element `origin`, and gather the outer levels around it."""
        params, grads, own = [(start - origin, stop - origin) for start, stop in span[1:]]
        route.targets.append(target[own[0] : own[1]])
        route.sources.append(unit.masters[number])
        self._stage(route, route.outer, unit.mesh.gather[2], target[grads[0] : grads[1]], own, grads[0])
        self._stage(route, route.outer, unit.mesh.gather[1], target[params[0] : params[1]], grads, params[0])

    def _stage(
        self, route: Route, stages: list[Exchange], group: Group, whole: Tensor, part: tuple[int, int], origin: int = 0
    ) -> None:
        if not group.is_trivial:
            place = as_bytes(whole[part[0] - origin : part[1] - origin])
            stages.append(self.transport.all_gather(group, as_bytes(whole), place))
            route.moved_bytes += whole.nbytes
