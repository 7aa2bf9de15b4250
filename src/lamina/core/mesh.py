"""The ranks that share data, and one process group for every stage of sharding and lane.

A `DeviceMesh` names axes; the runtime needs groups: for each level of `Factors`, this rank's group, once for gathers
and once for reductions (two lanes on one communicator would wait for each other). Axes other than "replicate" and
"shard" are left alone: every data group lies within one coordinate of theirs.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lamina.core.control import Control, name_ranks
from lamina.core.door import Door
from lamina.core.forked import refuse_in_fork
from lamina.core.group_sets import GroupSet, Lease, check_files, free_sets, take
from lamina.core.groups import Group, GroupMaker
from lamina.core.shard_losses import Share, watch_waiting
from lamina.core.start_up import DefaultGroups
from lamina.core.strategy import Factors, Level, Strategy, resolve
from lamina.errors import StateError, UsageError

DATA_AXES = ("replicate", "shard")
Row = TypeVar("Row")


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
    shard_group: Group  # all ranges of one copy, for whole `Shard`s
    shard_sums: Group  # the same, for a few numbers
    everyone: dist.ProcessGroup | None  # all data ranks, on the device
    sums: dist.ProcessGroup | None  # the same, for a few numbers
    control: dist.ProcessGroup | None  # all data ranks, on the host
    flags: dist.ProcessGroup | None  # the same, for what is sent without being waited for
    share: Share = field(default_factory=lambda: Share(None, 1))  # of this rank in means over the data ranks

    @property
    def world(self) -> int:
        return self.factors.world

    @property
    def range_index(self) -> int:
        return self.factors.range_index(self.rank)

    def by_data_rank(self, rows: Sequence[Row]) -> list[Row]:
        """What ranks have exchanged over `control`, whose group torch orders by global rank, by data rank."""
        place = {rank: number for number, rank in enumerate(sorted(self.global_ranks))}
        return [rows[place[rank]] for rank in self.global_ranks]


@dataclass(frozen=True)
class DataRanks:
    """The data world before anything is split: enough to agree on what comes next."""

    ranks: tuple[int, ...]  # global ranks, by data rank
    rank: int  # this one, among them
    shard_size: int | None  # the mesh's "shard" axis, where there are two data axes
    lease: Lease | None  # None: a world of one
    is_new: bool = True  # its groups have served no other model

    @property
    def control(self) -> dist.ProcessGroup | None:
        """All data ranks, on the host."""
        return None if self.lease is None else self.lease.groups.control


def find_data_ranks(mesh: DeviceMesh | None) -> DataRanks:
    """The ranks of a mesh that share data with this one, and a group to agree over. Collective over these ranks."""
    refuse_in_fork()
    watch_waiting()  # the last loss over parameters holds the groups of their model
    if not dist.is_initialized():
        _check_modes()
        return DataRanks((0,), 0, None, None)
    DefaultGroups.enter()
    door = Door()
    door.try_to(_check_modes)
    ranks, shard_size = door.try_to(lambda: _data_ranks(mesh))
    me = ranks.index(dist.get_rank())
    free, agreed = {}, []
    if dist.get_backend() != "fake" and len(ranks) > 1:
        free = free_sets(ranks)
        if not free:
            door.try_to(lambda: check_files(ranks))
        agreed = door.meet(ranks, list(free))
    if agreed:
        return DataRanks(ranks, me, shard_size, take(free[agreed[0]]), is_new=False)
    groups = GroupSet(ranks)
    groups.control = GroupMaker(groups, me, len(ranks) == dist.get_world_size(), None).on_host("control")
    return DataRanks(ranks, me, shard_size, None if groups.control is None else take(groups))


def resolve_on(strategy: str | Strategy, data: DataRanks) -> Factors:
    """Factors of a strategy over these ranks."""
    shard_size = data.shard_size
    if strategy == "hsdp" and shard_size is None and len(data.ranks) > 1:
        shard_size = _ranks_per_node(data.control)
    return resolve(strategy, len(data.ranks), shard_size)


def build_mesh(factors: Factors, data: DataRanks, device: torch.device, control: Control) -> DataMesh:
    """Create the groups of all levels, or find those that an earlier model has left; collective over the data ranks."""
    ranks, me = data.ranks, data.rank
    if data.lease is None:
        one = Group(None, 1, 0)
        return DataMesh(factors, 0, ranks, device, (one,) * 3, (one,) * 3, one, one, one, None, None, None, None)
    whole_world = len(ranks) == dist.get_world_size()
    if not data.is_new:
        data.lease.groups.forget_uneven(control.exchange_text(data.lease.groups.counts()))
    maker = GroupMaker(data.lease.groups, me, whole_world, "nccl" if device.type == "cuda" else None)
    gather = tuple(maker.make(level, "gather") for level in factors.levels)
    reduce = tuple(maker.make(level, "reduce") for level in factors.levels)
    replicas = maker.make(factors.replicas, "reduce")
    of_a_copy = Level(factors.optimizer, 1)  # `place` is that in the group, not the range
    shard_group, shard_sums = maker.make(of_a_copy, maker.wholes), maker.make(of_a_copy, "sums")
    everyone, sums, flags = maker.everyone(maker.wholes), maker.everyone("sums"), maker.on_host("flags")
    share = Share(sums, factors.world, lease=data.lease)
    return DataMesh(
        factors,
        me,
        ranks,
        device,
        gather,
        reduce,
        replicas,
        shard_group,
        shard_sums,
        everyone,
        sums,
        data.control,
        flags,
        share,
    )


def _check_modes() -> None:
    """Refuse modes in which no trainable memory can be made, and nothing could be agreed on either."""
    if torch.is_inference_mode_enabled():
        raise StateError(
            "lamina.shard() inside torch.inference_mode(): what is made there cannot be trained; leave it first"
        )
    if torch.empty(0).is_meta:
        raise StateError(
            "lamina.shard() while the default device is meta: leave `with torch.device('meta'):` first, shard() fills "
            "what was built in it"
        )


def _data_ranks(mesh: DeviceMesh | None) -> tuple[tuple[int, ...], int | None]:
    """Global ranks of this rank's data world, and the size of the "shard" axis where there are two data axes."""
    if mesh is None:
        return tuple(range(dist.get_world_size())), None
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(
            f"mesh={mesh!r}: wanted a torch DeviceMesh; type for example "
            f"mesh=init_device_mesh('cpu', ({dist.get_world_size()},), mesh_dim_names=('shard',))"
        )
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
    """Ranks that share a node, as hosts call themselves; None: all are on one.

    Raises:
        UsageError: on every rank, where nodes hold different numbers of ranks, or ranks that are not neighbours.
    """
    names: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(names, socket.gethostname(), group=group)
    nodes = {name: [rank for rank, other in enumerate(names) if other == name] for name in names}
    if len(nodes) == 1:
        return None
    here = "; ".join(f"{json.dumps(name)} has {name_ranks(ranks)}" for name, ranks in list(nodes.items())[:4])
    mesh = "give mesh=init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', 'shard'))"
    if len({len(ranks) for ranks in nodes.values()}) > 1:
        raise UsageError(
            f"strategy='hsdp' makes a replica of each node, and nodes differ: {here}. Start as many ranks on each, or "
            f"{mesh}"
        )
    if any(ranks[-1] - ranks[0] >= len(ranks) for ranks in nodes.values()):
        raise UsageError(
            f"strategy='hsdp' makes a replica of each node, and ranks are dealt to nodes in turn: {here}. Start "
            f"neighbours on one node (torchrun does; under SLURM type `srun --distribution=block`), or {mesh}"
        )
    return len(names) // len(nodes)
