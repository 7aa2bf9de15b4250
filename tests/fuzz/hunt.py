"""Seeds from the command line, one job after the other: what is not right is printed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from harness import RankFailure, run_ranks

TIME_S = 120.0  # of one job


def hunt(
    play_all: Callable[[Sequence[int], str], Sequence[object]],
    problem_of: Callable[[Sequence[object]], str],
    draw: Callable[[int, int], object],
    world: int,
) -> None:
    """Run the jobs of the seeds that are asked for, and end.

    Args:
        play_all: what comes out of jobs on one rank; called on all of them.
        problem_of: what is wrong with what came out of one job, by rank; "" if nothing is.
        draw: the job of a seed on so many ranks, to be printed.
        world: ranks, where no number is asked for.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0:100")
    parser.add_argument("--world", type=int, default=world)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    begin, _, end = options.seeds.partition(":")
    seeds = range(int(begin), int(end or int(begin) + 1))
    wrong = []
    for seed in seeds:
        try:
            by_rank = run_ranks(options.world, play_all, [seed], options.device, timeout=TIME_S)
            problem = problem_of([row[0] for row in by_rank])
        except RankFailure as failure:
            problem = str(failure)
        if problem:
            wrong.append(seed)
            print(f"seed {seed}: {problem}\n    {draw(seed, options.world)}", flush=True)
    print(f"{len(seeds)} seeds on {options.world} ranks: {len(wrong)} wrong {wrong or ''}")
    sys.exit(1 if wrong else 0)
