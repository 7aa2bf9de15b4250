"""Random walks through a few blocks, another on each rank and in each step, beside one process.

The jobs of play.py draw models whose ranks differ here and there. Here nothing but the path is drawn: which blocks are
called, how often, in what order, one inside another, recomputed, without gradient or cut off, and for how many steps
it stays the same. That is what moves a rank from program to agreement and back.

    python tests/fuzz/walks.py --seeds 0:200 --world 4          # prints what is not right
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import lamina
from fuzz.case import begin_on
from fuzz.hunt import hunt
from parity.reference import TOLERANCE, difference, gradient_deviation

WIDTH, STEPS, DEPTH = 8, 4, 2
EVALUATION = 99  # a step of its own
WAYS = ("plain",) * 6 + ("no_grad", "cut", "reentrant", "recomputed")
STRATEGIES = {
    1: ("zero3", "zero2"),
    2: ("zero3", "zero3", "zero2", "zero1", "ddp"),
    3: ("zero3", "zero2", "zero1"),
    4: ("zero3", "hsdp", "hsdp", (2, 2, 4), (2, 4, 4), (1, 2, 4), "zero2", "zero1"),
}
UNITS: tuple[Any, ...] = (["blocks.*"], ["first", "blocks.*", "last"], "auto")


@dataclass(frozen=True)
class Call:
    """One call of a block, and the calls in the middle of it."""

    block: int
    way: str
    inside: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Walk:
    """What is drawn for one job."""

    blocks: int
    micro_batches: int
    slots: int
    transport: str
    recompute: str | int
    accumulation: str
    debug: bool
    strategy: Any
    differs: str  # between what the paths differ
    steps: bool  # of an optimizer
    evaluates: bool
    units: Any


def draw_walk(seed: int, world: int) -> Walk:
    draw = random.Random(f"walk {seed} {world}")
    return Walk(
        blocks=draw.randint(2, 6),
        micro_batches=draw.choice([1, 1, 2, 3]),
        slots=draw.choice([1, 1, 2, 3, 4]),
        transport=draw.choice(["c10d", "peer"]),
        recompute=draw.choice(["none", "none", "full", "selective", 2]),
        accumulation=draw.choice(["each", "defer", "none"]),
        debug=draw.random() < 0.3,
        strategy=draw.choice(STRATEGIES[world]),
        differs=draw.choice(["ranks", "ranks", "steps", "both", "nothing", "one rank in one step"]),
        steps=draw.random() < 0.7,
        evaluates=draw.random() < 0.3,
        units=draw.choice(UNITS),
    )


def path_of(walk: Walk, seed: int, step: int, rank: int, micro: int) -> tuple[Call, ...]:
    keys = {
        "ranks": (rank, micro),
        "steps": (step // 2, micro),
        "both": (step // 2, rank, micro),
        "nothing": (),
        "one rank in one step": (rank == 1, step == 2),
    }
    draw = random.Random(f"path {seed} {keys[walk.differs]}")
    kind, order = draw.choice(["straight", "turned", "tree", "tree"]), list(range(walk.blocks))
    if kind == "tree":
        return tuple(_draw_call(draw, walk.blocks, DEPTH) for _ in range(draw.randint(0, walk.blocks)))
    if kind == "turned":
        draw.shuffle(order)
        order = [block for block in order if draw.random() < 0.9]
    return tuple(Call(block, "plain") for block in order)


def _draw_call(draw: random.Random, blocks: int, depth: int) -> Call:
    count = draw.choice([0, 0, 1, 1, 2]) if depth and draw.random() < 0.4 else 0
    inside = tuple(_draw_call(draw, blocks, depth - 1) for _ in range(count))
    return Call(draw.randrange(blocks), draw.choice(WAYS), inside)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, model: Walked, inside: tuple[Call, ...]) -> Tensor:
        hidden, found = self.up(x).tanh(), x
        for call in inside:
            found = model.follow(found, call)
        return x + self.down(hidden * found.mean() if inside else hidden)


class Walked(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, x: Tensor, path: tuple[Call, ...]) -> Tensor:
        x = self.first(x)
        for call in path:
            x = self.follow(x, call)
        return self.last(x)

    def follow(self, x: Tensor, call: Call) -> Tensor:
        block, inside = self.blocks[call.block], call.inside
        if call.way == "no_grad":
            with torch.no_grad():
                return x + block(x, self, inside)
        if call.way == "cut":
            return block(x.detach(), self, inside)
        if call.way in ("reentrant", "recomputed"):
            return checkpoint(block, x, self, inside, use_reentrant=call.way == "reentrant")
        return block(x, self, inside)


def build(walk: Walk, seed: int, device: str) -> Walked:
    torch.manual_seed(seed)
    return Walked(walk.blocks).double().to(device)


def output_of(model: nn.Module, walk: Walk, seed: int, step: int, rank: int, micro: int) -> Tensor:
    """(2, WIDTH), of one rank's data on its path."""
    generator = torch.Generator().manual_seed(((seed * 100 + step) * 10 + rank) * 10 + micro)
    data = torch.randn(2, WIDTH, dtype=torch.float64, generator=generator)
    return model(data.to(next(model.parameters()).device), path_of(walk, seed, step, rank, micro))


def play(seed: int, device: str) -> float:
    """Largest relative difference of losses, evaluations and gradients over the steps of one job, on this rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    walk, worst = draw_walk(seed, world), 0.0
    plain, strategy = build(walk, seed, device), walk.strategy
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard")) if strategy == "hsdp" else None
    lamina.debug(walk.debug)
    model = lamina.shard(
        build(walk, seed, device),
        lamina.Strategy(*strategy) if isinstance(strategy, tuple) else strategy,
        mesh=mesh,
        units=walk.units,
        slots=walk.slots,
        transport=walk.transport,
        recompute=walk.recompute,
    )
    lamina.debug(False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain)]
    for step in range(STEPS):
        for micro in range(walk.micro_batches):
            losses = [
                output_of(plain, walk, seed, step, r, micro).square().mean() / walk.micro_batches for r in range(world)
            ]
            (torch.stack(losses).sum() / world).backward()
            last = micro == walk.micro_batches - 1
            each = walk.accumulation != "none"
            with lamina.accumulate(model, last=last or not each, defer=walk.accumulation == "defer"):
                loss = output_of(model, walk, seed, step, rank, micro).square().mean() / walk.micro_batches
                loss.backward()
            worst = max(worst, difference(loss.detach(), losses[rank].detach()))
            if walk.evaluates:
                with torch.no_grad():
                    found, wanted = (output_of(m, walk, seed, EVALUATION, rank, micro) for m in (model, plain))
                worst = max(worst, difference(found, wanted))
        worst = max(worst, gradient_deviation(model, {name: p.grad for name, p in plain.named_parameters()}))
        for optimizer in optimizers:
            if walk.steps:
                optimizer.step()
            optimizer.zero_grad()
    return worst


def play_all(seeds: Sequence[int], device: str = "cpu") -> list[float]:
    begin_on(device)
    return [play(seed, device) for seed in seeds]


def problem_of(by_rank: Sequence[float]) -> str:
    return "; ".join(f"rank {rank}: {worst:.2e}" for rank, worst in enumerate(by_rank) if not worst <= TOLERANCE)


if __name__ == "__main__":
    hunt(play_all, problem_of, draw_walk, world=4)
