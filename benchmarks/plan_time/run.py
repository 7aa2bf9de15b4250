"""Does the forecast of a step's time hold for runs that it was not fitted on?

    python benchmarks/plan_time/run.py [ROWS.csv] [--save results/fsdp_measured.md] [--worst 12]

Few constants, the same for all models, sizes and machines, are fitted to some rows and asked for others: whole model
sizes left out in turn, large runs from small ones, whole GPU types. Rates of machines come from the files that ship
with lamina, and nothing is fitted to a row.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from fit import Constant, fit
from mpt import Run, read_run

from lamina.planner.machine import Machine, load_machine
from lamina.planner.rates import Reached
from lamina.planner.time import forecast_time

HERE = Path(__file__).parent
CONSTANTS = (
    Constant("matrix", 0.95, 0.5, 1.3),
    Constant("attention", 0.7, 0.2, 1.5),
    Constant("memory", 0.65, 0.3, 1.0),
    Constant("interference", 1.5, 0.0, 4.0),
    Constant("step_ms", 40.0, 0.0, 300.0),
    Constant("fp8_speedup", 1.6, 1.0, 2.0),
)
# Not fitted: what these rows cannot tell, from elsewhere.
FIXED = {"network": 0.8, "unit_host_ms": 1.8}
DIFFERENT = 0.05  # runs nearer than this have no order
SMALL_GPUS, LARGE_GPUS = 64, 128


class Model:
    """Forecasts of all rows for given constants."""

    def __init__(self, runs: Sequence[Run], constants: Sequence[Constant] = CONSTANTS) -> None:
        self.runs, self.constants = runs, constants
        self.seconds = np.array([run.step_s for run in runs])
        self.machines: dict[str, Machine] = {name: load_machine(name) for name in {run.machine for run in runs}}

    def predict(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        reached = Reached(**FIXED, **{c.name: float(value) for c, value in zip(self.constants, x, strict=True)})
        found = []
        for row in rows:
            run = self.runs[row]
            found.append(forecast_time(run.workload, run.choice, self.machines[run.machine], reached).total_ms)
        return np.array(found) / 1e3

    def fit(self, rows: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
        constants = self.constants
        if start is not None:
            constants = [dataclasses.replace(c, start=float(s)) for c, s in zip(constants, start, strict=True)]
        return fit(self.predict, self.seconds, rows, constants)

    def errors(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Forecast over measured, less one."""
        return self.predict(x, rows) / self.seconds[rows] - 1


def rows_where(runs: Sequence[Run], holds: Callable[[Run], bool]) -> np.ndarray:
    return np.array([i for i, run in enumerate(runs) if holds(run)], dtype=int)


