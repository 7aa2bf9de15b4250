"""What the host does in a step on GPUs: time of a step that no GPU work bounds, by function, and of its primitives.

torchrun --nproc-per-node 2 benchmarks/gpu_step/host.py [--tokens 256] [--ways bound,lamina,lamina-peer]

With few tokens a GPU the host is the slower one, so the wall time of a step is the host's. Backward hooks run in a
thread of autograd's: from Python 3.12 on cProfile sees all threads, before only the main one.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import os
import pstats
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from ways import BUILDERS, Job

STEPS = 10
REPEATS = 2000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--size", default="1b")
    parser.add_argument("--ways", default="bound,lamina,lamina-peer")
    parser.add_argument("--profile", default="lamina-peer", help="the way whose functions are shown")
    parser.add_argument("--rows", type=int, default=45)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cuda:nccl,cpu:gloo")
    if dist.get_rank() == 0:
        primitives()
    for way in options.ways.split(","):
        dist.barrier()
        step_of(way, options)
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def step_of(way: str, options: argparse.Namespace) -> None:
    job = Job(options.size, options.tokens)
    step, data = BUILDERS[way](job), job.batch(0)

    def steps() -> float:
        torch.cuda.synchronize()
        dist.barrier()
        started = time.perf_counter()
        for number in range(STEPS):
            step(*data, number)
        torch.cuda.synchronize()
        return (time.perf_counter() - started) * 1e3 / STEPS

    steps()
    times = [steps() for _ in range(5)]
    if dist.get_rank() == 0:
        print(f"{way:>14}: {statistics.median(times):6.2f} ms a step ({min(times):.2f} - {max(times):.2f})", flush=True)
    if way != options.profile:
        return
    profile = cProfile.Profile()
    if dist.get_rank() == 0:
        profile.enable()
    took = steps()
    if dist.get_rank() == 0:
        profile.disable()
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(options.rows)
        print(f"under cProfile {took:.2f} ms a step; the table is of {STEPS} steps")
        for line in text.getvalue().splitlines()[4:]:
            if line.strip():
                print(line.replace(str(Path(__file__).parents[2]), ""))


def primitives() -> None:
    """Host time of the calls that a unit makes on its lanes."""
    device = torch.device("cuda", torch.cuda.current_device())
    side, event = torch.cuda.Stream(device), torch.cuda.Event()
    small, other = torch.zeros(1024, device=device), torch.ones(1024, device=device)
    halves = [torch.ones(1024, device=device, dtype=torch.bfloat16) for _ in range(2)]

    def switch() -> None:
        before = torch._C._cuda_getCurrentStream(device.index)
        torch._C._cuda_setStream(side.stream_id, side.device_index, side.device_type)
        torch._C._cuda_setStream(*before)

    def fused_sum() -> None:
        from lamina.runtime.summing import add_rows

        add_rows(small, halves, 0.5, accumulate=False)

    calls: dict[str, Callable[[], object]] = {
        "new event, record": lambda: torch.cuda.Event().record(side),
        "record": lambda: event.record(side),
        "wait_event": lambda: side.wait_event(event),
        "switch stream twice": switch,
        "copy_": lambda: small.copy_(other),
        "add_": lambda: small.add_(other),
        "slice": lambda: small[:512],
        "_foreach_copy_ of 9": lambda: torch._foreach_copy_([small] * 9, [other] * 9),
        "fused sum of 2 rows": fused_sum,
    }
    for name, call in calls.items():
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        took = 0.0
        for _ in range(REPEATS // 200):
            started = time.perf_counter()
            for _ in range(200):
                call()
            took += time.perf_counter() - started
            torch.cuda.synchronize()
        print(f"{name:>24}: {took / REPEATS * 1e6:6.2f} us", flush=True)


if __name__ == "__main__":
    main()
