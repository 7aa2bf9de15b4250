"""Where a step's time goes on one GPU: kernels by lane, what of the communication is exposed, and gaps of compute.

torchrun --nproc-per-node 2 benchmarks/gpu_step/where.py [--tokens 8192] [--way lamina]
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from ways import BUILDERS, Job

STEPS = 3
Span = tuple[int, int]


def merged(spans: list[Span]) -> list[Span]:
    """Disjoint, in order."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def length(spans: list[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def without(spans: list[Span], others: list[Span]) -> int:
    """How much of disjoint `spans` lies outside disjoint `others`."""
    both = length(merged(spans + others))
    return both - length(others)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--size", default="1b")
    parser.add_argument("--way", default="lamina")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cuda:nccl,cpu:gloo")
    job = Job(options.size, options.tokens)
    step, data = BUILDERS[options.way](job), job.batch(0)
    for number in range(5):
        step(*data, number)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for number in range(STEPS):
            step(*data, number)
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        report(profile)
    dist.destroy_process_group()


def report(profile: torch.profiler.profile) -> None:
    by_stream: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0:
            by_stream[event.device_resource_id()].append((event.start_ns(), event.end_ns(), event.name()))
    everything = [item for items in by_stream.values() for item in items]
    is_comm = [("nccl" in name) for _, _, name in everything]
    comm = merged([(a, b) for (a, b, _), c in zip(everything, is_comm, strict=True) if c])
    other = merged([(a, b) for (a, b, _), c in zip(everything, is_comm, strict=True) if not c])
    first, last = min(a for a, _, _ in everything), max(b for _, b, _ in everything)
    ms = 1e-6 / STEPS
    print(
        f"step {(last - first) * ms:.2f} ms; kernels {length(other) * ms:.2f}; communication {length(comm) * ms:.2f}, "
        f"exposed {without(comm, other) * ms:.2f}; idle {(last - first - length(merged(comm + other))) * ms:.2f}"
    )
    main_lane = sorted(max(by_stream.values(), key=lambda items: sum(b - a for a, b, _ in items)))
    gaps = [(b[0] - a[1], (a[1] - first), a[2], b[2]) for a, b in pairwise(main_lane)]
    print(f"compute waits {sum(gap for gap, *_ in gaps if gap > 0) * ms:.2f} ms; longest, at ms of the {STEPS} steps:")
    for gap, at, before, after in sorted(gaps, reverse=True)[:18]:
        print(f"   {gap * 1e-6:7.3f} at {at * 1e-6:7.2f}  {before[:60]} -> {after[:60]}")
    for stream, items in sorted(by_stream.items(), key=lambda item: -sum(b - a for a, b, _ in item[1]))[:6]:
        names: dict[str, list[int]] = defaultdict(list)
        for a, b, name in items:
            names[name].append(b - a)
        print(f"stream {stream}: {sum(b - a for a, b, _ in items) * ms:.2f} ms")
        for name, times in sorted(names.items(), key=lambda item: -sum(item[1]))[:14]:
            print(f"   {sum(times) * ms:8.3f} ms  {len(times) // STEPS:5d} x  {name[:95]}")


if __name__ == "__main__":
    main()
