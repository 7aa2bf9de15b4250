"""The same training in one process: what every sharded run is compared with.

A rank's share of the data is a function of (step, rank, micro-batch) only, so each rank can run the whole reference by
itself, and compares its own ranges of parameters and gradients with it: no communication that could hide a fault.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from parity.models import build, language_batch, language_loss

STEPS = 3
MAX_NORM = 0.3  # below the norms that the models have: clipping always acts
TOLERANCE = 1e-10

LossOf = Callable[[nn.Module, int, int, int], Tensor]  # model, step, rank, micro-batch -> loss


@dataclass(frozen=True)
class Recipe:
    """How the optimizer and the micro-batches go."""

    optimizer: str = "adamw"  # "adamw" | "sgd"
    accumulation: str = "none"  # "none" | "twice" (two backwards, no scope) | "each" | "defer"
    steps: int = STEPS
    max_norm: float | None = MAX_NORM

    @property
    def micro_batches(self) -> int:
        return 1 if self.accumulation == "none" else 2

    def make_optimizer(self, params: Sequence[Tensor]) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(params, lr=1e-2, eps=1e-3, weight_decay=0.1, foreach=True)
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@dataclass
class Trace:
    """What one run left, by step: gradient norm, gradients before clipping, parameters afterwards."""

    norms: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    params: list[dict[str, Tensor]] = field(default_factory=list)


def language_loss_of(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
    """Three samples in the first micro-batch, one in the second: unequal content."""
    return language_loss(model, language_batch(1000 * step + 10 * rank + micro, 3 if micro == 0 else 1))


def one_process(model: nn.Module, world: int, recipe: Recipe, loss_of: LossOf = language_loss_of) -> Trace:
    """Train the plain model on what all ranks see together; gradients are means over ranks and micro-batches."""
    optimizer = recipe.make_optimizer([p for p in model.parameters() if p.requires_grad])
    trace = Trace()
    for step in range(recipe.steps):
        for micro in range(recipe.micro_batches):
            for rank in range(world):
                (loss_of(model, step, rank, micro) / (world * recipe.micro_batches)).backward()
        _note_gradients(trace, model, lambda grad: grad.clone())
        _step(trace, model, optimizer, recipe)
        trace.params.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return trace


def of_language(world: int, recipe: Recipe) -> Trace:
    """`one_process` of the language model: once in each rank's process, which lives on from test to test."""
    # scopes are nothing to one process
    return _of_language(world, replace(recipe, accumulation="none" if recipe.micro_batches == 1 else "each"))


@functools.cache
def _of_language(world: int, recipe: Recipe) -> Trace:
    return one_process(build(), world, recipe)


def sharded(model: nn.Module, expected: Trace, recipe: Recipe, loss_of: LossOf = language_loss_of) -> float:
    """Train the sharded model on this rank's share; the largest difference from `expected` on this rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    optimizer = recipe.make_optimizer([p for p in model.parameters() if p.requires_grad])
    worst = 0.0
    for step in range(recipe.steps):
        for micro in range(recipe.micro_batches):
            last = micro == recipe.micro_batches - 1
            with scope(model, recipe.accumulation, last):
                (loss_of(model, step, rank, micro) / recipe.micro_batches).backward()
        worst = max(worst, gradient_deviation(model, expected.grads[step]))
        found = Trace()
        _step(found, model, optimizer, recipe)
        if recipe.max_norm is not None:
            worst = max(worst, (found.norms[0] - expected.norms[step]).abs().item())
        worst = max(worst, parameter_deviation(model, expected.params[step]))
    return worst


def scope(model: nn.Module, accumulation: str, last: bool) -> contextlib.AbstractContextManager[None]:
    if accumulation in ("none", "twice"):
        return contextlib.nullcontext()
    return lamina.accumulate(model, last=last, defer=accumulation == "defer")


def _note_gradients(trace: Trace, model: nn.Module, take: Callable[[Tensor], Tensor]) -> None:
    trace.grads.append({name: None if p.grad is None else take(p.grad) for name, p in model.named_parameters()})


def _step(trace: Trace, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    if recipe.max_norm is not None:
        trace.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm))
    optimizer.step()
    optimizer.zero_grad(set_to_none=recipe.optimizer == "adamw")


def own_part(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements of a full tensor that this rank holds of `like`."""
    return tensor.reshape(-1)[like.start : like.stop] if isinstance(like, lamina.Shard) else tensor


def own_values(tensor: Tensor) -> Tensor:
    return tensor.local.detach() if isinstance(tensor, lamina.Shard) else tensor.detach()


def difference(found: Tensor, full: Tensor) -> float:
    """Largest absolute difference between this rank's part of `found` and the full tensor; NaN counts as infinite."""
    mine, other = own_values(found), own_part(full, found)
    assert mine.shape == other.shape, (mine.shape, other.shape)
    if mine.numel() == 0:
        return 0.0
    if not (mine.is_complex() or mine.dtype is torch.float64):
        mine, other = mine.double(), other.double()  # bool and float8 have no difference
    worst = (mine - other).abs().max().item()
    return worst if worst == worst else float("inf")


def parameter_deviation(model: nn.Module, expected: dict[str, Tensor]) -> float:
    found = dict(model.named_parameters())
    assert list(found) == list(expected)
    return max(difference(p, expected[name]) for name, p in found.items())


def gradient_deviation(model: nn.Module, expected: dict[str, Tensor | None]) -> float:
    worst = 0.0
    for name, param in model.named_parameters():
        full = expected[name]
        assert (param.grad is None) == (full is None), f"gradient of `{name}`: got {param.grad}, wanted {full}"
        if param.grad is not None and full is not None:
            assert param.grad.shape == full.shape
            worst = max(worst, difference(param.grad, full))
    return worst
