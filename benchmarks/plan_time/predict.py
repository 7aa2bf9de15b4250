"""Steps and memory of today's runtime on two H200, forecast before anyone has run them.

    python benchmarks/plan_time/predict.py [--save benchmarks/plan_time/predictions_two_gpus.md]    # no GPU

Rows of benchmarks/gpu_step, whose command runs them; what is measured later stands beside them in results/steps.md.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu_step"))

from model import Model

import lamina
from lamina.planner.machine import load_machine
from lamina.planner.measure import measure
from lamina.planner.measure_data import Measured
from lamina.planner.memory import forecast_memory
from lamina.planner.time import forecast_time
from lamina.planner.workload import Choice

LENGTH, WORLD = 2048, 2


@dataclass(frozen=True)
class Rows:
    """Rows of one model, and the options of gpu_step/run.py that make them."""

    size: str
    tokens: int
    options: str
    choices: tuple[tuple[str, Choice], ...]
    recompute: str = "none"

    def measured(self) -> Measured:
        with torch.device("meta"):
            model: nn.Module = Model(self.size)
        precision = lamina.Precision(compute=torch.bfloat16, keep=())
        return measure(model, self.tokens // LENGTH, LENGTH, precision=precision, recompute=self.recompute)


def both(**how: object) -> tuple[tuple[str, Choice], ...]:
    named = (("lamina", "c10d"), ("lamina-peer", "peer"))
    return tuple((way, Choice("zero3", WORLD, transport=transport, **how)) for way, transport in named)  # type: ignore[arg-type]


STRATEGIES = tuple((f"lamina-{name}", Choice(name, WORLD)) for name in ("ddp", "zero1", "zero2"))
ROWS = (
    Rows("1b", 8192, "", (*both(), *STRATEGIES)),
    Rows("1b", 2048, "--tokens 2048", both()),
    Rows("1b", 2048, "--tokens 2048, captured", both(captured=True)),
    Rows("1b", 8192, "compiled", both(compiled=True)),
    Rows("1b", 4096, "--tokens 4096 --micro-batches 4", both(accumulation=4)),
    Rows("3b", 4096, "--size 3b --tokens 4096 --recompute", both(recompute="full"), "full"),
    Rows("8b", 8192, "--size 8b, compiled", both(compiled=True)[1:]),
    Rows("experts", 8192, "--size experts", both()),
)


def report() -> str:
    machine = load_machine("h200")
    lines = ["| model | options | way | ms a step | used, GiB |", "|---|---|---|---|---|"]
    for rows in ROWS:
        measured = rows.measured()
        for way, choice in rows.choices:
            ms = forecast_time(measured.workload, choice, machine).total_ms
            used_gib = forecast_memory(measured, choice, machine).used_bytes / 2**30
            lines.append(f"| {rows.size} | `{rows.options}` | {way} | {ms:.1f} | {used_gib:.2f} |")
            print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=Path, default=None)
    options = parser.parse_args()
    text = report()
    if options.save is not None:
        options.save.write_text(text)


if __name__ == "__main__":
    main()
