"""Random fills of a `Shard`: the values, and the generator's state after, are those of one process.

Every rank draws the whole tensor and keeps its part, for the price of a transient full tensor. Drawing only the part
would be cheaper and would give other weights at every world size; torch's generators cannot skip ahead portably.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lamina.core.shard_ops import handles, mark, refuse
from lamina.core.shard_spec import ShardSpec
from lamina.core.shard_tensor import Shard


def _whole(source: Shard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Unset memory of the whole that one process would draw: of the larger tensor where there is one."""
    spec = source.spec
    if spec.outer and spec.global_spec is None:
        refuse(func, args, kwargs, "it is a part of a larger tensor of unknown shape, so the draw would differ by rank")
    shape = spec.shape if spec.global_spec is None else spec.global_spec.shape
    return torch.empty(shape, dtype=source.dtype, device=source.device)


def _part(whole: Tensor, spec: ShardSpec) -> Tensor:
    if spec.global_spec is not None:
        whole = spec.global_spec.part_of(whole, spec.shape)
    return whole.reshape(-1)[spec.start : spec.stop]


def _draws(args: tuple[Any, ...]) -> bool:
    """Only the first operand may be a tensor: a tensor of probabilities would have to be whole as well."""
    return type(args[0]) is Shard and not any(isinstance(arg, Tensor) for arg in args[1:])


@handles("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_")
def fill_randomly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shard:
    if not _draws(args):
        refuse(func, args, kwargs)
    target = args[0]
    whole = func(_whole(target, func, args, kwargs), *args[1:], **kwargs)
    target.local.copy_(_part(whole, target.spec))
    mark(target.spec)
    return target


@handles("rand_like", "randn_like", "randint_like")
def random_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shard:
    if not _draws(args):
        refuse(func, args, kwargs)
    source = args[0]
    kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    whole = func(_whole(source, func, args, kwargs), *args[1:], **kwargs)
    return Shard(_part(whole, source.spec).clone(), source.spec.derived)
