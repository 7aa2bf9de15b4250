"""Room for gradients in torch's allocator, made before the first activations come.

Gradients are made while activations go, and could lie where those lay. But the allocator joins free memory within a
segment only, and activations of a first step get segments of their own size, into which no gradient fits. So memory for
gradients is taken once, as one piece, and given back: activations then lie in it, and where those of a block have gone
there is room for its gradients. docs/decisions/room-for-gradients.md says what that spares, and why it is these parts
of what gradients take.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

KEPT, RECOMPUTED = 0.5, 0.6


def part(recompute: str | int, world: int, halved: bool) -> float:
    """Of the gradients, for which room is made; by what is recomputed, on how many ranks, and how masters lie there."""
    if halved:
        return 0.0  # gradients find it where whole masters lay before the first forward
    if recompute not in ("full", 1):
        return KEPT
    return RECOMPUTED if world > 1 else 0.0  # on one GPU it was in the way as often as not


def room_bytes(part: float, gradients_bytes: Iterable[int]) -> int:
    """Size of the piece for a part of gradients of these sizes."""
    return int(part * sum(gradients_bytes))


def make_room(part: float, gradients_bytes: Iterable[int], device: torch.device) -> None:
    """Let the allocator of a CUDA device hold a free piece for a part of gradients of these sizes, if it has memory."""
    if not part or device.type != "cuda":
        return
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(room_bytes(part, gradients_bytes), dtype=torch.uint8, device=device)
