"""Three float64 steps on two ranks equal one process, for every architecture of the table, with automatic units."""

from __future__ import annotations

import pytest

from architectures.models import ARCHITECTURES
from architectures.parity import TOLERANCE, WORLD, compare
from architectures.table import PAGE, parity_of_page
from harness import run_ranks

AT_A_TIME = 5
GROUPS = [list(ARCHITECTURES)[first : first + AT_A_TIME] for first in range(0, len(ARCHITECTURES), AT_A_TIME)]


@pytest.mark.parametrize("names", GROUPS, ids=", ".join)
def test_three_steps_equal_one_process(names: list[str]) -> None:
    said = parity_of_page(PAGE.read_text())
    for rank, outcomes in enumerate(run_ranks(WORLD, compare, names)):
        for outcome in outcomes:
            assert said[outcome.name] == outcome.word, "run python docs/make_units_table.py"
            if not outcome.refusal:
                assert max(outcome.worst.values()) <= TOLERANCE, (rank, outcome)
