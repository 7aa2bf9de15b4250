"""A fixed set of random jobs; thousands more on demand: `python tests/fuzz/run.py --seeds 0:5000`."""

from __future__ import annotations

import pytest

from fuzz.models import LEAVES, RandomModel
from fuzz.play import play_all
from fuzz.run import world_of
from harness import run_ranks

SEEDS = range(24)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_jobs_equal_one_process(world: int) -> None:
    seeds = [seed for seed in SEEDS if world_of(seed) == world]
    for outcomes in run_ranks(world, play_all, seeds, timeout=120):
        for outcome in outcomes:
            assert outcome.is_right, f"{outcome.worst:.2e} in {outcome.where}: {outcome.case}"


def test_the_set_has_every_kind_of_layer() -> None:
    seen = frozenset().union(*(RandomModel(seed).features for seed in SEEDS))
    assert {kind.__name__ for kind in LEAVES} | {"Chain", "Skipped", "Twice", "Recomputed", "Reads", "Pair"} <= seen
