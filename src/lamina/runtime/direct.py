"""A reduction that reads gradients where autograd has left them.

Where exchanges are pushes into the peers' memory, nobody needs a unit's gradients side by side: what is a peer's is
pushed from each gradient, what is this rank's own is summed from there. Laying them out first reads and writes all of
them once more, by a kernel beside the matrix products.

Note [Direct]
    1. Each rank decides for itself, reduction by reduction: the same bytes come to the same places of the peers'
       inboxes, between the same barriers, however they are sent. Between parameters go zeros, for a peer may sum whole
       rows.
    2. Against it are: gradients that are missing, not contiguous or of another dtype; levels of sharding or replicas
       beyond the first exchange; sums of micro-batches that wait; and small pieces, each a copy or a launch of its own.
    3. Gradients are held until they are summed. Compute waits for that before it goes on with the unit after the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from lamina.core.laying_out import LEAST_PIECE_BYTES, must_lay_out
from lamina.core.layout import Segment
from lamina.core.parameter_loops import all_there
from lamina.runtime.piece_sums import Piece, PieceSums, find_sums
from lamina.runtime.summing import add_rows
from lamina.runtime.unit import Unit
from lamina.runtime.unit_gradients import gradient_dtype
from lamina.transport.symmetric import Pushes, copy_each

_dtype_of = attrgetter("dtype")


def pieces_of(segment: Segment, first: int, place: int, members: int) -> tuple[list[Piece], list[tuple[int, int]]]:
    """What one of `members` equal parts of a segment consists of: gradients, and what is between them ([start, stop)).

    first: the position in the unit of the segment's first parameter.
    """
    numel = segment.numel // members
    begin, pieces, edges = place * numel, [], [0]
    for i, (at, spec) in enumerate(zip(segment.starts, segment.params, strict=True)):
        start, stop = max(begin - at, 0), min(begin + numel - at, spec.numel)
        if start < stop:
            pieces.append(Piece(first + i, spec.shape, start, stop, at + start - begin))
            edges += [at + start - begin, at + stop - begin]
    edges.append(numel)
    return pieces, [(start, stop) for start, stop in list(pairwise(edges))[::2] if start < stop]


@dataclass
class SegmentRoute:
    """The pieces of one segment, and the memory that they go to."""

    number: int
    pushes: list[tuple[Piece, Tensor]]  # and its place in a peer's inbox
    zeros: list[Tensor]  # places in the peers' inboxes that no gradient goes to
    sums: list[tuple[Piece, list[Tensor]]]  # and what arrives for it, by member; an empty tensor in this rank's place
    gaps: list[tuple[int, int]]  # of this rank's part
    together: PieceSums | None = None  # all sums in one launch

    @property
    def numels(self) -> tuple[int, ...]:
        return tuple(piece.stop - piece.start for piece, _ in self.sums)

    def split(self, grad: Tensor) -> list[Tensor]:
        """Where the sums go, of this rank's range."""
        return [grad[piece.at : piece.at + piece.stop - piece.start] for piece, _ in self.sums]


