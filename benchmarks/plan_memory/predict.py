"""Forecasts of the rows that run.py measures, as a table. Needs no GPU.

python benchmarks/plan_memory/predict.py --machine h100 > benchmarks/plan_memory/predictions_two_gpu.md
python benchmarks/plan_memory/predict.py --machine h200 >> benchmarks/plan_memory/predictions_two_gpu.md

Where a device is smaller than what the allocator would like to have, the row is followed once more with that limit:
either it runs all the same, the allocator giving memory back now and then, or it does not fit.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from rows import LENGTH, Model, Row, precision, rows_of, wire_of

from lamina.core.strategy import resolve
from lamina.planner.machine import Machine, load_machine
from lamina.planner.measure import measure
from lamina.planner.memory import forecast_memory
from lamina.planner.reserved import reserve
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
    print("Written by `predict.py` before any of these rows was run with this code; `run.py` measures them.")
    print("*Retries*: times that the allocator gives memory back to a device that is full.\n")
    print("| model | tokens | strategy | recompute | wire | allocated | reserved | used | fits | retries | peak at |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows_of(options.gpus):
        print("| " + " | ".join([*map(str, row), *forecast(row, options.gpus, machine)]) + " |")
    print()


def forecast(row: Row, gpus: int, machine: Machine) -> list[str]:
    """Allocated, reserved, used, whether it runs, retries, and where its peak is."""
    choice = Choice(row.strategy, gpus, recompute=row.recompute, wire=wire_of(row))
    found = measured(row.size, row.tokens, row.recompute)
    memory = forecast_memory(found, choice, machine)
    beside_bytes = memory.used_bytes - memory.reserved_bytes
    sizes_bytes, fits, retries = [memory.allocated_bytes, memory.reserved_bytes, memory.used_bytes], "yes", "0"
    if memory.used_bytes > machine.memory_bytes:
        limit_bytes = int(machine.memory_bytes) - beside_bytes
        limited = reserve(found, memory.state, resolve(row.strategy, gpus), limit_bytes=limit_bytes)
        fits, retries = ("no", "") if limited is None else ("yes", str(limited.retries))
        if limited is not None:
            sizes_bytes[1:] = [limited.reserved_bytes, limited.reserved_bytes + beside_bytes]
    return [*(f"{size / GIB:.2f}" for size in sizes_bytes), fits, retries, memory.peak.place]


if __name__ == "__main__":
    main()
