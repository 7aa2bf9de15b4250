"""Random jobs of two sharded models: each a random model in a layout of its own, joined as users join them.

    python tests/fuzz/pairs.py --seeds 0:200 --world 4

One after the other, side by side, the first one twice, a student and its teacher (an average, or fixed), a generator
and a critic that train in turn. All in float64, compared as `play.py` does.
"""

from __future__ import annotations

import itertools
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

import lamina
from fuzz.case import STEPS, TRIPLES, Case, begin_on
from fuzz.hunt import hunt
from fuzz.models import RandomModel
from fuzz.play import Job, case_of
from fuzz.sides import begin_step, forget
from fuzz.wider import Wider
from parity.reference import difference

WAYS = ("chain", "beside", "twice", "student", "average", "critic", "critic, frozen")
TOLERANCE = 1e-10
CALM = ("evaluate", "infer", "edit", "scale", "load", "nothing", "replicas")  # what one model does alone between steps
DECAY = 0.7

Forward = Callable[[int, Tensor, int], Tensor]  # number of the model, data, rank -> output


@dataclass(frozen=True)
class Pair:
    seed: int
    way: str
    cases: tuple[Case, Case]
    micro_batches: int
    scoped: str  # "" | "each" | "defer": both models' micro-batches
    splits: bool  # two backwards, one of each term

    def __str__(self) -> str:
        how = f"{self.way} {self.micro_batches} {self.scoped} splits={self.splits}"
        return "\n    ".join([how, *map(str, self.cases)])


def draw_pair(seed: int, world: int) -> Pair:
    draw = random.Random(f"pair {seed}")
    way, micro_batches, splits = draw.choice(WAYS), draw.choice([1, 1, 2]), draw.random() < 0.3
    scoped = draw.choice(["", "each", "defer"]) if micro_batches > 1 else ""
    in_one_backward = way in ("chain", "twice", "critic", "critic, frozen") or (way == "beside" and not splits)
    first, second = (_calm(case_of(_seed_of(seed, n, in_one_backward), world), draw, world) for n in (0, 1))
    if way == "average":  # in the same layout, so that weights lie side by side
        second = replace(first, acts=(("evaluate",),) * STEPS)
    return Pair(seed, way, (first, second), micro_batches, scoped, splits)


def _seed_of(seed: int, number: int, in_one_backward: bool) -> int:
    """Of a model that lets gradients pass on every rank.

    Where one backward goes through both models, and ranks take different paths through them, they may come to wait for
    each other: that is refused by name.
    """
    left_out = {"Cut", "Coarse", "Instead"} | ({"differs"} if in_one_backward else set())
    return next(n for n in itertools.count(200 * seed + 100 * number) if not RandomModel(n).features & left_out)


def _calm(case: Case, draw: random.Random, world: int) -> Case:
    """In float64, on all ranks; what one model does in its own step is drawn by `play.py`."""
    strategy = draw.choice(["zero3", "zero3", "zero2", "zero1", "ddp", *TRIPLES.get(world, [])])
    acts = tuple(tuple(act if act in CALM else "nothing" for act in some) for some in case.acts)
    return replace(
        case,
        world=world,
        grid=None,
        strategy=strategy,
        precision="own",
        accumulation="none",
        micro_batches=1,
        forwards=1,
        keeps=False,
        sides=None,
        penalty="",
        acts=acts,
        wider=Wider(),
        units="blocks" if case.units == "tree" else case.units,
    )


