"""The ranks that share data, and one process group for every stage of sharding and lane.

A `DeviceMesh` names axes; the runtime needs groups: for each level of `Factors`, this rank's group, once for gathers
and once for reductions (two lanes on one communicator would wait for each other). Axes other than "replicate" and
"shard" are left alone: every data group lies within one coordinate of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lamina.core.strategy import Factors, Level, Strategy, resolve
from lamina.errors import TransportError, UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DATA_AXES = ("replicate", "shard")


@dataclass(frozen=True)
class Group:
    """A process group and this rank's place in it, in the order of the ranges."""

    pg: dist.ProcessGroup | None
    size: int
    place: int

    @property
    def is_trivial(self) -> bool:
        return self.size == 1


@dataclass(frozen=True)
class DataMesh:
    """Data ranks, factors and groups as this rank sees them."""

    factors: Factors
    rank: int  # among the data ranks
    global_ranks: tuple[int, ...]  # by data rank
    device: torch.device
    gather: tuple[Group, ...]  # one a level: parameters, gradients, optimizer
    reduce: tuple[Group, ...]
    replicas: Group  # copies of this rank's optimizer range
    shard_group: Group  # all ranges of one copy, for the operations on `Shard`s
    everyone: dist.ProcessGroup | None  # all data ranks, on the device
    control: dist.ProcessGroup | None  # all data ranks, on the host

    @property
    def world(self) -> int:
        return self.factors.world

    @property
    def range_index(self) -> int:
        return self.factors.range_index(self.rank)


@dataclass(frozen=True)
class DataRanks:
    """The data world before anything is split: enough to agree on what comes next."""

    ranks: tuple[int, ...]  # global ranks, by data rank
    rank: int  # this one, among them
    shard_size: int | None  # the mesh's "shard" axis, where there are two data axes
    control: dist.ProcessGroup | None  # all data ranks, on the host


def find_data_ranks(mesh: DeviceMesh | None) -> DataRanks:
    """The ranks of a mesh that share data with this one, and a group to agree over. Collective over these ranks."""
    if not dist.is_initialized():
        return DataRanks((0,), 0, None, None)
    ranks, shard_size = _data_ranks(mesh)
    whole_world = len(ranks) == dist.get_world_size()
    if not whole_world:
        _check_group_history(ranks)
    me = ranks.index(dist.get_rank())
    return DataRanks(ranks, me, shard_size, _GroupMaker(ranks, me, whole_world, None).control())


def resolve_on(strategy: str | Strategy, data: DataRanks) -> Factors:
    """Factors of a strategy over these ranks."""
    shard_size = data.shard_size
    if strategy == "hsdp" and shard_size is None and len(data.ranks) > 1:
        shard_size = _ranks_per_node(data.control)
    return resolve(strategy, len(data.ranks), shard_size)


def build_mesh(factors: Factors, data: DataRanks, device: torch.device) -> DataMesh:
    """Create the groups of all levels; collective over the data ranks."""
    ranks, me = data.ranks, data.rank
    if data.control is None:
        one = Group(None, 1, 0)
        return DataMesh(factors, 0, ranks, device, (one,) * 3, (one,) * 3, one, one, None, None)
    whole_world = len(ranks) == dist.get_world_size()
    maker = _GroupMaker(ranks, me, whole_world, "nccl" if device.type == "cuda" else None)
    gather = tuple(maker.make(level, "gather") for level in factors.levels)
    reduce = tuple(maker.make(level, "reduce") for level in factors.levels)
    replicas = maker.make(factors.replicas, "reduce")
    shard_group = maker.make(Level(factors.optimizer, 1), "reduce")  # `place` is that in the group, not the range
    return DataMesh(factors, me, ranks, device, gather, reduce, replicas, shard_group, maker.everyone(), data.control)


