"""A kept graph: the runtime goes with its model all the same, and a backward through that graph says so.

What is freed is compared with the plain model, of which torch frees all but what a graph needs.
"""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lamina
from harness import run_ranks
from lamina.runtime.assemble import RUNTIMES
from leftovers import mapped_regions
from parity.models import UNITS, build, language_batch, language_loss
from parity.reference import TOLERANCE, Recipe, difference, of_language, sharded

ROWS, WIDTH = 7, 6
left: list[Tensor] = []  # where nobody looks


class Block(nn.Module):
    """Leaves in a list what its weight, its bias alone, and a lookup have made: the last two save no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.bias = (
            nn.Embedding(ROWS, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Parameter(torch.ones(6)),
        )
        self.kept: Any = None
        self.above: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = hidden = torch.tanh(self.mix(x))
        y = x.detach()
        left.extend([torch.tanh(self.mix(y)), y + self.bias, self.table(torch.tensor([0, 1]))])
        return x + hidden + self.bias + self.table(torch.tensor([2]))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)
        self.kept: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.memory(x)[0])

    def encode(self, tokens: Tensor) -> Tensor:
        return self(tokens) * 2.0


def plain(net: Net) -> Net:
    return net


def with_own_hooks(net: Net) -> Net:
    """The user's, on outputs of units: ours stand before them."""
    model = lamina.shard(net, units=UNIT_NAMES)
    for block in net.blocks:
        block.register_forward_hook(lambda module, args, output: output.register_hook(torch.clone) and None)
    return model


def copied(net: Net) -> Net:
    return copy.deepcopy(lamina.shard(net, units=UNIT_NAMES, recompute="full"))


def adopted(net: Net) -> Net:
    model = lamina.shard(net, units=UNIT_NAMES)
    model(tokens()).sum().backward()
    model.head = nn.Linear(WIDTH, 3)
    lamina.adopt(model, model.head)
    return model


def by(strategy: Any = "zero3", **arguments: Any) -> Callable[[Net], Net]:
    return lambda net: lamina.shard(net, strategy, **{"units": UNIT_NAMES, **arguments})


REPORT_S = 2.0  # the watch's thread has the control in its hands while it writes a report
UNIT_NAMES = ["table", "blocks.*", "memory", "head"]
WAYS: dict[str, Callable[[Net], Net]] = {
    "zero3 by collectives": by(transport="c10d"),
    "zero3 by peers": by(transport="peer"),
    "zero2": by("zero2", transport="c10d"),
    "zero1": by("zero1", transport="c10d"),
    "zero1 by peers": by("zero1", transport="peer"),
    "ddp": by("ddp", transport="c10d"),
    "ddp by peers": by("ddp", transport="peer"),
    "ddp in 16 bits": by("ddp", precision="bf16"),
    "16 bits": by(precision="bf16"),
    "recomputed": by(recompute="full"),
    "recomputed in part": by(recompute="selective", transport="c10d"),
    "one slot": by(slots=1),
    "joined": by(units="auto"),
    "units in units": by(units=["blocks.*", "blocks.*.mix", "memory"]),
    "entry points": by(entry_points=["encode"]),
    "own hooks": with_own_hooks,
    "copied": copied,
    "adopted": adopted,
}
KEEPS: dict[str, Callable[[Net, Tensor], Any]] = {
    "nothing": lambda model, output: None,
    "output": lambda model, output: output,
    "loss": lambda model, output: output.float().square().mean(),
    "loss after its backward": lambda model, output: after_backward(output.float().square().mean()),
    "activation": lambda model, output: model.blocks[1].kept,
    "list": lambda model, output: [output, model.blocks[0].kept],
    "output in the model": lambda model, output: setattr(model, "kept", output),
    "loss in a block": lambda model, output: setattr(model.blocks[0], "above", output.float().mean()),
    "circle": lambda model, output: setattr(model.blocks[1], "above", (model, output)),
}


def tokens() -> Tensor:
    return torch.arange(4).view(2, 2) + dist.get_rank()


def after_backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


def run(model: Net) -> Tensor:
    """A step, and the output of a forward behind it."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(tokens()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.encode(tokens())


def parts_of(model: Net) -> dict[str, weakref.ref[Any]]:
    """Everything that a model's runtime is made of, and what of the model no graph needs."""
    parts: dict[str, Any] = {"model": model, "a block": model.blocks[1], "recurrent": model.memory}
    if model in RUNTIMES:
        runtime = RUNTIMES[model]
        engine = runtime.engine
        parts |= {"runtime": runtime, "engine": engine, "control": runtime.control, "arena": runtime.arena}
        parts |= {name: getattr(engine, name) for name in ("lanes", "gatherer", "reducer", "residency", "gradients")}
        parts |= {f"hooks of {name}": hooks for name, hooks in runtime.hooks.items()}
        parts |= {"groups": runtime.mesh.share.lease} if runtime.mesh.factors.uses_shards else {}
        for unit in runtime.units:
            parts |= {f"unit {unit.name}": unit, f"slot of {unit.name}": unit.slot}
            parts |= {f"shard {p.name}": p for p in unit.params if isinstance(p, lamina.Shard)}
    return {name: weakref.ref(part) for name, part in parts.items() if part is not None}


