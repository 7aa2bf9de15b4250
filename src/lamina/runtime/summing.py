"""Sums of what an exchange brought: target = (target +) factor * (rows[0] + rows[1] + ...), in the target's dtype.

torch has no operation that adds several 16-bit tensors in float32: each row is a pass over the target. On a GPU these
passes take memory bandwidth from the backward that runs beside them, so there one kernel reads every row once and
writes the target once. It is compiled by Triton, which comes with torch on GPUs; where it does not work, the passes do.

Both ways add in the order of the rows: bitwise the same between runs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Rows = Sequence[Tensor]  # what is to be summed, (numel,) each; one where the sum is made

MOST_ROWS = 8  # that the kernel takes; more are added in turns
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def add_rows(target: Tensor, rows: Rows, factor: float, accumulate: bool) -> None:
    """Write (or add) `factor` times the sum of `rows` into `target`, (numel,) like each of them."""
    fused = _fused() if target.is_cuda and _fits(target, rows) else None
    if fused is None:
        _add_in_passes(target, rows, factor, accumulate)
        return
    for first in range(0, len(rows), MOST_ROWS):
        fused(target, rows[first : first + MOST_ROWS], factor, accumulate or first > 0)


def _fits(target: Tensor, rows: Rows) -> bool:
    return target.dtype is torch.float32 and target.numel() > 0 and rows[0].dtype in FUSED_DTYPES


def _add_in_passes(target: Tensor, rows: Rows, factor: float, accumulate: bool) -> None:
    for number, row in enumerate(rows):
        if accumulate or number > 0:
            target.add_(row, alpha=factor)
        elif row.dtype is target.dtype:
            torch.mul(row, _as_tensor(factor, row.dtype), out=target)
        elif factor == 1.0:
            target.copy_(row)
        else:
            target.copy_(row).mul_(factor)


@functools.cache
def _as_tensor(factor: float, dtype: torch.dtype) -> Tensor:
    """0-dim, on the host: as a number it would be made a tensor at every call."""
    with torch.inference_mode(False):
        return torch.tensor(factor, dtype=dtype)


@functools.cache
def _fused() -> Callable[[Tensor, Rows, float, bool], None] | None:
    """The kernel's launcher; None where Triton is missing or cannot compile."""
    try:
        from lamina.runtime import summing_kernel

        if not _adds_up(summing_kernel.launch, times=1):
            return None
        try:
            is_quick = _adds_up(summing_kernel.launch, times=2)
        except Exception:  # this Triton's compiled kernels are called in another way
            is_quick = False
        summing_kernel.looks_up = not is_quick
    except Exception as error:  # a compiler is missing, or any of the many ways in which one fails
        warnings.warn(f"lamina sums gradients in several passes, for Triton does not work here: {error}", stacklevel=2)
        return None
    return summing_kernel.launch


def _adds_up(launch: Callable[[Tensor, Rows, float, bool], None], times: int) -> bool:
    target = torch.zeros(16, device="cuda")
    for _ in range(times):
        launch(target, [torch.ones(16, device="cuda", dtype=torch.bfloat16)] * 2, 0.5, True)
    return target.tolist() == [float(times)] * 16