def left_out(model: Model, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Constants from all rows but `test`, and the errors on `test`."""
    train = np.setdiff1d(np.arange(len(model.runs)), test)
    x = model.fit(train)
    return x, model.errors(x, test)


def evaluate(runs: Sequence[Run], worst: int) -> tuple[str, dict[str, float]]:
    """The report, as Markdown, and the constants fitted to all rows."""
    model, everything = Model(runs), np.arange(len(runs))
    x = model.fit(everything)
    lines = ["| rows fitted on | rows asked for | rows | mean error | median | bias |", "|---|---|---|---|---|---|"]

    def row(fitted: str, asked: str, errors: np.ndarray) -> None:
        size = np.abs(errors)
        lines.append(
            f"| {fitted} | {asked} | {len(errors)} | {size.mean():.2%} | {np.median(size):.2%} | {errors.mean():+.2%} |"
        )

    row("all", "the same", model.errors(x, everything))
    crossed = np.zeros(len(runs))
    for name in dict.fromkeys(run.model for run in runs):
        test = rows_where(runs, lambda run, name=name: run.model == name)
        _, crossed[test] = left_out(model, test)
        row(f"other sizes than {name}", name, crossed[test])
    row("**other sizes**", "**each size in turn**", crossed)
    row("the same, no model: one share of the rate a GPU type", "each size in turn", one_share(model))
    large = rows_where(runs, lambda run: run.gpus >= LARGE_GPUS)
    small = rows_where(runs, lambda run: run.gpus <= SMALL_GPUS)
    if len(large) and len(small):
        row(f"**<= {SMALL_GPUS} GPUs**", f"**>= {LARGE_GPUS} GPUs**", model.errors(model.fit(small), large))
    machines = sorted({run.machine for run in runs})
    kinds = [(name, [name]) for name in machines]
    kinds.append(("both A100", [name for name in machines if name.startswith("a100")]))
    for title, names in kinds:
        test = rows_where(runs, lambda run, names=names: run.machine in names)
        if 0 < len(test) < len(runs):
            row(f"other GPUs than {title}", title, left_out(model, test)[1])
    lines += ["", "Constants, fitted to all rows: " + text_of(model, x), "", order_of(runs, crossed)]
    lines += ["", f"The {worst} worst, each size left out:", ""]
    lines += ["| run | error |", "|---|---|"]
    lines += [f"| {runs[i].title} | {crossed[i]:+.1%} |" for i in np.argsort(-np.abs(crossed))[:worst]]
    return "\n".join(lines) + "\n", {c.name: float(v) for c, v in zip(CONSTANTS, x, strict=True)}


def one_share(model: Model) -> np.ndarray:
    """What a rule of thumb gives: every run reaches the mean share of its GPU's rate that other sizes reach."""
    runs = model.runs
    plain_s = np.array([operations(run) / model.machines[run.machine].matrix_flops_per_s for run in runs])
    shares, errors = plain_s / model.seconds, np.zeros(len(runs))
    for i, run in enumerate(runs):
        others = rows_where(runs, lambda other, run=run: other.machine == run.machine and other.model != run.model)
        mean = shares[others].mean() if len(others) else shares.mean()
        errors[i] = plain_s[i] / mean / model.seconds[i] - 1
    return errors


def operations(run: Run) -> float:
    """Of all products of a step on one GPU, with what is recomputed."""
    passes = 3 + (run.choice.recompute != "none")
    forward = sum(2.0 * p.m * p.n * p.k * p.batch * p.count for u in run.workload.units for p in u.forward_products)
    return passes * forward * run.choice.accumulation


def order_of(runs: Sequence[Run], errors: np.ndarray) -> str:
    """In how many pairs of runs of one model on one machine the forecast names the faster one, per token and GPU."""
    right, pairs = 0, 0
    of_strategies = [0, 0]  # right, pairs: those that differ in it
    measured = [run.step_s * run.gpus / run.tokens for run in runs]
    for i, one in enumerate(runs):
        for j, other in enumerate(runs[:i]):
            if (one.model, one.machine) != (other.model, other.machine):
                continue
            if max(measured[i], measured[j]) <= (1 + DIFFERENT) * min(measured[i], measured[j]):
                continue
            forecast = [measured[k] * (1 + errors[k]) for k in (i, j)]
            pairs += 1
            is_right = (forecast[0] < forecast[1]) == (measured[i] < measured[j])
            right += is_right
            if one.keeps_weights != other.keeps_weights:
                of_strategies = [of_strategies[0] + is_right, of_strategies[1] + 1]
    return (
        f"Order: of {pairs} pairs of runs of one model on one machine that differ by more than {DIFFERENT:.0%} a token "
        f"and GPU, the forecast (size left out) names the faster one in {right} ({right / max(pairs, 1):.1%}); of "
        f"those that differ in strategy (FULL_SHARD, SHARD_GRAD_OP), in {of_strategies[0]} of {of_strategies[1]}."
    )


def text_of(model: Model, x: np.ndarray) -> str:
    return ", ".join(f"{c.name} {value:.3g}" for c, value in zip(model.constants, x, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("rows", nargs="?", type=Path, default=HERE / "data" / "fsdp_measured.csv")
    parser.add_argument("--save", type=Path, help="write the report here")
    parser.add_argument("--worst", type=int, default=12, help="how many of the worst rows to show")
    options = parser.parse_args()
    with open(options.rows, newline="") as file:
        runs = [read_run(row) for row in csv.DictReader(file)]
    report, constants = evaluate(runs, options.worst)
    print(report)
    if options.save is not None:
        options.save.write_text(report)
        options.save.with_suffix(".json").write_text(json.dumps(FIXED | constants, indent=1) + "\n")


if __name__ == "__main__":
    main()
