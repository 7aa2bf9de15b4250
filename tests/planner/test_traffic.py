"""Bytes that operations move, by hand: a pass is 4 x 6 elements of fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding, nll_loss
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.planner.traffic import CASTING, ON_CHIP_BYTES, STRIDED, TRANSPOSED, moved_bytes, runs_no_kernel

PASS = 4 * 6 * 4


class Sum(TorchDispatchMode):
    """Of all operations that run a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not runs_no_kernel(func) and torch.Tag.view_copy not in func.tags and not func.is_view:
            self.bytes += moved_bytes(func, args, kwargs or {}, result)
        return result


def wide(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    "function, passes",
    [
        (lambda x: x + x, 2),  # one tensor, read once
        (lambda x: x * wide(4, 6), 3),
        (lambda x: x.mul_(2.0), 2),
        (lambda x: torch.mul(x, 2.0, out=wide(4, 6)), 2),
        (lambda x: x.copy_(wide(4, 6)), 2),
        (lambda x: x * wide(6, 4).t(), 3 * TRANSPOSED),
        (lambda x: x * wide(4, 1), (2 + 1 / 6) * STRIDED),
        (lambda x: x * wide(4, 6, dtype=torch.bfloat16), 2.5 * CASTING),
        (lambda x: x.to(torch.bfloat16), 1.5),  # a kernel of its own
        (lambda x: x.t().contiguous(), 2 * TRANSPOSED),
        (lambda x: x.view(2, 2, 6).transpose(0, 1).contiguous(), 2 * STRIDED),  # heads: rows stay together
        (lambda x: x * wide(4, 1).expand(4, 6), (2 + 1) * STRIDED),
        (lambda x: torch.zeros_like(x), 1),
        (lambda x: x.new_full((4, 6), 1.0), 1),
        (lambda x: torch.empty_like(x), 0),
        (lambda x: x.log_softmax(-1), 3),  # read twice
        (lambda x: x.gather(1, wide(4, 1, dtype=torch.long)), 2 / 6),
        (lambda x: embedding(wide(2, dtype=torch.long), x), 2 * 2 / 4),
        (lambda x: nll_loss(x, wide(4, dtype=torch.long)), 0),
        (lambda x: x.t(), 0),
    ],
)
def test_passes(function: Callable[[Tensor], Any], passes: float) -> None:
    x = wide(4, 6)
    with Sum() as found:
        function(x)
    assert found.bytes == pytest.approx(passes * PASS, abs=1)


def test_long_rows_are_read_a_third_time() -> None:
    x = wide(2, ON_CHIP_BYTES // 4 + 4)
    with Sum() as found:
        x.log_softmax(-1)
    assert found.bytes == 4 * x.nbytes
