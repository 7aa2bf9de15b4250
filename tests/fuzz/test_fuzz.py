"""A fixed set of random jobs; thousands more on demand: `python tests/fuzz/run.py --seeds 0:5000`."""

from __future__ import annotations

import pytest

from fuzz.case import ACTS, BOTH, NAMES, OPTIMIZERS, SCHEMES, TURNED
from fuzz.lookups import CALLS, LOOKUPS, SOURCES
from fuzz.models import LEAVES, RandomModel
from fuzz.play import case_of, play_all
from fuzz.run import Way
from fuzz.sides import KEPT, ORDERS
from fuzz.twins import KINDS, kind_of_average
from fuzz.wider import OPTIMIZERS as WAYS_TO_SPLIT
from fuzz.wider import SCHEDULES
from harness import run_ranks
from leftovers import with_leftovers

world_of = Way(None).world_of
SEEDS = (15, 108, 137, 167, 188, 213, 458, 504, 629, 650, 678, 687, 697, 704, 760, 769, 832, 859, 881)
WIDER_SEEDS = (10078, 10257, 10385, 10463, 10609, 10647)
LATE_PEERS_SEEDS = (100014, 100030, 100033, 100087, 100119)
FREE_SEEDS = (80099, 80139, 80185, 80214, 80234)  # in which masters are put together again
LOOKUP_SEEDS = (50042, 50089, 50213, 50215, 50230, 50233, 50736, 50784, 50824, 50980)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_jobs_equal_one_process(world: int) -> None:
    seeds = [
        seed for seed in SEEDS + WIDER_SEEDS + LOOKUP_SEEDS + FREE_SEEDS + LATE_PEERS_SEEDS if world_of(seed) == world
    ]
    for outcomes, left in run_ranks(world, with_leftovers, play_all, seeds, timeout=120):
        for outcome in outcomes:
            assert outcome.is_right, f"{outcome.worst:.2e} in {outcome.where}: {outcome.case}"
        assert max(left.values()) <= 0, left


def test_the_set_has_some_of_everything() -> None:
    cases = [case_of(seed, world_of(seed)) for seed in SEEDS]
    layers = frozenset().union(*(RandomModel(seed).features for seed in SEEDS))
    assert {kind.__name__ for kind in LEAVES} <= layers
    assert {"Chain", "Skipped", "Twice", "Recomputed", "Reads", "Pair", "Cut"} <= layers
    assert {"Branches", "Again", "Calls", "tied head", "tied blocks"} <= layers
    assert {case.precision for case in cases} == set(SCHEMES) - {"bf16, free"}
    assert {*NAMES, "hsdp"} <= {case.strategy for case in cases}
    assert {BOTH, TURNED} <= {case.grid[1] for case in cases if case.grid}
    assert {*ACTS, "give_up", "strand", "outdate"} == {act for case in cases for acts in case.acts for act in acts}
    drawn = frozenset().union(*(case.features for case in cases))
    assert {"hooks before", "hooks after", "replicate", "ignores", "late", "debug", "keeps", "peeks"} <= drawn
    assert {"two forwards", "zeroes"} <= drawn and {f"optimizer={name}" for name in OPTIMIZERS} & drawn
    assert {f"units={name}" for name in ("auto", "blocks", "layers", "nested", "groups", "pattern", "classes")} <= drawn
    assert {f"sides {order}" for order in ORDERS} <= drawn
    assert {kind for case in cases if case.sides for _, kind in case.sides.hooks} == set(KEPT)
    assert {case.sides.hooked for case in cases if case.sides and case.sides.hooks} == {"before", "after", "late"}
    assert {f"leaves {way}" for way in ("attribute", "buffer", "above", "argument", "head of detached")} <= layers


def test_the_wider_set_has_some_of_everything() -> None:
    cases = [case_of(seed, world_of(seed)) for seed in WIDER_SEEDS]
    drawn = frozenset().union(*(case.features for case in cases))
    assert {f"optimizers {way}" for way in WAYS_TO_SPLIT} - {"optimizers one"} <= drawn
    assert {f"schedule {kind}" for kind in SCHEDULES if kind} <= drawn
    assert {"overflow first", "overflow head", "unscaled by the optimizer", "uneven", "slip", "units=tree"} <= drawn
    assert {"act move", "act twin", "act average", "act rewind"} <= drawn
    kinds = {kind_of_average(case.seed) for case in cases if "act average" in case.features}
    assert kinds == set(KINDS)
    assert {case.accumulation for case in cases if case.wider.batches} >= {"each", "defer"}


def test_the_set_of_free_forms_has_some_of_everything() -> None:
    cases = [case_of(seed, world_of(seed)) for seed in FREE_SEEDS]
    assert {case.precision for case in cases} == {"bf16, free"} and all(case.clips_in_step for case in cases)
    assert {case.world for case in cases} == {2, 3, 4} and {case.patience for case in cases} == {1, 2, 3}
    assert {act for case in cases for acts in case.acts for act in acts} >= {"move", "rewind", "toggle", "load", "fail"}


def test_the_set_of_late_peers_has_some_of_everything() -> None:
    cases = [case_of(seed, world_of(seed)) for seed in LATE_PEERS_SEEDS]
    assert all(case.late_peers for case in cases) and {case.world for case in cases} == {2, 3, 4}
    assert {case.accumulation for case in cases} >= {"twice", "defer"} and any(case.keeps for case in cases)
    assert {act for case in cases for acts in case.acts for act in acts} >= {"move", "rewind", "toggle", "fail", "twin"}


def test_the_set_of_lookups_has_some_of_everything() -> None:
    cases = [case_of(seed, world_of(seed)) for seed in LOOKUP_SEEDS]
    layers = frozenset().union(*(RandomModel(seed).features for seed in LOOKUP_SEEDS))
    assert {kind.__name__ for kind in LOOKUPS} | {"Tied", "tied tables", "frozen block"} <= layers
    assert {"Skipped", "Twice", "Recomputed"} <= layers
    assert {f"looks up: {way}" for way in CALLS} | {f"rows by {source}" for source in SOURCES} <= layers
    assert {"table padding", "table by frequency", "table sparse", "table frozen", "bag mean", "bag max"} <= layers
    own_units = [case for case in cases if case.units == "tables" and case.strategy == "zero3" and case.world > 1]
    assert {(case.transport, case.slots) for case in own_units} >= {("c10d", 1), ("c10d", 2), ("peer", 1), ("peer", 3)}
    assert {case.accumulation for case in own_units} == {"none", "twice", "each", "defer"}
    assert {"none", "full", 2} <= {case.recompute for case in cases} and any(case.hooks for case in cases)
