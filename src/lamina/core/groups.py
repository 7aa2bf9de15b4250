"""Process groups of one model: one for the same ranks on the same lane.

Models never share groups at the same time, dear as these are (one that comes later may take them over: group_sets.py).
The collectives of one model follow its program on every rank; how those of two models interleave in one backward
depends on the path that a rank takes, and on a common group they would pair different units
(tests/parity/test_two_models.py).
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lamina.core.group_sets import GroupSet
from lamina.core.strategy import Level
from lamina.core.watch_evidence import OUR_GROUPS
from lamina.errors import TransportError, UsageError

# NCCL's own choice of channels takes more device memory for each communicator (0.3 GiB on two H200) and is not faster;
# a communicator of a few numbers has one.
NCCL_MAX_BLOCKS, NCCL_MAX_BLOCKS_OF_SUMS = 16, 1


@contextlib.contextmanager
def naming_the_network() -> Iterator[None]:
    """Where Gloo's ranks do not find each other, or find no file number, say what to type."""
    try:
        yield
    except RuntimeError as error:
        if "Too many open files" in str(error):
            raise TransportError(
                f"no file number is left for the connections of a sharded model: type `ulimit -n 4096` before you "
                f"start the ranks, or drop models that are done. Gloo says: {error}"
            ) from error
        if "Resource temporarily unavailable" in str(error):
            raise TransportError(
                "no further thread can be started, and a sharded model needs a few for its connections: raise the "
                f"limit on processes (`ulimit -u`, or the container's) or on memory (`ulimit -v`). torch says: {error}"
            ) from error
        if "Unable to find address for" in str(error):
            raise TransportError(
                "GLOO_SOCKET_IFNAME names a network that this host does not have, or has no address in: "
                f"`ip -brief address` lists those that it has. Gloo says: {error}"
            ) from error
        if "connectFullMesh" not in str(error):
            raise
        raise TransportError(
            "ranks do not reach each other through Gloo, over which they agree on what they do. On several nodes, name "
            "the network that joins them, on each node: `export GLOO_SOCKET_IFNAME=eth0` (`ip -brief address` lists "
            "the interfaces). After a restart (`torchrun --max-restarts`) of a program that calls init_process_group "
            "itself, torch's store still has the addresses of the processes before: leave that call to lamina.shard(), "
            "or `export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` before torchrun. "
            f"Gloo says: {error}"
        ) from error


def nccl_options(lane: str) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = NCCL_MAX_BLOCKS_OF_SUMS if lane == "sums" else NCCL_MAX_BLOCKS
    return options


@dataclass(frozen=True)
class Group:
    """A process group and this rank's place in it, in the order of the ranges."""

    pg: dist.ProcessGroup | None
    size: int
    place: int

    @property
    def is_trivial(self) -> bool:
        return self.size == 1


class GroupMaker:
    """Groups of one mesh, asked for in the same order on every rank."""

    def __init__(self, groups: GroupSet, me: int, whole_world: bool, backend: str | None) -> None:
        self.ranks, self.me, self.whole_world, self.backend = groups.ranks, me, whole_world, backend
        self._made = groups.made

    def make(self, level: Level, lane: str) -> Group:
        """This rank's group of a level."""
        if level.size == 1:
            return Group(None, 1, 0)
        mine, found = level.members(self.me), None
        for members in sorted({level.members(rank) for rank in range(len(self.ranks))}):
            if self.whole_world or members == mine:  # torch wants all ranks of the world at every new group
                group = self._group([self.ranks[m] for m in members], lane, self.backend)
                found = group if members == mine else found
        return Group(found, level.size, level.place(self.me))

    def everyone(self, lane: str) -> dist.ProcessGroup | None:
        """All data ranks, for sums: their order does not matter."""
        if len(self.ranks) == 1:
            return None
        return self._group(sorted(self.ranks), lane, self.backend)

    @property
    def wholes(self) -> str:
        """The lane of whole Shards that the user's calls gather: some ranks may ask and others not.

        On Gloo that of sums (norms, tokens), of which the same is true: beside reductions they would pair with one of
        another size, and the process is ended, or both ranks wait with nothing to prove. A further communicator of NCCL
        that is made for more than a few numbers costs device memory.
        """
        return "reduce" if self.backend == "nccl" else "sums"

    def on_host(self, lane: str, timeout: datetime.timedelta | None = None) -> dist.ProcessGroup | None:
        """A host-side group of all data ranks; `timeout` is that of all models that ask for this lane."""
        if len(self.ranks) == 1:
            return None
        fake = dist.get_backend() == "fake"  # a benchmark of host time: nothing is sent
        return self._group(sorted(self.ranks), lane, "fake" if fake else "gloo", timeout)

    def _group(
        self, global_ranks: list[int], lane: str, backend: str | None, timeout: datetime.timedelta | None = None
    ) -> dist.ProcessGroup:
        if global_ranks != sorted(global_ranks):
            raise UsageError(
                f"a group of ranks {global_ranks} is needed in this order, and torch orders groups by number: give the "
                "mesh axes in the order ('replicate', 'shard')"
            )
        key = (lane, tuple(global_ranks), backend or "")
        if key not in self._made:
            with naming_the_network():
                made = dist.new_group(
                    global_ranks,
                    timeout=timeout,
                    backend=backend,
                    use_local_synchronization=not self.whole_world,
                    pg_options=nccl_options(lane) if backend == "nccl" else None,
                )
            if isinstance(made, dist.ProcessGroup):  # this rank is a member
                OUR_GROUPS.add(str(made.group_name))
            self._made[key] = made
        return self._made[key]


@contextlib.contextmanager
def group_for_a_while(ranks: tuple[int, ...], me: int, level: Level, lane: str, like: Group) -> Iterator[Group]:
    """This rank's group of a level, as `like` is one, whose communicator goes when the block ends. Collective.

    Args:
        ranks: all data ranks, by data rank.
        me: this one, among them.

    Where they are not the whole world it is `like` itself: torch may name a later group of the same ranks as one that
    is gone, and they would find each other's old addresses.
    """
    if len(ranks) != dist.get_world_size():
        yield like
        return
    backend = dist.get_backend(like.pg)
    groups = GroupSet(ranks)
    try:
        yield GroupMaker(groups, me, True, backend).make(level, lane)
    finally:
        for made in groups.made.values():
            if isinstance(made, dist.ProcessGroup):
                OUR_GROUPS.discard(str(made.group_name))
                dist.destroy_process_group(made)
