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
from itertools import pairwise

import torch
from torch import Tensor

from lamina.core.laying_out import LEAST_PIECE_BYTES, must_lay_out
from lamina.core.layout import Segment
from lamina.runtime.summing import Rows, add_rows
from lamina.runtime.unit import Unit
from lamina.transport.symmetric import Pushes


@dataclass(frozen=True)
class Piece:
    """A stretch of one gradient that lies in one member's part of a segment."""

    position: int  # of the parameter in the unit
    start: int  # elements of the flattened gradient
    stop: int
    at: int  # where it begins in the part

    def of(self, flat: dict[int, Tensor]) -> Tensor:
        """(stop - start,), of the flattened gradients, by position."""
        whole = flat[self.position]
        return whole if self.stop - self.start == whole.numel() else whole[self.start : self.stop]


def pieces_of(segment: Segment, first: int, place: int, members: int) -> tuple[list[Piece], list[tuple[int, int]]]:
    """What one of `members` equal parts of a segment consists of: gradients, and what is between them ([start, stop)).

    first: the position in the unit of the segment's first parameter.
    """
    numel = segment.numel // members
    begin, pieces, edges = place * numel, [], [0]
    for i, (at, spec) in enumerate(zip(segment.starts, segment.params, strict=True)):
        start, stop = max(begin - at, 0), min(begin + numel - at, spec.numel)
        if start < stop:
            pieces.append(Piece(first + i, start, stop, at + start - begin))
            edges += [at + start - begin, at + stop - begin]
    edges.append(numel)
    return pieces, [(start, stop) for start, stop in list(pairwise(edges))[::2] if start < stop]


@dataclass
class SegmentRoute:
    """The pieces of one segment, and the memory that they go to."""

    number: int
    size_bytes: int
    pushes: list[tuple[Piece, Tensor]]  # and its place in a peer's inbox
    zeros: list[Tensor]  # places in the peers' inboxes that no gradient goes to
    sums: list[tuple[Piece, list[Tensor]]]  # and what arrives for it, by member; an empty tensor in this rank's place
    gaps: list[tuple[int, int]]  # of this rank's part

    @property
    def numels(self) -> tuple[int, ...]:
        return tuple(piece.stop - piece.start for piece, _ in self.sums)


class DirectRoute:
    """How one unit's gradients are pushed and summed."""

    def __init__(
        self, transport: Pushes, segments: Sequence[SegmentRoute], dtypes: dict[int, torch.dtype], place: int
    ) -> None:
        self.transport, self.segments, self.place = transport, segments, place
        self.dtypes = dtypes  # in which gradients travel, by position of those that are reduced
        self._sizes = [segment.numels for segment in segments]

    def takes(self, gradients: Sequence[Tensor | None]) -> bool:
        """Note [Direct] 2, as far as it is about these gradients."""
        for position, dtype in self.dtypes.items():
            gradient = gradients[position]
            if gradient is None or gradient.dtype is not dtype or gradient.layout is not torch.strided:
                return False
            if not gradient.is_contiguous():
                return False
        return True

    def run(self, unit: Unit, gradients: Sequence[Tensor | None], factor: float) -> None:
        """Queue it on the lane that is running: `factor` times the sums, into the unit's gradient ranges."""
        flat = {i: gradient.view(-1) for i, gradient in enumerate(gradients) if gradient is not None}
        for segment in self.segments:
            self.transport.push([(target, piece.of(flat)) for piece, target in segment.pushes], segment.zeros)
        has_squares = True
        for segment, numels in zip(self.segments, self._sizes, strict=True):
            grad = unit.gradients.ranges[segment.number]
            notes = unit.gradients.squares_of(segment.number, numels)
            has_squares = has_squares and notes is not None
            for start, stop in segment.gaps:
                grad[start:stop].zero_()
            for i, (piece, arrived) in enumerate(segment.sums):
                rows: Rows = [*arrived[: self.place], piece.of(flat), *arrived[self.place + 1 :]]
                target = grad[piece.at : piece.at + numels[i]]
                add_rows(target, rows, factor, unit.gradients.valid[piece.position], notes[i] if notes else None)
        unit.gradients.has_squares = has_squares


def find_route(unit: Unit, transport: Pushes) -> DirectRoute | None:
    """The route of a unit whose layout and inboxes allow one; see Note [Direct] 2."""
    mesh, layout = unit.mesh, unit.layout
    if unit.plain or must_lay_out(layout, mesh.factors, LEAST_PIECE_BYTES):
        return None
    group, first = next(group for group in mesh.reduce if not group.is_trivial), 0
    found: list[SegmentRoute] = []
    dtypes: dict[int, torch.dtype] = {}
    for number, segment in enumerate(layout.segments):
        if segment.trainable:
            size_bytes = segment.compute_bytes
            inbox = transport.inbox(group, number, size_bytes)
            if inbox is None:
                return None
            dtypes |= dict.fromkeys(range(first, first + len(segment.params)), segment.compute)
            route = SegmentRoute(number, size_bytes, [], [], [], [])
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
            found.append(route)
        first += len(segment.params)
    return DirectRoute(transport, found, dtypes, group.place)