class DirectRoute:
    """How one unit's gradients are pushed and summed."""

    def __init__(
        self,
        transport: Pushes,
        segments: Sequence[SegmentRoute],
        dtypes: dict[int, torch.dtype],
        place: int,
        size_bytes: int,
    ) -> None:
        self.transport, self.segments, self.place = transport, segments, place
        self.dtypes = dtypes  # in which gradients travel, by position of those that are reduced
        self.size_bytes = size_bytes
        self._sizes = [segment.numels for segment in segments]
        pushes = [push for segment in segments for push in segment.pushes]
        self._parts = [piece for piece, _ in pushes if not piece.is_whole]
        self._sources = [piece.position for piece, _ in pushes if piece.is_whole]
        # of the sources, then of the parts
        self._places = [target.view(piece.shape) for piece, target in pushes if piece.is_whole]
        self._places += [target for piece, target in pushes if not piece.is_whole]
        self._zeros = [target for segment in segments for target in segment.zeros]
        self._positions, self._wanted = list(dtypes), list(dtypes.values())
        self._targets: list[tuple[Tensor, list[Tensor]]] = []  # by segment: the range, and its parts

    def takes(self, gradients: Sequence[Tensor | None]) -> bool:
        """Note [Direct] 2, as far as it is about these gradients, which autograd lets be dense or sparse."""
        found: Any = list(map(gradients.__getitem__, self._positions))
        if not all_there(found):
            return False
        try:
            are_contiguous = all(map(Tensor.is_contiguous, found))  # sparse ones are not
        except RuntimeError:  # or cannot say so
            return False
        return are_contiguous and all(map(is_, map(_dtype_of, found), self._wanted))

    def run(self, unit: Unit, gradients: Sequence[Tensor | None], factor: float) -> None:
        """Queue it on the lane that is running: `factor` times the sums, into the unit's gradient ranges."""
        try:
            self.transport.open()
            self._push(gradients)
        finally:
            self.transport.close()
        has_squares, valid = True, unit.gradients.valid
        are_valid = list(map(valid.__getitem__, self._positions))
        is_uniform = (accumulate := all(are_valid)) or not any(are_valid)
        for number, segment in enumerate(self.segments):
            grad = unit.gradients.ranges[segment.number]
            notes = unit.gradients.squares_of(segment.number, self._sizes[number])
            has_squares = has_squares and notes is not None
            for start, stop in segment.gaps:
                grad[start:stop].zero_()
            together = segment.together
            if not (is_uniform and together is not None and together.run(grad, gradients, factor, accumulate, notes)):
                self._sum_each(number, grad, gradients, factor, valid, notes)
        unit.gradients.has_squares = has_squares

    def _sum_each(
        self,
        number: int,
        grad: Tensor,
        gradients: Sequence[Tensor | None],
        factor: float,
        valid: Sequence[bool],
        notes: Sequence[Tensor] | None,
    ) -> None:
        """The sums of one segment, piece by piece."""
        targets = self._parts_of(number, grad)
        for i, (piece, arrived) in enumerate(self.segments[number].sums):
            arrived[self.place] = piece.of(gradients)
            add_rows(targets[i], arrived, factor, valid[piece.position], notes[i] if notes else None)
            arrived[self.place] = arrived[self.place - 1]  # the gradient is not ours to keep

    def _parts_of(self, number: int, grad: Tensor) -> list[Tensor]:
        """The parts of a range, which stays the same but for a unit that is thawed."""
        if not self._targets:
            self._targets = [(grad[:0], [])] * len(self.segments)
        if self._targets[number][0] is not grad:
            self._targets[number] = grad, self.segments[number].split(grad)
        return self._targets[number][1]

    def _push(self, gradients: Sequence[Tensor | None]) -> None:
        found: Any = list(map(gradients.__getitem__, self._sources))
        copy_each(self._places, chain(found, (piece.of(gradients) for piece in self._parts)))
        for target in self._zeros:
            target.zero_()


def find_route(unit: Unit, transport: Pushes) -> DirectRoute | None:
    """The route of a unit whose layout and inboxes allow one; see Note [Direct] 2."""
    mesh, layout = unit.mesh, unit.layout
    if unit.plain or must_lay_out(layout, mesh.factors, LEAST_PIECE_BYTES):
        return None
    group, first = next(group for group in mesh.reduce if not group.is_trivial), 0
    found: list[SegmentRoute] = []
    dtypes: dict[int, torch.dtype] = {}
    sent_bytes = 0
    for number, segment in enumerate(layout.segments):
        if segment.trainable:
            size_bytes = segment.compute_bytes
            inbox = transport.inbox(group, number, size_bytes)
            if inbox is None:
                return None
            dtypes |= dict.fromkeys(range(first, first + len(segment.params)), segment.compute)
            sent_bytes += size_bytes
            route = SegmentRoute(number, [], [], [], [])
            for place, target in transport.targets(number, size_bytes):
                pieces, gaps = pieces_of(segment, first, place, group.size)
                target = target.view(segment.compute)
                route.pushes += [(piece, target[piece.at : piece.at + piece.stop - piece.start]) for piece in pieces]
                route.zeros += [target[start:stop] for start, stop in gaps]
            rows = inbox.view(segment.compute).view(group.size, -1)
            own, route.gaps = pieces_of(segment, first, group.place, group.size)
            for piece in own:
                arrived = list(rows[:, piece.at : piece.at + piece.stop - piece.start].unbind())
                arrived[group.place] = arrived[group.place][:0]
                route.sums.append((piece, arrived))
            route.together = find_sums(own, rows, group.place, gradient_dtype(segment.master))
            found.append(route)
        first += len(segment.params)
    return DirectRoute(transport, found, dtypes, group.place, sent_bytes)
