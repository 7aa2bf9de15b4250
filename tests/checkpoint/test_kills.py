"""The small version of benchmarks/checkpoint/kills.py: one kill in every phase of a save, and a restart after each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from forked_programs import run_warm

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "checkpoint" / "kills.py"
PHASES = ["stage", "write", "fsync", "manifest", "rename", "retention"]


def test_a_rank_killed_in_any_phase_of_a_save(tmp_path: Path) -> None:
    """The script starts a job, kills, starts it anew, and compares losses with a run that was never interrupted."""
    command = [sys.executable, str(SCRIPT), "--kills", "1", "--width", "64", "--grace", "0", "--folder", str(tmp_path)]
    done = run_warm(subprocess.run, command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    tallies = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [tally["phase"] for tally in tallies] == PHASES
    for tally in tallies:
        assert tally["kills"] == tally["same_losses"] == tally["newest_survived"] + tally["earlier_survived"] == 1
        assert tally["lost"] == 0
