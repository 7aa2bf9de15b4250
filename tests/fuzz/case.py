"""What a random job is, but for its model: layout, precision, optimizer, what happens in and between the steps."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lamina
from fuzz.leaves import Leaves
from fuzz.models import RandomModel
from fuzz.sides import Sides, draw_sides
from fuzz.wider import WIDER_FROM, Wider, draw_wider
from gpu.cards import take_card
from lamina.runtime import direct

STEPS = 3
NAMES = ("zero3", "zero3", "zero3", "zero2", "zero1", "ddp")
TRIPLES = {
    2: [(1, 2, 2), (2, 2, 2), (1, 1, 2)],
    3: [(3, 3, 3), (1, 3, 3)],
    4: [(2, 2, 4), (2, 4, 4), (1, 2, 4), (2, 2, 2), (1, 2, 2)],
    8: [(2, 4, 8), (4, 8, 8), (2, 2, 8), (8, 8, 8), (1, 4, 8), (2, 8, 8), (4, 4, 4)],
}
ACTS = ("evaluate", "infer", "edit", "toggle", "load", "fail", "replicas", "scale", "nothing", "nothing")
OPTIMIZERS = ("amsgrad", "nadam", "adagrad", "rmsprop")  # beside the usual ones

Grid = tuple[tuple[int, ...], tuple[str, ...]]  # sizes and names of the axes
BOTH, TURNED = ("replicate", "shard"), ("shard", "replicate")
GRIDS: dict[int, list[Grid]] = {
    1: [((1,), ("shard",)), ((1, 1), BOTH)],
    2: [((2,), ("shard",)), ((2, 1), BOTH), ((1, 2), BOTH), ((1, 2), TURNED), ((2, 1), ("other", "shard"))],
    3: [((3,), ("replicate",)), ((3, 1), BOTH), ((1, 3), TURNED)],
    4: [
        ((4,), ("shard",)),
        ((2, 2), BOTH),
        ((2, 2), TURNED),
        ((2, 2), ("other", "shard")),
        ((2, 2), ("shard", "other")),
    ],
    8: [
        ((8,), ("shard",)),
        ((2, 4), BOTH),
        ((4, 2), BOTH),
        ((2, 4), ("other", "shard")),
        ((2, 2, 2), ("replicate", "shard", "other")),
    ],
}


@dataclass(frozen=True)
class Scheme:
    """A `precision=`, the dtype that the model comes in, and how near the result must be to the same job by hand."""

    given: Any
    born: torch.dtype
    tolerance: float
    rounds: bool = False  # several uses of a parameter may be summed in 16 bits

    @property
    def precision(self) -> lamina.Precision:
        if self.given is None:
            return lamina.Precision(keep=(), master=torch.float32)
        return self.given if isinstance(self.given, lamina.Precision) else lamina.Precision(compute=torch.bfloat16)


def _scheme(born: torch.dtype, rounds: bool, **options: Any) -> Scheme:
    return Scheme(lamina.Precision(master=torch.float64, **options), born, NEAR, rounds)


# By hand, all is rounded where lamina rounds it. What differs is the order, and the dtype, in which several uses of a
# parameter and several micro-batches are summed before they travel. Where such sums are of 16 bits, gradients may
# differ by a few roundings of random sign; the job by hand then goes on with the gradients that lamina has, so that
# norms, parameters and optimizer states are near in all schemes, and gradients in all jobs without such sums.
NEAR = 1e-6
ROUNDING = 2.0**-8  # of all gradients, by norm: half of the last of the 8 bits that bfloat16 has
ROUNDING_OF_ONE = 2.0**-6  # of one parameter's: a few elements do not average as many do
USED_TWICE = frozenset(
    {"Twice", "Reads", "Again", "Calls", "Read", "Tied", "tied head", "tied blocks", "tied tables", "rows added"}
)
SCHEMES = {
    "own": Scheme(None, torch.float64, 1e-10),
    "own, wide masters": _scheme(torch.float64, True, keep=()),  # of parameters narrower than the model
    "born in fp32": _scheme(torch.float32, False, keep=()),
    "fp32": _scheme(torch.float64, False, compute=torch.float32),
    "bf16": _scheme(torch.float64, True, compute=torch.bfloat16),
    "bf16, wide wire": _scheme(torch.float64, True, compute=torch.bfloat16, wire=torch.float32),
    "fp32, narrow wire": _scheme(torch.float64, True, compute=torch.float32, wire=torch.bfloat16),
    "bf16, fp32 masters": Scheme("bf16", torch.float32, NEAR, True),
    "born in bf16": Scheme("bf16", torch.bfloat16, NEAR, True),
    "bf16, halves": Scheme(lamina.Precision(compute=torch.bfloat16, halves=True), torch.float32, NEAR, True),
    "bf16, free": Scheme(lamina.Precision(compute=torch.bfloat16), torch.float32, NEAR, True),  # lamina chooses halves
}
DRAWN_FIRST = tuple(SCHEMES)[:-2]
FREE_FROM = 80_000  # jobs of seeds below are what they were without it
LATE_PEERS_FROM = 100_000


@dataclass(frozen=True)
class Case:
    """Everything about a job but its model."""

    seed: int
    world: int  # ranks that share data
    grid: Grid | None
    strategy: Any
    precision: str
    transport: str
    slots: int
    units: str
    replicate: tuple[str, ...]
    ignores: bool
    recompute: Any
    debug: bool
    hooks: str  # "" | "before" or "after" the model was sharded
    optimizer: str
    clip: float | None
    clip_by: str
    accumulation: str
    micro_batches: int
    forwards: int  # before one backward
    keeps: bool
    zeroes: bool  # zero_grad(set_to_none=False)
    peeks: bool  # evaluations between micro-batches
    late: int | None  # the rank that is late in every forward
    acts: tuple[tuple[str, ...], ...]  # before each step
    sides: Sides | None = None
    penalty: str = ""  # over parameters, outside the forward: "before" or "behind" it in one loss, or "alone"
    wider: Wider = field(default_factory=Wider)
    patience: int = 0  # steps, after which masters in halves are given up; 0: lamina has no choice
    late_peers: bool = False  # come, or not, in the middle of the job: see late.py

    @property
    def features(self) -> frozenset[str]:
        shown = ("strategy", "precision", "transport", "units", "recompute", "optimizer", "accumulation")
        found = {f"{name}={getattr(self, name)}" for name in shown} | {
            f"act {act}" for acts in self.acts for act in acts
        }
        found |= {f"hooks {self.hooks}"} if self.hooks else set()
        found |= {f"mesh {self.grid}"} if self.grid else set()
        found |= {
            name
            for name in ("debug", "keeps", "zeroes", "peeks", "replicate", "ignores", "late_peers")
            if getattr(self, name)
        }
        found |= {name for name, drawn in (("clipping", self.clip), ("late", self.late is not None)) if drawn}
        found |= self.sides.features if self.sides else set()
        found |= {f"penalty {self.penalty}"} if self.penalty else set()
        found |= self.wider.features
        return frozenset(found | ({"two forwards"} if self.forwards > 1 else set()))

    @property
    def scheme(self) -> Scheme:
        return SCHEMES[self.precision]

    @property
    def clips_in_step(self) -> bool:
        """Whether lamina's own optimizer does; it holds all parameters."""
        is_one = self.wider.optimizers in ("one", "groups")
        lie_in_halves = self.scheme.precision.halves or self.patience > 0
        return lie_in_halves and self.optimizer == "flat" and self.clip == 2.0 and is_one

    def rounds(self, layers: frozenset[str]) -> bool:
        """Whether gradients are sums in 16 bits, with a model of these layers.

        Each backward inside a backward is reduced for itself, so a parameter of Mixed or Coarse that is born in 16
        bits is summed in more than the plain model sums it in.
        """
        sums = self.forwards > 1 or bool(layers & USED_TWICE)
        if "Recomputed" in layers and layers & {"Mixed", "Coarse"} and sums:
            return True
        sums |= self.scheme.precision.wire is not None and self.accumulation != "none"
        return self.scheme.rounds and sums

    def __str__(self) -> str:
        return "  ".join(f"{each.name}={getattr(self, each.name)}" for each in fields(self))