def _data_ranks(mesh: DeviceMesh | None) -> tuple[tuple[int, ...], int | None]:
    """Global ranks of this rank's data world, and the size of the "shard" axis where there are two data axes."""
    if mesh is None:
        return tuple(range(dist.get_world_size())), None
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        return tuple(mesh.mesh.tolist()), None
    data = [name for name in DATA_AXES if name in names]
    if not data:
        raise UsageError(
            f"mesh axes {names or '(unnamed)'}: which of them hold data ranks? Name them 'replicate' and 'shard' "
            "in init_device_mesh(..., mesh_dim_names=...)"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UsageError(f"rank {dist.get_rank()} is not part of the mesh that was given to shard()")
    index = tuple(slice(None) if name in data else c for name, c in zip(names, coordinate, strict=True))
    grid = mesh.mesh[index]
    if data == list(DATA_AXES) and names.index("replicate") > names.index("shard"):
        grid = grid.t()
    return tuple(grid.flatten().tolist()), (grid.shape[-1] if len(data) == 2 else None)


def _ranks_per_node(group: dist.ProcessGroup | None) -> int | None:
    """Ranks that share this rank's node, when they are fewer than all and the same on every node."""
    import socket

    names: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, socket.gethostname(), group=group)
    per_node = {names.count(name) for name in names}
    return per_node.pop() if len(per_node) == 1 and len(set(names)) > 1 else None


_meshes_of: dict[tuple[int, ...], int] = {}  # meshes built so far, by their ranks


def _check_group_history(ranks: tuple[int, ...]) -> None:
    """torch names a group of some ranks by how many groups this process has had: members that differ wait for ever."""
    number = _meshes_of[ranks] = _meshes_of.get(ranks, 0) + 1
    store = dist.PrefixStore(f"lamina/groups/{ranks}/{number}", dist.distributed_c10d._get_default_store())
    store.set(str(dist.get_rank()), str(len(dist.distributed_c10d._world.pg_names)))
    counts = {rank: int(store.get(str(rank))) for rank in ranks}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"rank {rank}: {count}" for rank, count in counts.items())
        raise TransportError(
            f"the ranks of this mesh have created different numbers of process groups before ({said}), and torch "
            "cannot make a group of some ranks then. Create the same groups on all of them, or let all ranks "
            "call lamina.shard() on meshes of one init_device_mesh()"
        )


class _GroupMaker:
    """Creates groups in the same order on every rank; one group for the same ranks on the same lane."""

    def __init__(self, ranks: tuple[int, ...], me: int, whole_world: bool, backend: str | None) -> None:
        self.ranks, self.me, self.whole_world, self.backend = ranks, me, whole_world, backend
        self._made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}

    def make(self, level: Level, lane: str) -> Group:
        """This rank's group of a level."""
        if level.size == 1:
            return Group(None, 1, 0)
        mine = level.members(self.me)
        for members in sorted({level.members(rank) for rank in range(len(self.ranks))}):
            if (self.whole_world or members == mine) and (lane, members) not in self._made:
                self._made[lane, members] = self._new([self.ranks[m] for m in members], self.backend)
        return Group(self._made[lane, mine], level.size, level.place(self.me))

    def everyone(self) -> dist.ProcessGroup | None:
        """All data ranks, for sums: their order does not matter."""
        if len(self.ranks) == 1:
            return None
        whole = Level(len(self.ranks), 1)
        made = self._made.get(("reduce", whole.members(self.me)))
        return made if made is not None else self._new(sorted(self.ranks), self.backend)

    def control(self) -> dist.ProcessGroup | None:
        """A host-side group of all data ranks."""
        if len(self.ranks) == 1:
            return None
        fake = dist.get_backend() == "fake"  # a benchmark of host time: nothing is sent
        return self._new(sorted(self.ranks), backend="fake" if fake else "gloo")

    def _new(self, global_ranks: list[int], backend: str | None) -> dist.ProcessGroup:
        if global_ranks != sorted(global_ranks):
            raise UsageError(
                f"a group of ranks {global_ranks} is needed in this order, and torch orders groups by number: give the "
                "mesh axes in the order ('replicate', 'shard')"
            )
        return dist.new_group(global_ranks, backend=backend, use_local_synchronization=not self.whole_world)
