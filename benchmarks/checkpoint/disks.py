"""Saves on disks that are full, read-only, not ours, or slow: does every rank say it, and is the earlier one whole?

    python benchmarks/checkpoint/disks.py            # as root: it mounts small file systems in memory

The tests let calls fail; here the kernel does. Two ranks train and save into a tmpfs of a fixed size. Then the disk is
harmed, they save again, and the disk is healed:

    full        there is room for a drawn part of a checkpoint, down to all of it but the manifest's last page
    read-only   the file system is mounted anew without the right to write
    permission  the ranks, or one of them, are a user that may not write there
    slow        one rank's disk takes a drawn number of MB a second: nothing must raise, however long the other waits

After each: every rank raised the same error (none where the disk is slow), nothing is left behind, the earlier
checkpoint is loaded and equal, and the next save succeeds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here, before ranks are forked: the first optimizer of a process imports it
import torch.distributed as dist
from kills import build, train_one

import lamina
from lamina.checkpoint import datafile

NOBODY = 65534
ROOMS = (0.01, 0.3, 0.6, 0.97, 0.9999)  # parts of a checkpoint for which a full disk still has room
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Harm:
    kind: str
    amount: float  # full: room, in checkpoints; permission: ranks that are nobody; slow: MB a second
    wait: bool


@dataclass
class Outcome:
    harm: Harm
    said: list[str]  # by rank; "": no error
    seconds: float
    left: list[str]  # beside the checkpoints
    earlier_is_whole: bool
    next_save_works: bool

    @property
    def is_right(self) -> bool:
        same = len(set(self.said)) == 1
        raised = all(self.said) if self.harm.kind != "slow" else not any(self.said)
        return same and raised and not self.left and self.earlier_is_whole and self.next_save_works


@contextlib.contextmanager
def harmed(harm: Harm, disk: Path, rank: int) -> Iterator[None]:
    """On one rank; the disk's own state is changed by rank 0."""
    ballast, write_at = disk / ".ballast", datafile.write_at
    if harm.kind == "full" and rank == 0:
        checkpoint_bytes = sum(file.stat().st_size for file in (disk / "runs" / "good").iterdir())
        free = os.statvfs(disk).f_bavail * PAGE_BYTES
        with open(ballast, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - int(harm.amount * checkpoint_bytes) // PAGE_BYTES * PAGE_BYTES)
    if harm.kind == "read-only" and rank == 0:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    dist.barrier()
    if harm.kind == "permission" and rank >= 2 - harm.amount:
        os.seteuid(NOBODY)
    if harm.kind == "slow" and rank == 1:

        def slowly(descriptor: int, data: memoryview, at: int) -> None:
            time.sleep(len(data) / harm.amount / 1e6)
            write_at(descriptor, data, at)

        datafile.write_at = slowly
    try:
        yield
    finally:
        os.seteuid(0)
        datafile.write_at = write_at
        dist.barrier()
        if harm.kind == "read-only" and rank == 0:
            subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        if harm.kind == "full" and rank == 0:
            ballast.unlink()
        dist.barrier()


def job(rank: int, room: str, width: int, harms: list[Harm], pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{room}/store", rank=rank, world_size=2)
    disk, runs = Path(room, "disk"), Path(room, "disk", "runs")
    model, other = (lamina.shard(build(width), "zero3", start="trust") for _ in range(2))
    optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-4)
    other_optimizer = lamina.optim.AdamW(other.parameters(), lr=1e-4)
    for step, harm in enumerate(harms):
        train_one(model, optimizer, step, rank, 2, width)
        lamina.save(runs / "good", model, optimizer, extra=step)
        saved = [param.local.clone() for param in model.parameters()]
        train_one(model, optimizer, step, rank, 2, width)
        said = ""
        with harmed(harm, disk, rank):
            begin = time.perf_counter()
            try:
                lamina.save(runs / "new", model, optimizer, wait=harm.wait)
                lamina.checkpoint.finish()
            except lamina.CheckpointError as error:
                said = str(error).replace(str(disk), "DISK")
            seconds = time.perf_counter() - begin
        wanted = {"good", "new"} if harm.kind == "slow" else {"good"}
        left = sorted({entry.name for entry in runs.iterdir()} - wanted)
        extra = lamina.load(runs / "good", other, other_optimizer)
        is_whole = extra == step and all(map(torch.equal, (p.local for p in other.parameters()), saved))
        dist.barrier()
        if rank == 0:
            shutil.rmtree(runs / "new", ignore_errors=True)  # two fit, and one on its way
        dist.barrier()
        lamina.save(runs / "good", model, optimizer, extra=-1)
        pipe.send((said, seconds, left, is_whole, lamina.load(runs / "good", other, other_optimizer) == -1))
    dist.destroy_process_group()
    os._exit(0)


def run(room: str, width: int, harms: list[Harm]) -> list[Outcome]:
    context = multiprocessing.get_context("fork")
    ends = []
    for rank in range(2):
        ours, theirs = context.Pipe()
        context.Process(target=job, args=(rank, room, width, harms, theirs), daemon=True).start()
        theirs.close()
        ends.append(ours)
    outcomes = []
    for harm in harms:
        first, second = (end.recv() for end in ends)
        outcome = Outcome(
            harm, [first[0], second[0]], max(first[1], second[1]), sorted({*first[2], *second[2]}),
            first[3] and second[3], first[4] and second[4],
        )  # fmt: skip
        outcomes.append(outcome)
        print(json.dumps({"right": outcome.is_right, **asdict(outcome)}), flush=True)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024, help="of four square layers in float32, with AdamW")
    parser.add_argument("--save", type=Path, help="write what was seen as JSON")
    options = parser.parse_args()
    kinds = [("full", room) for room in ROOMS] + [("read-only", 0), ("permission", 1), ("permission", 2)]
    kinds += [("slow", 4), ("slow", 100)]
    harms = [Harm(kind, amount, wait) for kind, amount in kinds for wait in (True, False)]
    room = tempfile.mkdtemp()
    disk = Path(room, "disk")
    disk.mkdir()
    size = 4 * 4 * 3 * 4 * options.width**2  # four checkpoints: four layers, three tensors, four bytes
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "lamina", str(disk)], check=True)
    try:
        os.chmod(room, 0o755)
        outcomes = run(room, options.width, harms)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
        shutil.rmtree(room)
    if options.save is not None:
        options.save.write_text(json.dumps([{"right": o.is_right, **asdict(o)} for o in outcomes], indent=1))
    assert all(outcome.is_right for outcome in outcomes), "see above"


if __name__ == "__main__":
    main()
