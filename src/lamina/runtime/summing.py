"""Sums of what an exchange brought: target = (target +) factor * (rows[0] + rows[1] + ...), in the target's dtype.

torch has no operation that adds several 16-bit tensors in float32: each row is a pass over the target. On a GPU these
passes take memory bandwidth from the backward that runs beside them, so there one kernel reads every row once and
writes the target once. It is compiled by Triton, which comes with torch on GPUs; where it does not work, the passes do.

Both ways add in the order of the rows: bitwise the same between runs. Both can note the squares of what they write,
which the kernel has at hand: see Note [Squares] in unit_gradients.py.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Rows = Sequence[Tensor]  # what is to be summed, (numel,) each; one where the sum is made

MOST_ROWS = 8  # that the kernel takes; more are added in turns
BLOCK = 4096  # elements of one of the kernel's programs
# The host's kernel sums a float32 norm in few accumulators (off by 2e-3 over 4 M equal elements, 8e-5 over random
# ones), so there it is asked for float64, which converts its input: in pieces that stay in the cache. CUDA's sums as a
# tree and needs no help.
HOST_PIECE_NUMEL = 1 << 16
Launch = Callable[[Tensor, Rows, float, bool, "Tensor | None"], None]
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def add_rows(target: Tensor, rows: Rows, factor: float, accumulate: bool, squares: Tensor | None = None) -> None:
    """Write (or add) `factor` times the sum of `rows` into `target`, (numel,) like each of them.

    `squares`: of `make_squares(target)`, to be filled with what sums up to the squares of what `target` holds then.
    """
    fused = _fused() if target.is_cuda and _fits(target, rows) else None
    if fused is None:
        for act in passes_of(target, rows, factor, accumulate):
            act()
        if squares is not None and target.numel():
            squares.fill_(sum_of_squares(target))
        return
    for first in range(0, len(rows), MOST_ROWS):
        is_last = first + MOST_ROWS >= len(rows)
        fused(target, rows[first : first + MOST_ROWS], factor, accumulate or first > 0, squares if is_last else None)


def make_squares(target: Tensor, stretches: int = 1) -> Tensor | None:
    """Where `add_rows` can note the squares of what it writes into `target`: 1D; None where it cannot.

    stretches: the most that the target is written in; `split_squares` gives each a place.
    """
    if target.is_complex() or not target.is_floating_point():
        return None
    if not target.is_cuda:
        return torch.zeros(stretches, dtype=torch.float64)
    if target.dtype is not torch.float32 or _fused() is None:
        return None
    return torch.zeros(target.numel() // BLOCK + stretches, dtype=torch.float32, device=target.device)


def split_squares(squares: Tensor, numels: Sequence[int]) -> Sequence[Tensor]:
    """Places for stretches of these sizes, which together are no longer than the target that `squares` was made for."""
    sizes = [max(1, -(-numel // BLOCK)) if squares.is_cuda else 1 for numel in numels]
    return squares[: sum(sizes)].split(sizes)


def sum_of_squares(values: Tensor) -> Tensor:
    """Of a real tensor (numel,) on the host: 0-dim, float64. See HOST_PIECE_NUMEL."""
    if not values.numel():
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(values.split(HOST_PIECE_NUMEL), 2.0, torch.float64)).pow_(2.0).sum()


def _fits(target: Tensor, rows: Rows) -> bool:
    return target.dtype is torch.float32 and target.numel() > 0 and rows[0].dtype in FUSED_DTYPES


def passes_of(target: Tensor, rows: Rows, factor: float, accumulate: bool) -> list[Callable[[], object]]:
    """`add_rows` in passes, as often as they are called."""
    passes: list[Callable[[], object]] = []
    for number, row in enumerate(rows):
        if accumulate or number > 0:
            passes.append(functools.partial(target.add_, row, alpha=factor))
        elif row.dtype is target.dtype:
            passes.append(functools.partial(torch.mul, row, _as_tensor(factor, row.dtype), out=target))
        else:
            passes.append(functools.partial(target.copy_, row))
            if factor != 1.0:
                passes.append(functools.partial(target.mul_, factor))
    return passes


@functools.cache
def _as_tensor(factor: float, dtype: torch.dtype) -> Tensor:
    """0-dim, on the host: as a number it would be made a tensor at every call."""
    with torch.inference_mode(False):
        return torch.tensor(factor, dtype=dtype)


@functools.cache
def _fused() -> Launch | None:
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


def calls_at_once() -> bool:
    """Whether there is a kernel, and compiled ones can be called without Triton's search for them."""
    if not torch.cuda.is_available() or _fused() is None:
        return False
    from lamina.runtime import summing_kernel

    return not summing_kernel.looks_up


def _adds_up(launch: Launch, times: int) -> bool:
    target, squares = torch.zeros(16, device="cuda"), torch.zeros(1, device="cuda")
    for _ in range(times):
        launch(target, [torch.ones(16, device="cuda", dtype=torch.bfloat16)] * 2, 0.5, True, squares)
    return target.tolist() == [float(times)] * 16 and squares.item() == 16 * times**2
