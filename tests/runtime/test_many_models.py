"""Models that come and go: what one has taken from the process, the next one uses again, and numbers stay right.

Groups are never destroyed (that is collective, and ranks collect garbage at different times): see core/group_sets.py.
"""

from __future__ import annotations

import copy
import gc
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import RankFailure, run_ranks
from lamina.core import group_sets, watch
from lamina.core.group_sets import GroupSet
from parity.reference import TOLERANCE

WAYS = (("zero3", "auto"), ("zero3", "c10d"), ("ddp", "auto"), ("zero1", "c10d"), ("zero2", "peer"))
FEW_FILES = 256
SPARE_KIB = 4096


def small(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()


def batch(seed: int, rank: int) -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(100 * seed + rank)).double()


def deviation(seed: int, strategy: str, transport: str, model: nn.Module | None = None) -> float:
    """How far a new model's gradients and norm are from one process's after a step."""
    plain, world = small(seed), dist.get_world_size()
    for rank in range(world):
        (plain(batch(seed, rank)).pow(2).mean() / world).backward()
    if model is None:
        model = lamina.shard(small(seed), strategy, transport=transport)
    model(batch(seed, dist.get_rank())).pow(2).mean().backward()
    norm = lamina.clip_grad_norm_(model, 1e9)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    return float(abs(norm - expected)) + sum(
        float((full_of(p.grad) - q.grad).abs().max())  # type: ignore[operator]
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )


def full_of(value: Tensor | None) -> Tensor:
    assert value is not None
    return value.full() if isinstance(value, lamina.Shard) else value


@contextmanager
def few_files(spare: int, at_least: int = FEW_FILES) -> Iterator[None]:
    """Room for `spare` further files, and for `at_least` in all."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(at_least, files() + spare), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def used() -> tuple[int, int, int, int]:
    """Open files, threads, process groups, and models that the watch speaks of as gone."""
    running = watch.current()
    gone = len(running.dropped) if running is not None else 0
    return files(), len(os.listdir("/proc/self/task")), len(dist.distributed_c10d._world.pg_names), gone


def resident_kib() -> int:
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() // 1024


def come_and_go(count: int) -> tuple[float, tuple[int, ...], tuple[int, ...], int]:
    """The largest deviation, what the process used after a quarter and at the end, and its growth in KiB meanwhile."""
    worst, before, before_kib = 0.0, (0,), 0
    store = dist.distributed_c10d._get_default_store()
    with few_files(spare=100):
        for number in range(count):
            worst = max(worst, deviation(number, *WAYS[number % len(WAYS)]))
            if number == count // 4 or number == count - 1:
                gc.collect()
                dist.barrier()
                keys = store.num_keys()
                dist.barrier()
                if number < count - 1:
                    before, before_kib = (*used(), keys), resident_kib()
    return worst, before, (*used(), keys), resident_kib() - before_kib


def test_models_one_after_the_other_take_what_one_takes() -> None:
    for worst, before, after, grown_kib in run_ranks(2, come_and_go, 60):
        assert worst <= TOLERANCE
        assert max(a - b for a, b in zip(after, before, strict=True)) <= 2, (before, after)
        assert grown_kib < SPARE_KIB


def collect_at_times(count: int) -> tuple[float, int]:
    """Each rank collects garbage at another time: after model n, where n % 3 is its rank."""
    rank, worst, mine = dist.get_rank(), 0.0, []
    gc.disable()
    try:
        for number in range(count):
            model = lamina.shard(small(number), "zero3")
            worst = max(worst, deviation(number, "", "", model))
            mine.append(model)
            if number % 3 == rank:
                mine.clear()
                del model
                gc.collect()
    finally:
        gc.enable()
    return worst, len(dist.distributed_c10d._world.pg_names)


def test_ranks_that_collect_at_different_times_agree_on_groups() -> None:
    for worst, groups in run_ranks(3, collect_at_times, 12):
        assert worst <= TOLERANCE
        assert groups < 1 + 12 * group_sets.GROUPS_A_MODEL  # some were used again


def leave(what: str) -> tuple[object, set[int]]:
    """Train a model; the part of it that lives on, and which groups it had."""
    model = lamina.shard(small(0))
    model(batch(0, dist.get_rank())).pow(2).mean().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    weight: nn.Parameter = model[0].weight  # type: ignore[index, assignment, union-attr]
    kept: dict[str, Callable[[], object]] = {
        "parameter": lambda: weight,
        "gradient": lambda: weight.grad,
        "state": lambda: optimizer.state[weight]["exp_avg"],
        "loss": lambda: model(batch(0, dist.get_rank())).sum(),
        "penalty": lambda: weight.pow(2).sum(),
        "copy": lambda: copy.deepcopy(model),
        "part": lambda: model[0],  # type: ignore[index]
        "nothing": lambda: None,
    }
    return kept[what](), {id(group) for group in lease_of(model).made.values()}


def outlived(what: str) -> tuple[float, bool]:
    """Something of a model lives on while the next one trains."""
    kept, groups = leave(what)
    gc.collect()
    following = lamina.shard(small(1))
    is_other = not groups & {id(group) for group in lease_of(following).made.values()}
    worst = deviation(1, "", "", following)
    if isinstance(kept, lamina.Shard):
        kept.full()
    elif isinstance(kept, Tensor):
        with pytest.raises(lamina.StateError, match="a sharded model that is gone"):
            kept.backward()
    return worst, is_other


def lease_of(model: nn.Module) -> GroupSet:
    share = model[0].weight.spec.share  # type: ignore[index, union-attr]
    return share.lease.groups  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", ["parameter", "gradient", "state", "loss", "penalty", "copy", "part", "nothing"])
def test_groups_belong_to_a_model_as_long_as_anything_of_it_lives(what: str) -> None:
    """A graph of its forward is nothing of it."""
    for worst, is_other in run_ranks(2, outlived, what):
        assert worst <= TOLERANCE
        assert is_other == (what not in ("loss", "nothing"))


def left_in_the_middle(lane: str) -> tuple[float, bool]:
    """Rank 1 seems to have issued one collective more on one of the groups when its model goes."""
    model = lamina.shard(small(0), transport="c10d")
    groups = lease_of(model)
    uneven = groups.control if lane == "control" else next(g for key, g in groups.made.items() if key[0] == lane)
    control = groups.control
    counted = group_sets.issued_on
    group_sets.issued_on = lambda pg: counted(pg) + (pg is uneven and dist.get_rank() == 1)
    try:
        del model, groups
        gc.collect()
        following = lamina.shard(small(1), transport="c10d")
    finally:
        group_sets.issued_on = counted
    taken = lease_of(following)
    if lane != "control":
        assert taken.control is control
    return deviation(1, "", "", following), uneven in [taken.control, *taken.made.values()]


@pytest.mark.parametrize("lane", ["control", "flags", "gather", "reduce", "sums"])
def test_a_group_on_which_ranks_have_parted_is_not_used_again(lane: str) -> None:
    for worst, is_used in run_ranks(2, left_in_the_middle, lane):
        assert worst <= TOLERANCE
        assert not is_used


def too_many(poor: int) -> None:
    """Models that stay alive, until the files of one rank are too few."""
    models = []
    with few_files(spare=60 if dist.get_rank() == poor else 600, at_least=0):
        for number in range(12):
            models.append(lamina.shard(small(number)))


def test_too_many_models_at_once_are_refused_on_every_rank() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, too_many, 1, timeout=30)
    assert sorted(caught.value.errors) == [0, 1]
    for error in caught.value.errors.values():
        assert error.type_name == "TransportError"
        assert "open files" in error.message and "ulimit -n" in error.message
