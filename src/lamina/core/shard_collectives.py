"""The two collectives of a `Shard`: reducing a value over all pieces, and gathering the whole.

`torch.distributed` reduces what it is given; this file adds over which groups (the shard group, then every outer one),
NaN where the backends' MAX drops it, and a gather of uneven flat pieces that is exact for every dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lamina.core.control import finish
from lamina.core.forked import refuse_in_fork
from lamina.core.group_sets import refuse_destroyed
from lamina.core.shard_spec import ShardSpec
from lamina.core.uncompiled import refuse_traced, uncompiled


@dataclass
class Counters:
    """Collectives issued by Shards in this process, for tests and reports."""

    all_reduces: int = 0
    gathers: int = 0

    def reset(self) -> None:
        self.all_reduces = self.gathers = 0


COUNTERS = Counters()


@uncompiled
def all_reduce_(value: Tensor, op: dist.ReduceOp.RedOpType, spec: ShardSpec) -> Tensor:
    """Reduce `value` in place over everything that `spec` is spread over. Collective."""
    refuse_in_fork()
    refuse_traced(value, spec.name)
    for group in spec.groups:
        refuse_destroyed(group)
        if group.size() > 1:
            COUNTERS.all_reduces += 1
            finish(
                dist.all_reduce(value, op=op, group=group, async_op=True), value, "reduces over the pieces of a Shard"
            )
    return value


def all_reduce_max(value: Tensor, spec: ShardSpec) -> Tensor:
    """The elementwise maximum of floating `value` (1-D) over all pieces, NaN where one of them is NaN. Collective.

    Backends compare with `a > b ? a : b`, in which a NaN wins or loses by the order of ranks. So it travels as a flag.
    """
    if not spec.groups:
        return value
    is_nan = value.isnan()
    both = torch.cat([value.masked_fill(is_nan, -torch.inf), is_nan.to(value.dtype)])
    biggest, nan_somewhere = all_reduce_(both, dist.ReduceOp.MAX, spec).chunk(2)
    return biggest.masked_fill(nan_somewhere > 0, torch.nan)


@uncompiled
def gather_flat(local: Tensor, spec: ShardSpec) -> Tensor:
    """All pieces as one new 1-D tensor of `spec.numel` elements, the same on every rank of the group. Collective.

    The bytes travel as they are, so every dtype comes out exact. Two ways, chosen by the ranges, which all ranks know:
    padded pieces in one all-gather, or, where padding would more than double the memory (a parameter that lies on few
    of many ranks), one broadcast per owner.
    """
    refuse_traced(local, spec.name)
    local = local.detach().contiguous()
    if len(spec.ranges) == 1:
        return local.clone()
    refuse_in_fork()
    group = spec.groups[0] if spec.gathers is None else spec.gathers
    refuse_destroyed(group)
    COUNTERS.gathers += 1
    whole = torch.empty(spec.numel, dtype=local.dtype, device=local.device)
    item_bytes = local.element_size()
    into, mine = whole.view(torch.uint8), local.view(torch.uint8)
    longest = max(stop - start for start, stop in spec.ranges)
    if longest * len(spec.ranges) <= 2 * spec.numel:
        _gather_padded(into, mine, spec, longest * item_bytes, item_bytes, group)
        return whole
    for owner, (start, stop) in enumerate(spec.ranges):
        if start == stop:
            continue
        piece = into[start * item_bytes : stop * item_bytes]
        if owner == spec.index:
            piece.copy_(mine)
        work = dist.broadcast(piece, group=group, group_src=owner, async_op=True)
        finish(work, piece, f"gathers `{spec.name}` alone")
    return whole


def _gather_padded(
    into: Tensor, mine: Tensor, spec: ShardSpec, longest_bytes: int, item_bytes: int, group: dist.ProcessGroup
) -> None:
    padded = mine.new_zeros(longest_bytes)
    padded[: mine.numel()].copy_(mine)
    pieces = list(mine.new_empty(len(spec.ranges) * longest_bytes).chunk(len(spec.ranges)))
    finish(dist.all_gather(pieces, padded, group=group, async_op=True), padded, f"gathers `{spec.name}` alone")
    for piece, (start, stop) in zip(pieces, spec.ranges, strict=True):
        into[start * item_bytes : stop * item_bytes].copy_(piece[: (stop - start) * item_bytes])
