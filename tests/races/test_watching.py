"""What is seen of operators, storages, streams and events."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from harness import run_ranks
from lamina.core import lanes
from races.jobs import trace_here
from races.judge import races_in
from races.streams import FakeDevice
from races.trace import Access, GivenBack, Kept, Marked, Taken, Trace, Waited
from races.watching import Watch, watching


def seen_by(work: Callable[[Watch, lanes.Lanes], object]) -> Trace:
    trace = Trace(0)
    with watching(trace) as watch:
        work(watch, lanes.Lanes(FakeDevice()))  # type: ignore[arg-type]
    return trace


def accesses_of(work: Callable[[], object]) -> list[tuple[str, bool, int, int]]:
    trace = seen_by(lambda watch, _: work())
    return [(e.what, e.writes, e.start, e.stop) for e in trace.events if isinstance(e, Access)]


def classify() -> None:
    whole, part = torch.zeros(8), torch.ones(2)
    assert accesses_of(lambda: whole[2:4].copy_(part)) == [("copy_", False, 0, 8), ("copy_", True, 8, 16)]
    assert accesses_of(lambda: whole.view(2, 4)[1].detach()) == []
    assert accesses_of(lambda: whole.view(2, 4)[:, 1].zero_()) == [("zero_", True, 4, 24)]  # from first to last
    assert accesses_of(lambda: torch.add(part, part, out=part))[-1] == ("add", True, 0, 8)
    assert accesses_of(lambda: torch.empty(4)) == []
    assert accesses_of(lambda: part + 1) == [("add", False, 0, 8), ("add", True, 0, 8)]
    copies = accesses_of(lambda: torch._foreach_copy_([whole[:2], whole[4:6]], [part, part]))
    assert sorted(start for _, writes, start, _ in copies if writes) == [0, 16]
    assert accesses_of(lambda: nn.Parameter(part).data.mul_(2)) == [("mul_", True, 0, 8)]
    group = dist.group.WORLD
    assert accesses_of(lambda: group._allgather_base(whole[:4], whole[:4]).wait()) == [  # type: ignore[union-attr]
        ("c10d::_allgather_base_", False, 0, 16),
        ("c10d::_allgather_base_", True, 0, 16),
    ]


def test_operators_read_and_write_what_their_schema_says() -> None:
    run_ranks(1, classify)


def on_lanes() -> None:
    def work(watch: Watch, own: lanes.Lanes) -> None:
        tensor = torch.zeros(4)
        own.gather.wait(own.compute.mark())
        with own.gather.running():
            tensor.add_(1)
            torch.empty(4)
        tensor.mul_(2)
        own.gather.wait(None)
        mark = own.gather.mark()
        own.compute.wait(mark)
        own.compute.wait(mark)

    trace = seen_by(work)
    kinds = [(type(e), getattr(e, "lane", "").split(" ")[0]) for e in trace.events if not isinstance(e, GivenBack)]
    assert kinds == [
        (Taken, "compute"),
        (Access, "compute"),
        (Marked, "compute"),
        (Waited, "gather"),
        (Access, "gather"),
        (Taken, "gather"),
        (Access, "compute"),
        (Marked, "gather"),
        (Waited, "compute"),
        (Waited, "compute"),
    ]
    waits = [event for event in trace.events if isinstance(event, Waited)]
    assert [wait.is_queued for wait in waits] == [True, True, False]
    assert {wait.place.function for wait in waits} == {"on_lanes.<locals>.work"}
    (race,) = races_in([trace])
    assert race.first.what == "add_" and race.second.what == "mul_" and "test_watching.py" in race.first.stack[0].file


def test_work_is_on_the_lane_that_runs_and_lanes_wait_for_marks() -> None:
    run_ranks(1, on_lanes)


def storages() -> None:
    def work(watch: Watch, own: lanes.Lanes) -> None:
        tensor = torch.zeros(4)
        storage = tensor.untyped_storage()
        storage.resize_(16)  # to the size it has: CUDA moves it all the same
        storage.resize_(0)
        storage.resize_(16)
        with own.reduce.running():
            tensor.record_stream(own.reduce.stream)  # type: ignore[attr-defined]
        view = tensor[1:]
        del tensor, storage
        watch.flush()
        assert isinstance(watch.trace.events[-1], Kept)
        del view

    events = [event for event in seen_by(work).events if not (isinstance(event, Access) and event.writes)]
    blocks = [event.block for event in events]
    assert [type(event) for event in events] == [Taken, Access, Taken, GivenBack, GivenBack, Taken, Kept, GivenBack]
    assert blocks == [blocks[0]] * 2 + [blocks[2], blocks[0], blocks[2]] + [blocks[5]] * 3
    assert len(set(blocks)) == 3 and isinstance(events[1], Access) and events[1].what == "resize_"


def test_storages_are_moved_and_given_back_as_on_cuda() -> None:
    run_ranks(1, storages)


def laid_over() -> None:
    def work(watch: Watch, own: lanes.Lanes) -> None:
        memory = torch.zeros(8)
        over = torch.from_dlpack(memory[2:6])
        over[1:3].mul_(2)
        memory.add_(1)
        del over
        other = torch.ones(4)
        other.mul_(2)
        del memory, other
        watch.flush()

    events = seen_by(work).events
    product, total = (next(e for e in events if isinstance(e, Access) and e.what == what) for what in ("mul_", "add_"))
    assert product.block == total.block and (product.start, product.stop) == (12, 20)
    last = next(e for e in reversed(events) if isinstance(e, Access))
    assert last.block != product.block and last.start == 0
    assert sum(isinstance(event, GivenBack) for event in events) == 2


def test_a_storage_over_the_memory_of_another_is_a_part_of_it() -> None:
    run_ranks(1, laid_over)


def test_nothing_stays_patched() -> None:
    before = lanes.torch, torch.UntypedStorage.resize_, torch.Tensor.record_stream, lanes.StreamLane.wait
    run_ranks(1, trace_here, work_on_nothing)
    assert (lanes.torch, torch.UntypedStorage.resize_, torch.Tensor.record_stream, lanes.StreamLane.wait) == before


def work_on_nothing(watch: Watch) -> None: ...