def draw_case(seed: int, ranks: int, layers: frozenset[str] = frozenset()) -> Case:
    """`layers`: what the model has."""
    draw, hurry = random.Random(f"case {seed}"), random.Random(f"hurry {seed}")
    grid = draw.choice(GRIDS[ranks]) if draw.random() < 0.35 else None
    world = ranks if grid is None else _data_ranks(grid)
    names = [*NAMES, "hsdp", "hsdp", "hsdp"] if grid and set(grid[1]) == set(BOTH) else NAMES
    strategy = draw.choice(names if world == 1 or draw.random() < 0.6 else TRIPLES[world])
    if grid == ((2, 2), TURNED):  # torch numbers a group's ranks in order: all other strategies are refused by name
        strategy = "hsdp"
    precision = "own" if draw.random() < 0.6 else draw.choice(DRAWN_FIRST)
    accumulation = draw.choice(["none", "none", "twice", "each", "defer"])
    case = Case(
        seed=seed,
        world=world,
        grid=grid,
        strategy=strategy,
        precision="own, wide masters" if precision == "own" and "Coarse" in layers else precision,
        transport=draw.choice(["c10d", "c10d", "peer"]),
        slots=draw.choice([1, 2, 3, 3, 9]),
        units=draw.choice(["auto", "blocks", "layers", "groups", "pattern", "classes"]),
        replicate=draw.choice([("*bias",), ("first.*", "gain")]) if draw.random() < 0.15 else (),
        ignores=precision == "own" and draw.random() < 0.3,
        recompute=draw.choice(["none", "none", "full", "selective", 2]),
        debug=draw.random() < 0.3,
        hooks=draw.choice(["before", "after"]) if draw.random() < 0.3 else "",
        optimizer=draw.choice(["adamw", "foreach", "sgd", "flat", "flat"]),
        clip=draw.choice([None, 2.0, 2.0, 1.0, float("inf")]),
        clip_by=draw.choice(["torch", "lamina"]),
        accumulation=accumulation,
        micro_batches=1 if accumulation == "none" else draw.choice([2, 3]),
        forwards=draw.choice([1, 1, 1, 2]),
        keeps=draw.random() < 0.1,
        zeroes=draw.random() < 0.3,
        peeks=False,
        late=draw.randrange(world) if world > 1 and draw.random() < 0.2 else None,
        acts=tuple(tuple(draw.choice(ACTS) for _ in range(draw.choice([1, 1, 2]))) for _ in range(STEPS)),
    )
    if world > 1 and hurry.random() <= 0.15:
        # weights change on the quick ranks while the late one still evaluates
        pairs = [(hurry.choice(["evaluate", "infer"]), hurry.choice(["scale", "load"])) for _ in range(STEPS)]
        case = replace(case, late=hurry.randrange(world), acts=tuple(pairs))
    case = _draw_more(case, random.Random(f"more {seed}"))
    case = _draw_sides(_draw_free(case) if seed >= FREE_FROM else case, layers)
    case = _draw_wider(case, layers) if seed >= WIDER_FROM else case
    case = _draw_late_peers(case) if seed >= LATE_PEERS_FROM else case
    return _draw_units_of_tables(case, layers)


