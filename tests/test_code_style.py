"""Linter and type checker, with the settings of pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "examples", "benchmarks", "docs")


@pytest.mark.parametrize("tool", [("ruff", "check"), ("mypy",)], ids=" ".join)
def test_code_style(tool: tuple[str, ...]) -> None:
    folders = [name for name in FOLDERS if (ROOT / name).is_dir()] if tool[0] == "ruff" else []
    done = subprocess.run([sys.executable, "-m", *tool, *folders], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(tool)}\n{done.stdout}{done.stderr}"


def test_users_see_types() -> None:
    """Without the marker their type checker reads none of ours."""
    assert (ROOT / "src" / "lamina" / "py.typed").is_file()
    assert "Typing :: Typed" in (ROOT / "pyproject.toml").read_text()


def test_files_stay_readable() -> None:
    """A file that outgrows this holds a second noun; give that one a file of its own."""
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sorted((ROOT / "src").rglob("*.py"))
        if (lines := path.read_text().count("\n")) > 450
    }
    assert not long
