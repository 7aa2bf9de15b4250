"""One AdamW update of many ranges on a GPU, in one launch. Imported only where Triton is.

torch's fused kernel reads gradients that a pass before it has scaled, takes a few ranges a launch, and computes in
float64. Here one launch reads every range by a table of addresses, scales gradients by a number that lies on the device
(clipping, loss scaling) and leaves them as they are: 28 bytes an element in one pass, where scaling apart makes it 36
in two.

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
COLUMNS = 6  # of the table: addresses of parameter, gradient, both moments and step count; number of elements
ALIGNMENT_BYTES = 16


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    table, lr, scale, found_inf, decay, rest1, rest2, log_beta1, low1, log_beta2, low2, eps,
    LR_LIES_THERE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_FOUND_INF: tl.constexpr, MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(1) * COLUMNS
    numel = tl.load(row + 5)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if first < numel:
        is_sound = True
        if HAS_FOUND_INF:
            is_sound = tl.load(found_inf) == 0.0
        if is_sound:
            params = _place(row, ALIGNED) + first
            grads = _place(row + 1, ALIGNED) + first
            firsts = _place(row + 2, ALIGNED) + first
            seconds = _place(row + 3, ALIGNED) + first
            step = tl.load(_place(row + 4, False)).to(tl.float64)
            rate = lr
            if LR_LIES_THERE:
                rate = tl.load(lr).to(tl.float32)
            factor = 1.0
            if HAS_SCALE:
                factor = tl.load(scale).to(tl.float32)
            # beta ** step: the logarithm in two floats, for 1 - 0.999 has only half of a float's digits
            correction1 = 1.0 - tl.exp(step * (log_beta1.to(tl.float64) + low1.to(tl.float64)))
            correction2 = 1.0 - tl.exp(step * (log_beta2.to(tl.float64) + low2.to(tl.float64)))
            step_size = (rate / correction1).to(tl.float32)
            shrink = (1.0 / tl.sqrt(correction2)).to(tl.float32)
            left = 1.0 - rate * decay
            if first + BLOCK <= numel:  # without a mask, which would keep Triton from reading whole vectors
                _update(
                    params, grads, firsts, seconds, 0, factor, left, rest1, rest2, step_size, shrink, eps,
                    HAS_SCALE, MAXIMIZE, False, BLOCK,
                )  # fmt: skip
            else:
                _update(
                    params, grads, firsts, seconds, numel - first, factor, left, rest1, rest2, step_size, shrink, eps,
                    HAS_SCALE, MAXIMIZE, True, BLOCK,
                )  # fmt: skip


@triton.jit
def _place(cell, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The address that a cell of the table holds."""
    address = tl.load(cell)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address.to(tl.pointer_type(tl.float32))


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    params, grads, firsts, seconds, numel, factor, left, rest1, rest2, step_size, shrink, eps,
    HAS_SCALE: tl.constexpr, MAXIMIZE: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block: its first `numel` elements where MASKED, else all."""
    at = tl.arange(0, BLOCK)
    if MASKED:
        inside = at < numel
        grad = tl.load(grads + at, mask=inside, other=0.0)
        param = tl.load(params + at, mask=inside, other=0.0)
        mean = tl.load(firsts + at, mask=inside, other=0.0)
        square = tl.load(seconds + at, mask=inside, other=0.0)
    else:
        grad, param = tl.load(grads + at), tl.load(params + at)
        mean, square = tl.load(firsts + at), tl.load(seconds + at)
    if HAS_SCALE:
        grad = grad * factor
    if MAXIMIZE:
        grad = -grad
    mean = mean + (grad - mean) * rest1
    square = square + (grad * grad - square) * rest2
    param = param * left - step_size * mean / (tl.sqrt(square) * shrink + eps)
    if MASKED:
        tl.store(firsts + at, mean, mask=inside)
        tl.store(seconds + at, square, mask=inside)
        tl.store(params + at, param, mask=inside)
    else:
        tl.store(firsts + at, mean)
        tl.store(seconds + at, square)
        tl.store(params + at, param)


class Table:
    """Addresses of the ranges of one call, on the device."""

    def __init__(self, columns: Sequence[Sequence[Tensor]]) -> None:
        """`columns`: parameters, gradients, first and second moments, step counts (0-dim); all float32."""
        self._columns = columns
        self._gradients = [0] * len(columns[1])  # their addresses, which come and go
        self._rows = torch.empty(0)
        numels = [param.numel() for param in columns[0]]
        self._numels, self.most_blocks = numels, max((numel + BLOCK - 1) // BLOCK for numel in numels)
        self.is_aligned = False

    def rows(self) -> Tensor:
        """int64, (ranges, COLUMNS), as the tensors lie now."""
        gradients = [grad.data_ptr() for grad in self._columns[1]]
        if gradients != self._gradients:
            self._gradients = gradients
            addresses = [[tensor.data_ptr() for tensor in column] for column in self._columns]
            self.is_aligned = not any(address % ALIGNMENT_BYTES for column in addresses[:4] for address in column)
            rows = torch.tensor(list(zip(*addresses, self._numels, strict=True)), dtype=torch.int64)
            self._rows = rows.pin_memory().to(self._columns[0][0].device, non_blocking=True)
        return self._rows

    def __len__(self) -> int:
        return len(self._numels)


def launch(
    table: Table,
    lr: float | Tensor,
    scale: Tensor | None,
    found_inf: Tensor | None,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """Update every range of the table; `lr`, `scale` (of gradients) and `found_inf` may lie on the device, 0-dim."""
    rows = table.rows()
    lr_lies_there = isinstance(lr, Tensor) and lr.is_cuda
    logs: list[Any] = []
    for beta in betas:
        high = float(torch.tensor(_log(beta), dtype=torch.float32))
        logs += [high, _log(beta) - high]
    _adamw[(table.most_blocks, len(table))](
        rows,
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
        ALIGNED=table.is_aligned,
        BLOCK=BLOCK,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -1e4  # exp(-1e4 * step) is 0
