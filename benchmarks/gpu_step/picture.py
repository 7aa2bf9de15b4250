"""Draw the speed and memory of ways in results/ for the front page: `python benchmarks/gpu_step/picture.py [FILE]`."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
PICTURE = HERE / "speed.svg"
SERIES = {"lamina, peer": "#1b6ca8", "lamina, NCCL": "#7fb2d9", "FSDP2": "#c9c9c9"}  # colours
COMPILED = ("lamina-peer-compiled", "lamina-compiled", "fsdp2-compiled")
EAGER = ("lamina-peer", "lamina", "fsdp2-fp32")
CAPTURED = ("lamina-peer-captured", "lamina-captured", "")
ROWS = {  # files of two H200, and ways in the order of SERIES
    "1.27 B": ("core_1b", EAGER),
    "1.27 B, compiled": ("compiled_1b", COMPILED),
    "3 B, recomputed": ("recompute_3b", EAGER),
    "8 B, recomputed": ("recompute_8b", EAGER),
    "8 B, compiled": ("compiled_8b", COMPILED),
    "64 experts": ("experts", EAGER),
    "48 narrow blocks\n2048 tokens": ("deep_2048", EAGER),
    "1.27 B\n2048 tokens": ("eager_1b_2048", EAGER),
    "the same, captured": ("captured_1b_2048", CAPTURED),
}


def rows_of(name: str) -> dict[str, dict]:
    data = json.loads((HERE / "results" / f"{name}_2xH200.json").read_text())
    return {row["way"]: row for row in data["rows"]}


def share(row: dict, bound: dict) -> float:
    """Of the bound's speed: the median over rounds, as in the table."""
    return statistics.median(bound["rounds_ms"][key] / ms for key, ms in row["rounds_ms"].items())


def main(path: Path) -> None:
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "lamina"  # the same ids at each run
    figure, (speed, memory) = plt.subplots(1, 2, figsize=(9.5, 5), sharey=True, width_ratios=(3, 2), layout="tight")
    height = 0.8 / len(SERIES)
    for place, (name, ways) in enumerate(ROWS.values()):
        rows = rows_of(name)
        bound = rows[next(f"bound{kind}" for kind in ("-captured", "-compiled", "") if ways[0].endswith(kind))]
        for number, (way, color) in enumerate(zip(ways, SERIES.values(), strict=True)):
            if way in rows:
                at = place + (number - 1) * height
                found, used_gib = share(rows[way], bound), rows[way]["used_gib"]
                speed.barh(at, found, height, color=color)
                speed.text(found + 0.01, at, f"{found:.2f}", va="center", fontsize=7)
                memory.barh(at, used_gib, height, color=color)
                memory.text(used_gib + 1, at, f"{used_gib:.1f}", va="center", fontsize=7)
    speed.set_yticks(range(len(ROWS)), list(ROWS), fontsize=8)
    speed.invert_yaxis()
    speed.axvline(1, color="black", linewidth=0.8, zorder=0)
    speed.set(xlim=(0, 1.16), title="speed; 1: the same model without communication")
    memory.set(xlim=(0, 110), title="GiB in use on each GPU")
    for axes in (speed, memory):
        axes.title.set_fontsize(9)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    patches = [plt.Rectangle((0, 0), 1, 1, color=color) for color in SERIES.values()]
    memory.legend(patches, list(SERIES), fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
