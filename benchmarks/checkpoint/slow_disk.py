"""Loads from a slow disk with little memory for the page cache: lamina beside torch.distributed.checkpoint with FSDP2.

    python benchmarks/checkpoint/slow_disk.py --cache-mb 300 1300 --read-mb-per-s 250 --folder /a/real/disk    # as root

What is verified before anything changes is read again afterwards, from the page cache as far as that holds it. Here two
ranks run in a control group (version 1: `memory` and `blkio`) whose memory is what they need plus so much for the page
cache, on a disk that is read at a fixed speed. The files are dropped from the cache before each load. Printed: seconds,
and MB that the disk gave to a rank; the slower rank counts. lamina keeps gradient memory, FSDP2 frees it: each way has
its own need, and the same room beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import run as benchmark
import torch
import torch.distributed as dist

CONTROL = Path("/sys/fs/cgroup")
NAME = "lamina-slow-disk"
RANKS = 2


@contextlib.contextmanager
def control_group(device: str, read_bytes_per_s: int) -> Iterator[Path]:
    """The memory group, with a slow disk; processes have to be put into both."""
    memory, disk = CONTROL / "memory" / NAME, CONTROL / "blkio" / NAME
    for folder in (memory, disk):
        folder.mkdir()
    try:
        (disk / "blkio.throttle.read_bps_device").write_text(f"{device} {read_bytes_per_s}")
        yield memory
    finally:
        for folder in (memory, disk):
            folder.rmdir()


def read_from_disk_bytes() -> int:
    line = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes"))
    return int(line.split()[1])


def serve(kind: str, rank: int, args: argparse.Namespace, room: str, queue: Any) -> None:
    """A rank: save once, then load with each amount of memory for the page cache."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for controller in ("memory", "blkio"):
        (CONTROL / controller / NAME / "cgroup.procs").write_text(str(os.getpid()))
    dist.init_process_group("gloo", store=dist.FileStore(f"{room}/store-{kind}", RANKS), rank=rank, world_size=RANKS)
    way = (benchmark.Lamina if kind == "lamina" else benchmark.Dcp)(args.parameters, "cpu")
    way.step_once()
    folder = f"{room}/{kind}"
    way.save(folder)
    memory = CONTROL / "memory" / NAME
    for cache_mb in args.cache_mb:
        for _ in range(args.rounds):
            dist.barrier()
            if rank == 0:
                stat = dict(line.split() for line in (memory / "memory.stat").read_text().splitlines())
                benchmark.drop_from_cache(folder)
                (memory / "memory.limit_in_bytes").write_text(str(int(stat["rss"]) + cache_mb * 10**6))
            dist.barrier()
            before, start = read_from_disk_bytes(), time.perf_counter()
            way.load(folder)
            queue.put((cache_mb, time.perf_counter() - start, (read_from_disk_bytes() - before) / 1e6))
            dist.barrier()
            if rank == 0:
                (memory / "memory.limit_in_bytes").write_text("-1")
    dist.destroy_process_group()


def measure(kind: str, args: argparse.Namespace, room: str) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    ranks = [context.Process(target=serve, args=(kind, rank, args, room, queue)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    found: dict[int, list[tuple[float, float]]] = {}
    expected = RANKS * args.rounds * len(args.cache_mb)
    for _ in range(expected):
        while queue.empty():
            if any(process.exitcode for process in ranks):
                for process in ranks:
                    process.kill()
                    process.join()
                raise SystemExit(f"a rank of {kind} has ended")
            time.sleep(0.1)
        cache_mb, seconds, read_mb = queue.get()
        found.setdefault(cache_mb, []).append((seconds, read_mb))
    for cache_mb, rows in sorted(found.items()):
        pairs = [rows[i : i + RANKS] for i in range(0, len(rows), RANKS)]
        told = ", ".join(f"{max(s for s, _ in pair):.1f} s ({max(mb for _, mb in pair):.0f} MB)" for pair in pairs)
        print(f"{kind} load, {cache_mb} MB for the page cache: {told}", flush=True)
    for process in ranks:
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1.5e8)
    parser.add_argument("--cache-mb", type=int, nargs="+", default=[300, 700, 1300])
    parser.add_argument("--read-mb-per-s", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", default=".", help="on the disk that is to be slow")
    parser.add_argument("--device", default="254:0", help="its numbers, as lsblk shows them")
    parser.add_argument("--ways", nargs="+", default=list(benchmark.WAYS))
    args = parser.parse_args()
    state_mb = args.parameters * 12 / 1e6
    print(f"state {state_mb:.0f} MB, {state_mb / RANKS:.0f} a rank; disk {args.read_mb_per_s} MB/s", flush=True)
    room = tempfile.mkdtemp(dir=args.folder)
    try:
        for kind in args.ways:
            with control_group(args.device, args.read_mb_per_s * 10**6):
                measure(kind, args, room)
            shutil.rmtree(f"{room}/{kind}")
    finally:
        shutil.rmtree(room)


if __name__ == "__main__":
    main()
