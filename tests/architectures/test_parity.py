"""Three float64 steps on two ranks equal one process, for every architecture of the table, with automatic units."""

from __future__ import annotations

import pytest

from architectures.models import ARCHITECTURES
from architectures.parity import TOLERANCE, WORLD, compare
from architectures.table import PAGE, parity_of_page
from harness import run_ranks

AT_A_TIME = 5
GROUPS = [list(ARCHITECTURES)[first : first + AT_A_TIME] for first in range(0, len(ARCHITECTURES), AT_A_TIME)]
STILL = {  # fixed sinusoids; a norm that the model has and the features for the text do not pass
    "whisper": {"model.encoder.embed_positions.weight"},
    "llava": {"model.vision_tower.post_layernorm.weight", "model.vision_tower.post_layernorm.bias"},
}


@pytest.mark.parametrize("names", GROUPS, ids=", ".join)
def test_three_steps_equal_one_process(names: list[str]) -> None:
    said = parity_of_page(PAGE.read_text())
    for rank, outcomes in enumerate(run_ranks(WORLD, compare, names, timeout=180)):
        for outcome in outcomes:
            assert said[outcome.name] == outcome.word, (rank, outcome, "run python docs/make_units_table.py")
            if not outcome.refusal:
                assert max(outcome.worst.values()) <= TOLERANCE, (rank, outcome)
                assert set(outcome.still) == STILL.get(outcome.name, set())
                assert outcome.gathers > 0


def test_the_comparison_sees_ranks_on_the_same_data() -> None:
    """Each rank's part matters in every model: a reduction that lost one would be seen."""
    for outcomes in run_ranks(WORLD, compare, ["llama", "unet"], same_data=True):
        assert all(max(outcome.worst.values()) > 1e-3 for outcome in outcomes)
