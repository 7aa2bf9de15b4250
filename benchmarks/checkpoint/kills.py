"""Ranks killed while they save: is the last good checkpoint ever lost, and does every restart go on alike?

    python benchmarks/checkpoint/kills.py                      # 20 kills a phase, a state of 201 MB
    python benchmarks/checkpoint/kills.py --kills 1 --width 64 --grace 0

Two ranks train; one is killed (SIGKILL, by itself) at a drawn moment inside a drawn phase of a save. Then a new job
starts in the same folder from `lamina.latest`, must find what was last complete, and its losses must be those of a
run that was never interrupted: bit for bit on two ranks, within rounding where the restart is on one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here, before ranks are forked: the first optimizer of a process imports it
import torch.distributed as dist
from torch import nn

import lamina
from lamina.checkpoint import datafile, folders
from lamina.checkpoint.background import Background
from lamina.checkpoint.manifest import Manifest, to_json

PHASES = ("stage", "write", "fsync", "manifest", "rename", "retention")
STEPS_AFTER = 2  # losses that are compared after a restart
KEPT = 2


@dataclass(frozen=True)
class Kill:
    """Where a rank ends itself: `place` in [0, 1) is the moment within the phase."""

    phase: str
    place: float
    rank: int
    wait: bool
    over: bool  # the save replaces an earlier checkpoint of the same name


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lie_in_wait(kill: Kill, written_bytes: int) -> None:
    """Patch the phase so that this process ends in it."""
    {
        "stage": lambda: _around(Background, "stage", kill.place),
        "write": lambda: _inside_write(int(kill.place * written_bytes)),
        "fsync": lambda: _around(os, "fsync", kill.place, calls=4 if kill.rank == 0 else 1),
        "manifest": lambda: _inside_manifest(kill.place),
        "rename": lambda: _around(os, "rename", kill.place, calls=2 if kill.over else 1),
        "retention": lambda: _inside_retention(kill.place),
    }[kill.phase]()


def _around(owner: Any, name: str, place: float, calls: int = 1) -> None:
    """Just before or just after one of the next `calls` calls."""
    original, moment, count = getattr(owner, name), int(place * 2 * calls), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if moment == 2 * count[0]:
            die()
        result = original(*args, **kwargs)
        if moment == 2 * count[0] + 1:
            die()
        count[0] += 1
        return result

    setattr(owner, name, wrapped)


def _inside_write(at_byte: int) -> None:
    original, count = datafile.write_at, [0]

    def wrapped(descriptor: int, data: memoryview, at: int) -> None:
        count[0] += len(data)
        if count[0] > at_byte:
            original(descriptor, data[: max(0, len(data) - (count[0] - at_byte))], at)
            die()
        original(descriptor, data, at)

    datafile.write_at = wrapped


def _inside_manifest(place: float) -> None:
    """The manifest's text is there to a part only, or whole and not yet published."""

    def wrapped(path: Path, manifest: Manifest, number: int) -> None:
        text = to_json(manifest)
        (folders.partial(path, number) / folders.MANIFEST_NAME).write_text(
            text[: int(min(1.0, place * 1.2) * len(text))]
        )
        die()

    folders.publish = wrapped


def _inside_retention(place: float) -> None:
    """Before the name goes, after it, or between two files."""
    original = shutil.rmtree

    def wrapped(path: Path, **options: Any) -> None:
        for number, entry in enumerate(sorted(Path(path).iterdir())):
            if number >= int(place * 5) - 2:  # of three files
                die()
            entry.unlink()
        original(path, **options)

    if place < 1 / 5:
        _around(os, "rename", 0.5, calls=2)  # before the second one: the first publishes the save
    shutil.rmtree = wrapped


# -- one job


def build(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)))


