"""Jobs on lanes that are watched: random ones of fuzz/, and what their traces say.

python tests/races/jobs.py --world 2 --seeds 0:100 --waits     # races; how often each wait left out makes one
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch.distributed as dist

from fuzz import walks
from fuzz.play import case_of, run
from harness import RankFailure, run_ranks, shutdown
from mutants.faulty import faulty
from races.judge import Race, races_in
from races.trace import Place, Trace, places_of
from races.watching import Watch, watching

Work = Callable[[Watch], Any]


def trace_here(work: Work, fault: Path | None = None) -> tuple[Trace, Any]:
    """What `work` does on this rank, and what it returns. It calls `note_names` while its models are there.

    `fault`: a patch to the runtime, for the time being.
    """
    trace = Trace(dist.get_rank())
    with nullcontext() if fault is None else faulty(fault), watching(trace) as watch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = work(watch)
    return trace.shortened(), result


def trace_ranks(
    world: int, work: Work, fault: Path | None = None, timeout: float = 180
) -> tuple[list[Trace], list[Any]]:
    traces, results = zip(*run_ranks(world, trace_here, work, fault, timeout=timeout), strict=True)
    return list(traces), list(results)


def play(seed: int, watch: Watch) -> float:
    """A random job. Returns its largest deviation, of what may be."""
    job = run(case_of(seed, dist.get_world_size()), "cpu")
    watch.note_names()
    return job.worst / job.case.scheme.tolerance


def walk(seed: int, watch: Watch) -> float:
    """A random walk; see `play`."""
    worst = walks.play(seed, "cpu") / walks.TOLERANCE
    watch.note_names()
    return worst


def without_each(traces: list[Trace]) -> dict[Place, list[Race]]:
    """The races that there would be if one wait, meeting or `record_stream` were left out, by its line."""
    return {place: races_in(traces, place.__eq__) for place in places_of(traces)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0:20")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--walks", action="store_true")
    parser.add_argument("--waits", action="store_true", help="leave each wait out in turn")
    options = parser.parse_args()
    tried, noticed, first = Counter[Place](), Counter[Place](), dict[Place, Race]()
    races: dict[str, int] = {}
    begin, _, end = options.seeds.partition(":")
    for seed in range(int(begin), int(end or int(begin) + 1)):
        began = time.monotonic()
        work = functools.partial(walk if options.walks else play, seed)
        try:
            traces, deviations = trace_ranks(options.world, work, timeout=300)
        except RankFailure as failure:
            print(f"seed {seed}: {failure}", flush=True)
            continue
        found = races_in(traces)
        for race in found:
            races.setdefault(str(race), seed)
        for place, more in without_each(traces).items() if options.waits else ():
            tried[place] += 1
            noticed[place] += bool(more)
            if more:
                first.setdefault(place, more[0])
        events = sum(len(trace.events) for trace in traces)
        took_s = time.monotonic() - began
        print(f"seed {seed}: {len(found)} races, {events} events, {max(deviations):.1e}, {took_s:.1f} s", flush=True)
    for text, seed in races.items():
        print(f"seed {seed}: {text}")
    for place in sorted(tried):
        print(f"{noticed[place]:4d} of {tried[place]:4d}  {place}")
    shutdown()
    sys.exit(bool(races))


if __name__ == "__main__":
    main()
