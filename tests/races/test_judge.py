"""What the detector takes for a race, on traces of a few events."""

from __future__ import annotations

from races.judge import races_in
from races.trace import Access, Event, GivenBack, HostWaited, Kept, Marked, Met, Place, Taken, Trace, Waited

HERE = Place("here.py", 1, "here")
COMPUTE, GATHER = "compute lane of rank 0", "gather lane of rank 0"


def touch(lane: str, start: int = 0, stop: int = 8, writes: bool = True, block: int = 1) -> Access:
    return Access(lane, block, start, stop, writes, "op", (Place(f"{lane} {start}", 1, "work"),))


def count(*events: Event, dropped: Place | None = None) -> int:
    return len(races_in([Trace(0, list(events))], None if dropped is None else dropped.__eq__))


def test_two_accesses_race_if_one_writes_and_nobody_waits() -> None:
    assert count(touch(COMPUTE), touch(GATHER)) == 1
    assert count(touch(COMPUTE), touch(GATHER, writes=False)) == 1
    assert count(touch(COMPUTE, writes=False), touch(GATHER)) == 1
    assert count(touch(COMPUTE, writes=False), touch(GATHER, writes=False)) == 0
    assert count(touch(COMPUTE), touch(COMPUTE)) == 0


def test_bytes_are_compared_not_blocks() -> None:
    assert count(touch(COMPUTE, 0, 8), touch(GATHER, 8, 16)) == 0
    assert count(touch(COMPUTE, 0, 9), touch(GATHER, 8, 16)) == 1
    assert count(touch(COMPUTE, block=1), touch(GATHER, block=2)) == 0


def test_a_wait_orders_what_was_queued_before_the_mark() -> None:
    wait = Waited(GATHER, 1, HERE)
    assert count(touch(COMPUTE), Marked(COMPUTE, 1), wait, touch(GATHER)) == 0
    assert count(Marked(COMPUTE, 1), touch(COMPUTE), wait, touch(GATHER)) == 1
    assert count(touch(COMPUTE), Marked(COMPUTE, 1), touch(GATHER), wait) == 1
    assert count(touch(COMPUTE), Marked(COMPUTE, 1), wait, touch(GATHER), dropped=HERE) == 1


def test_what_a_lane_waited_for_goes_on_with_its_marks() -> None:
    reduce = "reduce lane of rank 0"
    passed_on = (
        touch(COMPUTE),
        Marked(COMPUTE, 1),
        Waited(reduce, 1, HERE),
        Marked(reduce, 2),
        Waited(GATHER, 2, HERE),
    )
    assert count(*passed_on, touch(GATHER)) == 0
    assert count(*passed_on, touch(COMPUTE), touch(GATHER)) == 1


def test_a_wait_that_was_superfluous_counts_where_another_is_left_out() -> None:
    there = Place("there.py", 1, "there")
    events = (touch(COMPUTE), Marked(COMPUTE, 1), Waited(GATHER, 1, HERE), Waited(GATHER, 1, there, is_queued=False))
    assert count(*events, touch(GATHER)) == 0
    assert count(*events, touch(GATHER), dropped=HERE) == 0
    assert count(touch(COMPUTE), Marked(COMPUTE, 1), events[-1], touch(GATHER)) == 1


def test_the_host_orders_only_what_it_has_waited_for() -> None:
    assert count(touch(COMPUTE), Marked(COMPUTE, 1), HostWaited(1), touch(GATHER)) == 0
    assert count(touch(COMPUTE), Marked(COMPUTE, 1), touch(COMPUTE), HostWaited(1), touch(GATHER)) == 1
    assert count(touch(GATHER, block=9), touch(COMPUTE), Marked(COMPUTE, 1), HostWaited(1), touch(GATHER)) == 0


def test_an_earlier_access_is_not_hidden_by_a_later_one() -> None:
    read = touch(GATHER, writes=False)
    assert count(read, touch(COMPUTE, 0, 4), Marked(COMPUTE, 1), Waited(GATHER, 1, HERE), touch(GATHER, 0, 4)) == 1
    part = (touch(GATHER, 0, 8), touch(GATHER, 0, 4, writes=False), Marked(GATHER, 1))
    assert count(*part, touch(COMPUTE, 4, 8)) == 1


def test_memory_that_is_taken_is_written_by_the_lane_that_took_it() -> None:
    taken = Taken(COMPUTE, 1, 8, "empty", (HERE,))
    assert count(taken, touch(GATHER)) == 1
    assert count(taken, Marked(COMPUTE, 1), Waited(GATHER, 1, HERE), touch(GATHER)) == 0


def test_freed_memory_must_be_out_of_use_when_its_lane_takes_memory_again() -> None:
    taken, more = Taken(COMPUTE, 1, 8, "empty", (HERE,)), Taken(COMPUTE, 2, 8, "empty", (HERE,))
    used = (taken, Marked(COMPUTE, 1), Waited(GATHER, 1, HERE), touch(GATHER), Marked(GATHER, 2))
    assert count(*used, GivenBack(1)) == 0
    assert count(*used, GivenBack(1), more) == 1
    assert count(*used, GivenBack(1), Taken(GATHER, 2, 8, "empty", (HERE,))) == 0
    assert count(*used, GivenBack(1), Waited(COMPUTE, 2, HERE), more) == 0
    assert count(*used, Kept(GATHER, 1, HERE), GivenBack(1), more) == 0
    there = Place("there.py", 1, "there")
    assert count(*used, Kept(GATHER, 1, there), GivenBack(1), more, dropped=there) == 1


def meetings(first: list[Event], second: list[Event]) -> int:
    return len(races_in([Trace(0, first), Trace(1, second)]))


def test_ranks_are_ordered_by_meetings_alone() -> None:
    mine, theirs = touch(COMPUTE, block=-5), touch("compute lane of rank 1", block=-5)
    met = Met(COMPUTE, "group", (0, 1)), Met("compute lane of rank 1", "group", (0, 1))
    assert meetings([mine], [theirs]) == 1
    assert meetings([mine, met[0]], [met[1], theirs]) == 0
    assert meetings([met[0], theirs], [mine, met[1]]) == 0
    assert meetings([mine, met[0]], [theirs, met[1]]) == 1
    elsewhere = touch(GATHER, block=-5)
    assert meetings([elsewhere, met[0]], [met[1], theirs]) == 1
    assert meetings([elsewhere, Marked(GATHER, 1), Waited(COMPUTE, 1, HERE), met[0]], [met[1], theirs]) == 0


def test_what_one_lane_alone_has_used_is_left_out_of_the_shortened_trace() -> None:
    alone = [Taken(COMPUTE, 2, 8, "empty", (HERE,)), touch(COMPUTE, block=2), GivenBack(2)]
    shared = [touch(COMPUTE), touch(GATHER)]
    short = Trace(0, alone + shared).shortened()
    assert short.events == [alone[0], *shared]
    assert len(races_in([short])) == len(races_in([Trace(0, alone + shared)])) == 1
