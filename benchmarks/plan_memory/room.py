"""What torch's allocator reserves with and without room for gradients (src/lamina/core/room.py), and with segments that
are expandable (src/lamina/core/expandable.py) besides: forecasts, no GPU.

Of models that are made unit by unit; those that were built on the device: compare.py.

python benchmarks/plan_memory/room.py > benchmarks/plan_memory/results/room.md             # some minutes
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from predict import GIB, measured

from lamina.core import room
from lamina.core.strategy import resolve
from lamina.planner.machine import load_machine
from lamina.planner.memory import forecast_memory
from lamina.planner.reserved import reserve
from lamina.planner.workload import Choice


class Case(NamedTuple):
    size: str
    tokens: int
    recompute: str
    strategy: str
    gpus: int
    accumulation: int = 1


CASES = (
    Case("1b", 8192, "none", "zero3", 1),
    Case("3b", 4096, "none", "zero3", 1),
    Case("1b", 2048, "none", "zero3", 2),
    Case("1b", 8192, "none", "zero3", 2),
    Case("1b", 8192, "selective", "zero3", 2),
    Case("1b", 8192, "none", "zero3", 2, accumulation=4),
    Case("1b", 8192, "none", "zero2", 2),
    Case("1b", 8192, "none", "ddp", 2),
    Case("1b", 4096, "none", "zero1", 4, accumulation=2),
    Case("3b", 4096, "none", "zero3", 2),
    Case("3b", 2048, "selective", "zero3", 4),
    Case("3b", 2048, "selective", "zero3", 2),
    Case("8b", 4096, "none", "zero3", 4),
    Case("8b", 4096, "none", "zero3", 8),
    Case("3b", 8192, "none", "zero3", 16),
    Case("8b", 4096, "none", "zero3", 64),
    Case("1b", 8192, "full", "zero3", 2),
    Case("3b", 4096, "full", "zero3", 2),
    Case("3b", 8192, "full", "zero3", 4, accumulation=2),
    Case("8b", 4096, "full", "zero3", 2),
    Case("8b", 4096, "full", "zero1", 8),
    Case("8b", 4096, "full", "zero3", 64),
)


def main() -> None:
    columns = "model | tokens | recompute | strategy | GPUs | micro-batches"
    print(f"| {columns} | allocated | reserved before | with room | expandable |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    shares = []
    for case in CASES:
        model, factors = measured(case.size, case.tokens, case.recompute), resolve(case.strategy, case.gpus)
        choice = Choice(case.strategy, case.gpus, recompute=case.recompute, accumulation=case.accumulation)
        state = forecast_memory(model, choice, load_machine("h200")).state
        part = room.part(case.recompute, case.gpus, halved=False)
        runs = [
            reserve(model, state, factors, case.accumulation, room_part=its_part, expandable=expandable)
            for its_part, expandable in ((0.0, False), (part, False), (part, True))
        ]
        before, now, grown = (run.reserved_bytes for run in runs if run is not None)
        allocated = max(run.allocated_bytes for run in runs if run is not None)
        shares.append((before / allocated, now / allocated, grown / allocated))
        sizes = f"{allocated / GIB:.2f} | {before / GIB:.2f} | {now / GIB:.2f} ({now / before - 1:+.1%})"
        sizes += f" | {grown / GIB:.2f} ({grown / now - 1:+.1%})"
        print("| " + " | ".join(map(str, case)) + f" | {sizes} |", flush=True)
    before, now, grown = (statistics.mean(column) for column in zip(*shares, strict=True))
    print(f"\nReserved over allocated, in the mean: {before:.3f} before, {now:.3f} with room, {grown:.3f} expandable.")


if __name__ == "__main__":
    main()