def train_one(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, world: int, width: int
) -> float:
    data = torch.randn(4, width, generator=torch.Generator().manual_seed(step))
    loss = model(data.chunk(world)[rank]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    if world > 1:
        dist.all_reduce(total)
    return float(total) / world


def job(rank: int, world: int, room: str, width: int, steps: int, kill: Kill | None, pipe: Any) -> None:
    """Start from the latest checkpoint, train and save; the last save is the one with the kill."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{room}/store-{time.time_ns() if world == 1 else os.getppid()}",
        rank=rank,
        world_size=world,
    )
    model = lamina.shard(build(width), "zero3", start="trust")
    optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-4)
    runs = f"{room}/runs"
    found, begin = lamina.latest(runs), 0
    if found is not None:
        begin = lamina.load(found, model, optimizer)["step"]
    losses = {}
    for step in range(begin, begin + steps):
        losses[step] = train_one(model, optimizer, step, rank, world, width)
    pipe.send((begin, losses))
    done, extra = begin + steps, {"step": begin + steps}
    lamina.save(f"{runs}/step-{done}", model, optimizer, extra=extra)
    lamina.checkpoint.keep_last(runs, KEPT)
    pipe.send("saved")
    if kill is not None:
        train_one(model, optimizer, done, rank, world, width)
        if rank == kill.rank:
            own = Path(runs, f"step-{done}", f"rank-{rank:05d}.safetensors")
            lie_in_wait(kill, own.stat().st_size)
        name = f"step-{done}" if kill.over else f"step-{done + 1}"
        lamina.save(f"{runs}/{name}", model, optimizer, extra={"step": done + 1}, wait=kill.wait)
        lamina.checkpoint.finish()
        lamina.checkpoint.keep_last(runs, 1)
        pipe.send("not killed")
        os._exit(0)
    dist.destroy_process_group()


@dataclass
class Ended:
    """What the driver saw of a job."""

    begin: int | None
    losses: dict[int, float]
    saved: bool
    killed: bool
    other: str  # how the other rank ended


def run(world: int, room: str, width: int, steps: int, kill: Kill | None, grace_s: float) -> Ended:
    context = multiprocessing.get_context("fork")
    for store in Path(room).glob("store-*"):
        store.unlink()
    ends, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe()
        process = context.Process(target=job, args=(rank, world, room, width, steps, kill, theirs), daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    awaited = processes if kill is None else [processes[kill.rank]]  # the other one may end while it is still dying
    multiprocessing.connection.wait([p.sentinel for p in awaited], timeout=300)
    deadline = time.monotonic() + (grace_s if kill is not None else 60)
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    messages = []
    while ends[0].poll():
        try:
            messages.append(ends[0].recv())
        except EOFError:
            break
    begin, losses = messages[0] if messages else (None, {})
    killed = kill is not None and codes[kill.rank] == -signal.SIGKILL
    other = "" if kill is None else {None: "was ended by the driver", 1: "raised"}.get(codes[1 - kill.rank], "ended")
    return Ended(begin, losses, "saved" in messages, killed, other)


# -- all trials


@dataclass
class Tally:
    phase: str
    kills: int = 0
    newest_survived: int = 0  # the save with the kill was complete after all
    earlier_survived: int = 0  # the one before it was found
    lost: int = 0
    same_losses: int = 0
    other_raised: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="kills a phase")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--width", type=int, default=2048, help="of four square layers in float32, with AdamW")
    parser.add_argument("--grace", type=float, default=8.0, help="seconds in which the other rank may raise")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where checkpoints go; default: a temporary folder")
    parser.add_argument("--save", type=Path, help="write the table as JSON")
    options = parser.parse_args()
    room = tempfile.mkdtemp(dir=options.folder)
    try:
        tallies = run_trials(room, options)
    finally:
        shutil.rmtree(room)
    for tally in tallies:
        print(json.dumps(asdict(tally)))
    if options.save is not None:
        options.save.write_text(json.dumps([asdict(t) for t in tallies], indent=1))
    assert all(t.lost == 0 and t.same_losses == t.kills == options.kills for t in tallies), "see the table"


def run_trials(room: str, options: argparse.Namespace) -> list[Tally]:
    draw, tallies, width = random.Random(options.seed), [], options.width
    reference = References(room, width)
    for phase in options.phases:
        tally = Tally(phase)
        tallies.append(tally)
        while tally.kills < options.kills:
            shutil.rmtree(f"{room}/runs", ignore_errors=True)
            rank = draw.randrange(2) if phase in ("stage", "write", "fsync") else 0
            wait = False if phase == "stage" else draw.random() < 0.5
            kill = Kill(phase, draw.random(), rank, wait, over=phase == "rename" and draw.random() < 0.5)
            first = run(2, room, width, 1, kill, options.grace)
            assert first.saved and first.killed, (kill, first)
            world = 1 if tally.kills % 5 == 4 else 2
            second = run(world, room, width, STEPS_AFTER, None, 0)
            tally.kills += 1
            tally.newest_survived += second.begin == 2
            tally.earlier_survived += second.begin == 1
            tally.lost += second.begin not in (1, 2)
            same = reference.agrees(second.losses, exactly=world == 2)
            tally.same_losses += same
            tally.other_raised += first.other == "raised"
            print(
                f"{phase} {tally.kills}: {kill} -> step {second.begin}, other rank {first.other}, same {same}",
                flush=True,
            )
    return tallies


class References:
    """Losses of a run on two ranks that is never interrupted."""

    def __init__(self, room: str, width: int) -> None:
        shutil.rmtree(f"{room}/runs", ignore_errors=True)
        self.losses = run(2, room, width, 2 + STEPS_AFTER, None, 0).losses
        assert len(self.losses) == 2 + STEPS_AFTER, "the run without kills failed"

    def agrees(self, losses: dict[int, float], exactly: bool) -> bool:
        close: Callable[[float, float], bool] = (
            (lambda a, b: a == b) if exactly else lambda a, b: abs(a - b) <= 1e-5 * abs(b)
        )
        return len(losses) == STEPS_AFTER and all(close(loss, self.losses[step]) for step, loss in losses.items())


if __name__ == "__main__":
    main()
