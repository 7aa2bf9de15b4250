"""Cut the parameters of a module over the ranks of a group, with the type alone: no units, no runtime.

The parameters are laid end to end and cut evenly, so cuts fall inside tensors and some ranks get no element of some.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lamina.core.shard_spec import DirtyFlag, ShardSpec
from lamina.core.shard_tensor import Shard, convert_, register


class Model(nn.Module):
    """Never run: shapes with a matrix, vectors, one element, and no dim at all."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7, dtype=dtype)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))
        self.norm = nn.LayerNorm(7, dtype=dtype)
        self.last = nn.Linear(7, 1, dtype=dtype)


def ranges_of(first: int, numel: int, total: int, world: int) -> tuple[tuple[int, int], ...]:
    """The ranges of a parameter that begins at `first` of `total` elements cut evenly over `world` ranks."""
    per_rank = -(-total // world)
    bounds = [min(max(rank * per_rank - first, 0), numel) for rank in range(world + 1)]
    bounds[-1] = numel
    return tuple(pairwise(bounds))


def cut_module(module: nn.Module, group: dist.ProcessGroup | None = None, flag: DirtyFlag | None = None) -> Tensor:
    """Convert every parameter in place; returns the flat buffer (1-D) of which the locals are views."""
    register()
    group = group or dist.group.WORLD
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    named = list(module.named_parameters())
    total = sum(param.numel() for _, param in named)
    specs, first = [], 0
    for name, param in named:
        ranges = ranges_of(first, param.numel(), total, world)
        specs.append(ShardSpec(name, param.shape, ranges, rank, group, dirty=flag))
        first += param.numel()
    flat = torch.empty(sum(spec.local_numel for spec in specs), dtype=named[0][1].dtype)
    at = 0
    for (_, param), spec in zip(named, specs, strict=True):
        local = flat[at : at + spec.local_numel]
        local.copy_(param.detach().reshape(-1)[spec.start : spec.stop])
        convert_(param, local, spec)
        at += spec.local_numel
    return flat


def cut_tensor(full: Tensor, group: dist.ProcessGroup | None = None, name: str = "x", uneven: bool = False) -> Shard:
    """One tensor over all ranks; `uneven`: the last rank holds all of it but one element."""
    group = group or dist.group.WORLD
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    ranges = ranges_of(0, full.numel(), full.numel(), world)
    if uneven and world > 1 and full.numel():
        ranges = ((0, 1), *(((1, 1),) * (world - 2)), (1, full.numel()))
    spec = ShardSpec(name, full.shape, ranges, rank, group)
    return Shard(full.reshape(-1)[spec.start : spec.stop].clone(), spec)


def part_of(full: Tensor, like: Shard) -> Shard:
    """A gradient or state of `like` with the values of `full`."""
    return Shard(full.detach().reshape(-1)[like.start : like.stop].clone(), like.spec.derived)
