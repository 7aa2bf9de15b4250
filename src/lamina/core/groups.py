"""Process groups, one for the same ranks on the same lane, shared by all sharded models of a process.

A group is dear: on a GPU a communicator holds hundreds of MB, on Gloo a thread wakes a hundred times a second. torch
makes a new one at every call; here models on the same ranks share them. That is safe because every rank issues the
collectives of all its models in one order (Note [One order] in runtime/engine.py).

Note [Groups shared]
    Ranks that were found at different places may have left half a collective in a group: whoever raises that error
    calls `forget_groups`, and the next model gets new ones. Should some ranks have forgotten and others not, they find
    out at the door of the next `shard()` (door.py), and all forget.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch.distributed as dist

from lamina.core.strategy import Level
from lamina.core.watch_evidence import OUR_GROUPS
from lamina.errors import UsageError


@dataclass(frozen=True)
class Group:
    """A process group and this rank's place in it, in the order of the ranges."""

    pg: dist.ProcessGroup | None
    size: int
    place: int

    @property
    def is_trivial(self) -> bool:
        return self.size == 1


class _Shared:
    """The groups made so far, by lane, backend and ranks; forgotten with the default group that they belong to."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, str | None, tuple[int, ...], bool], dist.ProcessGroup] = {}
        self.generation = 0
        self.world: weakref.ref[dist.ProcessGroup] | None = None


_shared = _Shared()


def forget_groups() -> None:
    """Let the next model make new groups: these may hold half a collective. See Note [Groups shared]."""
    _shared.groups = {}
    _shared.generation += 1


def generation() -> int:
    """How often this process has forgotten its groups; ranks where it differs must all forget them."""
    return _shared.generation


def begin_generation(number: int) -> None:
    """Forget, and count from a number that other ranks take as well."""
    _shared.groups, _shared.generation = {}, number


class GroupMaker:
    """Groups of one mesh, asked for in the same order on every rank."""

    def __init__(self, ranks: tuple[int, ...], me: int, whole_world: bool, backend: str | None) -> None:
        self.ranks, self.me, self.whole_world, self.backend = ranks, me, whole_world, backend
        world = dist.group.WORLD
        assert world is not None
        if _shared.world is None or _shared.world() is not world:
            forget_groups()
            _shared.world = weakref.ref(world)

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

    def everyone(self) -> dist.ProcessGroup | None:
        """All data ranks, for sums: their order does not matter."""
        if len(self.ranks) == 1:
            return None
        return self._group(sorted(self.ranks), "reduce", self.backend)

    def control(self) -> dist.ProcessGroup | None:
        """A host-side group of all data ranks."""
        if len(self.ranks) == 1:
            return None
        fake = dist.get_backend() == "fake"  # a benchmark of host time: nothing is sent
        return self._group(sorted(self.ranks), "control", "fake" if fake else "gloo")

    def _group(self, global_ranks: list[int], lane: str, backend: str | None) -> dist.ProcessGroup:
        if global_ranks != sorted(global_ranks):
            raise UsageError(
                f"a group of ranks {global_ranks} is needed in this order, and torch orders groups by number: give the "
                "mesh axes in the order ('replicate', 'shard')"
            )
        key = (lane, backend, tuple(global_ranks), self.whole_world)
        if key not in _shared.groups:
            made = dist.new_group(global_ranks, backend=backend, use_local_synchronization=not self.whole_world)
            if isinstance(made, dist.ProcessGroup):  # this rank is a member
                OUR_GROUPS.add(str(made.group_name))
            _shared.groups[key] = made
        return _shared.groups[key]
