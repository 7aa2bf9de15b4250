"""The runtime as on GPUs has no race that is seen, and each wait that is taken away makes one that is."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest

from races.drills import DRILLS, ON_FOUR_RANKS
from races.jobs import play, trace_ranks, walk
from races.judge import Race, races_in
from races.streams import ROOT
from races.trace import Trace, places_of
from races.waits import wait_at, waits_in_source

PATCHES = Path(__file__).with_name("patches")
FAULTS = {  # and a drill that comes by it
    "edit-beside-cast": "slots=1",
    "emptied-slot-not-awaited": "slots=1",
    "failed-backward-goes-on": "zero2",
    "failed-use-forgotten": "slots=1",
    "resized-beside-gather": "nested",
    "staging-of-compute": "zero1",
    "step-beside-cast": "slots=3",
}
# Lines of which the drills cannot say whether they are needed, and why.
RECORDING = "a graph is recorded from the lanes"
UNSEEN = {
    ("optim/capture.py", "Captured._record"): RECORDING,
    ("optim/capture.py", "Captured._replay"): "only a graph runs behind it",
    ("runtime/gathering.py", "Gatherer.open"): RECORDING,
    ("optim/adamw.py", "AdamW._clip_factor"): f"compute has waited for all gathers, unless {RECORDING}",
    ("runtime/halved.py", "HalvedMaster.make_halves"): "the optimizer's own kernel relies on it; others ask again",
    ("core/slots.py", "Slot._poison"): "debug mode fills a slot on the lane that has just freed it",
}
WALKS = (22, 31)  # of fuzz/, which copy weights to where their forward has read them


WORK = {**DRILLS, **{f"walk {seed}": functools.partial(walk, seed) for seed in WALKS}}


@functools.cache
def traces_of(work: str) -> list[Trace]:
    return trace_ranks(2, WORK[work])[0]


def check(found: list[Race]) -> None:
    assert not found, f"{len(found)} races\n" + "\n".join(map(str, found))


@pytest.mark.parametrize("work", WORK)
def test_no_race_is_seen(work: str) -> None:
    check(races_in(traces_of(work)))


@pytest.mark.parametrize("work", ON_FOUR_RANKS)
def test_no_race_is_seen_on_four_ranks(work: str) -> None:
    check(races_in(trace_ranks(4, ON_FOUR_RANKS[work])[0]))


def test_a_wait_that_is_left_out_is_noticed() -> None:
    lines = waits_in_source()
    # what symmetric.py tries out while it connects runs before there are lanes
    unnoticed = {wait for wait in lines if wait.file != "transport/symmetric.py" or "." in wait.function}
    for work in WORK:
        traces = traces_of(work)
        for place in places_of(traces):
            wait = wait_at(place, lines)
            if wait in unnoticed and races_in(traces, place.__eq__):
                unnoticed.remove(wait)
    assert {(wait.file, wait.function) for wait in unnoticed} == set(UNSEEN), "\n".join(map(str, unnoticed))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    assert races_in(trace_ranks(2, DRILLS[FAULTS[fault]], PATCHES / f"{fault}.patch")[0])


def test_all_faults_fit_the_sources_and_say_what_they_break() -> None:
    patches = sorted(PATCHES.glob("*.patch"))
    assert [patch.stem for patch in patches] == sorted(FAULTS)
    for patch in patches:
        first, blank, *_ = patch.read_text().splitlines()
        assert first and not first.startswith("---") and not blank, patch.name
        done = subprocess.run(["git", "apply", "--check", str(patch)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{patch.name}: the sources have moved on, draw it anew: {done.stderr}"


JOBS = [(1, 0), (2, 9), (2, 22), (4, 31)]


@pytest.mark.parametrize(("world", "seed"), JOBS)
def test_a_random_job_has_no_race(world: int, seed: int) -> None:
    traces, deviations = trace_ranks(world, functools.partial(play, seed))
    assert max(deviations) <= 1.0
    check(races_in(traces))
