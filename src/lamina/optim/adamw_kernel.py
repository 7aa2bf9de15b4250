"""One AdamW update of many ranges on a GPU, in one launch; it may write copies in 16 bits. Imported where Triton is.

torch's fused kernel reads gradients that a pass before it has scaled, takes a few ranges a launch, and computes in
float64. Here one launch reads every range by a table of addresses, scales gradients by a number that lies on the device
(clipping, loss scaling) and leaves them as they are: 28 bytes an element in one pass, where scaling apart makes it 36
in two.

Parameters may also lie in halves (core/halves.py): then the copy is the upper one, and is read, too.

The algorithm is that of Loshchilov and Hutter, "Decoupled weight decay regularization"; products in float32, bias
corrections in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements of one program; of 1024 to 4096 the quickest
WARPS = 8
CHUNK_BLOCKS = 256  # of one row of the table; long ranges take several, so that few programs have nothing to do
# of the table: places of parameter (or lower half), gradient, both moments and step count; number of elements; place of
# the copy (or upper half)
COLUMNS = 7
ALIGNMENT_BYTES, FLOAT_BYTES = 16, 4
VECTOR_NUMEL = 4  # what is aligned begins at a multiple of so many elements


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    table, anchor, copies, lowers, lr, scale, found_inf, decay, rest1, rest2, log_beta1, low1, log_beta2, low2, eps,
    LR_LIES_THERE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_FOUND_INF: tl.constexpr, MAXIMIZE: tl.constexpr,
    PUBLISHES: tl.constexpr, HALVED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK_BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(0) // CHUNK_BLOCKS * COLUMNS
    numel = tl.load(row + 5)
    first = tl.program_id(0) % CHUNK_BLOCKS * BLOCK
    if first < numel:
        is_sound = True
        if HAS_FOUND_INF:
            is_sound = tl.load(found_inf) == 0.0
        if is_sound:
            params = _place(row, lowers if HALVED else anchor, ALIGNED) + first
            grads = _place(row + 1, anchor, ALIGNED) + first
            firsts = _place(row + 2, anchor, ALIGNED) + first
            seconds = _place(row + 3, anchor, ALIGNED) + first
            published = copies
            if PUBLISHES:
                published = _place(row + 6, copies, ALIGNED) + first
            step = tl.load(_place(row + 4, anchor, False)).to(tl.float64)
            rate = lr
            if LR_LIES_THERE:
                rate = tl.load(lr).to(tl.float32)
            factor = 1.0
            if HAS_SCALE:
                factor = tl.load(scale).to(tl.float32)
            # beta ** step: the logarithm in two floats, for 1 - 0.999 has only half of a float's digits
            correction1 = 1.0 - tl.exp(step * log_beta1 + step * low1)
            correction2 = 1.0 - tl.exp(step * log_beta2 + step * low2)
            step_size = (rate / correction1).to(tl.float32)
            shrink = (1.0 / tl.sqrt(correction2)).to(tl.float32)
            left = 1.0 - rate * decay
            if first + BLOCK <= numel:  # without a mask, which would keep Triton from reading whole vectors
                _update(
                    params, grads, firsts, seconds, published, 0, factor, left, rest1, rest2, step_size, shrink, eps,
                    HAS_SCALE, MAXIMIZE, PUBLISHES, HALVED, False, BLOCK,
                )  # fmt: skip
            else:
                _update(
                    params, grads, firsts, seconds, published, numel - first, factor, left, rest1, rest2, step_size,
                    shrink, eps, HAS_SCALE, MAXIMIZE, PUBLISHES, HALVED, True, BLOCK,
                )  # fmt: skip


@triton.jit
def _place(cell, anchor, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a cell of the table points: so many elements from the anchor."""
    distance = tl.load(cell)
    if ALIGNED:
        distance = distance // 4 * 4  # it is so already; Triton knows nothing of what is loaded
    return anchor + distance


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    params, grads, firsts, seconds, published, numel, factor, left, rest1, rest2, step_size, shrink, eps,
    HAS_SCALE: tl.constexpr, MAXIMIZE: tl.constexpr, PUBLISHES: tl.constexpr, HALVED: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block: its first `numel` elements where MASKED, else all."""
    at = tl.arange(0, BLOCK)
    if MASKED:
        inside = at < numel
        grad = tl.load(grads + at, mask=inside, other=0.0)
        param = tl.load(params + at, mask=inside, other=0)
        if HALVED:
            param = _join(tl.load(published + at, mask=inside, other=0.0), param)
        mean = tl.load(firsts + at, mask=inside, other=0.0)
        square = tl.load(seconds + at, mask=inside, other=0.0)
    else:
        grad, param = tl.load(grads + at), tl.load(params + at)
        if HALVED:
            param = _join(tl.load(published + at), param)
        mean, square = tl.load(firsts + at), tl.load(seconds + at)
    if HAS_SCALE:
        grad = grad * factor
    if MAXIMIZE:
        grad = -grad
    mean = mean + (grad - mean) * rest1
    square = square + (grad * grad - square) * rest2
    param = param * left - step_size * mean / (tl.sqrt(square) * shrink + eps)
    kept = param  # where the parameter lies, and beside it
    copy = param
    if HALVED:
        bits = _bits(param)
        kept = bits.to(tl.int16)
        copy = ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif PUBLISHES:
        copy = param.to(published.dtype.element_ty)
    if MASKED:
        tl.store(firsts + at, mean, mask=inside)
        tl.store(seconds + at, square, mask=inside)
        tl.store(params + at, kept, mask=inside)
        if PUBLISHES:
            tl.store(published + at, copy, mask=inside)
    else:
        tl.store(firsts + at, mean)
        tl.store(seconds + at, square)
        tl.store(params + at, kept)
        if PUBLISHES:
            tl.store(published + at, copy)


@triton.jit
def _join(weight, remainder):  # type: ignore[no-untyped-def]
    """`join` of core/halves.py."""
    upper = weight.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return (upper + remainder.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _bits(number):  # type: ignore[no-untyped-def]
    """Of what is halved: every NaN is the same."""
    bits = number.to(tl.int32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)


class Table:
    """Where the ranges of one call lie, on the device: a row for each CHUNK_BLOCKS blocks of a range.

    Places are distances from the first parameter, for Triton reads whole vectors only where it knows how a pointer is
    aligned, and it knows that of arguments, not of addresses that were loaded.
    """

    def __init__(
        self,
        columns: Sequence[Sequence[Tensor]],
        published: Sequence[Tensor] = (),
        remainders: Sequence[Tensor] = (),
    ) -> None:
        """`columns`: parameters, gradients, first and second moments, step counts (0-dim); all float32.

        `published`: copies of the parameters, all of one dtype. `remainders`: int16, for parameters that lie in halves;
        the copies are the other ones, and the first column anything of the same lengths.
        """
        self._columns, self.anchor = columns, columns[0][0]
        self._published, self._remainders = list(published), list(remainders)
        self.copies = published[0] if published else self.anchor
        self.remainders = remainders[0] if remainders else self.anchor
        self._gradients: list[int] = []  # their addresses, which come and go
        self._rows = torch.empty(0)
        self._place: Tensor | None = None  # that the next recorded kernel may read
        self._recorded: list[tuple[Tensor, Tensor]] = []  # what recorded kernels read, and what is to stand there
        numels = torch.tensor([param.numel() for param in columns[0]])
        chunk_numel = CHUNK_BLOCKS * BLOCK
        counts = (numels + chunk_numel - 1) // chunk_numel  # rows of each range
        self._range = torch.arange(len(numels)).repeat_interleave(counts)  # by row
        number = torch.arange(len(self._range)) - (counts.cumsum(0) - counts)[self._range]  # of the chunk in its range
        self._starts = number * chunk_numel
        self._numels = (numels[self._range] - number * chunk_numel).clamp(max=chunk_numel)
        self.is_aligned = False

    def rows(self) -> Tensor:
        """int64, (rows, COLUMNS), on the device, as the tensors lie now."""
        if torch.cuda.is_current_stream_capturing():  # it is written once, not by the graph: see `end_recording`
            assert self._place is not None
            self._gradients = []  # they lie in the graph's memory
            self._recorded.append((self._place, self._rows_on_host()))
            self._place = None
            return self._recorded[-1][0]
        gradients = [grad.data_ptr() for grad in self._columns[1]]
        if gradients != self._gradients:
            self._gradients = gradients
            self._rows = self._rows_on_host().pin_memory().to(self.anchor.device, non_blocking=True)
        return self._rows

    def _rows_on_host(self) -> Tensor:
        addresses = torch.tensor([[tensor.data_ptr() for tensor in column] for column in self._columns])
        self.is_aligned = not bool((addresses[:4] % ALIGNMENT_BYTES).any())
        rows = torch.zeros(len(self), COLUMNS, dtype=torch.int64)
        rows[:, :5] = ((addresses - self.anchor.data_ptr()) // FLOAT_BYTES)[:, self._range].T
        rows[:, :4] += self._starts[:, None]
        rows[:, 5] = self._numels
        if self._published:
            rows[:, 6] = self._distances(self._published)
        if self._remainders:
            rows[:, 0] = self._distances(self._remainders)
        return rows

    def _distances(self, tensors: Sequence[Tensor]) -> Tensor:
        """By row: elements from the first of them."""
        first, item_bytes = tensors[0].data_ptr(), tensors[0].itemsize
        places = torch.tensor([tensor.data_ptr() for tensor in tensors]) - first
        are_aligned = not any(place % (VECTOR_NUMEL * item_bytes) for place in (first, *places.tolist()))
        self.is_aligned = self.is_aligned and are_aligned
        return (places // item_bytes)[self._range] + self._starts

    def make_place(self) -> None:
        """Memory for the rows of a recorded kernel: not the graph's own, where other kernels write before it."""
        self._place = torch.empty(len(self), COLUMNS, dtype=torch.int64, device=self.anchor.device)

    @property
    def has_place(self) -> bool:
        return self._place is not None

    def end_recording(self) -> list[Tensor]:
        """Write the rows that recorded kernels will read, and return them."""
        recorded, self._recorded = self._recorded, []
        for place, rows in recorded:
            place.copy_(rows)
        return [place for place, _ in recorded]

    def __len__(self) -> int:
        return len(self._range)


