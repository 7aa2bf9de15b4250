"""One way to try a case: a model, a loss, and every strategy and transport against one process in float64.

`parity.reference` compares the same language model under many strategies. Here the model changes from case to case, and
may hold buffers and draw random numbers: the reference is one plain copy of the model for each rank, so that each has
buffers of its own, all of which take the mean gradient. Random numbers are seeded by (step, rank) on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from parity.reference import TOLERANCE, gradient_deviation, parameter_deviation

WIDTH = 5
Loss = Callable[[nn.Module, Tensor], Tensor]

__all__ = ["TOLERANCE", "WAYS", "WIDTH", "Case", "Way", "batch_of", "deviation", "seeded", "worst_of"]


class Way(NamedTuple):
    strategy: str
    transport: str = "c10d"
    slots: int = 3


WAYS = (Way("zero3", slots=1), Way("zero1", slots=2), Way("zero3", "peer"), Way("ddp"))


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).abs().pow(2).mean()


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    loss: Loss = mean_square
    units: tuple[Any, ...] = ("blocks.*",)
    optimizer: str = "sgd"  # "sgd" | "adam": for-loop | "foreach": Adam
    steps: int = 2
    max_norm: float | None = None
    dtype: torch.dtype = torch.float64

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        params = [p for p in model.parameters() if p.requires_grad]
        if self.optimizer == "sgd":
            return torch.optim.SGD(params, lr=0.1)
        return torch.optim.Adam(params, lr=0.01, eps=1e-3, foreach=self.optimizer == "foreach")


def seeded(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same model at every call; what floats is made in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)


def batch_of(rank: int, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def _run(case: Case, model: nn.Module, rank: int, step: int) -> None:
    torch.manual_seed(1000 + 10 * step + rank)
    case.loss(model, batch_of(rank, step, case.dtype)).backward()


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def _mean_gradients(plains: list[nn.Module]) -> dict[str, Tensor | None]:
    """Mean over the ranks' copies; None where none has one. Every copy is given it."""
    means: dict[str, Tensor | None] = {}
    for (name, first), *others in zip(*(plain.named_parameters() for plain in plains), strict=True):
        params = [first, *(param for _, param in others)]
        grads = [_dense(param.grad) for param in params if param.grad is not None]
        means[name] = torch.stack(grads).sum(0) / len(params) if grads else None
        for param in params:
            param.grad = means[name] if means[name] is None else means[name].clone()
    return means


class Expected(NamedTuple):
    """What a step in one process leaves, on every rank's copy of the model."""

    gradients: dict[str, Tensor | None]
    norm: Tensor | None
    parameters: dict[str, Tensor]


def one_process(case: Case, world: int) -> list[Expected]:
    """By step."""
    plains = [seeded(case.build, case.dtype) for _ in range(world)]
    optimizers = [case.make_optimizer(plain) for plain in plains]
    steps = []
    for step in range(case.steps):
        for rank, plain in enumerate(plains):
            _run(case, plain, rank, step)
        means, norms = _mean_gradients(plains), []
        if case.max_norm is not None:
            norms = [torch.nn.utils.clip_grad_norm_(plain.parameters(), case.max_norm) for plain in plains]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        parameters = {name: param.detach().clone() for name, param in plains[0].named_parameters()}
        steps.append(Expected(means, norms[0] if norms else None, parameters))
    return steps


def deviation(case: Case, way: Way, expected: list[Expected]) -> float:
    """Largest difference of gradients, norms and parameters from one process on this rank, over all steps."""
    rank = dist.get_rank()
    model = lamina.shard(
        seeded(case.build, case.dtype), way.strategy, units=list(case.units), transport=way.transport, slots=way.slots
    )
    optimizer = case.make_optimizer(model)
    worst = 0.0
    for step, wanted in enumerate(expected):
        _run(case, model, rank, step)
        worst = max(worst, gradient_deviation(model, wanted.gradients))
        if case.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
            worst = max(worst, (norm - wanted.norm).abs().item())
        optimizer.step()
        optimizer.zero_grad()
        worst = max(worst, parameter_deviation(model, wanted.parameters))
    return worst


def worst_of(case: Case, ways: tuple[Way, ...] = WAYS) -> dict[str, float]:
    """By way; every way trains a model of its own."""
    found = {}
    expected = one_process(case, dist.get_world_size())
    for way in ways:
        try:
            found[str(way)] = deviation(case, way, expected)
        except Exception as error:
            error.add_note(f"in {way}")
            raise
    return found
