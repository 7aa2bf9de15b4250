"""Many random jobs, or one:  python tests/fuzz/run.py --seeds 0:1000   |   python tests/fuzz/run.py --seeds 17 --show

Seeds go round the worlds 1 to 4. A difference, an error that is not lamina's, or a hang is printed with the case.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import harness
from fuzz.play import Outcome, play_all

BATCH = 10  # seeds a call
LIMIT_S = 60.0


def world_of(seed: int) -> int:
    return 1 + seed % 4


def run_seeds(seeds: list[int]) -> list[tuple[int, str, Outcome | None]]:
    """Seed, what went wrong ("" if nothing did), and the outcome."""
    found: list[tuple[int, str, Outcome | None]] = []
    for world in sorted({world_of(seed) for seed in seeds}):
        mine = [seed for seed in seeds if world_of(seed) == world]
        try:
            by_rank = harness.run_ranks(world, play_all, mine, timeout=LIMIT_S * len(mine) / 10 + 30)
        except harness.RankFailure as failure:
            if len(mine) > 1:
                found += [row for seed in mine for row in run_seeds([seed])]
            else:
                found.append((mine[0], str(failure), None))
            continue
        for number, seed in enumerate(mine):
            outcomes = [outcomes[number] for outcomes in by_rank]
            wrong = [f"rank {r}: {o.worst:.2e} in {o.where}" for r, o in enumerate(outcomes) if not o.is_right]
            if len({bool(o.refused) for o in outcomes}) > 1:
                wrong.append(f"refused on some ranks only: {[o.refused for o in outcomes]}")
            found.append((seed, "; ".join(wrong), outcomes[0]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0:100")
    parser.add_argument("--show", action="store_true", help="describe every case")
    options = parser.parse_args()
    first, _, stop = options.seeds.partition(":")
    seeds = list(range(int(first), int(stop or int(first) + 1)))
    began, wrong, refused, features = time.monotonic(), 0, Counter[str](), Counter[str]()
    for at in range(0, len(seeds), 4 * BATCH):
        for seed, problem, outcome in run_seeds(seeds[at : at + 4 * BATCH]):
            if outcome is not None:
                features.update(outcome.features)
                if outcome.refused:
                    refused[outcome.refused[:110]] += 1
            if problem or options.show:
                print(f"seed {seed}: {problem or 'right'}\n    {outcome.case if outcome else ''}", flush=True)
                print(f"    {sorted(outcome.features) if outcome else ''} {outcome.refused if outcome else ''}")
            wrong += bool(problem)
    took = time.monotonic() - began
    print(f"{len(seeds)} seeds in {took:.0f} s: {wrong} wrong, {refused.total()} refused")
    for text, count in refused.most_common():
        print(f"    {count} x {text}")
    print("features: " + ", ".join(f"{name} {count}" for name, count in sorted(features.items())))
    harness.shutdown()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
