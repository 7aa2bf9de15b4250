"""One random training job, on all ranks and in one process, from a seed.

Every rank runs the plain model on what all ranks see, in float64, and compares losses, norms, gradients (whether there
is one, too) and its own ranges of the parameters after each of three steps. Between and inside the steps the job does
what users do: evaluations, edits, freezing, loads, errors that are caught.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from fuzz.models import WIDTH, RandomModel
from parity.reference import difference, gradient_deviation, parameter_deviation

STEPS = 3
TOLERANCE = 1e-10
TRIPLES = {
    2: [(1, 2, 2), (2, 2, 2), (1, 1, 2)],
    3: [(3, 3, 3), (1, 3, 3)],
    4: [(2, 2, 4), (2, 4, 4), (1, 2, 4), (2, 2, 2), (1, 2, 2)],
}
ACTS = ("evaluate", "infer", "edit", "toggle", "load", "fail", "replicas", "nothing", "nothing")


@dataclass(frozen=True)
class Case:
    """Everything about a job but its model."""

    seed: int
    world: int
    strategy: Any
    transport: str
    slots: int
    units: str
    recompute: Any
    debug: bool
    optimizer: str
    clip: float | None
    clip_by: str
    accumulation: str
    micro_batches: int
    forwards: int  # before one backward
    keeps: bool
    zeroes: bool  # zero_grad(set_to_none=False)
    acts: tuple[str, ...]  # before each step

    @property
    def features(self) -> frozenset[str]:
        found = {
            f"{name}={getattr(self, name)}" for name in ("strategy", "transport", "units", "recompute", "optimizer")
        }
        found |= {f"accumulation={self.accumulation}"} | {f"act {act}" for act in self.acts}
        found |= {name for name in ("debug", "keeps", "zeroes") if getattr(self, name)}
        return frozenset(
            found | ({"clipping"} if self.clip else set()) | ({"two forwards"} if self.forwards > 1 else set())
        )

    def __str__(self) -> str:
        return "  ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def draw_case(seed: int, world: int) -> Case:
    draw = random.Random(f"case {seed}")
    names = ["zero3", "zero3", "zero3", "zero2", "zero1", "ddp"]
    strategy = draw.choice(names if world == 1 or draw.random() < 0.6 else TRIPLES[world])
    accumulation = draw.choice(["none", "none", "twice", "each", "defer"])
    return Case(
        seed=seed,
        world=world,
        strategy=strategy,
        transport=draw.choice(["c10d", "c10d", "peer"]),
        slots=draw.choice([1, 2, 3, 3, 9]),
        units=draw.choice(["auto", "blocks", "layers", "groups", "pattern", "classes"]),
        recompute=draw.choice(["none", "none", "full", "selective", 2]),
        debug=draw.random() < 0.3,
        optimizer=draw.choice(["adamw", "foreach", "sgd", "flat", "flat"]),
        clip=draw.choice([None, 2.0, 2.0, 1.0, float("inf")]),
        clip_by=draw.choice(["torch", "lamina"]),
        accumulation=accumulation,
        micro_batches=1 if accumulation == "none" else draw.choice([2, 3]),
        forwards=draw.choice([1, 1, 1, 2]),
        keeps=draw.random() < 0.1,
        zeroes=draw.random() < 0.3,
        acts=tuple(draw.choice(ACTS) for _ in range(STEPS)),
    )


def units_of(case: Case, model: RandomModel) -> Any:
    if case.units == "auto":
        return "auto"
    if case.units == "layers":  # the innermost ones with parameters of their own, nested ones included
        chosen = [m for m in model.blocks.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        return chosen or "auto"
    if case.units == "pattern":
        return ["blocks.*"]
    blocks = [block for block in model.blocks if any(True for _ in block.parameters())]
    kinds = tuple(sorted({type(block) for block in model.blocks}, key=lambda kind: kind.__name__))
    inner = [module for block in model.blocks for module in block.modules() if module is not block]
    if case.units == "classes" and not any(isinstance(module, kinds) for module in inner):
        return list(kinds)
    if case.units == "groups":
        return [list(blocks[i : i + 2]) for i in range(0, len(blocks), 2)]
    return list(blocks)


def make_optimizer(kind: str, params: Sequence[Tensor], is_reference: bool) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)
    options = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
    if kind == "flat" and not is_reference:
        return lamina.optim.AdamW(params, **options)
    return torch.optim.AdamW(params, **options, foreach=kind == "foreach")


class Job:
    """The sharded model of this rank, and the plain one."""

    def __init__(self, case: Case) -> None:
        self.case, self.rank = case, dist.get_rank()
        self.draw = random.Random(f"job {case.seed}")
        self.plain, model = RandomModel(case.seed), RandomModel(case.seed)
        lamina.debug(case.debug)
        strategy = lamina.Strategy(*case.strategy) if isinstance(case.strategy, tuple) else case.strategy
        self.model = lamina.shard(
            model,
            strategy,
            units=units_of(case, model),
            transport=case.transport,
            slots=case.slots,
            recompute=case.recompute,
        )
        lamina.debug(False)
        trains = [[p for p in m.parameters() if p.requires_grad] for m in (self.model, self.plain)]
        self.optimizers = [make_optimizer(case.optimizer, trains[i], i == 1) for i in (0, 1)]
        self.worst, self.where = 0.0, ""

    def compare(self, what: str, deviation: float) -> None:
        if not deviation <= self.worst:
            self.worst, self.where = deviation, what

    def data(self, step: int, rank: int, micro: int, forward: int) -> Tensor:
        """(samples, WIDTH), of one rank."""
        key = ((step * 7 + rank) * 5 + micro) * 3 + forward
        generator = torch.Generator().manual_seed(key)
        return torch.randn(1 + (key % 3), WIDTH, dtype=torch.float64, generator=generator)

    def loss(self, model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
        outputs = [model(self.data(step, rank, micro, f), rank) for f in range(self.case.forwards)]
        return torch.stack([output.pow(2).mean() for output in outputs]).sum() / self.case.micro_batches

    # ---- a step ------------------------------------------------------------------------------------------------

    def step(self, number: int) -> None:
        case, title = self.case, f"step {number}"
        for micro in range(case.micro_batches):
            for rank in range(case.world):
                loss = self.loss(self.plain, number, rank, micro)
                (loss / case.world).backward()
                if rank == self.rank:
                    wanted = loss.detach()
            with self.scope(micro):
                found = self.loss(self.model, number, self.rank, micro)
                self.compare(f"{title} loss", difference(found.detach(), wanted))
                found.backward()
        expected = {name: p.grad for name, p in self.plain.named_parameters()}
        self.compare(f"{title} gradients", gradient_deviation(self.model, expected))
        if case.clip is not None:
            theirs = torch.nn.utils.clip_grad_norm_
            mine = theirs if case.clip_by == "torch" and case.clip != float("inf") else lamina.clip_grad_norm_
            filled = [p for p in self.plain.parameters() if p.numel()]  # torch has no largest element of an empty one
            norms = [mine(self.model.parameters(), 0.1, case.clip), theirs(filled, 0.1, case.clip)]
            self.compare(f"{title} norm", (norms[0] - norms[1]).abs().item())
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not case.zeroes)
        self.compare(f"{title} parameters", self.parameters())
        self.compare(f"{title} optimizer state", self.states())

    def scope(self, micro: int) -> Any:
        case = self.case
        if case.accumulation in ("each", "defer"):
            return lamina.accumulate(
                self.model, last=micro == case.micro_batches - 1, defer=case.accumulation == "defer"
            )
        return lamina.keep(self.model.blocks[0]) if case.keeps else torch.enable_grad()

    def parameters(self) -> float:
        return parameter_deviation(self.model, {n: p.detach() for n, p in self.plain.named_parameters()})

    def states(self) -> float:
        """Largest deviation of what the optimizers know of the parameters; both must know the same of the same."""
        worst, plain = 0.0, dict(self.plain.named_parameters())
        for name, param in self.model.named_parameters():
            mine, other = self.optimizers[0].state.get(param, {}), self.optimizers[1].state.get(plain[name], {})
            assert mine.keys() == other.keys(), f"optimizer state of `{name}`: {list(mine)}, wanted {list(other)}"
            for key, value in other.items():
                if isinstance(value, Tensor):
                    worst = max(worst, difference(mine[key], value))
        return worst

    # ---- what happens between steps ----------------------------------------------------------------------------

    def act(self, what: str) -> None:
        getattr(self, what)()

    def nothing(self) -> None: ...

    def evaluate(self, mode: Callable[[], Any] = torch.no_grad) -> None:
        data = self.data(99, self.rank, 0, 0)
        with mode():
            self.compare("evaluation", difference(self.model(data, self.rank), self.plain(data, self.rank)))

    def infer(self) -> None:
        self.evaluate(torch.inference_mode)

    def edit(self) -> None:
        with lamina.gathered(self.model, write=True), torch.no_grad():
            for parameter in filter(_has_fractions, self.model.parameters()):
                parameter.mul_(0.9)
        with torch.no_grad():
            for parameter in filter(_has_fractions, self.plain.parameters()):
                parameter.mul_(0.9)

    def toggle(self) -> None:
        """Freeze or unfreeze what was trainable when the model was sharded."""
        group = self.optimizers[1].param_groups[0]["params"]
        names = [name for name, p in self.plain.named_parameters() if any(p is q for q in group)]
        chosen = {name for name in names if name != "gain" and self.draw.random() < 0.3}
        for model in (self.model, self.plain):
            for name, parameter in model.named_parameters():
                if name in chosen:
                    parameter.requires_grad_(not parameter.requires_grad)

    def load(self) -> None:
        with torch.no_grad():
            for parameter in filter(_has_fractions, self.plain.parameters()):
                parameter.add_(0.01)
        self.model.load_state_dict(self.plain.state_dict())
        self.compare("load", self.parameters())

    def fail(self) -> None:
        """An error in the middle of a forward, which the user catches."""
        handle = self.model.blocks[-1].register_forward_pre_hook(_raise)
        try:
            self.model(self.data(98, self.rank, 0, 0), self.rank)
        except ZeroDivisionError:
            pass
        finally:
            handle.remove()

    def replicas(self) -> None:
        lamina.check(self.model)


def _has_fractions(parameter: Tensor) -> bool:
    return parameter.dtype is not torch.int8


def _raise(module: nn.Module, args: Any) -> None:
    raise ZeroDivisionError


@dataclass(frozen=True)
class Outcome:
    case: Case
    features: frozenset[str]
    worst: float
    where: str

    @property
    def is_right(self) -> bool:
        return self.worst <= TOLERANCE


def play(seed: int) -> Outcome:
    """Run one job on this rank. Any error is a fault: nothing that these jobs do is refused."""
    job = Job(draw_case(seed, dist.get_world_size()))
    for number in range(STEPS):
        job.act(job.case.acts[number])
        job.step(number)
    return Outcome(job.case, job.plain.features | job.case.features, job.worst, job.where)


def play_all(seeds: Sequence[int]) -> list[Outcome]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        return [play(seed) for seed in seeds]
