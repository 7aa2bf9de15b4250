"""The kernel of `summing`. Imported only where Triton is.

Rows are separate arguments, not a table of addresses: so Triton knows how each is aligned, and reads whole vectors.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lamina.runtime.summing import MOST_ROWS, Rows

BLOCK = 4096  # elements of one program


@triton.jit
def _add_rows(  # type: ignore[no-untyped-def]
    target, r0, r1, r2, r3, r4, r5, r6, r7, numel, factor,
    ROWS: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr,
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


def launch(target: Tensor, rows: Rows, factor: float, accumulate: bool) -> None:
    """`summing.add_rows` for float32 targets and at most MOST_ROWS rows of 16 or 32 bits."""
    numel, count = target.numel(), len(rows)
    padded: list[Any] = [*rows, *[rows[0]] * (MOST_ROWS - count)]
    grid = ((numel + BLOCK - 1) // BLOCK,)
    _add_rows[grid](target, *padded, numel, factor, ROWS=count, ACCUMULATE=accumulate, BLOCK=BLOCK, num_warps=8)
