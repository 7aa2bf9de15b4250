"""Scopes around forwards and backwards: `accumulate`, `keep`, and means over tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from lamina.runtime.access import runtime_of


@contextlib.contextmanager
def accumulate(model: nn.Module, last: bool, defer: bool = False) -> Iterator[None]:
    """One micro-batch of several: gradients are complete after the one with `last=True`.

    Args:
        last: whether this is the last micro-batch before the optimizer's step.
        defer: keep whole float32 sums on this rank (4 bytes a parameter) and reduce once, at the last micro-batch;
            otherwise every micro-batch is reduced into the gradient shards as far as the strategy splits gradients.
    """
    engine = runtime_of(model).engine
    before = engine.last_micro_batch, engine.defer
    engine.last_micro_batch, engine.defer = bool(last), bool(defer)
    try:
        yield
    finally:
        engine.last_micro_batch, engine.defer = before


def debug(enabled: bool = True) -> None:
    """Fill freed slots with NaN and check every transition of a slot; for models that are sharded afterwards."""
    from lamina.core.slots import DebugMode

    DebugMode.enabled = enabled


def total(count: torch.Tensor | int | float, model: nn.Module | None = None) -> torch.Tensor:
    """The sum of `count` over all data ranks, on every rank. Collective."""
    value = torch.as_tensor(count, dtype=torch.float64 if not isinstance(count, torch.Tensor) else None)
    value = value.detach().clone()
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        group = None if model is None else runtime_of(model).mesh.everyone
        torch.distributed.all_reduce(value, group=group)
    return value
