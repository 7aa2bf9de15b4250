"""Room for gradients in torch's allocator, made before the first activations come.

Gradients are made while activations go, and could lie where those lay. But the allocator joins free memory within a
segment only, and activations of a first step get segments of their own size, into which no gradient fits. So the memory
of all gradients is taken once, in large pieces, and given back: activations then lie in those, and where a block's have
gone there is room for its gradients: docs/decisions/room-for-gradients.md says what that spares.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

PIECE_BYTES = 1 << 30


def pieces_bytes(gradients_bytes: Iterable[int]) -> list[int]:
    """Sizes of the pieces for gradients of these sizes: of successive ones together, until there are `PIECE_BYTES`."""
    pieces, size_bytes = [], 0
    for gradient_bytes in gradients_bytes:
        size_bytes += gradient_bytes
        if size_bytes >= PIECE_BYTES:
            pieces.append(size_bytes)
            size_bytes = 0
    return [*pieces, size_bytes] if size_bytes else pieces


def make_room(gradients_bytes: Iterable[int], device: torch.device) -> None:
    """Let the allocator of a CUDA device hold free pieces for gradients of these sizes, as far as it has memory."""
    held = []
    with contextlib.suppress(torch.OutOfMemoryError):
        for size_bytes in pieces_bytes(gradients_bytes):
            held.append(torch.empty(size_bytes, dtype=torch.uint8, device=device))
