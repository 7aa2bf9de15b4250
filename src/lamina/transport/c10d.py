"""Moving bytes with torch.distributed: NCCL on GPUs, Gloo on CPUs.

Note [c10d]
    Gathers move bytes, so every dtype works. Sums of 16-bit gradients are made in fp32 by an all-to-all and a local
    sum: 16 bits on the wire, the exactness of fp32. Gloo takes that way for all dtypes: its reduce-scatter took 10.8 ms
    where all-to-all took 4.6 ms (4 MB, 2 ranks). SUM and a local factor, never AVG or PREMUL_SUM: some of their
    factors zero bf16 gradients in NCCL.
    On a GPU the calls are made on a lane's stream and return None; on the CPU they return a handle to wait for.
"""

from __future__ import annotations

import datetime
import functools
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from lamina.core.groups import Group

# On the stream that is running, as torch.distributed does it for `async_op=False`.
GATHER_NOW, EXCHANGE_NOW = AllgatherOptions(), AllToAllOptions()
GATHER_NOW.asyncOp = EXCHANGE_NOW.asyncOp = False

# torch 2.13 deprecates the *_tensor names for *_single; 2.11 has only the former
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


Exchange = Callable[[], dist.Work | None]  # an exchange between fixed places, as often as it is called


class Transport(Protocol):
    """One stage of a gather or a reduction over one group. `None` as handle: nothing to wait for on the host."""

    name: str
    pushes: bool  # exchanges are the cheapest way to reduce, whatever the dtype

    def inbox(self, group: Group, number: int, size_bytes: int) -> Tensor | None:
        """Where an exchange of a unit's segment `number` has to arrive; None: anywhere."""

    def all_gather(self, group: Group, whole: Tensor, part: Tensor) -> Exchange:
        """Prepare: fill `whole` (group.size * n bytes) from every rank's `part` (n bytes), this rank's place in it."""

    def exchange(self, group: Group, inbox: Tensor, source: Tensor) -> Exchange:
        """Prepare: the i-th part of `source` (group.size * n bytes) goes to rank i; what comes is in `inbox`, by rank.

        Where the inbox is the transport's own, this rank's part is left in `source`.
        """

    def close(self) -> None:
        """The exchanges of one unit have all been made."""

    def reduce_scatter(self, group: Group, part: Tensor, source: Tensor) -> dist.Work | None:
        """Sum of this rank's part of every rank's `source`, into `part`, which may be its place in `source`."""

    def all_reduce(self, group: Group, tensor: Tensor) -> dist.Work | None:
        """Sum over the group, in place."""


class C10d:
    """`Transport` over torch.distributed."""

    name = "c10d"
    pushes = False

    def __init__(self, device: torch.device) -> None:
        self.asynchronous = device.type == "cpu"

    def inbox(self, group: Group, number: int, size_bytes: int) -> Tensor | None:
        return None

    def all_gather(self, group: Group, whole: Tensor, part: Tensor) -> Exchange:
        assert group.pg is not None  # past torch.distributed's checks: 20 us of host time for each call
        pg = group.pg
        if self.asynchronous:
            return functools.partial(on_host(pg)._allgather_base, whole, part)
        return lambda: _queue(pg._allgather_base(whole, part, GATHER_NOW))

    def exchange(self, group: Group, inbox: Tensor, source: Tensor) -> Exchange:
        assert group.pg is not None
        if self.asynchronous:
            return functools.partial(on_host(group.pg).alltoall_base, inbox, source, [], [])
        pg = group.pg
        return lambda: _queue(pg.alltoall_base(inbox, source, [], [], EXCHANGE_NOW))

    def close(self) -> None:
        return None

    def reduce_scatter(self, group: Group, part: Tensor, source: Tensor) -> dist.Work | None:
        if not self.asynchronous:
            return _reduce_scatter(as_real(part), as_real(source), group=group.pg)
        guard = dist.all_reduce(torch.zeros(1), group=group.pg, async_op=True)
        work = _reduce_scatter(as_real(part), as_real(source), group=group.pg, async_op=True)
        return GuardedWork(guard, work)  # type: ignore[return-value]

    def all_reduce(self, group: Group, tensor: Tensor) -> dist.Work | None:
        return dist.all_reduce(as_real(tensor), group=group.pg, async_op=self.asynchronous)


def on_host(pg: dist.ProcessGroup) -> Any:
    """What carries a group's collectives out on a CPU, past torch's dispatcher, which costs more than what it calls."""
    try:
        return pg._get_backend(torch.device("cpu"))
    except (AttributeError, RuntimeError):  # a group that is written in Python
        return pg


def _queue(work: dist.Work | None) -> None:
    if work is not None:  # of a backend that has not made the stream wait by itself
        work.wait()


class GuardedWork:
    """Gloo's reduce-scatter ignores the time limit of `wait` and never says that it has ended.

    A one-element all-reduce before it ends only when all ranks have come to the reduction; that one can be waited for
    with a limit, so that a rank in it can say where it waits.
    """

    def __init__(self, guard: dist.Work, work: dist.Work) -> None:
        self.guard, self.work = guard, work

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Like `Work.wait`; raises RuntimeError when the time is over."""
        if timeout is None:
            self.guard.wait()
        else:
            self.guard.wait(timeout)
        return self.work.wait()


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor


warnings.filterwarnings("ignore", message=".*(all_gather_into_tensor|reduce_scatter_tensor).*deprecated.*")
