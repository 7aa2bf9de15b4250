"""The loss of a model on a batch: next token, summed, so that ranks and passes can be weighed by their tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lamina.core.shard_tensor import Shard
from lamina.runtime.scopes import keep, token_mean
from lamina.train.chunked_loss import ChunkedHead, summed_loss, vocabulary_of
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


# -- what is found out by trying, because every architecture is another program (see separation.py as well)


def chunks_agree(objective: NextToken, device: torch.device) -> bool:
    """Whether the head's output is all there is to the logits (some models scale or cap them then). Collective.

    Weights as small as a model begins with would hide a cap: so the model is also given an output that is large.
    """
    head = objective.head
    assert head is not None
    tokens = torch.arange(8, device=device).view(1, 8)
    batch = Batch(tokens, tokens.roll(-1, 1), None, 8)
    large = torch.linspace(-64.0, 64.0, vocabulary_of(head.head), device=device).expand(1, 8, -1)
    with evaluating(objective.model):
        chunked = objective.loss_sum(batch)
        whole = summed_loss(objective.logits(tokens).flatten(0, 1), batch.labels.flatten())
        head.stand_in = large
        try:
            unchanged = torch.equal(objective.logits(tokens).to(torch.bfloat16), large.to(torch.bfloat16))
        finally:
            head.stand_in = None
    return unchanged and bool((chunked - whole).abs() <= 1e-3 * whole.abs() + 1e-6)
