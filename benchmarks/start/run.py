"""How long does `lamina.deferred()` take, and computing all values after it, a unit at a time?

    python benchmarks/start/run.py [--width 1024] [--blocks 24] [--threads 1 2]

Rows: eager construction; deferred with every draw made in the block too (skipping switched off, one thread), which is
what anything unknown falls back to; deferred as it is, with one thread and with more. Each row is a process of its own,
without `torch.distributed`: what one rank does. torch itself is told to use one thread.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
from torch import nn

import lamina
from lamina.runtime import side_by_side, skipping
from lamina.runtime.materialise import materialise

ROWS = ("eager", "drawn twice", "skipped")


@dataclass(frozen=True)
class Moment:
    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.perf_counter(), time.process_time())

    def until(self, later: Moment) -> str:
        return f"{later.cpu_s - self.cpu_s:.2f} | {later.wall_s - self.wall_s:.2f}"


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def build(blocks: int, width: int) -> nn.ModuleList:
    return nn.ModuleList(
        nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0) for _ in range(blocks)
    )


def materialise_blocks(model: nn.ModuleList) -> None:
    for index, block in enumerate(model):
        materialise(model, [(f"{index}.{name}", parameter) for name, parameter in block.named_parameters()], "cpu")


def row(kind: str, threads: int, blocks: int, width: int) -> None:
    torch.set_num_threads(1)
    with lamina.deferred():
        small = build(2, 16)  # what is imported and set up once
    materialise_blocks(small)
    before_mib, start = peak_mib(), Moment.now()
    if kind == "eager":
        torch.manual_seed(0)
        eager = build(blocks, width)
        built = Moment.now()
        numel = sum(p.numel() for p in eager.parameters())
    else:
        side_by_side.MOST_THREADS = threads
        if kind == "drawn twice":
            skipping.distrust()
        with lamina.deferred():
            model = build(blocks, width)
        built = Moment.now()
        materialise_blocks(model)
        numel = sum(p.numel() for p in model.parameters())
    end = Moment.now()
    times = " | ".join((start.until(built), built.until(end), start.until(end)))
    print(f"| {kind} | {threads} | {numel / 1e9:.2f} | {times} | {peak_mib() - before_mib:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--row", choices=ROWS)
    given = parser.parse_args()
    if given.row:
        row(given.row, given.threads[0], given.blocks, given.width)
        return
    print(
        "| | threads | 10^9 params | block: CPU s | wall s | values: CPU s | wall s | sum: CPU s | wall s | peak MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for kind in ROWS:
        for threads in given.threads if kind == "skipped" else [1]:
            command = [sys.executable, __file__, "--row", kind, "--threads", str(threads)]
            subprocess.run([*command, "--width", str(given.width), "--blocks", str(given.blocks)], check=True)


if __name__ == "__main__":
    main()
