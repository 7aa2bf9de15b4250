"""Which operations are matrix products, and of what shape.

Pure: reads shapes only.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lamina.planner.meta_run import FLASH
from lamina.planner.workload import MatrixProduct

_aten: Any = torch.ops.aten
# Those that write into a given tensor are left out: a forward that computes gradients early (train/chunked_loss.py) is
# counted as one that does not, backward being twice its forward.
MATRIX = {_aten.mm.default: 0, _aten.addmm.default: 1, _aten.bmm.default: 0, _aten.baddbmm.default: 1}  # first factor
WRITING_PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)

GROUPED = _aten._grouped_mm.default
PRODUCTS = {  # forward's and backward's, with attention's
    *MATRIX,
    *FLASH,
    GROUPED,
    _aten.convolution.default,
    _aten.convolution_backward.default,
    _aten._scaled_dot_product_flash_attention_backward.default,
    _aten._scaled_dot_product_efficient_attention_backward.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


class ProductCount:
    """Products, those of one shape counted together."""

    def __init__(self) -> None:
        self._counts: Counter[MatrixProduct] = Counter()

    def add(self, product: MatrixProduct) -> None:
        self._counts[product] += 1

    def result(self) -> tuple[MatrixProduct, ...]:
        return tuple(replace(product, count=count) for product, count in self._counts.items())


def product_of(func: Any, args: Any, result: Any) -> MatrixProduct | None:
    """The product that an operation is, or None."""
    if func in MATRIX:
        left, right = args[MATRIX[func] : MATRIX[func] + 2]
        batch = left.shape[0] if left.dim() == 3 else 1
        return MatrixProduct(left.shape[-2], right.shape[-1], left.shape[-1], batch, dtype_bytes=left.element_size())
    if func in FLASH:
        query, key, value = args[:3]
        batch, heads, length, _ = query.shape
        width = (query.shape[-1] + value.shape[-1]) // 2  # of the two products
        return MatrixProduct(
            length, key.shape[2], width, batch * heads, dtype_bytes=query.element_size(), is_attention=True
        )
    if func is GROUPED:
        return _grouped(args[0], args[1])
    if func is _aten.convolution.default:
        return _convolution(args, result)
    return None


def _grouped(left: Tensor, right: Tensor) -> MatrixProduct:
    """Experts, (rows, k) by (groups, k, n): which row meets which is a value, so each gets as many."""
    groups = right.shape[0] if right.dim() == 3 else left.shape[0]
    rows = left.shape[-2] if left.dim() == 3 else max(1, left.shape[-2] // groups)
    return MatrixProduct(rows, right.shape[-1], left.shape[-1], groups, dtype_bytes=left.element_size())


def _convolution(args: Any, result: Tensor) -> MatrixProduct:
    """As the product it is computed by: positions by filters, over what a filter sees."""
    weight = args[1]
    is_transposed, groups = args[6], args[8]
    places = result if not is_transposed else args[0]
    filters = weight.shape[0] if not is_transposed else weight.shape[1]
    rows = math.prod(places.shape) // places.shape[1]
    return MatrixProduct(
        rows, filters // groups or 1, math.prod(weight.shape[1:]), groups, dtype_bytes=weight.element_size()
    )
