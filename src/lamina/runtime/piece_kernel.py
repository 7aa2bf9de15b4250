"""The kernel of `piece_sums`: many pieces in one launch. Imported only where Triton is.

It adds as that of `summing_kernel` does, block by block: bitwise the same. Which block does what stands in a table that
stays; the gradients, which lie elsewhere at every step, are arguments, for a table that is written anew would be read
by the kernel before, and Triton knows how an argument is aligned.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lamina.runtime.piece_sums import ALIGNMENT_NUMEL, COLUMNS, MOST_PIECES, Batch
from lamina.runtime.summing import BLOCK


@triton.jit
def _add_pieces(  # type: ignore[no-untyped-def]
    table, target, inbox, squares, g0, g1, g2, g3, g4, g5, g6, g7, g8, g9, g10, g11, g12, g13, g14, g15, row_numel,
    factor, ROWS: tl.constexpr, PLACE: tl.constexpr, ACCUMULATE: tl.constexpr, SQUARES: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    cell = table + tl.program_id(0) * COLUMNS
    piece = tl.load(cell)
    # multiples already; Triton knows nothing of what is loaded
    in_piece = tl.load(cell + 1) // ALIGNED * ALIGNED
    in_range = tl.load(cell + 2) // ALIGNED * ALIGNED
    numel = tl.load(cell + 3) // ALIGNED * ALIGNED
    own = g0
    if piece == 1:
        own = g1
    if piece == 2:
        own = g2
    if piece == 3:
        own = g3
    if piece == 4:
        own = g4
    if piece == 5:
        own = g5
    if piece == 6:
        own = g6
    if piece == 7:
        own = g7
    if piece == 8:
        own = g8
    if piece == 9:
        own = g9
    if piece == 10:
        own = g10
    if piece == 11:
        own = g11
    if piece == 12:
        own = g12
    if piece == 13:
        own = g13
    if piece == 14:
        own = g14
    if piece == 15:
        own = g15
    own += in_piece
    arrived, place = inbox + in_range, target + in_range
    at = tl.arange(0, BLOCK)
    inside = at < numel
    total = _row(own, arrived, row_numel, 0, PLACE, at, inside)
    if ROWS > 1:
        total += _row(own, arrived, row_numel, 1, PLACE, at, inside)
    if ROWS > 2:
        total += _row(own, arrived, row_numel, 2, PLACE, at, inside)
    if ROWS > 3:
        total += _row(own, arrived, row_numel, 3, PLACE, at, inside)
    if ROWS > 4:
        total += _row(own, arrived, row_numel, 4, PLACE, at, inside)
    if ROWS > 5:
        total += _row(own, arrived, row_numel, 5, PLACE, at, inside)
    if ROWS > 6:
        total += _row(own, arrived, row_numel, 6, PLACE, at, inside)
    if ROWS > 7:
        total += _row(own, arrived, row_numel, 7, PLACE, at, inside)
    total = total * factor
    if ACCUMULATE:
        total += tl.load(place + at, mask=inside, other=0.0)
    tl.store(place + at, total, mask=inside)
    if SQUARES:
        tl.store(squares + tl.program_id(0), tl.sum(total * total))  # beyond the end it is zero


@triton.jit
def _row(own, arrived, row_numel, ROW: tl.constexpr, PLACE: tl.constexpr, at, inside):  # type: ignore[no-untyped-def]
    """What member ROW adds; this rank's own part is the gradient."""
    if ROW == PLACE:
        source = own
    else:
        source = arrived + row_numel.to(tl.int64) * ROW
    return tl.load(source + at, mask=inside, other=0.0).to(tl.float32)


_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    batch: Batch,
    target: Tensor,
    gradients: list[Tensor],
    addresses: list[int],
    factor: float,
    accumulate: bool,
    squares: Tensor | None,
) -> None:
    """`piece_sums.Launch` of what is aligned."""
    has_squares = squares is not None
    noted = target if squares is None else squares
    constants = batch.rows, batch.place, accumulate, has_squares, BLOCK, COLUMNS, ALIGNMENT_NUMEL
    missing, numbers = MOST_PIECES - len(addresses), (batch.row_numel, factor)
    run = batch.runs.get((accumulate, has_squares))
    if run is not None:  # addresses as numbers: of each tensor Triton would ask the driver where it lies
        places = batch.table_at, target.data_ptr(), batch.inbox_at, noted.data_ptr(), *addresses
        run(*places, *addresses[:1] * missing, *numbers, *constants)
        return
    grid, key = (batch.blocks, 1, 1), (batch.inbox.dtype, batch.inbox.device, constants)
    if key in _compiled:
        batch.runs[accumulate, has_squares] = _compiled[key][grid]
        launch(batch, target, gradients, addresses, factor, accumulate, squares)
        return
    tensors = batch.table, target, batch.inbox, noted, *gradients, *gradients[:1] * missing
    _compiled[key] = _add_pieces[grid](*tensors, *numbers, *constants, num_warps=8)
