"""What two looks at all ranks prove, and what they do not: no processes, worlds of any size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lamina.core.watch_judge import (
    DIED,
    ENDED,
    ORDER,
    OWN_CALL,
    STOPPED,
    GroupCount,
    Limits,
    Report,
    Verdict,
    Wait,
    describe,
    judge,
)

LIMITS = Limits()
Counts = dict[str, int]
OURS = ("gather", "reduce", "control")


def rank(
    number: int,
    counts: Counts | None = None,
    *,
    waits: str = "",
    for_s: float = 5.0,
    place: str = "step 12 backward",
    doing: str = "runs",
    group: str = "",
    missing: tuple[int, ...] = (),
) -> Report:
    """A rank that has issued `counts` collectives by group, and `waits` in lamina, a call, behind the device or not."""
    wait = Wait(100 + number, waits, for_s, "1", group, missing) if waits else None
    groups = {name: GroupCount(issued, name in OURS) for name, issued in (counts or {}).items()}
    return Report(number, 7, place, doing, f"train.py:{80 + number}", wait, groups)


def look_twice(*reports: Report, stale: tuple[int, ...] = (), silence_counts: bool = False) -> Verdict | None:
    """The same reports at two moments; those of `stale` ranks are not renewed."""
    before = {report.rank: report for report in reports}
    now = {r.rank: r if r.rank in stale else replace(r, beat=r.beat + 1) for r in reports}
    return judge(before, now, LIMITS, silence_counts)


AHEAD_IN_REDUCE, AHEAD_IN_GATHER = {"gather": 4, "reduce": 3}, {"gather": 5, "reduce": 2}


def test_ranks_that_wait_for_each_other_are_named() -> None:
    verdict = look_twice(
        rank(0, AHEAD_IN_REDUCE, waits="lamina", doing="reduces `layers.3`"),
        rank(1, AHEAD_IN_GATHER, waits="lamina", doing="gathers `layers.4`"),
    )
    assert verdict is not None and verdict.code == ORDER
    words = "step 12 backward: rank 0 reduces `layers.3` (train.py:80), rank 1 gathers `layers.4` (train.py:81)"
    assert words in verdict.text
    assert verdict.waits == {0: 100, 1: 101} and verdict.controls == ("1",)


def test_a_circle_of_three_is_named_and_a_rank_outside_it_is_not() -> None:
    """Ranks 0-2 wait in three groups of two, each for the next one; rank 3 is in none of them and computes."""

    def member(number: int, counts: Counts) -> Report:
        groups = {name: GroupCount(issued, True) for name, issued in counts.items()}
        return replace(rank(number, waits="lamina"), groups=groups)

    circle = (member(0, {"a": 2, "c": 1}), member(1, {"b": 2, "a": 1}), member(2, {"c": 2, "b": 1}))
    verdict = look_twice(*circle, rank(3))
    assert verdict is not None and sorted(verdict.waits) == [0, 1, 2]
    assert look_twice(circle[0], circle[1], replace(circle[2], wait=None), rank(3)) is None, "rank 2 is merely slow"


def test_a_call_of_the_user_is_named() -> None:
    verdict = look_twice(
        rank(0, {"gather": 5, "world": 1}, waits="lamina", place="step 13 forward", doing="gathers `layers.0`"),
        rank(1, {"gather": 4, "world": 2}, waits="call", group="world", doing="waits in torch.distributed.barrier"),
    )
    assert verdict is not None and verdict.code == OWN_CALL
    assert "rank 1 in step 12 backward waits in torch.distributed.barrier (train.py:81)" in verdict.text


@pytest.mark.parametrize(
    "reports",
    [
        pytest.param((rank(0, {"gather": 5}, waits="lamina"), rank(1, {"gather": 4})), id="the other computes"),
        pytest.param(
            (rank(0, {"gather": 5}, waits="lamina"), rank(1, {"gather": 5}, waits="lamina")), id="bytes under way"
        ),
        pytest.param(
            (
                rank(0, {"gather": 5}, waits="lamina", place="step 13 forward"),
                rank(1, {"gather": 4}, waits="lamina", place="step 12 backward"),
            ),
            id="one ahead of a slow network",
        ),
        pytest.param(
            (rank(0, AHEAD_IN_REDUCE, waits="lamina", for_s=1.0), rank(1, AHEAD_IN_GATHER, waits="lamina", for_s=1.0)),
            id="not for long",
        ),
        pytest.param(
            (
                rank(0, {"gather": 5, "world": 1}, waits="lamina"),
                rank(1, {"gather": 4, "other": 2}, waits="call", group="other"),
            ),
            id="a call on a group of other ranks",
        ),
        pytest.param(
            (rank(0, {"gather": 5, "own": 1}, waits="lamina"), rank(1, {"gather": 4, "own": 9}, waits="device")),
            id="another thread's group",
        ),
        pytest.param((rank(0), rank(1)), id="nobody waits"),
    ],
)
def test_slowness_is_no_hang(reports: tuple[Report, ...]) -> None:
    assert look_twice(*reports) is None


def test_one_look_proves_nothing() -> None:
    first, second = rank(0, AHEAD_IN_REDUCE, waits="lamina"), rank(1, AHEAD_IN_GATHER, waits="lamina")
    assert look_twice(first, second, stale=(1,)) is None, "rank 1 may have moved since"
    moved = {r.rank: replace(r, beat=8) for r in (first, second)}
    moved[1] = replace(moved[1], wait=Wait(999, "lamina", 5.0, "1"))
    assert judge({0: first, 1: second}, moved, LIMITS) is None, "rank 1 is in another wait"
    further = replace(second, beat=8, groups={**second.groups, "gather": GroupCount(6, True)})
    assert judge({0: first, 1: second}, {0: replace(first, beat=8), 1: further}, LIMITS) is None, "rank 1 goes on"


def test_different_phases_under_one_number() -> None:
    """On a GPU hosts run ahead: rank 1 does not wait at all."""
    first = replace(rank(0, waits="device"), phases={"1": {7: "a forward without gradients", 6: "a backward"}})
    second = replace(rank(1), phases={"1": {7: "a forward", 6: "a backward"}})
    verdict = look_twice(first, second)
    assert verdict is not None and verdict.code == ORDER
    assert "rank 0 began a forward without gradients; rank 1 began a forward" in verdict.text
    assert look_twice(first, replace(second, phases={"1": {6: "a backward"}})) is None, "rank 1 has not come so far"


GONE = "has died (process 5 on node was ended by SIGKILL)"


def test_a_dead_neighbour_is_named_with_its_last_position() -> None:
    first = replace(rank(0, {"gather": 5}, waits="lamina", doing="gathers `layers.1`"), near={1: GONE})
    verdict = look_twice(first, rank(1, {"gather": 4}, place="step 11 forward"), stale=(1,))
    assert verdict is not None and verdict.code == DIED
    assert verdict.text.startswith(
        f"rank 1 {GONE}, last seen in step 11 forward (train.py:81). Waiting for it: step 12"
    )


def test_a_rank_that_died_before_it_told_its_groups_is_named() -> None:
    first = replace(rank(0, {"gather": 1}, waits="lamina"), near={1: GONE})
    assert look_twice(first, rank(1, place="lamina.shard"), stale=(1,)) is not None
    assert look_twice(first, rank(1, {"control": 5}), stale=(1,)) is None, "a rank of other groups"


def test_a_death_on_another_host_is_told_by_a_rank_of_that_host() -> None:
    """Rank 2 waits on another host, rank 1 is a neighbour of the dead rank 0 and only computes."""
    counts = {"gather": 5}
    dead, neighbour = rank(0, {"gather": 4}), replace(rank(1, counts), near={0: GONE})
    verdict = look_twice(dead, neighbour, rank(2, counts, waits="lamina"), stale=(0,))
    assert verdict is not None and verdict.code == DIED and verdict.waits == {2: 102}


def test_a_death_without_witness_is_known_by_its_broken_connections() -> None:
    waiting, other = rank(0, {"gather": 5}, waits="lamina"), rank(1, {"gather": 4})
    lost = replace(waiting, lost="Connection closed by peer")
    assert look_twice(waiting, other, stale=(1,), silence_counts=True) is None, "silent, but perhaps only busy"
    assert look_twice(lost, other, stale=(1,)) is None, "not silent for long"
    assert look_twice(lost, other, silence_counts=True) is None, "it reports"
    verdict = look_twice(lost, other, stale=(1,), silence_counts=True)
    assert verdict is not None and verdict.code == DIED and "rank 1 is gone" in verdict.text


def test_a_stopped_rank_must_be_seen_twice() -> None:
    reports = [rank(0, {"gather": 5}, waits="lamina"), rank(1, {"gather": 4})]
    stopped = [replace(reports[0], near={1: "is stopped (SIGSTOP)"}), reports[1]]
    verdict = look_twice(*stopped, stale=(1,))
    assert verdict is not None and verdict.code == STOPPED
    before = {r.rank: r for r in reports}
    assert judge(before, {0: replace(stopped[0], beat=8), 1: reports[1]}, LIMITS) is None


def test_a_rank_that_ended_well_harms_only_those_that_wait_for_it() -> None:
    ended = replace(rank(1, {"gather": 5}), left="has ended its program")
    assert look_twice(rank(0, {"gather": 5}, waits="lamina"), ended, stale=(1,)) is None, "its last bytes are under way"
    verdict = look_twice(rank(0, {"gather": 6}, waits="lamina"), ended, stale=(1,))
    assert verdict is not None and verdict.code == ENDED and "lamina.even" in verdict.text and not verdict.cause


def test_a_rank_that_raised_is_the_cause() -> None:
    raised = replace(rank(1, {"gather": 4}), left="raised ValueError: bad batch (data.py:17)", failed=True)
    verdict = look_twice(rank(0, {"gather": 5}, waits="lamina"), raised, stale=(1,))
    assert verdict is not None and verdict.cause == "left 1"
    assert verdict.text.startswith("rank 1 raised ValueError: bad batch (data.py:17). Waiting for it: step 12")


def test_a_dropped_model_is_named() -> None:
    dropped = replace(rank(1, {"gather": 4}), dropped=("1",))
    verdict = look_twice(rank(0, {"gather": 5}, waits="lamina"), dropped)
    assert verdict is not None and "rank 1 ended or dropped the model" in verdict.text
    other = replace(dropped, dropped=("2",))
    assert look_twice(rank(0, {"gather": 5}, waits="lamina"), other) is None
    in_call = rank(0, {"gather": 5}, waits="call", group="gather")
    assert look_twice(in_call, dropped) is not None


def test_a_rank_that_has_dropped_its_model_may_still_come_to_a_call_of_the_user() -> None:
    """It writes a report of the run, say, and the others are in the barrier already."""
    dropped = replace(rank(1, {"gather": 5, "world": 1}), dropped=("1",))
    barrier = rank(0, {"gather": 5, "world": 2}, waits="call", group="world")
    assert look_twice(barrier, dropped) is None
    assert look_twice(barrier, replace(dropped, left="has ended its program")) is not None


def test_ranks_known_to_be_missing_go_before_counts() -> None:
    """One-sided reads have no collectives to count: the wait itself says who is late."""
    late = [rank(0, waits="lamina", missing=(1,)), rank(1, waits="lamina", missing=(0,))]
    assert look_twice(*late) is not None
    assert look_twice(late[0], rank(1)) is None


def test_the_last_resort_takes_half_a_minute() -> None:
    """All blocked, nobody ahead: the same collective was entered from different places, or the network is very slow."""
    places = ("step 12 forward", "step 12 backward")
    for for_s, is_named in ((25.0, False), (35.0, True)):
        reports = [rank(r, {"gather": 5}, waits="lamina", for_s=for_s, place=places[r]) for r in range(2)]
        assert (look_twice(*reports) is not None) is is_named
    alike = [rank(r, {"gather": 5}, waits="lamina", for_s=35.0) for r in range(2)]
    assert look_twice(*alike) is None


def test_a_thousand_ranks_are_one_sentence() -> None:
    world = 1000
    reports = [rank(r, {"gather": 5, "world": 1}, waits="lamina", doing="gathers `a`") for r in range(world - 1)]
    reports = [replace(report, site="train.py:88") for report in reports]
    odd = rank(999, {"gather": 4, "world": 2}, waits="call", group="world", doing="waits in barrier")
    verdict = look_twice(*reports, odd)
    assert verdict is not None and len(verdict.waits) == world
    assert "rank 999 waits in barrier" in verdict.text and "ranks 0-998 gather `a` (train.py:88)" in verdict.text
    assert len(verdict.text) < 400


def test_texts_come_back() -> None:
    report = replace(
        rank(3, {"gather": 5}, waits="call", group="g", missing=(1, 2)), near={1: GONE}, phases={"1": {2: "x"}}
    )
    assert Report.parse(report.text()) == report
    verdict = Verdict("text", ORDER, {0: 5}, ("1",), "left 1")
    assert Verdict.parse(verdict.to_json()) == verdict
    assert describe([rank(0, doing="runs")]) == "step 12 backward: rank 0 runs (train.py:80)"
