"""Losses over sharded parameters, outside every forward: regularisers, learned weights of tasks, temperatures.

In one process the loss is the mean over all data, so what a rank's own loss makes of a number that all ranks hold (a
norm, a sum over a parameter) counts as one part of that mean. But a rank has only its own elements of a parameter, and
so their gradient only as far as its own loss goes. Two things make it that of the mean.

Note [Losses over Shards]
    1. `own factor * p.norm()` gives the gradient of the mean factor. The incoming gradient of each reduction is noted,
       and what a gradient of 1 would come to behind it, by a backward inside the backward; nothing else goes on from
       there. When the backward has ended, one all-reduce averages what came in, in the order of the forward: autograd
       comes to a reduction at another moment on each rank where their paths differ, so nobody may wait there.
    2. What elementwise operations mix in before it (numbers, plain tensors) has to be the same on all ranks, as each
       rank computes with its own part of it. The first backwards compare checksums.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lamina.core.control import finish
from lamina.core.shard_spec import ShardSpec
from lamina.core.shard_tensor import Parts, Shard
from lamina.core.slots import outlived
from lamina.core.uncompiled import uncompiled
from lamina.errors import ShardOpError

if TYPE_CHECKING:
    from lamina.core.group_sets import Lease

COMPARED_BACKWARDS = 16
_MOST_NOTED = 4096
_Handler = TypeVar("_Handler", bound=Callable[..., Any])
_waiting: list[tuple[Tensor, ShardSpec, int]] = []  # the last result, which autograd gives its node after the handler


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
    reductions: int = 0  # of Shards that losses are made of, so far
    seen: int = 0  # of these, when the last backward ended
    arrived: dict[tuple[int, int], tuple[Tensor, list[Any]]] = field(default_factory=dict)  # by number and output
    steps: int = 0  # of optimizers, so far
    steps_sum: int = 0  # checksum of these, in any order
    settings: str = ""  # of the last one
    lease: Lease | None = None  # of the groups: every Shard of the model holds this object
    served_by: list[weakref.ref[Any]] = field(default_factory=list)  # who hands over what has arrived: a model, copies

    def is_left(self) -> bool:
        """Whether everybody is gone who would hand it over."""
        return bool(self.served_by) and all(reference() is None for reference in self.served_by)

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
                first.spec.share.reductions += 1
                number = first.spec.share.reductions
                _waiting.append((result[0] if isinstance(result, list | tuple) else result, first.spec, number))
                share, name = first.spec.share, str(func._schema.name).removeprefix("aten::")
                if share.left and len(share.mixed) < _MOST_NOTED:
                    mixed = sum(source._mixed for source in sources if type(source) is Shard)
                    share.mixed.append(Mixed(first.spec.name, name, mixed))
        return result

    return reduce  # type: ignore[return-value]


def watch_waiting() -> None:
    """Hook the node of the last reduction, which is there by now."""
    while _waiting:
        result, spec, number = _waiting.pop()
        if result.grad_fn is not None:
            result.grad_fn.register_prehook(functools.partial(_defer, spec, number))


class Captures:
    now = False  # `torch.autograd.grad` is under way, which returns gradients at once


@uncompiled
def _defer(spec: ShardSpec, number: int, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
    """Note what comes in, and what one would come to here; see Note [Losses over Shards] 1."""
    share = spec.share
    assert share is not None
    if Parts.noted is not None:
        return None  # inside another reduction's: what comes in is no rank's own
    if any(grad is not None and grad.requires_grad for grad in grads):
        raise ShardOpError(
            f"a second derivative through a loss over the sharded {spec.describe()} is not offered: compute that loss "
            "in the model's forward, where the parameter is whole"
        )
    if Captures.now:
        return tuple(None if grad is None else _mean(share, grad.clone(), spec.name) for grad in grads)
    if share.is_left():
        raise outlived(spec.describe())
    node = torch._C._current_autograd_node()
    for output, grad in enumerate(grads):
        if grad is None:
            continue
        before = share.arrived.get((number, output))
        if before is not None:
            share.arrived[number, output] = before[0] + grad, before[1]
            continue
        parts: list[Any] = []
        Parts.noted = parts
        try:
            edge = torch.autograd.graph.GradientEdge(node, output)
            torch.autograd.backward(edge, torch.ones_like(grad), retain_graph=True)
        finally:
            Parts.noted = None
        share.arrived[number, output] = grad, parts
    return (None,) * len(grads)


def _mean(share: Share, value: Tensor, name: str) -> Tensor:
    """Over the data ranks that have data. Collective."""
    if not share.contributes:
        value.zero_()
    work = dist.all_reduce(value, group=share.group, async_op=True)
    finish(work, value, f"averages the gradient of a loss over {name}")
    return value / share.active


def hand_over_means(share: Share) -> None:
    """A backward has ended: give parameters the gradients of losses over them. Collective, the same on all ranks."""
    arrived, share.arrived = share.arrived, {}
    keys = sorted(arrived)
    if not keys:
        return
    wide = torch.stack([arrived[key][0].to(torch.complex128).reshape(()) for key in keys])
    means = torch.view_as_complex(_mean(share, torch.view_as_real(wide).clone(), "parameters"))
    for key, mean in zip(keys, means, strict=True):
        for receive, part in arrived[key][1]:
            receive(part * (mean if part.is_complex() else mean.real).to(part.dtype))


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
