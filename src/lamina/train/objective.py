"""The loss of a model on a batch: next token, summed, so that ranks and passes can be weighed by their tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lamina.core.shard_tensor import Shard
from lamina.errors import UsageError
from lamina.runtime.scopes import keep, token_mean
from lamina.train.chunked_loss import ChunkedHead, summed_loss
from lamina.train.data import Batch


class NextToken:
    """The objective of a sharded model, our own or a pretrained one."""

    def __init__(self, model: nn.Module, head: ChunkedHead | None = None) -> None:
        self.model, self.head = model, head
        accepted = inspect.signature(model.forward).parameters
        self.pretrained = "input_ids" in accepted
        self.takes_positions = "position_ids" in accepted

    def logits(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """[sequences, length, vocabulary]"""
        if not self.pretrained:
            return self.model(tokens)
        given: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if positions is not None and self.takes_positions:
            given["position_ids"] = positions
        return self.model(**given).logits

    def loss_sum(self, batch: Batch) -> Tensor:
        if self.head is None:
            return summed_loss(self.logits(batch.tokens, batch.positions).flatten(0, 1), batch.labels.flatten())
        self.head.labels = batch.labels.flatten()
        try:
            return self.logits(batch.tokens, batch.positions).sum()
        finally:
            self.head.labels = None

    def backward(self, batch: Batch, total: int) -> Tensor:
        """Gradients of the mean over `total` tokens of the step; the sum of this batch's loss."""
        if self.head is not None:
            self.head.factor = 1 / total
        with self._head_kept():
            loss = self.loss_sum(batch)
            token_mean(loss, batch.count, total=total).backward()
        return loss.detach()

    def _head_kept(self) -> AbstractContextManager[None]:
        """One gather for all chunks, where the head has a window of its own."""
        weight = None if self.head is None else next(self.head.head.parameters(), None)
        return keep(weight) if isinstance(weight, Shard) else nullcontext()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout, no graph."""
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was)


# -- what is found out by trying, because every architecture is another program


def chunks_agree(objective: NextToken, device: torch.device) -> bool:
    """Whether the head's output is all there is to the logits (some models scale or cap them then). Collective."""
    tokens = torch.arange(8, device=device).view(1, 8)
    batch = Batch(tokens, tokens.roll(-1, 1), None, 8)
    with evaluating(objective.model):
        chunked = objective.loss_sum(batch)
        whole = summed_loss(objective.logits(tokens).flatten(0, 1), batch.labels.flatten())
    return bool((chunked - whole).abs() <= 1e-3 * whole.abs() + 1e-6)


def check_packing(objective: NextToken, device: torch.device) -> None:
    """Two documents in one sequence must give the logits that each gives alone. Collective; raises `UsageError`.

    In 16 bits they differ by rounding: what counts is how much that is beside the same tokens as one document.
    """
    first, second = torch.arange(1, 9, device=device), torch.arange(11, 19, device=device)
    tokens = torch.cat((first, second)).view(1, 16)
    positions = torch.arange(8, device=device).repeat(2).view(1, 16)
    with evaluating(objective.model):
        packed = objective.logits(tokens, positions)[0, 8:].double()
        joined = objective.logits(tokens, torch.arange(16, device=device).view(1, 16))[0, 8:].double()
        alone = objective.logits(second.view(1, 8), positions[:, :8])[0].double()
    apart, crossing, size = (float(x.abs().max()) for x in (packed - alone, joined - alone, alone))
    if not apart <= max(0.2 * crossing, 0.02 * size, 1e-6):
        raise UsageError(
            f"{type(objective.model).__name__} does not keep documents apart that share a sequence (its logits change "
            f"by {apart:.2g} of {size:.2g}): type --packing padded"
        )
