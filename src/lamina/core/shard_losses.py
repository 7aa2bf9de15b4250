"""Losses over sharded parameters, outside every forward: regularisers, learned weights of tasks, temperatures.

In one process the loss is the mean over all data, so what a rank's own loss makes of a number that all ranks hold (a
norm, a sum over a parameter) counts as one part of that mean. But a rank has only its own elements of a parameter, and
so their gradient only as far as its own loss goes. Two things make it that of the mean.

Note [Losses over Shards]
    1. Behind each reduction the incoming gradient is averaged over the data ranks in the backward: `ranks' own factor *
       p.norm()` gives the gradient of the mean factor. One all-reduce of a number, as the reduction itself.
    2. What elementwise operations mix in before it (numbers, plain tensors) has to be the same on all ranks, as each
       rank computes with its own part of it. The first backwards compare checksums.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lamina.core.control import finish
from lamina.core.shard_spec import ShardSpec
from lamina.core.shard_tensor import Shard
from lamina.errors import ShardOpError

COMPARED_BACKWARDS = 16
_MOST_NOTED = 4096
_Handler = TypeVar("_Handler", bound=Callable[..., Any])
_waiting: list[tuple[Tensor, ShardSpec]] = []  # the last result, which autograd gives its node after the handler


@dataclass
class Mixed:
    """One reduction in a loss, and what was mixed in before it."""

    name: str  # of the parameter
    operation: str
    checksum: int


@dataclass
class Share:
    """This rank's part in means over the data ranks; one a model."""

    group: dist.ProcessGroup | None  # all data ranks
    active: int  # ranks that have data
    contributes: bool = True  # whether this one has
    left: int = COMPARED_BACKWARDS
    mixed: list[Mixed] = field(default_factory=list)  # since the last backward
    steps: int = 0  # of optimizers, so far
    steps_sum: int = 0  # checksum of these, in any order
    settings: str = ""  # of the last one

    def note_step(self, settings: str) -> None:
        """An optimizer steps parameters of the model."""
        self.steps, self.settings = self.steps + 1, settings
        self.steps_sum = (self.steps_sum + zlib.crc32(settings.encode())) & 0x7FFFFFFF


def differentiable(handler: _Handler) -> _Handler:
    """A reduction whose result is part of a loss; see Note [Losses over Shards] 1."""

    @functools.wraps(handler)
    def reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = handler(func, args, kwargs)
        if torch.is_grad_enabled():
            sources = args[0] if isinstance(args[0], list | tuple) else args[:1]
            first = next((s for s in sources if type(s) is Shard and s.requires_grad), None)
            if first is not None and first.spec.share is not None and first.spec.share.group is not None:
                watch_waiting()
                _waiting.append((result[0] if isinstance(result, list | tuple) else result, first.spec))
                share, name = first.spec.share, str(func._schema.name).removeprefix("aten::")
                if share.left and len(share.mixed) < _MOST_NOTED:
                    mixed = sum(source._mixed for source in sources if type(source) is Shard)
                    share.mixed.append(Mixed(first.spec.name, name, mixed))
        return result

    return reduce  # type: ignore[return-value]


def watch_waiting() -> None:
    """Hook the node of the last reduction, which is there by now."""
    while _waiting:
        result, spec = _waiting.pop()
        if result.grad_fn is not None:
            result.grad_fn.register_prehook(functools.partial(_average, spec))


def _average(spec: ShardSpec, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    share = spec.share
    assert share is not None
    found = []
    for grad in grads:
        if grad is not None:
            if grad.requires_grad:
                raise ShardOpError(
                    f"a second derivative through a loss over the sharded {spec.describe()} is not offered: compute "
                    "that loss in the model's forward, where the parameter is whole"
                )
            grad = grad.clone() if share.contributes else torch.zeros_like(grad)
            work = dist.all_reduce(grad, group=share.group, async_op=True)
            finish(work, grad, f"averages the gradient of a loss over `{spec.name}`")
            grad = grad / share.active
        found.append(grad)
    return tuple(found)


def checksum_of(spec: ShardSpec, operands: Iterable[Any]) -> int:
    """Of what an elementwise operation that records gradients mixes in; see Note [Losses over Shards] 2."""
    share, value = spec.share, 0
    if share is None or share.group is None or share.left == 0:
        return 0
    for operand in operands:
        if type(operand) is Shard:
            value += operand._mixed
        elif isinstance(operand, Tensor):
            value = zlib.crc32(_bytes_of(operand), value & 0xFFFFFFFF)
        elif operand is not None:
            value = zlib.crc32(repr(operand).encode(), value & 0xFFFFFFFF)
    return value


def _bytes_of(value: Tensor) -> bytes:
    value = value.detach().cpu().contiguous()
    return value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
