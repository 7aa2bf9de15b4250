"""Which groups carry what: few numbers apart from weights and gradients, where that costs no device memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lamina
from harness import run_ranks
from lamina.core import groups
from lamina.core.control import Control
from lamina.core.groups import GroupMaker, group_for_a_while
from lamina.core.mesh import build_mesh, find_data_ranks, resolve_on
from lamina.runtime.assemble import RUNTIMES


def lanes_on_gpus(strategy: str) -> dict[str, str]:
    """For what NCCL's options of each group were made: Gloo stands for it."""
    lane_of: dict[Any, str] = {}
    new_group = dist.new_group

    def noting(ranks: list[int], pg_options: str | None = None, backend: str | None = None, **more: Any) -> Any:
        made = new_group(ranks, backend="gloo" if backend == "nccl" else backend, **more)
        lane_of[made] = f"{backend} {pg_options}"
        return made

    ranks = find_data_ranks(None)
    control = Control(ranks.control, ranks.rank, len(ranks.ranks), "lanes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "nccl_options", lambda lane: lane)
        patch.setattr(dist, "new_group", noting)
        mesh = build_mesh(resolve_on(strategy, ranks), ranks, torch.device("cuda"), control)
    found = {
        "gather": mesh.gather[0].pg,
        "reduce": mesh.reduce[0].pg,
        "replicas": mesh.replicas.pg,
        "wholes": mesh.shard_group.pg,
        "norms": mesh.shard_sums.pg,
        "everyone": mesh.everyone,
        "tokens": mesh.sums,
        "means": mesh.share.group,
        "flags": mesh.flags,
    }
    return {name: lane_of[pg] for name, pg in found.items() if pg is not None}


def test_few_numbers_have_communicators_of_their_own() -> None:
    both = {"everyone": "nccl reduce", "tokens": "nccl sums", "means": "nccl sums", "flags": "gloo None"}
    split = {"gather": "nccl gather", "reduce": "nccl reduce", "wholes": "nccl reduce", "norms": "nccl sums"}
    assert run_ranks(2, lanes_on_gpus, "zero3") == [both | split] * 2
    assert run_ranks(2, lanes_on_gpus, "ddp") == [both | {"replicas": "nccl reduce"}] * 2


def note(seen: list[str], names: dict[Any, str], call: str, act: Callable[..., Any], *args: Any, **more: Any) -> Any:
    seen.append(f"{call} {names.get(more.get('group'))}")
    return act(*args, **more)


def users_of_groups() -> list[str]:
    """As on GPUs, whole Shards come on the lane of reductions."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupMaker, "wholes", "reduce")
        model = lamina.shard(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5)), replicate=["1.bias"], transport="c10d")
    mesh = RUNTIMES[model].mesh
    names = {mesh.shard_sums.pg: "sums", mesh.shard_group.pg: "reduce", mesh.gather[0].pg: "gather"}
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for call in ("all_reduce", "all_gather"):
            patch.setattr(dist, call, functools.partial(note, seen, names, call, getattr(dist, call)))
        model(torch.ones(3, 6)).sum().backward()
        seen.append("backward")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        lamina.clip_grad_norm_(model, 1.0)
        seen.append("norms")
        model[0].weight.full()
    return seen


def test_norms_go_apart_and_whole_shards_with_reductions() -> None:
    for seen in run_ranks(2, users_of_groups):
        backward, rest = seen[: seen.index("backward")], seen[seen.index("backward") + 1 :]
        norms, wholes = rest[: rest.index("norms")], rest[rest.index("norms") + 1 :]
        assert backward == ["all_reduce reduce"], "of the replicated bias"
        assert norms and set(norms) == {"all_reduce sums"}
        assert wholes == ["all_gather reduce"]


def gather_for_a_while(times: int) -> list[list[float]]:
    """What the members of this rank's level have said, in groups that are gone afterwards."""
    model = lamina.shard(nn.Linear(4, 4), lamina.Strategy(2, 2, 2), transport="c10d")
    mesh, found = RUNTIMES[model].mesh, []
    for time in range(times):
        with group_for_a_while(mesh.global_ranks, mesh.rank, mesh.factors.levels[0], "gather", mesh.gather[0]) as group:
            assert group.pg is not mesh.gather[0].pg and group.pg in dist.distributed_c10d._world.pg_names
            parts = [torch.empty(1) for _ in range(group.size)]
            dist.all_gather(parts, torch.tensor([10.0 * time + mesh.rank]), group=group.pg)
        assert group.pg not in dist.distributed_c10d._world.pg_names
        found.append([float(part) for part in parts])
    return found


def test_a_group_for_a_while_is_gone_afterwards() -> None:
    low, high = [[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]], [[2.0, 3.0], [12.0, 13.0], [22.0, 23.0]]
    assert run_ranks(4, gather_for_a_while, 3) == [low, low, high, high]


def gather_beside_others() -> bool:
    """Data ranks that are not the whole world."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    inner = RUNTIMES[lamina.shard(nn.Linear(4, 4), mesh=mesh, transport="c10d")].mesh
    with group_for_a_while(inner.global_ranks, inner.rank, inner.factors.levels[0], "gather", inner.gather[0]) as group:
        return group is inner.gather[0]


def test_ranks_that_are_not_the_world_keep_their_group() -> None:
    assert all(run_ranks(4, gather_beside_others))
