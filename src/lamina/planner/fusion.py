"""What a compiled unit moves: bytes and launches of its forward where elementwise kernels are fused.

Counting an eager forward, each operation reads its inputs and writes its result. A compiler keeps results in registers
until something reads them that it cannot fuse: a product, attention, a gather of rows, or whoever comes behind the
unit. Here the operations of a forward are followed in order by that rule; no compiler is asked, so it says what fusion
can save, not what one version of Inductor does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten
REDUCTIONS = ("mean", "sum", "var_mean", "amax", "logsumexp", "_softmax", "_log_softmax", "native_layer_norm", "empty")


def is_fused(func: Any) -> bool:
    """Elementwise operations, and reductions that elementwise ones before and behind them are joined to."""
    name = func._schema.name.removeprefix("aten::").removesuffix("_like")
    return torch.Tag.pointwise in func.tags or name in REDUCTIONS or func is _aten._to_copy.default


class FusedCount:
    """Of one unit."""

    def __init__(self, number_of: Callable[[Tensor], int | None]) -> None:
        """`number_of` a tensor's storage, never given twice (an address is, once its tensor has gone); None: older."""
        self.memory_bytes = self.kernels = 0
        self._number_of = number_of
        self._in_registers: dict[int, int] = {}  # number -> bytes, of what no kernel has written

    def saw(self, func: Any, inputs: Iterable[Tensor], results: Iterable[Tensor], is_product: bool) -> None:
        """One operation that is no view."""
        fused = is_fused(func)
        for tensor in inputs:
            key = self._number_of(tensor)
            if key in self._in_registers:
                if not fused:
                    self._write(key)
                    self.memory_bytes += 0 if is_product else tensor.nbytes
            elif not is_product:
                self.memory_bytes += tensor.nbytes
        for tensor in results:
            key = self._number_of(tensor)
            if fused and key is not None:
                self._in_registers[key] = tensor.nbytes
            elif not is_product:
                self.memory_bytes += tensor.nbytes
        self.kernels += not fused

    def left(self, outputs: Iterable[Tensor]) -> None:
        """The unit's forward has ended: what comes behind it reads its outputs."""
        for tensor in outputs:
            self._write(self._number_of(tensor))
        self._in_registers.clear()

    def _write(self, key: int | None) -> None:
        size_bytes = 0 if key is None else self._in_registers.pop(key, 0)
        self.memory_bytes += size_bytes
        self.kernels += size_bytes > 0
