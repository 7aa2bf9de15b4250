"""A fixed set of random jobs; thousands more on demand: `python tests/fuzz/run.py --seeds 0:5000`."""

from __future__ import annotations

import pytest

from fuzz.models import LEAVES
from fuzz.play import play_all
from fuzz.run import run_seeds, world_of
from harness import run_ranks

SEEDS = range(48)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_jobs_equal_one_process(world: int) -> None:
    seeds = [seed for seed in SEEDS if world_of(seed) == world]
    for outcomes in run_ranks(world, play_all, seeds, timeout=120):
        for outcome in outcomes:
            assert outcome.is_right, f"{outcome.worst:.2e} in {outcome.where}: {outcome.case}"


def test_the_set_has_every_kind_of_layer_and_few_refusals() -> None:
    rows = run_seeds([seed for seed in SEEDS if world_of(seed) == 1])
    outcomes = [outcome for _, _, outcome in rows if outcome is not None]
    seen = frozenset().union(*(outcome.features for outcome in outcomes))
    assert {kind.__name__ for kind in LEAVES} | {"Chain", "Skipped", "Twice", "Recomputed", "Reads", "Pair"} <= seen
    assert sum(bool(outcome.refused) for outcome in outcomes) <= 1
