"""Output layer and loss of a few tokens at a time, so that the logits of all of them never exist.

A large vocabulary makes the logits the largest tensor of a step: 152,064 words at 4,096 tokens are 2.3 GiB in fp32, and
their gradient again. Computing them in chunks under torch's checkpoint saves the memory and pays for it: every product
of the head a second time, and the head's whole weight gradient, in 16 bits, written and summed once a chunk.

Nothing follows the loss but a factor, so the gradient of a chunk's logits is known as soon as its logits are. Here one
pass computes a chunk's loss, the gradient of its hidden states, and its share of the weight gradient; backward
multiplies by the factor that arrives. Nothing is computed twice.

Note [Rounded once] In 16 bits a sum over chunks and a late factor would each round again, and make the gradients twice
as inexact as those of whole logits. So the weight gradient is summed in fp32, and the factor that is expected (one over
the tokens of the step) is multiplied before anything is rounded; what is left for backward is a small whole number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear, log_softmax
from torch.utils.checkpoint import checkpoint

from lamina.train.data import IGNORED

CHUNK_BYTES = 512 << 20  # of logits in fp32; products of fewer tokens wait for the weights that they read
MOST_TOKENS = 1024  # of a chunk: longer ones gain nothing


def vocabulary_of(head: nn.Module) -> int:
    """Rows of its weight."""
    weight = head.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """In fp32 at least; IGNORED labels count nothing."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(wide, labels, reduction="sum", ignore_index=IGNORED)


class ChunkedHead:
    """The forward of an output layer; with `labels` set, the sum of the loss instead of logits.

    It stands where the head's forward stood, so the model's own code runs around it, whatever it is. A head that is
    more than torch's `Linear` computes its own forward, a chunk at a time, and again in backward.
    """

    def __init__(self, head: nn.Module, vocabulary: int) -> None:
        self.head, self.original = head, head.forward
        self.is_linear = type(head) is nn.Linear and getattr(head.forward, "__func__", None) is nn.Linear.forward
        self.labels: Tensor | None = None  # [tokens]
        self.stand_in: Tensor | None = None  # [..., vocabulary]: what it returns while a model is tried
        self.factor = 1.0  # that the loss is expected to be multiplied by; any other is right as well
        self.chunk = min(MOST_TOKENS, max(1, CHUNK_BYTES // (4 * vocabulary)))  # tokens
        head.forward = self  # type: ignore[assignment]

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.stand_in is not None:
            return self.stand_in.to(hidden.dtype)
        if self.labels is None:
            return self.original(hidden)
        flat = hidden.flatten(0, -2)  # [tokens, width]
        if self.is_linear:
            loss = _LinearLoss.apply(flat, self.head.weight, self.head.bias, self.labels, self.chunk, self.factor)
        else:
            parts = zip(flat.split(self.chunk), self.labels.split(self.chunk), strict=True)
            losses = [checkpoint(self._part, piece, labels, use_reentrant=False) for piece, labels in parts]
            loss = torch.stack(losses).sum()
        return loss.view(1, 1, 1)

    def remove(self) -> None:
        self.head.forward = self.original  # type: ignore[method-assign]

    def _part(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return summed_loss(self.original(hidden), labels)


class _LinearLoss(torch.autograd.Function):
    """Summed cross entropy of `linear(hidden, weight, bias)`, with its gradients computed on the way."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int, expected: float
    ) -> Tensor:  # [tokens, width], [vocabulary, width], [vocabulary], [tokens]; a scalar
        wanted: Sequence[bool] = ctx.needs_input_grad[:3]
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32  # of loss, softmax and sums
        for_hidden = torch.empty_like(hidden) if wanted[0] else None
        for_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        for_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None
        losses = []
        for start in range(0, len(hidden), chunk):
            part, told = hidden[start : start + chunk], labels[start : start + chunk].long()
            logs = log_softmax(linear(part, weight, bias), -1, dtype=wide)  # [chunk, vocabulary]
            counts, places = (told != IGNORED).unsqueeze(1), told.clamp(min=0).unsqueeze(1)
            losses.append(-logs.gather(1, places).masked_fill(~counts, 0.0).sum())
            if not any(wanted):
                continue
            shares = logs.exp_()
            shares.scatter_add_(1, places, shares.new_full(places.shape, -1.0))
            gradient = torch.mul(shares, counts.to(wide) * expected, out=torch.empty_like(shares, dtype=weight.dtype))
            if for_hidden is not None:
                torch.mm(gradient, weight, out=for_hidden[start : start + chunk])
            if for_weight is not None:
                _add_product(for_weight, gradient.t(), part)
            if for_bias is not None:
                for_bias += gradient.sum(0, dtype=wide)
        ctx.gradients, ctx.expected, ctx.dtype = (for_hidden, for_weight, for_bias), expected, weight.dtype
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("backward through the chunked loss a second time: compute the loss again")
        gradients, ctx.gradients = ctx.gradients, None
        rest = factor / ctx.expected
        return (*(None if g is None else g.mul_(rest).to(ctx.dtype) for g in gradients), None, None, None)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, rounded to the dtype of `total` alone, which may be wider than that of the factors."""
    if total.is_meta:
        return  # forecasts: nothing to compute, and not every torch has the product below there
    if total.dtype != a.dtype and total.device.type != "cpu":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