def _draw_more(case: Case, draw: random.Random) -> Case:
    """What was added later, from a source of its own: the seeds stay what they were."""
    if draw.random() < 0.2:
        case = replace(case, optimizer=draw.choice(OPTIMIZERS))
    if draw.random() < 0.25:
        step = draw.randrange(STEPS)
        acts = [(*acts, "give_up") if n == step else acts for n, acts in enumerate(case.acts)]
        case = replace(case, acts=tuple(acts))
    case = replace(case, peeks=draw.random() < 0.25)
    if draw.random() < 0.3 and case.precision == "own" and not case.hooks:
        case = replace(case, penalty=draw.choice(["before", "behind", "alone"]))
    if draw.random() < 0.15 and _may_be_halved(case):
        case = replace(case, precision="bf16, halves", transport="peer", ignores=False, penalty="")
    return case


def _draw_free(case: Case) -> Case:
    """Masters that lamina halves under our optimizer, which most of these jobs have, and gives up soon."""
    draw = random.Random(f"free {case.seed}")
    if draw.random() > 0.4 or not _may_be_halved(case):
        return case
    optimizer, clip = ("flat", 2.0) if draw.random() < 0.8 else (case.optimizer, case.clip)
    case = replace(
        case, precision="bf16, free", transport="peer", ignores=False, penalty="", patience=draw.randint(1, 3)
    )
    return replace(case, optimizer=optimizer, clip=clip)


