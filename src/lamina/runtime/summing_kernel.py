"""The kernel of `summing`. Imported only where Triton is.

Rows are separate arguments, not a table of addresses: so Triton knows how each is aligned, and reads whole vectors.

Triton looks at every argument of every launch, to find the compiled kernel that fits: 90 us where it is called once a
unit. What decides is few things here, so the usual launch goes to the compiled kernel straight away.
"""

from __future__ import annotations

import functools
from operator import or_
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lamina.runtime.summing import BLOCK, MOST_ROWS, Rows


@triton.jit
def _add_rows(  # type: ignore[no-untyped-def]
    target, r0, r1, r2, r3, r4, r5, r6, r7, squares, numel, factor,
    ROWS: tl.constexpr, ACCUMULATE: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    total = tl.load(r0 + at, mask=inside, other=0.0).to(tl.float32)
    if ROWS > 1:
        total += tl.load(r1 + at, mask=inside, other=0.0).to(tl.float32)
    if ROWS > 2:
        total += tl.load(r2 + at, mask=inside, other=0.0).to(tl.float32)
    if ROWS > 3:
        total += tl.load(r3 + at, mask=inside, other=0.0).to(tl.float32)
    if ROWS > 4:
        total += tl.load(r4 + at, mask=inside, other=0.0).to(tl.float32)
    if ROWS > 5:
        total += tl.load(r5 + at, mask=inside, other=0.0).to(tl.float32)
    if ROWS > 6:
        total += tl.load(r6 + at, mask=inside, other=0.0).to(tl.float32)
    if ROWS > 7:
        total += tl.load(r7 + at, mask=inside, other=0.0).to(tl.float32)
    total = total * factor
    if ACCUMULATE:
        total += tl.load(target + at, mask=inside, other=0.0)
    tl.store(target + at, total, mask=inside)
    if SQUARES:
        tl.store(squares + tl.program_id(0), tl.sum(total * total))  # beyond the end it is zero


ALIGNMENT_BYTES = 16
SHORT_NUMEL = 2**31  # from here on Triton takes another type for it
_address_of = Tensor.data_ptr
_compiled: dict[tuple[Any, ...], Any] = {}
looks_up = False  # every launch by Triton's own way


def launch(target: Tensor, rows: Rows, factor: float, accumulate: bool, squares: Tensor | None = None) -> None:
    """`summing.add_rows` for float32 targets and at most MOST_ROWS rows of 16 or 32 bits, all of one dtype."""
    numel, count = target.numel(), len(rows)
    missing = MOST_ROWS - count
    grid = ((numel + BLOCK - 1) // BLOCK, 1, 1)
    addresses = list(map(_address_of, (target, *rows)))
    is_usual = not (looks_up or numel >= SHORT_NUMEL or functools.reduce(or_, addresses, numel) % ALIGNMENT_BYTES)
    has_squares = squares is not None
    noted = target if squares is None else squares
    key = rows[0].dtype, count, accumulate, has_squares, target.device.index
    kernel = _compiled.get(key) if is_usual else None
    if kernel is not None:  # addresses as numbers: of each tensor Triton would ask the driver where it lies
        places = *addresses, *addresses[1:2] * missing, noted.data_ptr()
        kernel[grid](*places, numel, factor, count, accumulate, has_squares, BLOCK)
        return
    kernel = _add_rows[grid](
        target,
        *rows,
        *[rows[0]] * missing,
        noted,
        numel,
        factor,
        ROWS=count,
        ACCUMULATE=accumulate,
        SQUARES=has_squares,
        BLOCK=BLOCK,
        num_warps=8,
    )
    if is_usual:
        _compiled[key] = kernel
