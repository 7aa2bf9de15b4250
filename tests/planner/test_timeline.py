"""Simulated times: the lane rules hold for any plan, and a few programs worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.core.arena import Demand, Packing, pack
from lamina.core.program import Op, Program, UnitTraits, plan_step
from lamina.planner.timeline import COMPUTE, GATHER, REDUCE, Schedule, Span, busy_ms, end_ms, lane_of, simulate

DURATIONS_MS = {Op.GATHER: 1.0, Op.FORWARD: 2.0, Op.BACKWARD: 4.0, Op.REDUCE: 3.0}


def blocks(count: int, slots: int) -> tuple[Program, Packing]:
    packing = pack([Demand(f"block{i}", 1000, resident=False) for i in range(count)], slots)
    return plan_step([UnitTraits()] * count, packing.conflicts), packing


def test_three_units_by_hand() -> None:
    program, packing = blocks(3, 3)
    assert simulate(program, DURATIONS_MS, packing.conflicts) == (
        Span(GATHER, "AG0", 0, 1),
        Span(COMPUTE, "FWD0", 1, 3),
        Span(GATHER, "AG1", 1, 2),  # issued when FWD0 has begun
        Span(COMPUTE, "FWD1", 3, 5),
        Span(GATHER, "AG2", 3, 4),
        Span(COMPUTE, "FWD2", 5, 7),
        Span(COMPUTE, "BWD2", 7, 11),
        Span(REDUCE, "RS2", 11, 14),
        Span(COMPUTE, "BWD1", 11, 15),
        Span(REDUCE, "RS1", 15, 18),
        Span(COMPUTE, "BWD0", 15, 19),
        Span(REDUCE, "RS0", 19, 22),
    )


def test_with_one_slot_a_gather_waits_for_the_use_and_the_reduction_before_it() -> None:
    program, packing = blocks(2, 1)
    spans = {span.label: span for span in simulate(Program.parse(program.text()), DURATIONS_MS, packing.conflicts)}
    assert program.text() == "AG0 FWD0 AG1 FWD1 BWD1 RS1 AG0 BWD0 RS0"
    assert spans["AG1"].start_ms == spans["FWD1"].start_ms - 1 == 3  # FWD0 ends at 3
    assert spans["AG0"].start_ms == spans["RS1"].end_ms


def test_a_slow_gather_lane_delays_compute() -> None:
    program, packing = blocks(3, 3)
    spans = simulate(program, {**DURATIONS_MS, Op.GATHER: 5.0}, packing.conflicts)
    assert [s.start_ms for s in spans if s.label.startswith("FWD")] == [5, 10, 15]


def test_durations_may_depend_on_the_unit() -> None:
    spans = simulate(Program.parse("AG0 FWD0 AG1 FWD1"), lambda step: 1.0 + step.unit)
    assert [span.duration_ms for span in spans] == [1, 1, 2, 2]


@given(st.integers(1, 8), st.integers(1, 4), st.lists(st.integers(0, 5), min_size=4, max_size=4))
@settings(max_examples=60, deadline=None)
def test_the_lane_rules_hold(count: int, slots: int, times_ms: list[int]) -> None:
    program, packing = blocks(count, slots)
    spans = simulate(program, dict(zip(Op, times_ms, strict=True)), packing.conflicts)
    assert [span.label for span in spans] == program.text().split()
    pairs = list(zip(program.steps, spans, strict=True))
    for lane in (COMPUTE, GATHER, REDUCE):
        own = [span for span in spans if span.lane == lane]
        assert all(a.end_ms <= b.start_ms for a, b in pairwise(own))
    for position, (step, span) in enumerate(pairs):
        assert span.lane == lane_of(step.op)
        before = pairs[:position]
        if step.op is Op.GATHER:
            sharing = packing.conflicts(step.unit)
            ends = [s.end_ms for other, s in before if other.unit in sharing and other.op is not Op.GATHER]
        else:
            needed = Op.BACKWARD if step.op is Op.REDUCE else Op.GATHER
            ends = [s.end_ms for other, s in before if other.unit == step.unit and other.op is needed]
        assert all(end <= span.start_ms for end in ends)


def alone(program: Program, times_ms: list[int]) -> list[float]:
    return [float(times_ms[list(Op).index(step.op)]) for step in program.steps]


@given(st.integers(1, 8), st.integers(1, 4), st.lists(st.integers(0, 5), min_size=4, max_size=4))
@settings(max_examples=30, deadline=None)
def test_sharing_keeps_the_lane_rules(count: int, slots: int, times_ms: list[int]) -> None:
    """By events as by order, where nothing is shared; a shared link carries no more than it can, and delays nothing
    but by what it carries twice."""
    program, packing = blocks(count, slots)
    schedule, durations_ms = Schedule(program, packing.conflicts), alone(program, times_ms)
    plain_ms = schedule.times(durations_ms)
    for loads in ((0.0, 0.0), (0.5, 0.5)):
        assert schedule.times(durations_ms, [loads] * len(program.steps)) == tuple(map(pytest.approx, plain_ms))
    starts_ms, ends_ms = schedule.times(durations_ms, [(1.0, 0.0)] * len(program.steps))
    assert all(s + d <= e + 1e-9 for s, d, e in zip(starts_ms, durations_ms, ends_ms, strict=True))
    moved = sorted((s, e) for s, e, lane in zip(starts_ms, ends_ms, schedule.lanes, strict=True) if lane)
    covered_ms, reached_ms = 0.0, 0.0
    for start_ms, stop_ms in moved:
        covered_ms += max(0.0, stop_ms - max(start_ms, reached_ms))
        reached_ms = max(reached_ms, stop_ms)
    carried_ms = sum(d for d, lane in zip(durations_ms, schedule.lanes, strict=True) if lane)
    assert covered_ms == pytest.approx(carried_ms), "one link: busy for exactly as long as both take alone"
    assert max(ends_ms) <= max(plain_ms[1]) + carried_ms + 1e-9


def test_two_on_one_link_by_hand() -> None:
    """AG1 of 4 ms and RS0 of 2 begin together and go at half their rates: RS0 takes 4, AG1 then 2 more."""
    schedule = Schedule(Program.parse("AG0 FWD0 BWD0 FWD0 AG1 RS0 FWD1"))
    durations_ms = [1.0, 1.0, 1.0, 1.0, 4.0, 2.0, 1.0]
    one_link = [(1.0, 0.2)] * 7
    starts_ms, ends_ms = schedule.times(durations_ms, one_link)
    assert starts_ms == [0, 1, 2, 3, 3, 3, 9] and ends_ms == [1, 2, 3, 4, 9, 7, 10]
    other_links = [(1.0, 0.0)] * 5 + [(0.0, 1.0)] * 2
    assert schedule.times(durations_ms, other_links) == schedule.times(durations_ms)


@given(st.integers(1, 8))
@settings(max_examples=8, deadline=None)
def test_more_slots_are_never_slower(count: int) -> None:
    ends_ms = []
    for slots in range(1, count + 1):
        program, packing = blocks(count, slots)
        ends_ms.append(end_ms(simulate(program, DURATIONS_MS, packing.conflicts)))
    assert ends_ms == sorted(ends_ms, reverse=True)


def test_busy_and_end() -> None:
    program, packing = blocks(3, 3)
    spans = simulate(program, DURATIONS_MS, packing.conflicts)
    assert (busy_ms(spans, COMPUTE), busy_ms(spans, GATHER), busy_ms(spans, REDUCE)) == (18, 3, 9)
    assert end_ms(spans) == 22
    assert simulate(Program(())) == () and end_ms(()) == 0


def test_a_missing_duration_is_an_error() -> None:
    with pytest.raises(KeyError):
        simulate(Program.parse("AG0"), {Op.FORWARD: 1.0})
