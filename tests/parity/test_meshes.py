"""Meshes: hybrid sharding, degenerate shapes, a part of the ranks, bytes by the formula, a tensor-parallel axis."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lamina
from harness import expect_error, run_ranks
from lamina.core.strategy import resolve
from lamina.runtime.assemble import RUNTIMES
from parity.models import UNITS, build
from parity.reference import MAX_NORM, TOLERANCE, Recipe, difference, language_loss_of, of_language, own_part, sharded

ALL_IN_UNITS = ["embedding", "blocks.*", ["norm", "head"]]


def hybrid(strategies: list[Any], shape: tuple[int, int], names: tuple[str, str]) -> dict[str, float]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    found = {}
    for strategy in strategies:
        for recipe in (Recipe(), Recipe(accumulation="each"), Recipe(accumulation="defer")):
            expected = of_language(dist.get_world_size(), recipe)
            lamina.debug(recipe.accumulation == "each")
            model = lamina.shard(build(), strategy, mesh=mesh, units=UNITS)
            found[f"{strategy} {recipe.accumulation}"] = sharded(model, expected, recipe)
        if strategy == "hsdp":  # regions of the ranks of a gather group, which need not be neighbours
            model = lamina.shard(build(), strategy, mesh=mesh, units=UNITS, transport="peer")
            found[f"{strategy} peer"] = sharded(model, of_language(dist.get_world_size(), Recipe()), Recipe())
    return found


MESHES = [
    (4, (2, 2), ("replicate", "shard"), ["hsdp", "zero1", "zero3", lamina.Strategy(2, 2, 4)]),
    (4, (2, 2), ("shard", "replicate"), ["hsdp"]),
    (4, (4, 1), ("replicate", "shard"), ["hsdp", "zero2"]),
    (4, (1, 4), ("replicate", "shard"), ["zero3", "zero1"]),
    (2, (2, 1), ("replicate", "shard"), ["hsdp"]),
    (3, (3, 1), ("replicate", "shard"), ["hsdp"]),
]


@pytest.mark.parametrize(("world", "shape", "names", "strategies"), MESHES, ids=lambda value: str(value)[:40])
def test_hybrid_meshes_equal_one_process(
    world: int, shape: tuple[int, int], names: tuple[str, str], strategies: list[Any]
) -> None:
    for found in run_ranks(world, hybrid, strategies, shape, names):
        assert max(found.values()) <= TOLERANCE, found


def on_hosts(names: list[str]) -> tuple[str, float]:
    """The border between nodes, found by the names of hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: names[dist.get_rank()])
        model = lamina.shard(build(), "hsdp", units=UNITS)
    recipe = Recipe()
    factors = RUNTIMES[model].units[0].mesh.factors
    return f"{factors.params} of {factors.world}", sharded(model, of_language(len(names), recipe), recipe)


def test_a_node_is_a_replica_where_no_mesh_says_otherwise() -> None:
    for found, worst in run_ranks(4, on_hosts, ["a", "a", "b", "b"]):
        assert found == "2 of 4" and worst <= TOLERANCE


@pytest.mark.parametrize(
    ("names", "words"),
    [(["a", "b", "a", "b"], ["ranks 0, 2", "--distribution=block"]), (["a", "a", "a", "b"], ["ranks 0-2", "as many"])],
)
def test_nodes_that_make_no_replicas_are_named_on_every_rank(names: list[str], words: list[str]) -> None:
    expect_error(4, on_hosts, names, error="UsageError", contains=[*words, "init_device_mesh"], timeout=15)


def hybrid_on_one_replica() -> float:
    recipe = Recipe()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = lamina.shard(build(), "hsdp", mesh=mesh, units=UNITS)
    return sharded(model, of_language(2, recipe), recipe)


def test_hybrid_sharding_on_a_mesh_of_one_replica_is_zero3() -> None:
    assert max(run_ranks(2, hybrid_on_one_replica)) <= TOLERANCE


def one_dimensional(named: bool) -> float:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",) if named else None)
    recipe = Recipe()
    model = lamina.shard(build(), "zero3", mesh=mesh, units=UNITS)
    return sharded(model, of_language(2, recipe), recipe)


