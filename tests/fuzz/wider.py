"""What jobs do from seed `WIDER_FROM` on, beside all else; jobs of seeds below are what they were without it."""

from __future__ import annotations

import random
from dataclasses import dataclass

WIDER_FROM = 10_000
OPTIMIZERS = ("one", "groups", "shapes", "turns", "ends", "late")
SCHEDULES = ("", "lambda", "cycle")


@dataclass(frozen=True)
class Wider:
    optimizers: str = "one"  # or one with "groups", two by "shapes", "turns" or "ends", or one that gets some "late"
    second: str = "sgd"  # the other optimizer's kind
    schedule: str = ""
    overflow: tuple[int, int, str] | None = (
        None  # losses are scaled; step, rank, and the module behind which they overflow
    )
    unscales: bool = True  # before the norm is taken
    batches: tuple[int, ...] = ()  # of each data rank, under `lamina.even`
    slip: tuple[int, int, str] | None = None  # a forward that fails: step, micro-batch before which, and where

    @property
    def features(self) -> set[str]:
        found = {f"optimizers {self.optimizers}"} if self.optimizers != "one" else set()
        found |= {f"schedule {self.schedule}"} if self.schedule else set()
        found |= {f"overflow {self.overflow[2]}"} if self.overflow else set()
        found |= {"unscaled by the optimizer"} if not self.unscales else set()
        found |= {"uneven"} if self.batches else set()
        return found | ({"slip"} if self.slip else set())


def draw_wider(draw: random.Random, world: int, steps: int, micro_batches: int) -> tuple[Wider, dict[int, str]]:
    """Of a job that has such things; and what is to happen before which step."""
    share = 0.25
    optimizers, second, schedule, overflow, batches, slip = "one", "sgd", "", None, (), None
    if draw.random() < share:
        optimizers, second = draw.choice(OPTIMIZERS[1:]), draw.choice(["sgd", "flat", "foreach", "amsgrad"])
    if draw.random() < share:
        schedule = draw.choice(SCHEDULES[1:])
    if draw.random() < share:
        overflow = draw.randrange(steps), draw.randrange(world), draw.choice(["first", "first", "head"])
    unscales = overflow is None or draw.random() < 0.7
    if draw.random() < share and world > 1:
        most = steps * micro_batches
        counts = [draw.randint(1, most) for _ in range(world)]
        counts[draw.randrange(world)] = most
        batches = tuple(counts)
    if draw.random() < share:
        slip = draw.randrange(steps), draw.randrange(micro_batches), draw.choice(["before", "after"])
    acts: dict[int, str] = {}
    for act in ("move", "twin", "average"):
        if draw.random() < share:
            acts[draw.randrange(steps)] = act
    if draw.random() < share:
        acts.setdefault(draw.randrange(steps), "twin")  # of which most jobs are no case
    if draw.random() < share:
        taken, back = sorted(draw.sample(range(steps), 2))
        acts[taken], acts[back] = "rewind", "rewind"
    return Wider(optimizers, second, schedule, overflow, unscales, batches, slip), acts