def _draw_late_peers(case: Case) -> Case:
    draw = random.Random(f"late peers {case.seed}")
    is_open = case.world > 1 and not case.patience and not case.scheme.precision.halves
    return replace(case, late_peers=is_open and draw.random() < 0.5)


def _draw_sides(case: Case, layers: frozenset[str]) -> Case:
    """Losses of what forwards leave beside their output."""
    draw = random.Random(f"stranded {case.seed}")
    case = replace(
        case, sides=draw_sides(case.seed, case.precision == "own", any(name.startswith("leaves") for name in layers))
    )
    if case.sides and case.recompute == "selective" and case.sides.order in ("first", "then", "grad"):
        case = replace(case, sides=replace(case.sides, order="with"))  # torch refuses a second backward
    if any(name.startswith("leaves") for name in layers) and random.Random(f"nested {case.seed}").random() < 0.3:
        case = replace(case, units="nested")
    if "leaves stranded" in layers and "differs" not in layers and case.precision == "own" and draw.random() < 0.8:
        step = draw.randrange(STEPS)
        act = draw.choice(["strand", "strand", "outdate"])
        case = replace(case, acts=tuple((*acts, act) if n == step else acts for n, acts in enumerate(case.acts)))
    return case


def _draw_wider(case: Case, layers: frozenset[str]) -> Case:
    """Half of the jobs stay as they are."""
    draw = random.Random(f"wider {case.seed}")
    if draw.random() < 0.5:
        return case
    wider, acts = draw_wider(draw, case.world, STEPS, case.micro_batches)
    if case.optimizer == "adagrad" and wider.optimizers == "late":  # torch makes its states in the constructor only
        wider = replace(wider, optimizers="turns")
    if wider.optimizers == "late":  # torch's schedulers count the groups that there are at first
        wider = replace(wider, schedule="")
    if case.clips_in_step or "Mixed" in layers or wider.optimizers not in ("one", "groups"):
        wider = replace(wider, overflow=None, unscales=True)  # torch cannot unscale complex gradients, or none at all
    if case.rounds(layers):  # the job by hand goes on with the gradients that lamina has
        wider = replace(wider, unscales=True)
    if case.penalty or {"strand", "outdate"} & {act for acts in case.acts for act in acts}:
        wider = replace(wider, batches=())
    if wider.overflow is not None and layers & {"Cut", "Instead", "frozen first"}:
        wider = replace(wider, overflow=(*wider.overflow[:2], "head"))
    if any(name.startswith("leaves") for name in layers):  # torch copies no graphs
        acts = {step: act for step, act in acts.items() if act in ("move", "rewind")}
    if case.hooks or case.sides or wider.batches:
        acts = {step: act for step, act in acts.items() if act != "twin"}
    if wider.optimizers == "late" or "move" in acts.values():  # a snapshot is of the groups and layout that there were
        acts = {step: act for step, act in acts.items() if act != "rewind"}
    drawn = {act for some in case.acts for act in some}
    if wider.optimizers == "late" and drawn & {"strand", "outdate", "give_up", "fail"}:
        wider = replace(wider, optimizers="ends")  # which clear gradients that are still to come
    units = "tree" if draw.random() < 0.25 else case.units
    every = tuple((*some, acts[n]) if n in acts else some for n, some in enumerate(case.acts))
    return replace(case, acts=every, units=units, wider=wider)


