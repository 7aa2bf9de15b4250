"""Random walks that have parted ranks once, and a few more; hundreds on demand: `python tests/fuzz/walks.py`."""

from __future__ import annotations

import pytest

from fuzz.walks import play_all
from harness import run_ranks
from parity.reference import TOLERANCE

SEEDS = {2: range(4), 3: range(2), 4: (12, 13, 14, 16)}


@pytest.mark.parametrize("world", SEEDS)
def test_walks_equal_one_process(world: int) -> None:
    for found in run_ranks(world, play_all, list(SEEDS[world]), timeout=120):
        assert max(found) <= TOLERANCE, dict(zip(SEEDS[world], found, strict=True))
