"""Can the random jobs fail? Seeded faults of the runtime, and how many seeds it takes to find each.

    python tests/mutants/run.py [--only stale-slot,...] [--save docs/fuzz-mutants.md]

Every patch is applied to a copy of the package, outside the checkout, and random jobs run on that copy until one is not
right; that job must be right on the package as it is. What stands above the diff in a patch says what it breaks. The
saved table grows row by row; faults that it says were found are not hunted again.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.models import LOOKUPS_FROM
from fuzz.wider import WIDER_FROM

ROOT = Path(__file__).parents[2]
PATCHES = sorted(Path(__file__).with_name("patches").glob("*.patch"))
MOST_SEEDS = 500
# faults of what only jobs from seed WIDER_FROM on do
OF_WIDER_JOBS = frozenset(
    {
        "copy-shares-weights",
        "late-steps-joined",
        "left-out-step-counts",
        "load-unnoticed",
        "moments-of-another-place",
        "nan-between-gradients",
        "overflow-of-one-rank",
        "run-out-ranks-count",
        "waiting-sums-not-scaled",
    }
)
# faults of what only tables lead to
OF_LOOKUPS = frozenset({"neighbour-not-let-go", "neighbour-taken-for-zeros", "readers-taken-for-lookups"})
LIMIT_S = 900
HEAD = "| fault | what it breaks | seeds until found | it showed as | seen |\n|---|---|---|---|---|\n"


@dataclass(frozen=True)
class Hunt:
    """What became of a fault."""

    seed: int | None  # the first that was not right
    how: str  # what the job said
    tried: int  # seeds

    @property
    def kind(self) -> str:
        """How it showed: a wrong number, an error of lamina's or of another, a hang."""
        if self.seed is None:
            return ""
        types = set(re.findall(r"ranks? [\d, \[\]]+: ([A-Z]\w+)(?::|;|$)", self.how))
        if "Hung" in types:
            return "hang"
        if _is_comparison(self.how):
            return "a gradient where there is none, or none where there is one"
        named = {name for name in types if (ROOT / "src/lamina/errors.py").read_text().find(f"class {name}(") >= 0}
        if named:
            return f"named error ({', '.join(sorted(named))})"
        return f"error ({', '.join(sorted(types))})" if types else "wrong number"


def apply(patch: Path, folder: Path) -> None:
    """A copy of the package in `folder`/src, with the patch.

    Raises:
        CalledProcessError: the sources have moved on.
    """
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True, capture_output=True, text=True)


def hunt(patch: Path, seeds: str, *options: str, limit_s: float = LIMIT_S) -> Hunt:
    """Run jobs on the patched package until one is not right, or the time is over."""
    with tempfile.TemporaryDirectory() as name:
        apply(patch, Path(name))
        said = _run_jobs(Path(name, "src"), seeds, "--until-wrong", *options, limit_s=limit_s)
    blocks = re.findall(r"^seed (\d+): (.*?)^    seed=", said, re.MULTILINE | re.DOTALL)
    found = sorted((int(seed), _errors_first(how)) for seed, how in blocks)
    tried = [int(count) for count in re.findall(r"^(\d+) seeds", said, re.MULTILINE)]
    seed, how = found[0] if found else (None, "" if tried else said.strip()[-300:])
    return Hunt(seed, how, tried[-1] if tried else 0)


def is_right_without(seed: int) -> bool:
    """The job of this seed on the package as it is."""
    said = _run_jobs(ROOT / "src", str(seed), limit_s=LIMIT_S)
    return re.search(r"^1 seeds in \d+ s: 0 wrong$", said, re.MULTILINE) is not None


def _run_jobs(source: Path, seeds: str, *options: str, limit_s: float) -> str:
    """What the jobs print, as far as they came within the limit; nothing of them is left running."""
    command = [sys.executable, str(ROOT / "tests/fuzz/run.py"), "--seeds", seeds, *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), str(ROOT / "tests")])}
    with tempfile.TemporaryFile("w+") as said:
        jobs = subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            jobs.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(jobs.pid, signal.SIGKILL)
            jobs.wait()
        said.seek(0)
        return said.read()


def row_of(patch: Path, limit_s: float) -> str:
    """Hunt one fault: its row of the table."""
    what = patch.read_text().splitlines()[0]
    first = WIDER_FROM if patch.stem in OF_WIDER_JOBS else LOOKUPS_FROM if patch.stem in OF_LOOKUPS else 0
    result = hunt(patch, f"{first}:{first + MOST_SEEDS}", limit_s=limit_s)
    if result.seed is None:
        return f"| {patch.stem} | {what} | not found in {result.tried} | | {_short(result.how)} |\n"
    kind = result.kind if is_right_without(result.seed) else "not right without the fault either"
    of_which = f" from {first}" if first else ""
    return f"| {patch.stem} | {what} | {result.seed - first + 1}{of_which} | {kind} | {_short(result.how)} |\n"


def _errors_first(how: str) -> str:
    """What ranks said, without tracebacks; a comparison that failed comes before what other ranks then said of it."""
    said = re.findall(r"^(?:ranks? [\d, \[\]]+: .*)$", how, re.MULTILINE)
    return "; ".join(sorted(said, key=lambda line: not _is_comparison(line))) or how.strip()


def _is_comparison(line: str) -> bool:
    return re.search(r"AssertionError: (gradient|optimizer state) of `", line) is not None


def _short(how: str) -> str:
    return re.sub(r"\s+", " ", how).replace("|", "/")[:90]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one fault")
    options = parser.parse_args()
    wanted = set(options.only.split(",")) - {""}
    rows: dict[str, str] = {}
    if options.save is not None and options.save.exists():
        rows = {line.split()[1]: line for line in options.save.read_text().splitlines(keepends=True)[2:]}
    for patch in PATCHES:
        if (wanted and patch.stem not in wanted) or "not found" not in rows.get(patch.stem, "not found"):
            continue
        began = time.monotonic()
        rows[patch.stem] = row_of(patch, options.limit)
        print(f"{time.monotonic() - began:4.0f} s  {rows[patch.stem]}", end="", flush=True)
        if options.save is not None:
            options.save.write_text(HEAD + "".join(rows[name] for name in sorted(rows)))


if __name__ == "__main__":
    main()
