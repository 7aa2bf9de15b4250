"""How many bytes an operation that is no product moves: all that it reads and all that it writes.

Inputs and results are counted whole, but for operations that look at a few of their input's elements, that take no more
than a shape from it, or that run no kernel at all. Kernels that cannot read four elements at a time, or read more than
once, are counted as if they moved more; by how much was measured kernel by kernel on one H200
(benchmarks/plan_time/results/parts_h200.json), not on whole steps.

Pure: reads shapes only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

PICK = {"gather", "index_select", "embedding", "index", "take", "take_along_dim"}  # as many elements as the result has
PUT = {"scatter", "scatter_add", "index_put", "index_add", "index_copy"}  # as many as are put: read, read and written
FILL = {"zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "zero", "fill", "rand", "randn", "bernoulli"}
EMPTY = {"empty", "new_empty", "empty_strided", "new_empty_strided"}
COPIES = {"_to_copy", "clone", "copy", "contiguous"}  # casts have kernels of their own
SOFTMAX = {"_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"}
STRIDED = 1.75  # torch's elementwise kernel where strides differ or shapes are broadcast: 2.5 TB/s, 4.3 where not
TRANSPOSED = 5.3  # and where what is adjacent in one tensor is not in another: 0.8 TB/s (gpu_step's experts: gradients)
CASTING = 3.0  # the same where element types differ, and every element is converted by itself: 1.3 TB/s
ON_CHIP_BYTES = 228 << 10  # of a row of a softmax: longer ones are read a third time
LOSS = {"nll_loss_forward": 0, "nll_loss_backward": 1}  # passes over the logits: labels pick, the gradient is zeros


def runs_no_kernel(func: Any) -> bool:
    return _name(func) in EMPTY


def moved_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    name, results = _name(func), [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    written = sum(t.nbytes for t in results)
    if name in EMPTY:
        return 0
    if name in FILL:
        return written
    if name in LOSS:
        return LOSS[name] * written
    if name in PICK:
        return 2 * written
    if name in PUT:
        return 3 * max((t.nbytes for t in _tensors(args, kwargs) if t is not args[0]), default=0)
    given = _tensors(args[1:] if name == "copy" else args, {k: v for k, v in kwargs.items() if k != "out"})
    read = list({id(t): t for t in given}.values())
    size_bytes = written + sum(t.nbytes for t in read)
    if name in SOFTMAX:
        dim = next((arg for arg in args if isinstance(arg, int)), kwargs.get("dim", -1))
        row_bytes = results[0].shape[dim] * results[0].element_size() if results[0].dim() else 0
        return size_bytes + written * (2 if row_bytes > ON_CHIP_BYTES else 1)
    if torch.Tag.pointwise in func.tags or name in COPIES:
        size_bytes = int(size_bytes * _slower([*read, *results], name in COPIES))
    return size_bytes


def _slower(tensors: list[Tensor], copies: bool) -> float:
    """How much longer an elementwise kernel takes than one that reads plain memory."""
    large = [t for t in tensors if t.numel() > 1]
    if not copies and len({t.dtype for t in large if t.is_floating_point()}) > 1:
        return CASTING
    if len({(t.shape, t.stride()) for t in large}) <= 1:
        return 1.0
    whole = [t for t in large if t.numel() == max(t.numel() for t in large) and 0 not in t.stride()]
    return (
        TRANSPOSED if len({_adjacent(t) for t in whole}) > 1 else STRIDED
    )  # what is broadcast is small, and stays near


def _adjacent(tensor: Tensor) -> int:
    """The dimension along which elements lie side by side, or nearest."""
    return min((i for i in range(tensor.dim()) if tensor.shape[i] > 1), key=tensor.stride, default=0)


def _name(func: Any) -> str:
    name: str = func._schema.name.removeprefix("aten::").removesuffix("_like")
    return name.rstrip("_")


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
