"""One-sided gathers where ranks, orders and outputs are unusual: what tests/parity asks of c10d, asked of `peer`.

Nobody else takes part in a gather there, so a rank may use what it likes; reductions stay collective.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import lamina
from cases.training import TOLERANCE, Way, batch_of, seeded
from harness import expect_error, run_ranks
from parity.reference import gradient_deviation, one_process, sharded
from parity.structures import STRUCTURES, build_structure
from parity.test_outputs import PACK, Parent, grads, linears, own_step, reference_step
from parity.test_paths import PATHS, FirstThenSecond, Stack, compare, two_heads
from parity.test_structures import batch, recipes_of

PATHWISE = ("experts", "skipping", "sometimes", "unused")  # ranks differ
LATE = ("lora int8", "detached", "two inputs", "nested reentrant", "looped", "tied", "motley", "bitfit")


def structures(names: tuple[str, ...], slots: int) -> dict[str, float]:
    found = {}
    for name in names:
        structure, recipe = STRUCTURES[name], recipes_of(name)[-1]

        def loss_of(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
            return structure.loss(model, batch(step, rank, micro), rank)  # noqa: B023  # called in this round only

        expected = one_process(build_structure(name), dist.get_world_size(), recipe, loss_of)
        model = lamina.shard(build_structure(name), units=list(structure.units), transport="peer", slots=slots)
        found[name] = sharded(model, expected, recipe, loss_of)
    return found


@pytest.mark.parametrize(("world", "names", "slots"), [(2, PATHWISE, 1), (3, PATHWISE, 3), (2, LATE, 1)])
def test_structures(world: int, names: tuple[str, ...], slots: int) -> None:
    for found in run_ranks(world, structures, names, slots):
        assert max(found.values()) <= TOLERANCE, found


def paths(checkpointing: str) -> dict[str, float]:
    found = {}
    for number, (name, path) in enumerate(PATHS.items()):
        build = lambda: Stack(checkpointing)  # noqa: E731
        found[name] = compare(build, path, transport="peer", slots=1 + number % 2)
    found["first output, then the other"] = compare(two_heads, FirstThenSecond(), steps=3, transport="peer", slots=1)
    return found


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_forwards_and_backwards_in_any_order(checkpointing: str) -> None:
    for found in run_ranks(2, paths, checkpointing):
        assert max(found.values()) <= TOLERANCE, found


WAYS = (Way("zero3", "peer", 1), Way("zero1"), Way("ddp"))


def packs() -> dict[str, float]:
    """C07 beyond zero3 on c10d."""
    found = {}
    for pack in PACK:
        for way in WAYS:
            plain, model = (seeded(lambda pack=pack: Parent(pack)) for _ in range(2))
            model = lamina.shard(model, way.strategy, units=["blocks.*"], transport=way.transport, slots=way.slots)
            for step in range(2):
                reference_step(plain, step)
                own_step(model, step)
            found[f"{pack} {way}"] = gradient_deviation(model, grads(plain))
    return found


def test_outputs_of_any_type() -> None:
    for found in run_ranks(2, packs):
        assert max(found.values()) <= TOLERANCE, found


def penalty(model: nn.Module, rank: int, step: int) -> Tensor:
    x = batch_of(rank, step).requires_grad_()
    out = torch.tanh(model(x))
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + gradient.pow(2).sum(1).mean()


def penalties() -> dict[str, float]:
    """Second derivatives inside `keep`."""
    found = {}
    for way in WAYS:
        plain, model = seeded(linears), seeded(linears)
        model = lamina.shard(model, way.strategy, units=["blocks.*"], transport=way.transport, slots=way.slots)
        for step in range(2):
            for rank in range(2):
                (penalty(plain, rank, step) / 2).backward()
            with lamina.keep(model):
                penalty(model, dist.get_rank(), step).backward()
        found[str(way)] = gradient_deviation(model, grads(plain))
    return found


def test_gradient_penalties_inside_keep() -> None:
    for found in run_ranks(2, penalties):
        assert max(found.values()) <= TOLERANCE, found


def penalty_outside() -> None:
    model = lamina.shard(seeded(linears), units=["blocks.*"], transport="peer")
    penalty(model, dist.get_rank(), 0).backward()


def test_a_gradient_penalty_outside_keep_is_named() -> None:
    expect_error(2, penalty_outside, error="StateError", contains=["create_graph", "lamina.keep"], timeout=15)


def part_of_the_ranks(transport: str) -> float:
    """C08: ranks 1 and 3 train a layer smaller than they are many; 0 and 2 have gone on."""
    mesh = DeviceMesh("cpu", torch.tensor([1, 3]), mesh_dim_names=("shard",))
    if dist.get_rank() not in (1, 3):
        return 0.0
    plain, model = (seeded(lambda: nn.Linear(5, 3)) for _ in range(2))
    model = lamina.shard(model, mesh=mesh, transport=transport)
    for step in range(2):
        for rank in (1, 3):
            (plain(batch_of(rank, step)).pow(2).mean() / 2).backward()
        model(batch_of(dist.get_rank(), step)).pow(2).mean().backward()
    return gradient_deviation(model, grads(plain))


@pytest.mark.parametrize("transport", ["c10d", "peer"])
def test_a_part_of_the_ranks(transport: str) -> None:
    assert max(run_ranks(4, part_of_the_ranks, transport)) <= TOLERANCE
