"""Many random jobs, or one:  python tests/fuzz/run.py --seeds 0:1000   |   python tests/fuzz/run.py --seeds 17 --show

Seeds go round the worlds 1 to 4. A difference, an error, or a hang is printed
with the case. No job does anything that lamina refuses, so any error is a fault.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch.distributed as dist

import harness
from fuzz.models import RandomModel
from fuzz.play import Outcome, case_of, play_all

BATCH = 40  # seeds a call, over all worlds
START_S, SEED_S = 25.0, 3.0  # time limit of a call: a seed takes 0.1 s on a quiet machine
GPU_SEED_S = 12.0  # with communicators of its own


Row = tuple[int, str, Outcome | None]  # seed, what went wrong ("" if nothing did), what came out


@dataclass(frozen=True)
class Way:
    """How jobs are run."""

    world: int | None  # None: 1 to 4 ranks, by seed
    device: str = "cpu"
    until_wrong: bool = False

    def world_of(self, seed: int) -> int:
        return 1 + seed % 4 if self.world is None else self.world

    def limit_s(self, jobs: int) -> float:
        seed_s = SEED_S if self.device == "cpu" else GPU_SEED_S
        return START_S + jobs * seed_s * (3 if self.world == 8 else 1)  # more ranks than most machines have cores


def run_seeds(seeds: Sequence[int], way: Way) -> list[Row]:
    """Seed, what went wrong ("" if nothing did), and the outcome; with `until_wrong` not of all."""
    found: list[Row] = []
    for world in sorted({way.world_of(seed) for seed in seeds}):
        mine = [seed for seed in seeds if way.world_of(seed) == world]
        try:
            by_rank = harness.run_ranks(world, play_all, mine, way.device, timeout=way.limit_s(len(mine)))
        except harness.RankFailure as failure:
            rows = _one_by_one(mine, way, failure) if len(mine) > 1 else [(mine[0], str(failure), None)]
        else:
            rows = [(seed, _wrong([o[n] for o in by_rank]), by_rank[0][n]) for n, seed in enumerate(mine)]
        found += rows
        if way.until_wrong and any(problem for _, problem, _ in rows):
            break
    return found


def _one_by_one(seeds: Sequence[int], way: Way, together: harness.RankFailure) -> list[Row]:
    """Which of these seeds it was that raised, died or hung; it may be none of them alone."""
    found: list[Row] = []
    for seed in seeds:
        found += run_seeds([seed], way)
        if way.until_wrong and found[-1][1]:
            return found
    if not any(problem for _, problem, _ in found):
        found[-1] = (seeds[-1], f"wrong after {list(seeds[:-1])}, right alone: {together}", found[-1][2])
    return found


def _run_here(seeds: Sequence[int], way: Way) -> list[Row]:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found: list[Row] = []
    for seed in seeds:
        if way.world_of(seed) == 1:
            try:
                (outcome,) = play_all([seed], way.device)
            except Exception as problem:
                found.append((seed, f"rank 0: {type(problem).__name__}: {problem}", None))
            else:
                found.append((seed, _wrong([outcome]), outcome))
    return found


def _wrong(outcomes: Sequence[Outcome]) -> str:
    return "; ".join(f"rank {r}: {o.worst:.2e} in {o.where}" for r, o in enumerate(outcomes) if not o.is_right)


class Tally:
    """What all jobs came to: one summary of all workers."""

    def __init__(self, shows: bool, way: Way) -> None:
        self.shows, self.way, self.began, self.features = shows, way, time.monotonic(), Counter[str]()
        self.done: set[int] = set()
        self.wrong: list[int] = []
        self.worst: dict[str, float] = defaultdict(float)

    def add(self, rows: Iterable[Row]) -> None:
        for seed, problem, outcome in rows:
            if outcome is not None:
                self.features.update(outcome.features)
                kind = f"{outcome.case.precision} (within {outcome.tolerance:g})"
                self.worst[kind] = max(self.worst[kind], outcome.worst)
                kind = f"{outcome.case.precision}, sums in 16 bits (within 1)"
                if outcome.rounding:
                    self.worst[kind] = max(self.worst[kind], outcome.rounding)
            if problem or self.shows:
                print(f"seed {seed}: {problem or 'right'}\n    {case_of(seed, self.way.world_of(seed))}", flush=True)
                print(f"    {sorted(RandomModel(seed).features)}", flush=True)
            if problem:
                self.wrong.append(seed)
            self.done.add(seed)
        print(f"{len(self.done)} seeds so far", flush=True)

    def print(self) -> None:
        print(f"{len(self.done)} seeds in {time.monotonic() - self.began:.0f} s: {len(self.wrong)} wrong")
        print("largest differences: " + ", ".join(f"{name} {value:.1e}" for name, value in sorted(self.worst.items())))
        print("features: " + ", ".join(f"{name} {count}" for name, count in sorted(self.features.items())))
        if self.wrong:
            print("not right: --seeds " + ",".join(map(str, sorted(self.wrong))))


def _work(seeds: Sequence[int], way: Way, told: Connection) -> None:
    """A worker: a process with ranks of its own."""
    try:
        for some in _batches(seeds, way):
            told.send(run_seeds(some, way))
    finally:
        told.close()
        harness.shutdown()


def _batches(seeds: Sequence[int], way: Way) -> list[Sequence[int]]:
    size = BATCH // 4 if way.until_wrong else BATCH
    return [seeds[at : at + size] for at in range(0, len(seeds), size)]


def run_workers(seeds: Sequence[int], count: int, tally: Tally) -> None:
    """Deal the seeds out to processes; one that dies is named by the first seed that it owes."""
    context = multiprocessing.get_context("spawn")
    owed: dict[Connection, list[int]] = {}
    processes = []
    for n in range(count):
        mine = [seed for place, seed in enumerate(seeds) if place // BATCH % count == n]
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(mine, tally.way, theirs), name=f"worker {n}")
        process.start()
        theirs.close()
        owed[ours] = mine
        processes.append(process)
    while owed and not (tally.way.until_wrong and tally.wrong):
        for ours in wait(list(owed)):
            assert isinstance(ours, Connection)
            try:
                rows = ours.recv()
            except EOFError:
                left = [seed for seed in owed.pop(ours) if seed not in tally.done]
                tally.add((seed, "its worker died at this seed or at one soon after", None) for seed in left[:1])
            else:
                tally.add(rows)
    for process in processes:
        if tally.way.until_wrong:
            process.terminate()
        process.join()


def _seeds_of(text: str) -> list[int]:
    seeds: list[int] = []
    for part in text.split(","):
        first, _, stop = part.partition(":")
        seeds += range(int(first), int(stop or int(first) + 1))
    return seeds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0:100", help="0:100, or 3,17,40:50")
    parser.add_argument("--workers", type=int, default=1, help="so many of up to four ranks each, side by side")
    parser.add_argument("--show", action="store_true", help="describe every case")
    parser.add_argument("--until-wrong", action="store_true", help="end soon after the first seed that is not right")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: float64 jobs; see gpu/cards.py")
    parser.add_argument("--here", action="store_true", help="only jobs of one rank, in this process: for a debugger")
    parser.add_argument("--world", type=int, choices=[2, 3, 4, 8], default=None, help="ranks of every job")
    options = parser.parse_args()
    way = Way(options.world, options.device, options.until_wrong)
    seeds, tally = _seeds_of(options.seeds), Tally(options.show, way)
    if options.workers > 1 and not options.here:
        run_workers(seeds, options.workers, tally)
    else:
        for some in _batches(seeds, way):
            tally.add(_run_here(some, way) if options.here else run_seeds(some, way))
            if way.until_wrong and tally.wrong:
                break
    tally.print()
    harness.shutdown()
    sys.exit(1 if tally.wrong else 0)


if __name__ == "__main__":
    main()
