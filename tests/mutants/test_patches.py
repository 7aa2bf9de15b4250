"""The seeded faults still fit the sources, and the random jobs still find faults."""

from __future__ import annotations

import subprocess
from pathlib import Path

from fuzz.play import Outcome, play_all
from harness import run_ranks
from mutants.faulty import faulty
from mutants.run import PATCHES, apply


def test_there_are_enough_and_each_says_what_it_breaks() -> None:
    assert len(PATCHES) >= 30
    for patch in PATCHES:
        first, blank, *_ = patch.read_text().splitlines()
        assert first and not first.startswith("---") and not blank, patch.name


def test_all_patches_fit(tmp_path: Path) -> None:
    apply(PATCHES[0], tmp_path)
    subprocess.run(["git", "apply", "-R", str(PATCHES[0])], cwd=tmp_path, check=True)
    for patch in PATCHES:
        done = subprocess.run(["git", "apply", "--check", str(patch)], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{patch.name}: the sources have moved on, draw it anew: {done.stderr}"


def play_with_fault(name: str, seed: int) -> tuple[Outcome, Outcome]:
    """The same job with the fault and without."""
    with faulty(PATCHES[0].with_name(f"{name}.patch")):
        (wrong,) = play_all([seed])
    (right,) = play_all([seed])
    return wrong, right


def test_a_fault_is_found() -> None:
    ((wrong, right),) = run_ranks(1, play_with_fault, "missed-accumulation", 8)
    assert right.is_right, right.where
    assert not wrong.is_right and wrong.worst > 1e-3, wrong.where