def remaining(parts: dict[str, weakref.ref[Any]]) -> list[str]:
    """Names of those that are alive, though the watch's thread has had the time to end its report."""
    deadline = time.monotonic() + REPORT_S
    while (found := [name for name, part in parts.items() if part() is not None]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def stay(way: str, keep: str) -> list[str]:
    """What is alive when the model has been dropped, and the collector has not run unless torch needs it, too."""
    before = mapped_regions()
    make = plain if way == "plain" else WAYS[way]
    model = make(Net())
    kept = KEEPS[keep](model, run(model))
    parts = parts_of(model)
    gc.collect()
    dist.barrier()
    gc.disable()
    try:
        del model
        left.clear()
        if keep == "circle":
            gc.collect()
        found = remaining(parts)
        regions = mapped_regions()
        return found if regions == before else [*found, f"{regions - before} regions"]
    finally:
        gc.enable()
        del kept


def all_that_stay(way: str) -> dict[str, list[str]]:
    return {keep: found for keep in KEEPS if (found := stay(way, keep))}


@pytest.mark.parametrize("way", ["plain", *WAYS])
def test_a_kept_graph_holds_no_runtime(way: str) -> None:
    assert run_ranks(2, all_that_stay, way) == [{}, {}]


def test_nor_where_replicas_are_sharded() -> None:
    assert run_ranks(4, all_that_stay_in_replicas) == [{}] * 4


def all_that_stay_in_replicas() -> dict[str, list[str]]:
    WAYS["replicas"] = by(lamina.Strategy(params=2, grads=2, optimizer=4))
    return all_that_stay("replicas")


def groups_taken() -> list[int]:
    """Process groups of this rank after each of some models whose outputs are all kept."""
    outputs, counts = [], []
    for _ in range(3):
        model = lamina.shard(Net(), units=UNIT_NAMES, transport="c10d")
        outputs.append(run(model))
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_the_next_model_takes_over_the_groups() -> None:
    for counts in run_ranks(2, groups_taken):
        assert counts[1:] == counts[1:2] * 2, counts  # the second one is made while the name holds the first


# ---- a backward through it -----------------------------------------------------------------------------------------


def refused(way: str) -> list[str]:
    """Backwards that are not refused by name, or leave gradients."""
    wrong = []
    for keep in ("output", "loss", "activation", "left"):
        left.clear()
        model = WAYS[way](Net())
        output = run(model)
        shards = [p for p in model.parameters() if isinstance(p, lamina.Shard)]
        is_plain = all(unit.plain for unit in RUNTIMES[model].units)
        graphs = left[-9:] if keep == "left" else [KEEPS[keep](model, output)]
        model.zero_grad()
        left.clear()
        engine = weakref.ref(RUNTIMES[model].engine)
        del model, output
        wrong += [f"{keep}: {name} is alive" for name in remaining({"the engine": engine})]
        # what nobody has seen leave leads to parameters that are plain, and the user's own again
        for number, graph in enumerate(graphs if not (is_plain and keep == "left") else []):
            try:
                graph.float().sum().backward()
                wrong.append(f"{keep} {number}: no error")
            except lamina.StateError as error:
                if "of a sharded model that is gone" not in str(error) or "until its last backward" not in str(error):
                    wrong.append(f"{keep} {number}: {error}")
        if any(param.grad is not None for param in shards):
            wrong.append(f"{keep}: gradients")
        dist.barrier()
    return wrong


@pytest.mark.parametrize("way", WAYS)
def test_its_backward_is_refused_by_name(way: str) -> None:
    assert run_ranks(2, refused, way) == [[], []]


def train_after_a_refusal(strategy: str, transport: str) -> float:
    model = lamina.shard(build(), strategy, units=UNITS, transport=transport)
    loss = language_loss(model, language_batch(0, 2))
    model = lamina.shard(build(), strategy, units=UNITS, transport=transport)
    with pytest.raises(lamina.StateError, match="a sharded model that is gone"):
        loss.backward()
    recipe = Recipe(steps=2)
    return sharded(model, of_language(dist.get_world_size(), recipe), recipe)


@pytest.mark.parametrize("transport", ["c10d", "peer"])
@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
def test_the_next_model_trains_after_a_refusal(strategy: str, transport: str) -> None:
    assert max(run_ranks(2, train_after_a_refusal, strategy, transport)) <= TOLERANCE


def drop_on_one_rank() -> str:
    model = lamina.shard(build(), units=UNITS, transport="c10d")
    for step in range(2):
        language_loss(model, language_batch(step, 2)).backward()
    loss = language_loss(model, language_batch(3, 2))
    if dist.get_rank() == 0:
        del model
    with pytest.raises(lamina.LaminaError) as raised:
        loss.backward()
    return str(raised.value)


def test_others_that_have_kept_the_model_are_told() -> None:
    said = run_ranks(2, drop_on_one_rank, timeout=60)
    assert "a sharded model that is gone" in said[0] and "rank 0 ended or dropped the model" in said[1]


def loss_of_a_parameter() -> list[str]:
    said = []
    for drops in ("before", "after"):
        model = lamina.shard(build(), units=UNITS)
        param = next(model.parameters())
        loss = (param**2).sum() if drops == "after" else None
        del model
        loss = (param**2).sum() if loss is None else loss
        with pytest.raises(lamina.StateError) as raised:
            loss.backward()
        said.append(str(raised.value))
    return said


def test_a_loss_over_a_parameter_that_has_outlived_the_model_is_refused() -> None:
    for said in run_ranks(2, loss_of_a_parameter):
        assert all("`embedding.weight`" in each and "a sharded model that is gone" in each for each in said), said


# ---- where it works ------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.is_reentrant)
        return x


def made(is_reentrant: bool) -> Checkpointed:
    torch.manual_seed(3)
    return Checkpointed(is_reentrant).double()


def loss_of(model: nn.Module, rank: int) -> Tensor:
    x = torch.linspace(-1, 1 + rank, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH).requires_grad_()
    return model(x).square().mean()


def worst_difference(params: list[Tensor], wanted: nn.Module) -> float:
    for rank in range(dist.get_world_size()):
        (loss_of(wanted, rank) / dist.get_world_size()).backward()
    found = zip(params, wanted.parameters(), strict=True)
    return max(difference(param.grad, other.grad) for param, other in found)  # type: ignore[arg-type]


def backward_by_the_users_checkpoint(strategy: str, is_reentrant: bool) -> tuple[float, bool]:
    """torch's checkpoint holds its layers, so they hold their runtime: as plain torch does, the backward works."""
    model = lamina.shard(made(is_reentrant), strategy, units=["layers.*"])
    params, engine = list(model.parameters()), weakref.ref(RUNTIMES[model].engine)
    loss = loss_of(model, dist.get_rank())
    del model
    gc.collect()
    is_alive = engine() is not None
    loss.backward()
    del loss
    return worst_difference(params, made(is_reentrant)), is_alive and engine() is None


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
def test_what_torchs_checkpoint_holds_still_runs_backward(strategy: str, is_reentrant: bool) -> None:
    for worst, goes_with_the_graph in run_ranks(2, backward_by_the_users_checkpoint, strategy, is_reentrant):
        assert worst <= TOLERANCE and goes_with_the_graph


def train_a_part() -> float:
    model = lamina.shard(made(False), units=["layers.*"])
    layer, params = model.layers[1], list(model.layers[1].parameters())
    del model
    gc.collect()
    loss_of(layer, dist.get_rank()).backward()
    return worst_difference(params, made(False).layers[1])


def test_a_part_of_the_model_that_is_kept_trains() -> None:
    assert max(run_ranks(2, train_a_part)) <= TOLERANCE


def drop_the_critic(strategy: str) -> tuple[float, bool]:
    """A generator's output was a critic's input, and the critic is gone: nothing of it hinders the generator."""
    made_by = lamina.shard(made(False), strategy, units=["layers.*"])
    output = made_by(torch.linspace(-1, 1, WIDTH, dtype=torch.float64)[None].requires_grad_())
    critic = lamina.shard(made(False), strategy, units=["layers.*"])
    critic(output)
    engine = weakref.ref(RUNTIMES[critic].engine)
    del critic
    is_gone = engine() is None
    output.square().mean().backward()
    reference = made(False)
    reference(torch.linspace(-1, 1, WIDTH, dtype=torch.float64)[None].requires_grad_()).square().mean().backward()
    found = zip(made_by.parameters(), reference.parameters(), strict=True)
    return max(difference(param.grad, other.grad) for param, other in found), is_gone


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_an_input_of_a_model_that_is_gone_runs_backward(strategy: str) -> None:
    for worst, _ in run_ranks(2, drop_the_critic, strategy):
        assert worst <= TOLERANCE
