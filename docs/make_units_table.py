"""Write the table of architectures into docs/units.md: `python docs/make_units_table.py`.

Trains every architecture on two ranks and in one process for the column of parity: about a minute.
`--check` writes nothing and only compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from architectures.models import ARCHITECTURES  # noqa: E402
from architectures.parity import WORLD, compare  # noqa: E402
from architectures.table import PAGE, with_table  # noqa: E402
from harness import run_ranks, shutdown  # noqa: E402


def words_of_parity() -> dict[str, str]:
    """One word for each architecture; ranks that disagree are both told."""
    outcomes = run_ranks(WORLD, compare, list(ARCHITECTURES), timeout=600)
    said = {name: [rank[number].word for rank in outcomes] for number, name in enumerate(ARCHITECTURES)}
    return {name: " / ".join(dict.fromkeys(words)) for name, words in said.items()}


if __name__ == "__main__":
    old = PAGE.read_text()
    new = with_table(old, words_of_parity())
    shutdown()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if new == old else "docs/units.md is out of date; run python docs/make_units_table.py")
    PAGE.write_text(new)