class PairJob:
    def __init__(self, pair: Pair, device: str) -> None:
        self.pair, self.device = pair, device
        self.jobs = [Job(case, device) for case in pair.cases]
        self.world, self.rank = pair.cases[0].world, self.jobs[0].rank
        self.models = [[job.model for job in self.jobs], [job.reference.model for job in self.jobs]]

    def terms(self, forward: Forward, data: Tensor, rank: int, turn: int) -> list[Tensor]:
        """Losses of one micro-batch, to be added or run backward one after the other."""
        way = self.pair.way
        if way == "chain":
            return [forward(1, torch.tanh(forward(0, data, rank)), rank).pow(2).mean()]
        if way == "beside":
            return [forward(0, data, rank).pow(2).mean(), forward(1, data, rank).sub(1).pow(2).mean()]
        if way == "twice":
            return [forward(0, torch.tanh(forward(1, torch.tanh(forward(0, data, rank)), rank)), rank).pow(2).mean()]
        if way in ("student", "average"):
            with torch.no_grad():
                target = forward(1, data, rank)
            return [(forward(0, data, rank) - target).pow(2).mean()]
        made = torch.tanh(forward(0, data, rank))
        if turn == 1:  # the critic's
            return [forward(1, made.detach(), rank).pow(2).mean(), forward(1, data, rank).sub(1).pow(2).mean()]
        return [forward(1, made, rank).sub(1).pow(2).mean()]

    def trained(self, turn: int) -> list[int]:
        """Numbers of the models that step."""
        if self.pair.way in ("chain", "beside", "twice"):
            return [0, 1]
        return [turn]

    def step(self, number: int) -> None:
        for turn in (0, 1) if self.pair.way.startswith("critic") else (0,):
            self.take_turn(number, turn)
        if self.pair.way == "average":
            self.follow()

    def take_turn(self, number: int, turn: int) -> None:
        pair, title = self.pair, f"step {number}.{turn}"
        for job in self.jobs:
            job.reference.refresh()
            for model in (job.model, job.reference.model):
                begin_step(model, number)
        self.freeze(turn, True)
        for micro in range(pair.micro_batches):
            for rank in range(self.world):
                data = self.jobs[0].data(number, rank, micro, turn)
                terms = self.terms(lambda n, x, r: self.models[1][n](x, r), data, rank, turn)
                if rank == self.rank:
                    wanted = torch.stack(terms).sum().detach()
                self.backward_plain(torch.stack(terms).sum())
            last, defer = micro == pair.micro_batches - 1, pair.scoped == "defer"
            first, second = (lamina.accumulate(m, last or not pair.scoped, defer) for m in self.models[0])
            with first, second:
                data = self.jobs[0].data(number, self.rank, micro, turn)
                terms = self.terms(lambda n, x, r: self.models[0][n](x, r), data, self.rank, turn)
                self.compare(f"{title} loss", difference(torch.stack(terms).sum().detach(), wanted))
                losses = terms if pair.splits else [torch.stack(terms).sum()]
                for loss in losses:
                    (loss / pair.micro_batches).backward(retain_graph=loss is not losses[-1])
        self.freeze(turn, False)
        for n, job in enumerate(self.jobs):
            if n in self.trained(turn):
                job.end_of_step(f"{title} of {n}")
            else:
                job.compare_gradients(f"{title} beside {n}", False)
                for trainer in job.trainers:
                    trainer.zero_grad(set_to_none=not job.case.zeroes)

    def backward_plain(self, loss: Tensor) -> None:
        (loss / (self.pair.micro_batches * self.world)).backward()
        for job in self.jobs:
            for master, copy in job.reference.pairs:
                if copy.grad is not None:
                    found = copy.grad.to_dense()  # a table's may be sparse
                    master.grad = found if master.grad is None else master.grad + found
                    copy.grad = None

    def freeze(self, turn: int, frozen: bool) -> None:
        """The critic's weights while the generator trains."""
        if self.pair.way == "critic, frozen" and turn == 0:
            for model in (self.models[0][1], self.models[1][1], self.jobs[1].plain):
                names = self.jobs[1].trainers[1].names
                for name, param in model.named_parameters():
                    if name in names:
                        param.requires_grad_(not frozen)

    @torch.no_grad()
    def follow(self) -> None:
        """The teacher's weights become averages of the student's."""
        student, teacher = self.jobs
        for mine, given in ((teacher.model, student.model), (teacher.plain, student.plain)):
            for param, value in zip(mine.parameters(), given.parameters(), strict=True):
                if param.dtype is not torch.int8:
                    param.lerp_(value, 1 - DECAY)

    def compare(self, what: str, deviation: float) -> None:
        self.jobs[0].compare(what, deviation)


def play(seed: int, device: str = "cpu") -> tuple[float, str]:
    """Largest difference on this rank, and where."""
    pair = draw_pair(seed, dist.get_world_size())
    job = PairJob(pair, device)
    for number in range(STEPS):
        for each in job.jobs:
            for act in each.case.acts[number]:
                each.act(act)
        job.step(number)
    for model in job.models[0] + job.models[1]:
        forget(model)
    return max((each.worst, each.where) for each in job.jobs)


def play_all(seeds: Sequence[int], device: str = "cpu") -> list[tuple[float, str]]:
    begin_on(device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        return [play(seed, device) for seed in seeds]


def problem_of(by_rank: Sequence[tuple[float, str]]) -> str:
    return "; ".join(
        f"rank {r}: {worst:.2e} in {where}" for r, (worst, where) in enumerate(by_rank) if not worst <= TOLERANCE
    )


if __name__ == "__main__":
    hunt(play_all, problem_of, draw_pair, world=2)
