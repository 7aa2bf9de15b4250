"""The harness itself: results, errors, deaths, hangs, and that none of them reaches the next test."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import time
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import harness
import harness_worker
import lamina
from harness import RankFailure, RankTimeout, expect_error, run_alone, run_ranks
from lamina.errors import UnitError


@dataclass
class Point:
    x: int


def rank_times(factor: int, plus: int = 0) -> int:
    return dist.get_rank() * factor + plus


def move(point: Point) -> Point:
    return Point(point.x + dist.get_rank())


def summed() -> torch.Tensor:
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    return value


def process_id() -> int:
    return os.getpid()


def group_and_process() -> tuple[bool, int]:
    return dist.is_initialized(), os.getpid()


def raise_on(ranks: tuple[int, ...], message: str) -> str:
    if dist.get_rank() in ranks:
        raise UnitError(f"{message} on rank {dist.get_rank()}")
    return "fine"


def raise_alone(message: str) -> None:
    raise UnitError(message)


def raise_while_others_wait() -> None:
    if dist.get_rank() == 1:
        raise ValueError("left the others alone")
    dist.barrier()


def begin_anew(world: int) -> None:
    """New ranks, which have imported this module."""
    with pytest.raises(RankFailure):
        run_ranks(world, os._exit, 7)
    run_ranks(world, process_id)


def die() -> None:
    if dist.get_rank() == 0:
        os._exit(7)


def hang() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def leave_group_out_of_step() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(3), async_op=True)


def spoil_global_state() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(5)


def global_state() -> tuple[torch.dtype, bool, float]:
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.rand(1).item()


class Circle:
    def __init__(self) -> None:
        self.itself = self


_left: list[weakref.ref[Circle]] = []


def import_and_leave_garbage(module: str) -> None:
    importlib.import_module(module)
    _left.append(weakref.ref(Circle()))


def garbage_and_size_of_a_look() -> tuple[int, int]:
    return sum(left() is not None for left in _left), len(gc.get_objects())


def import_and_train(module: str) -> None:
    importlib.import_module(module)
    model = lamina.shard(torch.nn.Linear(4, 4), transport="c10d")
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()


def groups_and_size_of_a_look() -> tuple[int, int]:
    return harness_worker._threads_of_groups() // harness_worker.THREADS_OF_A_GROUP, len(gc.get_objects())


_kept: list[object] = []


def import_and_keep_a_group(module: str) -> None:
    """Of which torch knows nothing any more: its process group lives while we have it."""
    importlib.import_module(module)
    group = dist.new_group([0, 1])
    _kept.append(group)
    dist.destroy_process_group(group)


def things_set_aside(drops: bool) -> int:
    if drops:
        _kept.clear()
    return gc.get_freeze_count()


def lambda_result() -> object:
    return lambda: None


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_by_rank(world: int) -> None:
    assert run_ranks(world, rank_times, 10, plus=1) == [10 * rank + 1 for rank in range(world)]


def test_values_of_own_classes_and_tensors() -> None:
    assert run_ranks(2, move, Point(3)) == [Point(3), Point(4)]
    first, second = run_ranks(2, summed)
    assert first.item() == second.item() == 3.0


def test_partial_is_taken_and_a_lambda_is_not() -> None:
    assert run_ranks(2, functools.partial(rank_times, plus=5), 1) == [5, 6]
    with pytest.raises(TypeError, match="module-level"):
        run_ranks(2, lambda: None)


def test_processes_live_on_after_results_and_errors() -> None:
    before = run_ranks(2, process_id)
    expect_error(2, raise_on, (0, 1), "bad unit", error="UnitError", contains=("bad unit", "on rank"))
    assert run_ranks(2, process_id) == before


def test_every_call_starts_from_the_same_state() -> None:
    expected = run_ranks(2, global_state)
    run_ranks(2, spoil_global_state)
    assert run_ranks(2, global_state) == expected
    assert expected[0][:2] == (torch.float32, True)


def test_after_a_call_its_garbage_is_gone_and_what_it_imported_is_not_looked_through_again() -> None:
    begin_anew(1)
    ((_, before),) = run_ranks(1, garbage_and_size_of_a_look)
    run_ranks(1, import_and_leave_garbage, "_pydecimal")  # of 500 functions
    ((left, size),) = run_ranks(1, garbage_and_size_of_a_look)
    assert left == 0 and size < before + 200


def test_groups_of_a_model_end_with_its_call() -> None:
    begin_anew(2)
    run_ranks(2, import_and_train, "string")
    before = run_ranks(2, groups_and_size_of_a_look)
    run_ranks(2, import_and_train, "_pydecimal")
    after = run_ranks(2, groups_and_size_of_a_look)
    assert [groups for groups, _ in before + after] == [1] * 4
    assert all(size < old + 200 for (_, old), (_, size) in zip(before, after, strict=True)), (before, after)


def test_nothing_is_set_aside_while_a_group_is_alive() -> None:
    """What keeps it would never be seen to be garbage, and the other rank's end of it waits for ours."""
    begin_anew(2)
    before = run_ranks(2, things_set_aside, False)
    run_ranks(2, import_and_keep_a_group, "xml.dom.minidom")
    kept = run_ranks(2, things_set_aside, True)
    after = run_ranks(2, things_set_aside, False)
    assert all(a >= b for a, b in zip(before, kept, strict=True)) and all(
        a > k for a, k in zip(after, kept, strict=True)
    )


