"""Forecasts of the rows that run.py measures, as a table. Needs no GPU.

python benchmarks/plan_memory/predict.py > benchmarks/plan_memory/predictions.md
python benchmarks/plan_memory/predict.py --gpus 1 --machine h200 > benchmarks/plan_memory/predictions_one_gpu.md
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from rows import LENGTH, Model, precision, rows_of

from lamina.planner.machine import load_machine
from lamina.planner.measure import measure
from lamina.planner.memory import forecast_memory
from lamina.planner.workload import Choice

GIB = 1 << 30


@functools.cache
def measured(size: str, tokens: int, recompute: str):
    with torch.device("meta"):
        model = Model(size)
    return measure(model, tokens // LENGTH, LENGTH, precision=precision(), recompute=recompute)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--machine", default="h100")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = load_machine(options.machine)
    print(f"# Predictions for {options.gpus} x {machine.device}, GiB\n")
    print("Written by `predict.py` before any of these rows was run; `run.py` measures them.\n")
    print("| model | tokens a GPU | strategy | recompute | allocated | reserved | used | fits | peak at |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows_of(options.gpus):
        choice = Choice(row.strategy, options.gpus, recompute=row.recompute)
        f = forecast_memory(measured(row.size, row.tokens, row.recompute), choice, machine)
        fits = "yes" if f.used_bytes <= f.device_bytes else "no"
        figures = " | ".join(f"{size / GIB:.2f}" for size in (f.allocated_bytes, f.reserved_bytes, f.used_bytes))
        print(f"| {row.size} | {row.tokens} | {row.strategy} | {row.recompute} | {figures} | {fits} | {f.peak.place} |")


if __name__ == "__main__":
    main()
