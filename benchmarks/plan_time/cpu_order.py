"""Does the forecast order strategies as two CPU ranks do?

    python benchmarks/plan_time/cpu_order.py [--rounds 7] [--save benchmarks/plan_time/results/cpu_order.md]

The same ranks measure the machine (as `lamina doctor` does), then step the same model under each strategy in turn, so
that everything sees the same load. Times are the best of the rounds, of the slower rank: other load only adds.
"""

from __future__ import annotations

import argparse
import dataclasses
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
WIDTH, HIDDEN, BLOCKS, RANKS = 512, 2048, 6, 2
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


def work(rounds: int) -> tuple[Measured, dict[tuple[str, int, int], float]]:
    """On every rank: the machine's rates, and the time of a step by strategy and case."""
    initialise_distributed()
    torch.set_num_threads(1)
    shapes = tuple((tokens, HIDDEN, WIDTH) for tokens in (32, 512))
    # the model computes in 32 bit: measure such products where the doctor measures 16-bit ones
    rates = measure(CpuBench(dataclasses.replace(CPU_SIZES, products=shapes[:1], product_fp32=shapes[1])))
    steps = {name: stepper(name) for name in STRATEGIES}
    times: dict[tuple[str, int, int], list[float]] = {}
    for _ in range(rounds + 2):
        for tokens, count in CASES:
            for name, step in steps.items():
                dist.barrier()
                begin = time.perf_counter()
                step(tokens, count)
                times.setdefault((name, tokens, count), []).append((time.perf_counter() - begin) * 1e3)
    own = torch.tensor([min(values[2:]) for values in times.values()])
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    dist.destroy_process_group()
    return rates, dict(zip(times, own.tolist(), strict=True))


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
    parser = argparse.ArgumentParser(description="order of strategies on two CPU ranks")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    rates, times = lamina.launch(work, nprocs=RANKS, args=(options.rounds,))
    machine = machine_of(collect_facts(), rates)
    lines = ["| tokens x micro-batches | strategy | measured, ms | forecast, ms |", "|---|---|---|---|"]
    right = pairs = 0
    for tokens, count in CASES:
        found = {}
        for name in STRATEGIES:
            choice = Choice(name, RANKS, accumulation=count, compute_bytes=4, wire_bytes=4, sums="exchange")
            found[name] = forecast_time(workload(tokens), choice, machine, CPU).total_ms
            lines.append(f"| {tokens} x {count} | {name} | {times[name, tokens, count]:.1f} | {found[name]:.1f} |")
        for i, one in enumerate(STRATEGIES):
            for other in STRATEGIES[:i]:
                a, b = times[one, tokens, count], times[other, tokens, count]
                if max(a, b) > (1 + DIFFERENT) * min(a, b):
                    pairs += 1
                    right += (a < b) == (found[one] < found[other])
    lines += ["", f"Of {pairs} pairs that differ by more than {DIFFERENT:.0%}, {right} have the forecast's order."]
    report = "\n".join(lines) + "\n"
    print(report)
    if options.save is not None:
        options.save.write_text(report)


if __name__ == "__main__":
    main()
