"""One launch for all of this rank's pieces of a segment, where `summing.add_rows` takes one for each.

A launch costs the host more than anything else that a reduction does by pieces (direct.py), and what differs from step
to step is only where the gradients lie: which block of which piece goes where is written down once, on the device.
Where it does not fit, pieces are summed one by one, with the same result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import or_
from typing import Any

import torch
from torch import Tensor

from lamina.runtime import summing
from lamina.runtime.summing import BLOCK, FUSED_DTYPES, MOST_ROWS

MOST_PIECES = 16  # of one launch: arguments of the kernel
COLUMNS = 4  # of a table: the piece, elements into its gradient and into the range, elements from there to its end
ALIGNMENT_NUMEL, ALIGNMENT_BYTES = 16, 16  # of what lies in memory for good, and of gradients
SHORT_NUMEL = 2**31  # from here on Triton takes another type for it
_address_of: Callable[[Tensor], int] = Tensor.data_ptr


@dataclass(frozen=True)
class Piece:
    """A stretch of one gradient that lies in one member's part of a segment."""

    position: int  # of the parameter in the unit
    shape: tuple[int, ...]  # of the gradient
    start: int  # elements of the flattened gradient
    stop: int
    at: int  # where it begins in the part

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.numel == math.prod(self.shape)

    def of(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """(stop - start,), of contiguous gradients, by position."""
        gradient, numel = gradients[self.position], self.stop - self.start
        assert gradient is not None
        if numel == gradient.numel():
            return gradient.view(-1)
        return gradient.as_strided((numel,), (1,), gradient.storage_offset() + self.start)


@dataclass
class Batch:
    """What one launch sums, but for the gradients."""

    table: Tensor  # int64, (blocks, COLUMNS), on the device
    inbox: Tensor  # (rows, row_numel), what has arrived, by member
    place: int  # this rank's row, which is never read: it is the gradients'
    pieces: slice  # of the segment's
    first_block: int  # of the segment's
    runs: dict[tuple[bool, bool], Any] = field(default_factory=dict)  # ready to be called, by how they sum

    def __post_init__(self) -> None:
        self.blocks = len(self.table)
        self.rows, self.row_numel = self.inbox.shape
        self.table_at, self.inbox_at = self.table.data_ptr(), self.inbox.data_ptr()


# A batch, the range, the gradients by piece and their addresses, factor, accumulate, squares by block
Launch = Callable[[Batch, Tensor, list[Tensor], list[int], float, bool, "Tensor | None"], None]


def table_of(pieces: Sequence[Piece]) -> Tensor:
    """int64, (blocks, COLUMNS), on the host. Blocks of a piece follow each other, as their squares do."""
    rows = [
        (number, piece.start + begin, piece.at + begin, piece.numel - begin)
        for number, piece in enumerate(pieces)
        for begin in range(0, piece.numel, BLOCK)
    ]
    return torch.tensor(rows, dtype=torch.int64)


def make_batch(pieces: Sequence[Piece], inbox: Tensor, place: int, first: int = 0, first_block: int = 0) -> Batch:
    """Of at most MOST_PIECES pieces. The table is on its way when this returns: nobody waits for what is queued."""
    table = table_of(pieces)
    if inbox.is_cuda:
        table = table.pin_memory().to(inbox.device, non_blocking=True)
    return Batch(table, inbox, place, slice(first, first + len(pieces)), first_block)


class PieceSums:
    """All of this rank's pieces of one segment."""

    def __init__(self, pieces: Sequence[Piece], inbox: Tensor, place: int) -> None:
        """`inbox`: as of Batch."""
        self._positions = [piece.position for piece in pieces]
        self._batches: list[Batch] = []
        blocks = 0
        for first in range(0, len(pieces), MOST_PIECES):
            batch = make_batch(pieces[first : first + MOST_PIECES], inbox, place, first, blocks)
            self._batches.append(batch)
            blocks += batch.blocks

    def run(
        self,
        target: Tensor,
        gradients: Sequence[Tensor | None],
        factor: float,
        accumulate: bool,
        squares: Sequence[Tensor] | None,
    ) -> bool:
        """Write (or add) `factor` times the sums into `target`; False: nothing was done, for it does not fit.

        Args:
            target: float32, (range_numel,).
            gradients: by position in the unit, contiguous.
            squares: by piece, of `summing.split_squares`: side by side, a place for each block.
        """
        found: Any = list(map(gradients.__getitem__, self._positions))
        addresses = list(map(_address_of, found))
        launch = launcher()
        if launch is None or functools.reduce(or_, addresses, target.data_ptr()) % ALIGNMENT_BYTES:
            return False
        noted = None if squares is None else squares[0]
        if len(self._batches) == 1:
            launch(self._batches[0], target, found, addresses, factor, accumulate, noted)
            return True
        for batch in self._batches:
            if squares is not None:
                noted = squares[batch.pieces.start]
            launch(batch, target, found[batch.pieces], addresses[batch.pieces], factor, accumulate, noted)
        return True


def find_sums(pieces: Sequence[Piece], inbox: Tensor, place: int, target: torch.dtype) -> PieceSums | None:
    """None where one launch cannot do it. `inbox`: as of Batch; `target`: the dtype of the range."""
    if not pieces or target is not torch.float32 or inbox.dtype not in FUSED_DTYPES or len(inbox) > MOST_ROWS:
        return None
    row_numel = inbox.shape[1]
    if row_numel >= SHORT_NUMEL or row_numel % ALIGNMENT_NUMEL or inbox.data_ptr() % ALIGNMENT_BYTES:
        return None
    if any(number % ALIGNMENT_NUMEL for piece in pieces for number in (piece.start, piece.stop, piece.at)):
        return None
    return PieceSums(pieces, inbox, place) if can_launch(inbox) else None


def can_launch(inbox: Tensor) -> bool:
    """Whether there is a kernel for its device. A table cannot be made while a graph is recorded."""
    return inbox.is_cuda and not torch.cuda.is_current_stream_capturing() and launcher() is not None


@functools.cache
def launcher() -> Launch | None:
    """The kernel's; None where it does not work, or would cost the host as much as a launch for each piece."""
    if not summing.calls_at_once():
        return None
    try:
        from lamina.runtime import piece_kernel

        return piece_kernel.launch if _adds_up(piece_kernel.launch) else None
    except Exception:  # one for each piece works
        return None


def _adds_up(launch: Launch) -> bool:
    """Two pieces, of which the second comes first in the range, three times: compiled, found again, called at once."""
    inbox = torch.full((2, 32), 2.0, device="cuda", dtype=torch.bfloat16)
    gradients = [torch.full((16,), value, device="cuda", dtype=torch.bfloat16) for value in (1.0, 3.0)]
    batch = make_batch([Piece(0, (16,), 0, 16, 16), Piece(1, (16,), 0, 16, 0)], inbox, 1)
    target, squares = torch.zeros(32, device="cuda"), torch.zeros(2, device="cuda")
    for _ in range(3):
        launch(batch, target, gradients, list(map(_address_of, gradients)), 0.5, True, squares)
    return target.tolist() == [7.5] * 16 + [4.5] * 16 and squares.tolist() == [16 * 4.5**2, 16 * 7.5**2]
