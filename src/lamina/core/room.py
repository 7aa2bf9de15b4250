"""Room for gradients in torch's allocator, made before the first activations come.

Gradients are made while activations go, and could lie where those lay. But the allocator joins free memory within a
segment only, and activations of a first step get segments of their own size, into which no gradient fits. So memory for
gradients is taken once, as one piece, and given back: activations then lie in it, and where those of a block have gone
there is room for its gradients. docs/decisions/room-for-gradients.md says what that spares, why it is half of what
gradients take, and why there is none where all blocks are recomputed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

SHARE = 0.5  # of the gradients


def helps(recompute: str | int) -> bool:
    """Whether activations of blocks last until the backward of these, by the choice of what is recomputed."""
    return recompute not in ("full", 1)


def room_bytes(gradients_bytes: Iterable[int]) -> int:
    """Size of the piece for gradients of these sizes."""
    return int(SHARE * sum(gradients_bytes))


def make_room(gradients_bytes: Iterable[int], device: torch.device) -> None:
    """Let the allocator of a CUDA device hold a free piece for gradients of these sizes, if it has memory."""
    if device.type != "cuda":
        return
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(room_bytes(gradients_bytes), dtype=torch.uint8, device=device)
