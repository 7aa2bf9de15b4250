"""Draw the pictures of docs/plans.md from real plans: `python docs/make_pictures.py [folder]`.

Drawn by hand they would drift from what the code does. The files are the same bytes at each run, so a changed
picture in a diff is a changed plan.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.core.arena import Demand, Packing, pack
from lamina.core.program import UnitTraits, plan_step
from lamina.trace.draw import draw_packing, draw_program

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB_BYTES = 2**20


def three_blocks(slots: int) -> Packing:
    return pack([Demand(f"block {i}", 64 * MIB_BYTES, resident=False) for i in range(3)], slots)


def small_model(slots: int = 3) -> Packing:
    """A root (final norm), an embedding, six equal blocks and a head."""
    gathered = [("embedding", 150), *((f"block {i}", 64) for i in range(6)), ("head", 150)]
    return pack(
        [
            Demand("root", 8 * MIB_BYTES, resident=True),
            *(Demand(n, s * MIB_BYTES, resident=False) for n, s in gathered),
        ],
        slots,
    )


def pictures() -> dict[str, Figure]:
    drawn = {}
    for file_name, slots in (("program", 3), ("program_one_slot", 1)):
        packing = three_blocks(slots)
        program = plan_step([UnitTraits()] * 3, packing.conflicts)
        title = f"three units, {slots} slot{'s' if slots > 1 else ''}:  {program.text()}"
        drawn[file_name] = draw_program(program, conflicts=packing.conflicts, title=title)
    packing = small_model()
    share = packing.total_bytes / sum(d.size_bytes for d in packing.demands)
    drawn["arena"] = draw_packing(
        packing, title=f"arena of {packing.total_bytes / MIB_BYTES:.0f} MiB: {share:.0%} of all units, 3 slots"
    )
    return drawn


def main(folder: Path) -> None:
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "lamina"  # the same ids at each run
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in pictures().items():
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "pictures")