def _draw_units_of_tables(case: Case, layers: frozenset[str]) -> Case:
    """A table that is a sharded unit is not gathered for its backward; with few slots, others lie in its place."""
    draw = random.Random(f"units of tables {case.seed}")
    if "tables" not in layers or draw.random() < 0.3:
        return case
    keeps = case.strategy == "hsdp" or case.scheme.precision.halves or case.patience or draw.random() < 0.3
    strategy = case.strategy if keeps else "zero3"
    return replace(case, units="tables", strategy=strategy, slots=draw.choice([1, 1, 1, 2, 3]))


def moved(case: Case, number: int, layers: frozenset[str]) -> Case:
    """The same job in another layout."""
    ranks = case.world if case.grid is None else math.prod(case.grid[0])
    other = draw_case(-(case.seed + number) - 1, ranks, layers)
    new = replace(case, slots=other.slots, debug=other.debug, units=other.units)
    if case.precision not in ("bf16, halves", "bf16, free"):  # which not every layout has
        new = replace(new, transport=other.transport, replicate=other.replicate)
        if not case.wider.batches or ranks == case.world == other.world:  # ranks keep their numbers
            new = replace(new, grid=other.grid, world=other.world, strategy=other.strategy)
    if case.sides is None:
        new = replace(new, recompute=other.recompute)
    return replace(new, late=None if case.late is None else case.late % new.world)


def _may_be_halved(case: Case) -> bool:
    """Every unit over peers, its parameters split like their optimizer state."""
    if case.world == 1 or case.grid is not None or case.replicate:
        return False
    strategy = case.strategy
    return strategy == "zero3" or (isinstance(strategy, tuple) and 1 < strategy[0] == strategy[2])


def _data_ranks(grid: Grid) -> int:
    ranks = 1
    for size, name in zip(*grid, strict=True):
        ranks *= 1 if name == "other" else size
    return ranks


def begin_on(device: str) -> None:
    """All jobs that follow on this rank are on that device."""
    if device == "cuda":
        take_card(dist.get_rank())
        direct.LEAST_PIECE_BYTES = 0  # as for wide models


def place_on(grid: Grid | None, rank: int, device: str) -> tuple[DeviceMesh | None, int]:
    """The mesh, and this rank's number among those it shares data with."""
    if grid is None:
        return None, rank
    mesh = init_device_mesh(device, grid[0], mesh_dim_names=grid[1])
    coordinate, number = mesh.get_coordinate(), 0
    assert coordinate is not None
    for size, name, at in zip(*grid, coordinate, strict=True):
        number = number if name == "other" else number * size + at
    return mesh, number


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
    if case.units == "nested":
        return [*blocks, *(m.deep for block in blocks for m in block.modules() if isinstance(m, Leaves))]
    if case.units in ("tree", "tables"):
        share = 0.5 if case.units == "tree" else 0.9
        return _draw_tree(model, random.Random(f"tree {case.seed}"), ignored_of(case, model), share) or "auto"
    if case.units == "groups":
        return [list(blocks[i : i + 2]) for i in range(0, len(blocks), 2)]
    return list(blocks)


def _draw_tree(model: RandomModel, draw: random.Random, ignored: list[str], tables: float) -> list[nn.Module]:
    """Modules at any depth, one inside another, each with a parameter that lies in no other one.

    `tables`: the share of the tables that are chosen.
    """
    places = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    left = {p for name, p in model.named_parameters() if places[p] == 1 and name not in ignored}
    chosen = []
    for module in reversed(list(model.blocks.modules())):  # the innermost ones first
        own = left.intersection(module.parameters())
        share = tables if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else 0.5
        if own and not isinstance(module, nn.ModuleList) and draw.random() < share:
            chosen.append(module)
            left -= own
    return chosen


def ignored_of(case: Case, model: RandomModel) -> list[str]:
    """Frozen matrices of low-rank adapters, and the first layer where it is frozen."""
    if not case.ignores:
        return []
    names = [name for name, p in model.named_parameters() if not p.requires_grad]
    return [name for name in names if ".base." in name or name.startswith("first.")]
