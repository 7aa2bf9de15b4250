"""Can the random jobs fail? Seeded faults of the runtime, and how many seeds it takes to find each.

    python tests/mutants/run.py [--only stale-slot,...] [--save docs/fuzz-mutants.md]

Every patch is applied to a copy of the package, outside the checkout, and random jobs run on that copy until one is not
right. What stands above the diff in a patch says what it breaks.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATCHES = sorted(Path(__file__).with_name("patches").glob("*.patch"))
MOST_SEEDS = 500
LIMIT_S = 900


def apply(patch: Path, folder: Path) -> None:
    """A copy of the package in `folder`/src, with the patch.

    Raises:
        CalledProcessError: the sources have moved on.
    """
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True, capture_output=True, text=True)


def hunt(patch: Path, seeds: str) -> tuple[int | None, str]:
    """The first seed that is not right on the patched package, and how it showed."""
    with tempfile.TemporaryDirectory() as name:
        apply(patch, Path(name))
        paths = os.pathsep.join([str(Path(name, "src")), str(ROOT / "tests")])
        command = [sys.executable, str(ROOT / "tests/fuzz/run.py"), "--seeds", seeds, "--until-wrong"]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=LIMIT_S
        )
    found = sorted((int(seed), how) for seed, how in re.findall(r"^seed (\d+): (.*)$", done.stdout, re.MULTILINE))
    return found[0] if found else (None, done.stderr.strip()[-200:] if done.returncode else "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    wanted = set(options.only.split(",")) - {""}
    lines = ["| fault | what it breaks | seeds until found | how it showed |", "|---|---|---|---|"]
    for patch in PATCHES:
        if wanted and patch.stem not in wanted:
            continue
        began = time.monotonic()
        seed, how = hunt(patch, f"0:{MOST_SEEDS}")
        what = patch.read_text().splitlines()[0]
        how = re.sub(r"\s+", " ", how).replace("|", "/")[:110]
        lines.append(f"| {patch.stem} | {what} | {'not found' if seed is None else seed + 1} | {how} |")
        print(f"{time.monotonic() - began:4.0f} s  {lines[-1]}", flush=True)
    if options.save is not None:
        options.save.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
