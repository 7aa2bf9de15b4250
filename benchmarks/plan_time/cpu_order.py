"""Does the forecast order strategies as CPU ranks do?

    python benchmarks/plan_time/cpu_order.py [--ranks 2] [--rounds 7] [--save benchmarks/plan_time/results/cpu_order.md]

The same ranks measure the machine (as `lamina doctor` does), then step the same model under each strategy in turn, so
that everything sees the same load. *Best* is the shortest round, of the slower rank: other load only adds. *CPU* is the
median of the CPU time of all threads of all ranks, which other load hardly changes; where ranks have a core each it is
that many times the step, less what they wait for each other.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from lamina.planner.doctor_facts import collect_facts
from lamina.planner.doctor_machine import machine_of
from lamina.planner.doctor_measure import CPU_SIZES, CpuBench, Measured, measure
from lamina.planner.rates import Reached
from lamina.planner.time import forecast_time
from lamina.planner.workload import Choice, MatrixProduct, UnitWork, Workload
from lamina.runtime.environment import initialise_distributed

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
WIDTH, HIDDEN, BLOCKS = 512, 2048, 6
CASES = ((32, 1), (32, 4), (512, 1))  # tokens a rank and micro-batch, micro-batches
DIFFERENT = 0.05  # times nearer than this have no order
# Lanes on a CPU are threads of the same cores, so what moves takes its whole time from compute.
CPU = Reached(memory=1.0, interference=1.0, unit_host_ms=1.0, step_ms=1.0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


Times = dict[tuple[str, int, int], tuple[float, float]]  # strategy, tokens, micro-batches: best and CPU, ms


def work(rounds: int) -> tuple[Measured, Times]:
    """On every rank: the machine's rates, and the time of a step by strategy and case."""
    initialise_distributed()
    torch.set_num_threads(1)
    shapes = tuple((tokens, HIDDEN, WIDTH) for tokens in (32, 512))
    # the model computes in 32 bit: measure such products where the doctor measures 16-bit ones
    rates = measure(CpuBench(dataclasses.replace(CPU_SIZES, products=shapes[:1], product_fp32=shapes[1])))
    steps = {name: stepper(name) for name in STRATEGIES}
    wall_ms: dict[tuple[str, int, int], list[float]] = {}
    cpu_ms: dict[tuple[str, int, int], list[float]] = {}
    for _ in range(rounds + 2):
        for tokens, count in CASES:
            for name, step in steps.items():
                dist.barrier()
                begin, cpu = time.perf_counter(), time.process_time()
                step(tokens, count)
                wall_ms.setdefault((name, tokens, count), []).append((time.perf_counter() - begin) * 1e3)
                dist.barrier()  # what a rank still does for the others counts
                cpu_ms.setdefault((name, tokens, count), []).append((time.process_time() - cpu) * 1e3)
    best = torch.tensor([min(values[2:]) for values in wall_ms.values()])
    dist.all_reduce(best, op=dist.ReduceOp.MAX)
    used = torch.tensor([statistics.median(values[2:]) for values in cpu_ms.values()])
    dist.all_reduce(used)
    dist.destroy_process_group()
    return rates, dict(zip(wall_ms, zip(best.tolist(), used.tolist(), strict=True), strict=True))


def stepper(strategy: str):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(BLOCKS)])
    lamina.shard(model, strategy, units=[Block], transport="c10d")
    optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-4)

    def step(tokens: int, count: int) -> None:
        data = torch.ones(tokens, WIDTH)
        for i in range(count):
            with lamina.accumulate(model, last=i == count - 1):
                model(data).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def workload(tokens: int) -> Workload:
    products = (MatrixProduct(tokens, HIDDEN, WIDTH, 1, 1, 4), MatrixProduct(tokens, WIDTH, HIDDEN, 1, 1, 4))
    numel, memory_bytes = 2 * WIDTH * HIDDEN + WIDTH + HIDDEN, 4.0 * tokens * (2 * HIDDEN + 3 * WIDTH)
    units = tuple(UnitWork(f"{i}", numel, 0, products, memory_bytes, 4, block_index=i) for i in range(BLOCKS))
    return Workload("mlp", units, 1, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description="order of strategies on CPU ranks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rates, times = lamina.launch(work, nprocs=options.ranks, args=(options.rounds,))
    machine = machine_of(collect_facts(), rates)
    lines = [f"{options.ranks} ranks, {os.cpu_count()} cores, load {load:.1f} before, {options.rounds} rounds", ""]
    lines += ["| tokens x micro-batches | strategy | best, ms | CPU, ms | forecast, ms |", "|---|---|---|---|---|"]
    counts = {"best": [0, 0], "CPU": [0, 0]}
    wrong: list[str] = []
    for tokens, count in CASES:
        found = {}
        for name in STRATEGIES:
            choice = Choice(name, options.ranks, accumulation=count, compute_bytes=4, wire_bytes=4, sums="exchange")
            found[name] = forecast_time(workload(tokens), choice, machine, CPU).total_ms
            best, cpu = times[name, tokens, count]
            lines.append(f"| {tokens} x {count} | {name} | {best:.1f} | {cpu:.1f} | {found[name]:.1f} |")
        for i, one in enumerate(STRATEGIES):
            for other in STRATEGIES[:i]:
                for which, (kind, tally) in enumerate(counts.items()):
                    a, b = times[one, tokens, count][which], times[other, tokens, count][which]
                    if max(a, b) > (1 + DIFFERENT) * min(a, b):
                        right = (a < b) == (found[one] < found[other])
                        tally[0] += right
                        tally[1] += 1
                        wrong += [] if right else [f"{kind}: {other}/{one} {tokens} x {count}: {b:.0f}/{a:.0f} ms"]
    for kind, (right, pairs) in counts.items():
        lines += ["", f"By {kind}: of {pairs} pairs that differ by more than {DIFFERENT:.0%}, {right} as forecast."]
    lines += ["", f"Not as forecast: {'; '.join(wrong) or 'none'}."]
    report = "\n".join(lines) + "\n"
    print(report)
    if options.save is not None:
        options.save.write_text(report)


if __name__ == "__main__":
    main()
