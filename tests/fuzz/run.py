"""Many random jobs, or one:  python tests/fuzz/run.py --seeds 0:1000   |   python tests/fuzz/run.py --seeds 17 --show

Seeds go round the worlds 1 to 4. A difference, an error, or a hang is printed
with the case. No job does anything that lamina refuses, so any error is a fault.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch.distributed as dist

import harness
from fuzz.models import RandomModel
from fuzz.play import Outcome, case_of, play_all

BATCH = 40  # seeds a call, over all worlds
START_S, SEED_S = 25.0, 3.0  # time limit of a call: a seed takes 0.1 s on a quiet machine


def world_of(seed: int) -> int:
    return 1 + seed % 4


def run_seeds(seeds: Sequence[int], until_wrong: bool = False) -> list[tuple[int, str, Outcome | None]]:
    """Seed, what went wrong ("" if nothing did), and the outcome; with `until_wrong` not of all."""
    found: list[tuple[int, str, Outcome | None]] = []
    for world in sorted({world_of(seed) for seed in seeds}):
        mine = [seed for seed in seeds if world_of(seed) == world]
        try:
            by_rank = harness.run_ranks(world, play_all, mine, timeout=START_S + SEED_S * len(mine))
        except harness.RankFailure as failure:
            rows = _one_by_one(mine, until_wrong) if len(mine) > 1 else [(mine[0], str(failure), None)]
        else:
            rows = [(seed, _wrong([o[n] for o in by_rank]), by_rank[0][n]) for n, seed in enumerate(mine)]
        found += rows
        if until_wrong and any(problem for _, problem, _ in rows):
            break
    return found


def _one_by_one(seeds: Sequence[int], until_wrong: bool) -> list[tuple[int, str, Outcome | None]]:
    """Which of these seeds it was that raised, died or hung; it may be none of them alone."""
    found: list[tuple[int, str, Outcome | None]] = []
    for seed in seeds:
        found += run_seeds([seed])
        if until_wrong and found[-1][1]:
            return found
    if not any(problem for _, problem, _ in found):
        found[-1] = (seeds[-1], f"wrong after {list(seeds[:-1])}, right alone", found[-1][2])
    return found


def _run_here(seeds: Sequence[int]) -> list[tuple[int, str, Outcome | None]]:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found: list[tuple[int, str, Outcome | None]] = []
    for seed in seeds:
        if world_of(seed) == 1:
            try:
                (outcome,) = play_all([seed])
            except Exception as problem:
                found.append((seed, f"rank 0: {type(problem).__name__}: {problem}", None))
            else:
                found.append((seed, _wrong([outcome]), outcome))
    return found


def _wrong(outcomes: Sequence[Outcome]) -> str:
    return "; ".join(f"rank {r}: {o.worst:.2e} in {o.where}" for r, o in enumerate(outcomes) if not o.is_right)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0:100", help="0:100, or 3,17,40:50")
    parser.add_argument("--show", action="store_true", help="describe every case")
    parser.add_argument("--until-wrong", action="store_true", help="end soon after the first seed that is not right")
    parser.add_argument("--here", action="store_true", help="only jobs of one rank, in this process: for a debugger")
    options = parser.parse_args()
    seeds: list[int] = []
    for part in options.seeds.split(","):
        first, _, stop = part.partition(":")
        seeds += range(int(first), int(stop or int(first) + 1))
    began, wrong, done, features = time.monotonic(), 0, 0, Counter[str]()
    worst: dict[str, float] = defaultdict(float)
    size = BATCH // 4 if options.until_wrong else BATCH
    for at in range(0, len(seeds), size):
        some = seeds[at : at + size]
        for seed, problem, outcome in _run_here(some) if options.here else run_seeds(some, options.until_wrong):
            if outcome is not None:
                features.update(outcome.features)
                kind = f"{outcome.case.precision} (within {outcome.tolerance:g})"
                worst[kind] = max(worst[kind], outcome.worst)
            if problem or options.show:
                print(f"seed {seed}: {problem or 'right'}\n    {case_of(seed, world_of(seed))}", flush=True)
                print(f"    {sorted(RandomModel(seed).features)}", flush=True)
            wrong, done = wrong + bool(problem), done + 1
        print(f"{done} seeds so far", flush=True)
        if options.until_wrong and wrong:
            break
    print(f"{done} seeds in {time.monotonic() - began:.0f} s: {wrong} wrong")
    print("largest differences: " + ", ".join(f"{name} {value:.1e}" for name, value in sorted(worst.items())))
    print("features: " + ", ".join(f"{name} {count}" for name, count in sorted(features.items())))
    harness.shutdown()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