def test_an_error_on_one_rank() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, raise_on, (1,), "bad unit")
    assert caught.value.results == {0: "fine"}
    (error,) = caught.value.errors.values()
    assert error.type_name == "UnitError" and error.message == "bad unit on rank 1"
    assert "raise_on" in error.traceback and "raise_on" in str(caught.value)


def test_expect_error_wants_every_rank_the_type_and_the_words() -> None:
    with pytest.raises(AssertionError, match=r"ranks \[0\] returned"):
        expect_error(2, raise_on, (1,), "bad", error="UnitError")
    with pytest.raises(AssertionError, match="rank 0 raised UnitError"):
        expect_error(2, raise_on, (0, 1), "bad", error="UsageError")
    with pytest.raises(AssertionError, match="without"):
        expect_error(2, raise_on, (0, 1), "bad", error="UnitError", contains=("cure",))
    with pytest.raises(AssertionError, match="they returned"):
        expect_error(2, raise_on, (), "bad", error="UnitError")


def test_a_result_that_cannot_be_sent_is_an_error_of_its_rank() -> None:
    with pytest.raises(RankFailure, match="pickle"):
        run_ranks(1, lambda_result)


def test_one_rank_raises_while_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "GRACE_S", 4.0)
    begin = time.monotonic()
    with pytest.raises(RankTimeout) as caught:
        run_ranks(2, raise_while_others_wait, timeout=600)
    assert time.monotonic() - begin < 300  # the start of a pool and the grace; without it, the call's whole time
    assert caught.value.errors[1].type_name == "ValueError"
    assert caught.value.errors[0].type_name == "Hung"
    assert "raise_while_others_wait" in caught.value.errors[0].traceback
    assert run_ranks(2, rank_times, 1) == [0, 1]


def test_a_death_is_reported_and_the_next_call_has_new_processes() -> None:
    before = run_ranks(2, process_id)
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, die)
    assert caught.value.errors[0].type_name == "Died" and "exit code 7" in caught.value.errors[0].message
    assert not set(run_ranks(2, process_id)) & set(before)


def test_a_hang_ends_at_the_timeout() -> None:
    with pytest.raises(RankTimeout) as caught:
        run_ranks(2, hang, timeout=5)
    assert list(caught.value.errors) == [1] and "hang" in caught.value.errors[1].traceback
    assert run_ranks(2, rank_times, 1) == [0, 1]


def test_a_group_left_out_of_step_does_not_reach_the_next_call() -> None:
    run_ranks(2, leave_group_out_of_step)
    assert [value.item() for value in run_ranks(2, summed)] == [3.0, 3.0]


def test_alone_is_a_new_process_without_a_group() -> None:
    has_group, process = run_alone(group_and_process)
    assert not has_group and process not in (os.getpid(), run_alone(process_id))
    with pytest.raises(RankFailure, match="a word"):
        run_alone(raise_alone, "a word")
    with pytest.raises(RankFailure, match="exit code 7"):
        run_alone(os._exit, 7)
    with pytest.raises(RankTimeout):
        run_alone(time.sleep, 60, timeout=0.2)