@pytest.mark.parametrize("named", [False, True])
def test_one_dimensional_meshes(named: bool) -> None:
    assert max(run_ranks(2, one_dimensional, named)) <= TOLERANCE


def hybrid_without_mesh() -> None:
    lamina.shard(build(), "hsdp")


def hybrid_on_one_dimension() -> None:
    lamina.shard(build(), "hsdp", mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))


def unknown_strategy() -> None:
    lamina.shard(build(), "zero4")


def indivisible() -> None:
    lamina.shard(build(), lamina.Strategy(params=2, grads=2, optimizer=3))


def unnamed_axes() -> None:
    lamina.shard(build(), "zero3", mesh=init_device_mesh("cpu", (1, 2)))


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (hybrid_without_mesh, ["hsdp", "zero3", "init_device_mesh"]),
        (hybrid_on_one_dimension, ["hsdp", "zero3", "init_device_mesh"]),
        (unknown_strategy, ["zero4", "zero3"]),
        (indivisible, ["grads=2", "optimizer=3", "divide"]),
        (unnamed_axes, ["replicate", "shard", "mesh_dim_names"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_strategies_that_cannot_be_meant_are_named_on_every_rank(attempt: Any, words: list[str]) -> None:
    expect_error(2, attempt, error="UsageError", contains=words, timeout=15)


def part_of_the_ranks() -> float | None:
    """Ranks 1 and 3 train; the others idle, and the default group stays silent."""
    mesh = DeviceMesh("cpu", torch.tensor([1, 3]), mesh_dim_names=("shard",))
    if dist.get_rank() not in (1, 3):
        return None
    recipe = Recipe(accumulation="each")
    place = (1, 3).index(dist.get_rank())
    expected = of_language(2, recipe)
    model = lamina.shard(build(), "zero3", mesh=mesh, units=UNITS)
    return sharded(model, expected, recipe, lambda m, step, rank, micro: language_loss_of(m, step, place, micro))


def test_two_of_four_ranks() -> None:
    idle, first, other_idle, second = run_ranks(4, part_of_the_ranks)
    assert idle is None and other_idle is None
    assert max(first, second) <= TOLERANCE


def two_models_in_two_groups() -> float:
    """Each half of the ranks trains a model of its own; ranks have been in other groups, and in fewer, before."""
    if dist.get_rank() in (1, 3):
        dist.new_group([1, 3], use_local_synchronization=True)
    halves = [DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("shard",)) for ranks in ([0, 1], [2, 3])]
    half, place = divmod(dist.get_rank(), 2)
    for _ in range(1 + half):
        model = lamina.shard(build(), "zero3", mesh=halves[half], units=UNITS)
    recipe = Recipe()

    def loss_of(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
        return language_loss_of(model, step, place, micro)

    worst = sharded(model, of_language(2, recipe), recipe, loss_of)
    whole = lamina.shard(build(), "zero2", units=UNITS)
    return max(worst, sharded(whole, of_language(4, recipe), recipe))


def test_groups_of_ranks_with_different_histories_are_named() -> None:
    """torch would wait for ever: it names such a group by how many groups a process has had."""
    expect_error(4, two_models_in_two_groups, error="TransportError", contains=("process groups", "rank"))


def bytes_of_a_step(triple: tuple[int, int, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Counted and expected bytes of the third step, float32 throughout."""
    world = dist.get_world_size()
    factors = resolve(lamina.Strategy(*triple), world)
    model = lamina.shard(build().float(), lamina.Strategy(*triple), units=ALL_IN_UNITS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reports = []
    for step in range(3):
        language_loss_of(model, step, dist.get_rank(), 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        reports.append(lamina.report(model))
    before, after = reports[1:]
    expected = {"gather": 0, "reduce": 0}
    for old, new in zip(before.units, after.units, strict=True):
        moved = factors.bytes_moved(new.bytes // 4, 4, 4, regathers=new.gathers - old.gathers)
        expected = {kind: expected[kind] + moved[kind] for kind in expected}
    counted = {
        "gather": after.bytes_gathered - before.bytes_gathered,
        "reduce": after.bytes_reduced - before.bytes_reduced,
    }
    return counted, expected


TRIPLES = [(1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 2, 4), (1, 4, 4), (2, 2, 2), (2, 2, 4), (4, 4, 4)]


@pytest.mark.parametrize("triple", TRIPLES)
def test_bytes_moved_are_those_of_the_formula(triple: tuple[int, int, int]) -> None:
    for counted, expected in run_ranks(4, bytes_of_a_step, triple):
        assert counted == expected


class _Copy(torch.autograd.Function):
    """Into a column-parallel layer: the identity; backward, the sum over the axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """Out of a row-parallel layer: the sum over the axis; backward, the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


TP_DIMS = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # by last two parts of the name; the rest is replicated
TP_WIDTH, TP_HIDDEN = 6, 10


class ParallelBlock(nn.Module):
    """norm -> column-parallel -> tanh -> row-parallel; without a group, the whole block in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(TP_WIDTH)
        self.up, self.down = nn.Linear(TP_WIDTH, TP_HIDDEN), nn.Linear(TP_HIDDEN, TP_WIDTH, bias=False)
        self.bias = nn.Parameter(torch.randn(TP_WIDTH))
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.group is not None:
            y = _Copy.apply(y, self.group)
        y = self.down(torch.tanh(self.up(y)))
        if self.group is not None:
            y = _Sum.apply(y, self.group)
        return x + y + self.bias

    def split(self, group: dist.ProcessGroup) -> None:
        """Keep this rank's columns and rows."""
        self.group = group
        for layer in (self.up, self.down):
            for name, param in list(layer.named_parameters()):
                dim = 0 if layer is self.up else 1
                part = param.detach().chunk(group.size(), dim)[group.rank()].clone()
                setattr(layer, name, lamina.split_parameter(nn.Parameter(part), dim=dim, group=group))


def parallel_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(ParallelBlock() for _ in range(3)), nn.Linear(TP_WIDTH, 3)).double()


def parallel_data(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, TP_WIDTH, generator=generator, dtype=torch.float64)


def tensor_parallel(strategy: str, own_clip: bool) -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    group, data_rank = mesh.get_group("tp"), mesh.get_local_rank("shard")
    plain, model = parallel_model(), parallel_model()
    for block in model[:3]:
        block.split(group)
    model = lamina.shard(model, strategy, mesh=mesh, units=[ParallelBlock])
    clip_ours = lamina.clip_grad_norm_ if own_clip else torch.nn.utils.clip_grad_norm_
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3) for m in (plain, model)]
    worst = 0.0
    for step in range(3):
        for rank in range(2):
            (plain(parallel_data(step, rank)).pow(2).mean() / 2).backward()
        model(parallel_data(step, data_rank)).pow(2).mean().backward()
        worst = max(worst, part_deviation(model, {n: p.grad for n, p in plain.named_parameters()}, group))
        norms = [
            torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM),
            clip_ours(model.parameters(), MAX_NORM),
        ]
        worst = max(worst, (norms[0] - norms[1]).abs().item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found = {n: p.detach() for n, p in plain.named_parameters()}
        worst = max(worst, part_deviation(model, found, group, of_gradients=False))
    return worst


def part_deviation(
    model: nn.Module, expected: dict[str, Tensor | None], group: dist.ProcessGroup, of_gradients: bool = True
) -> float:
    worst = 0.0
    for name, param in model.named_parameters():
        found, full = param.grad if of_gradients else param, expected[name]
        assert found is not None and full is not None, name
        dim = TP_DIMS.get(".".join(name.split(".")[-2:]))
        part = full if dim is None else full.chunk(group.size(), dim)[group.rank()].contiguous()
        assert own_part(part, found).numel() <= part.numel()
        worst = max(worst, difference(found, part))
    return worst


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@pytest.mark.parametrize("own_clip", [False, True])
def test_a_tensor_parallel_pair_inside_units_equals_one_process(strategy: str, own_clip: bool) -> None:
    assert max(run_ranks(4, tensor_parallel, strategy, own_clip)) <= TOLERANCE


def test_parts_that_would_stay_plain_are_refused() -> None:
    """torch's clipping would count them as whole parameters."""
    expect_error(4, tensor_parallel, "ddp", False, error="UsageError", contains=("up.weight", "zero1"))
