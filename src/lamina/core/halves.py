"""An fp32 number as two halves: a bf16 weight, rounded to nearest, and a 16-bit remainder.

Cutting the bits in the middle would leave a weight that is rounded towards zero, and with it another training. Here the
weight is the number rounded to nearest, and the remainder, a signed 16-bit integer, says how many units in the last
place of fp32 lie between the two: `bits(number) == (bits(weight) << 16) + remainder`.

Note [Ties]
    Numbers exactly between two bf16 go away from zero, where torch's cast takes the even one. It cannot be otherwise:
    the numbers that round to one even weight are 65,537 if both ties are among them, and a remainder has 65,536 values.
    So of all numbers one in 131,072 gets the other of its two nearest weights; the number itself is exact.

A NaN comes back as `torch.nan`, whatever its bits were; all other numbers come back bit for bit. Pure: no
communication.
"""

from __future__ import annotations

import torch
from torch import Tensor

PIECE_NUMEL = {"cpu": 1 << 16, "cuda": 1 << 24}  # elements at a time: what is made on the way stays small
HALF_BITS = 16
NAN_BITS = 0x7FC00000
_HALF = 0x8000


def halve(numbers: Tensor, weights: Tensor, remainders: Tensor) -> None:
    """Write the halves of `numbers`. All 1D, of one length: float32, bfloat16, int16."""
    assert numbers.dtype is torch.float32 and weights.dtype is torch.bfloat16 and remainders.dtype is torch.int16
    for number, weight, remainder in _pieces(numbers, weights, remainders):
        bits = number.view(torch.int32).masked_fill(number.isnan(), NAN_BITS)
        remainder.copy_(bits)  # the lower 16 bits of each
        weight.view(torch.int16).copy_(bits.add_(_HALF) >> HALF_BITS)


def join(weights: Tensor, remainders: Tensor, numbers: Tensor) -> None:
    """Write the numbers that `halve` got."""
    assert numbers.dtype is torch.float32 and weights.dtype is torch.bfloat16 and remainders.dtype is torch.int16
    for number, weight, remainder in _pieces(numbers, weights, remainders):
        number.copy_(weight)  # the same bits, and 16 zeros
        number.view(torch.int32).add_(remainder)


def _pieces(numbers: Tensor, weights: Tensor, remainders: Tensor) -> zip:  # type: ignore[type-arg]
    numel = PIECE_NUMEL.get(numbers.device.type, PIECE_NUMEL["cuda"])
    return zip(numbers.split(numel), weights.split(numel), remainders.split(numel), strict=True)
