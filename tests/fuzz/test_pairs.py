"""A few random jobs of two models; more on demand: `python tests/fuzz/pairs.py --seeds 0:200 --world 4`."""

from __future__ import annotations

import pytest

from fuzz.models import RandomModel
from fuzz.pairs import TOLERANCE, WAYS, draw_pair, play_all
from harness import run_ranks
from leftovers import with_leftovers

SEEDS = {2: (0, 1, 2, 13), 3: (8, 12, 27, 258)}


@pytest.mark.parametrize("world", SEEDS)
def test_random_pairs_equal_one_process(world: int) -> None:
    for rows, left in run_ranks(world, with_leftovers, play_all, SEEDS[world], timeout=120):
        for seed, (worst, where) in zip(SEEDS[world], rows, strict=True):
            assert worst <= TOLERANCE, f"seed {seed}: {worst:.2e} in {where}"
        assert max(left.values()) <= 0, left


def test_the_set_has_every_way() -> None:
    assert {draw_pair(seed, world).way for world, seeds in SEEDS.items() for seed in seeds} == set(WAYS)


def test_there_is_a_job_for_every_seed() -> None:
    """And the gradients that come to one model come to the other, too."""
    for seed in (280, 5000, 100_000):
        assert all(not RandomModel(case.seed).features & {"Cut", "Instead"} for case in draw_pair(seed, 3).cases)
