"""The seeded faults still fit the sources, and the random jobs still find faults."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mutants.run import PATCHES, apply, hunt


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


@pytest.mark.parametrize("name", ["missed-accumulation"])
def test_a_fault_is_found(name: str) -> None:
    (patch,) = [patch for patch in PATCHES if patch.stem == name]
    found = hunt(patch, "8", "--here", limit_s=90)  # one rank, in its own process
    assert found.seed is not None and found.kind == "wrong number", found