def launch(
    table: Table,
    lr: float | Tensor,
    scale: Tensor | None,
    found_inf: Tensor | None,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool,
    publishes: bool = False,
) -> None:
    """Update every range of the table; `lr`, `scale` (of gradients) and `found_inf` may lie on the device, 0-dim.

    `publishes`: write the copies, too.
    """
    assert publishes or table.remainders is table.anchor, "both halves are written"
    rows = table.rows()
    lr_lies_there = isinstance(lr, Tensor) and lr.device == rows.device and lr.is_cuda
    logs: list[Any] = []
    for beta in betas:
        high = float(torch.tensor(_log(beta), dtype=torch.float32))
        logs += [high, _log(beta) - high]
    _adamw[(len(table) * CHUNK_BLOCKS,)](
        rows,
        table.anchor,
        table.copies,
        table.remainders,
        lr if lr_lies_there else float(lr),
        rows if scale is None else scale,
        rows if found_inf is None else found_inf,
        weight_decay,
        1.0 - betas[0],
        1.0 - betas[1],
        *logs,
        eps,
        LR_LIES_THERE=lr_lies_there,
        HAS_SCALE=scale is not None,
        HAS_FOUND_INF=found_inf is not None,
        MAXIMIZE=maximize,
        PUBLISHES=publishes,
        HALVED=table.remainders is not table.anchor,
        ALIGNED=table.is_aligned,
        BLOCK=BLOCK,
        CHUNK_BLOCKS=CHUNK_BLOCKS,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -1e4  # exp(-1e4 * step) is 0
