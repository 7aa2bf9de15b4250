"""What does the watch cost while nothing is wrong? Two CPU ranks, without a GPU.

    python benchmarks/hangs/cost.py

Two equal models in the same processes: the control of one tells the watch what it does and waits by its rules, that of
the other knows none. Their steps go in turns, the slower rank counts, medians. The watch's two threads run beside both:
their processor time is read from the system and given for a second of training.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import lamina

ROUNDS, STEPS = 40, 10
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def threads_s() -> dict[str, float]:
    """Processor seconds so far of the threads of this process that Python knows, by name."""
    found = {}
    for thread in threading.enumerate():
        text = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
        fields = text[text.rindex(")") + 2 :].split()
        found[thread.name] = (int(fields[11]) + int(fields[12])) * TICK_S
    return found


def make(is_watched: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    from lamina.runtime.assemble import RUNTIMES  # a global would be sent along

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)])
    model = lamina.shard(model, units=["*"])
    if not is_watched:
        RUNTIMES[model].engine.control._watch = None
    return model, lamina.optim.AdamW(model.parameters(), lr=1e-3)


def steps_s(model: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor) -> float:
    dist.barrier()
    started = time.perf_counter()
    for _ in range(STEPS):
        model(data).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    took = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def measure() -> tuple[list[tuple[float, float]], dict[str, float], float]:
    torch.set_num_threads(1)
    ways = [make(True), make(False)]
    data = torch.randn(8, 64)
    for _ in range(3):
        for way in ways:
            steps_s(*way, data)
    before, started = threads_s(), time.perf_counter()
    rounds = []
    for number in range(ROUNDS):
        pair = [steps_s(*way, data) for way in (ways if number % 2 == 0 else ways[::-1])]
        rounds.append((pair[0], pair[1]) if number % 2 == 0 else (pair[1], pair[0]))
    took_s = time.perf_counter() - started
    return rounds, {name: s - before.get(name, 0.0) for name, s in threads_s().items()}, took_s


if __name__ == "__main__":
    rounds, threads, took_s = lamina.launch(measure, nprocs=2)
    watched, alone = (statistics.median(column) * 1e3 / STEPS for column in zip(*rounds, strict=True))
    ratios = sorted(a / b for a, b in rounds)
    quartiles = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
    print(f"a step of 12 units: {watched:.2f} ms watched, {alone:.2f} ms not")
    print(f"ratio by round {statistics.median(ratios):.3f} (quartiles {quartiles[0]:.3f}, {quartiles[1]:.3f})")
    for name, seconds in sorted(threads.items(), key=lambda item: -item[1]):
        if name.startswith("lamina"):
            print(f"   {1e3 * seconds / took_s:7.2f} ms of processor time a second: {name}")
