"""Does the forecast order strategies as CPU ranks do?

    python benchmarks/plan_time/cpu_order.py [--ranks 2] [--rounds 7] [--save benchmarks/plan_time/results/cpu_order.md]

The same ranks measure the machine (by the doctor's code), then step the same model under each strategy in turn, so that
everything sees the same load. Two clocks: *wall*, the shortest round, of the slower rank, beside a forecast from rates
by the wall clock; and *CPU*, the time that all threads of a rank have computed (the mean of the ranks, median of the
rounds), beside a forecast from rates by that clock. A busy machine spoils the first and hardly touches the second;
where nothing else runs they differ by what ranks wait for each other.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from lamina.planner.doctor_facts import collect_facts
from lamina.planner.doctor_machine import machine_of
from lamina.planner.doctor_measure import CPU_SIZES, GROUPS, CpuBench, Measured, Sizes, measure
from lamina.planner.rates import Reached
from lamina.planner.time import forecast_time
from lamina.planner.workload import Choice, MatrixProduct, UnitWork, Workload
from lamina.runtime.environment import initialise_distributed

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "zero3 peer")  # the last as `transport="auto"` takes it on one host
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


Times = dict[tuple[str, int, int], tuple[float, float]]  # strategy, tokens, micro-batches: wall and CPU, ms
CLOCKS = {"wall": time.perf_counter, "CPU": time.process_time}


class ClockBench(CpuBench):
    """Takes times by one of the clocks; CPU time with what a rank does for the others once it has its own result."""

    def __init__(self, sizes: Sizes, clock: str) -> None:
        super().__init__(sizes)
        self.clock_name = clock

    def time_ms(self, call: Callable[[], object], repeats: int) -> float:
        clock, found = CLOCKS[self.clock_name], []
        call()
        for _ in range(GROUPS):
            begin = clock()
            for _ in range(repeats):
                call()
            if self.clock_name == "CPU":
                dist.barrier()
            found.append((clock() - begin) / repeats * 1e3)
        return statistics.median(found) if self.clock_name == "CPU" else min(found)  # as steps are told


def work(rounds: int) -> tuple[dict[str, Measured], Times]:
    """On every rank: the machine's rates by each clock, and the time of a step by strategy and case."""
    initialise_distributed()
    torch.set_num_threads(1)
    shapes = tuple((tokens, HIDDEN, WIDTH) for tokens in (32, 512))
    # the model computes in 32 bit: measure such products where the doctor measures 16-bit ones
    sizes = dataclasses.replace(CPU_SIZES, products=shapes[:1], product_fp32=shapes[1], repeats=8)
    rates = {name: measure(ClockBench(sizes, name)) for name in CLOCKS}
    steps = {name: stepper(name) for name in STRATEGIES}
    found: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for _ in range(rounds + 2):
        for tokens, count in CASES:
            for name, step in steps.items():
                dist.barrier()
                begin, cpu = time.perf_counter(), time.process_time()
                step(tokens, count)
                wall_ms = (time.perf_counter() - begin) * 1e3
                dist.barrier()  # what a rank still does for the others counts
                found.setdefault((name, tokens, count), []).append((wall_ms, (time.process_time() - cpu) * 1e3))
    wall = torch.tensor([min(ms for ms, _ in values[2:]) for values in found.values()])
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    cpu_ms = torch.tensor([statistics.median(ms for _, ms in values[2:]) for values in found.values()])
    dist.all_reduce(cpu_ms)
    cpu_ms /= dist.get_world_size()
    dist.destroy_process_group()
    return rates, dict(zip(found, zip(wall.tolist(), cpu_ms.tolist(), strict=True), strict=True))


def transport_of(strategy: str) -> str:
    return "peer" if strategy.endswith(" peer") else "c10d"


def stepper(strategy: str):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(BLOCKS)])
    lamina.shard(model, strategy.split()[0], units=[Block], transport=transport_of(strategy))
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
    machines = {clock: machine_of(collect_facts(), found) for clock, found in rates.items()}
    lines = [f"{options.ranks} ranks, {os.cpu_count()} cores, load {load:.1f} before, {options.rounds} rounds", ""]
    lines += [
        "| tokens x micro-batches | strategy | wall, ms | forecast | CPU, ms | forecast |",
        "|---|---|---|---|---|---|",
    ]
    tally = {clock: [0, 0] for clock in CLOCKS}
    wrong: list[str] = []
    for tokens, count in CASES:
        forecasts = {}
        for name in STRATEGIES:
            choice = Choice(
                name.split()[0],
                options.ranks,
                accumulation=count,
                compute_bytes=4,
                sums="exchange",
                transport=transport_of(name),
            )
            forecasts[name] = [forecast_time(workload(tokens), choice, m, CPU).total_ms for m in machines.values()]
            pairs = zip(times[name, tokens, count], forecasts[name], strict=True)
            lines.append(f"| {tokens} x {count} | {name} | {' | '.join(f'{a:.1f} | {b:.1f}' for a, b in pairs)} |")
        for i, one in enumerate(STRATEGIES):
            for other in STRATEGIES[:i]:
                for which, clock in enumerate(CLOCKS):
                    a, b = times[one, tokens, count][which], times[other, tokens, count][which]
                    if max(a, b) <= (1 + DIFFERENT) * min(a, b):
                        continue
                    right = (a < b) == (forecasts[one][which] < forecasts[other][which])
                    tally[clock][0] += right
                    tally[clock][1] += 1
                    wrong += [] if right else [f"{clock}, {tokens} x {count}: {other} {b:.0f}, {one} {a:.0f} ms"]
    for clock, (right, pairs) in tally.items():
        lines += ["", f"By {clock}: of {pairs} pairs that differ by more than {DIFFERENT:.0%}, {right} as forecast."]
    lines += ["", f"Not as forecast: {'; '.join(wrong) or 'none'}."]
    report = "\n".join(lines) + "\n"
    print(report)
    if options.save is not None:
        options.save.write_text(report)


if __name__ == "__main__":
    main()
