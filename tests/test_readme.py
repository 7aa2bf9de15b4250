"""The README is true: its programs run as it says, its links lead somewhere, its commands are the ones that CI runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(arguments: list[str], folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["python", "torchrun"])
def test_the_first_program(launcher: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[0])
    losses = re.findall(r"loss ([\d.]+)", run([*launcher, "program.py"], tmp_path))
    assert len(losses) == (2 if launcher else 1)
    assert all(float(loss) < 0.1 for loss in losses), "an untrained model has 0.45"


@pytest.mark.parametrize("index", range(1, len(PROGRAMS)))
def test_the_other_programs(index: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[index])
    run(["program.py"], tmp_path)


def test_the_first_program_is_short() -> None:
    assert len(PROGRAMS[0].strip().splitlines()) <= 12


def test_the_commands() -> None:
    first, second = (command.strip() for command in COMMANDS)
    for command in (first, second):
        assert command.startswith("pip install torch==2.13.0 && ") and "\n" not in command
    assert (ROOT / first.split()[-1]).is_file()
    assert second.endswith("python -m pytest")
    assert "grep -m 1 '^pip install .*pytest' README.md" in (ROOT / ".ci" / "run").read_text()


def test_the_example_of_the_first_command(tmp_path: Path) -> None:
    """A few steps of it; its full run takes a minute."""
    output = run([str(ROOT / "examples" / "first_steps.py"), "--steps", "3"], tmp_path)
    assert re.search(r"loss .*bigram", output, re.DOTALL)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"
