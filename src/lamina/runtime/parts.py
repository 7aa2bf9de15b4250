"""Parameters that are themselves parts of larger ones, as tensor parallelism cuts them: said before `shard()`."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

from lamina.core.shard_spec import GlobalSpec
from lamina.core.shard_tensor import Shard
from lamina.errors import StateError, UsageError


def further_axes(param: nn.Parameter) -> tuple[tuple, GlobalSpec | None]:
    """Groups and global shape of a parameter that is itself a part of something larger (tensor parallelism)."""
    part = PARTS.get(param)
    return ((part[0],), part[1]) if part is not None else ((), None)


PARTS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> (group, GlobalSpec)


def split_parameter(param: nn.Parameter, dim: int, group: ProcessGroup) -> nn.Parameter:
    """Say, before `shard()`, that a parameter is one rank's part of a larger one (tensor parallelism).

    Norms, reductions and checkpoints then count the larger tensor once.

    Args:
        param: this rank's part, of equal shape on all ranks of `group`.
        dim: tensor dim along which the larger tensor is split.
        group: the ranks that hold the parts, in order.

    Raises:
        StateError: the parameter is sharded already.
        UsageError: no parameter, no dim of it, or no group that this rank is in.
    """
    if isinstance(param, Shard):
        raise StateError(f"lamina.split_parameter() of `{param.name}` after lamina.shard(): say it before")
    if not isinstance(param, nn.Parameter):
        raise UsageError(f"lamina.split_parameter() takes an nn.Parameter, not a {type(param).__name__}")
    if type(dim) is not int or not -param.ndim <= dim < param.ndim:
        raise UsageError(f"lamina.split_parameter(dim={dim!r}): not a dim of shape {tuple(param.shape)}")
    if not isinstance(group, ProcessGroup):
        raise UsageError(
            f"lamina.split_parameter(group={group!r}): wanted a process group that this rank is in; type for example "
            'mesh["tensor"].get_group()'
        )
    shape = list(param.shape)
    dim = dim % len(shape)
    start = shape[dim] * group.rank()
    shape[dim] *= group.size()
    PARTS[param] = (group, GlobalSpec(torch.Size(shape), dim, start))
    return param
