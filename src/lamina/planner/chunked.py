"""A loss in chunks, for forecasts: output layer and cross entropy of a few tokens at a time, and again in backward.

The logits of a large vocabulary, their fp32 copy and its gradient can be the peak of a step: 128 thousand words at 8192
tokens are 4 GiB in fp32. `lamina train` avoids them by itself (train/objective.py); in a loop of one's own the loss is
not ours, so a forecast can only say what it would save. This is the loss that such a forecast runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 512 << 20  # of logits in fp32; products of fewer tokens wait for the weights that they read
MOST_TOKENS = 1024  # of a chunk: longer ones gain nothing


class ChunkedLoss:
    """Of a model whose output is that of its module `head`."""

    def __init__(self, head: str) -> None:
        self.head = head

    def __call__(self, model: nn.Module, inputs: Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
        head = model.get_submodule(self.head)
        original: Callable[[Tensor], Tensor] = head.forward

        def part(hidden: Tensor) -> Tensor:
            logits = original(hidden)
            labels = torch.empty(logits.shape[0], dtype=torch.long, device=logits.device)
            return cross_entropy(logits.float(), labels, reduction="sum")

        def in_chunks(hidden: Tensor) -> Tensor:
            rows: tuple[Tensor, ...] = hidden.flatten(0, -2).split(rows_of_chunk(head))  # type: ignore[no-untyped-call]
            losses: list[Tensor] = [checkpoint(part, piece, use_reentrant=False) for piece in rows]
            return torch.stack(losses).sum().view(1, 1, 1)

        head.forward = in_chunks  # type: ignore[assignment]
        try:
            result = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
        finally:
            head.forward = original  # type: ignore[method-assign]
        output = getattr(result, "logits", result)
        if output.numel() != 1:
            raise ValueError(f"what comes behind `{self.head}` needs all of its output")
        return output.sum()


def rows_of_chunk(head: nn.Module) -> int:
    return min(MOST_TOKENS, max(1, CHUNK_BYTES // (4 * words_of(head))))


def words_of(head: nn.Module) -> int:
    """Rows of its weight."""
    weight = head.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def find_head(model: nn.Module, rows: int, logits_bytes: int) -> str | None:
    """The output layer, by name: what the model says it is, else its last linear layer; None if its output cannot be
    the model's (`rows` of logits of `logits_bytes` in all), or has no more rows than a chunk."""
    tell: Any = getattr(model, "get_output_embeddings", None)
    named = None if tell is None else tell()
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = [name for name, module in linears if module is named or named is None]
    if not found or not logits_bytes:
        return None
    head = model.get_submodule(found[-1])
    width_bytes, rest = divmod(logits_bytes, rows * words_of(head))
    if rest or width_bytes not in (2, 4) or rows <= rows_of_chunk(head):
        return None
    return found[-1]
