"""Losses that read parameters outside every forward: regularisers, temperatures, heads that the training script uses.

In one process it is all the same to autograd. Here such a gradient passes by what reduces the others: where a rank
holds whole parameters it is the rank's own, where it holds shards a factor before it is. Penalties whose value is the
same on all ranks, in the usual orders, are in test_calls.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lamina
from cases.training import TOLERANCE, WAYS, WIDTH, Case, Way, batch_of, seeded, worst_of
from harness import expect_error, run_ranks
from parity.reference import Recipe, one_process, sharded
from parity.structures import Chain

Loss = Callable[[nn.Module, Tensor], Tensor]


class Scaled(Chain):
    """With parameters that its forward leaves to the loss."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))
        self.scale, self.shift = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.randn(3))


def tied() -> nn.Module:
    model = Scaled()
    model.blocks[1][0].weight = model.blocks[0][0].weight
    model.first.bias = model.blocks[0][0].bias
    return model


def square(model: nn.Module) -> Tensor:
    return 0.1 * sum(p.pow(2).sum() for p in model.parameters())


def before_the_forward(model: nn.Module, x: Tensor) -> Tensor:
    """Its backward comes last, when reductions have written gradients already."""
    penalty = square(model)
    return penalty + model(x).pow(2).mean()


def own_factors(model: nn.Module, x: Tensor) -> Tensor:
    """Each rank weighs the penalties by its own data, one before and one behind the forward."""
    penalty = model.last.weight.norm() + model.scale.pow(2).sum()
    loss = model(x).pow(2).mean()
    return loss * (penalty + model.first.weight.abs().max()) + x.mean() * model.blocks[0][0].weight.pow(2).mean()


def simple_sums(model: nn.Module, x: Tensor) -> Tensor:
    """Their gradients are plain tensors of one number, expanded."""
    return model(x).pow(2).mean() * 2 + model.first.bias.sum() + x.sum() * model.shift.mean() + model.last.bias.sum()


def alone(model: nn.Module, x: Tensor) -> Tensor:
    """A backward that no forward is part of, then one of parameters that no forward uses, both weighed by the data."""
    (x.std() * model.last.weight.pow(2).sum()).backward()
    loss = model(x).pow(2).mean()
    (x.mean() * (model.shift.norm() + model.scale.pow(2).sum())).backward()
    return loss


class Parting(Scaled):
    """Ranks leave out other blocks, and one of two gives the first block no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        skip = int(x[0, 0] > 0)
        y = self.first(x)
        for number, block in enumerate(self.blocks):
            y = y if number == skip else block(y.detach() if skip else y)
        return self.last(y)


SHARED: dict[str, Case] = {
    fn.__name__: Case(Scaled, fn) for fn in (before_the_forward, own_factors, simple_sums, alone)
}
SHARED |= {
    "tied": Case(tied, own_factors, optimizer="foreach", max_norm=0.05),
    "tied, before": Case(tied, before_the_forward, max_norm=0.05),
    "ranks part": Case(Parting, before_the_forward, units=("blocks.*", "last"), steps=4),
    "ranks part, own factors": Case(Parting, own_factors, units=("blocks.*", "last"), steps=4),
}


def temperature(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).pow(2) * model.scale.exp()).mean()


def head_outside(model: nn.Module, x: Tensor) -> Tensor:
    """A weight that the training script uses on what a part of the model returns."""
    return F.linear(model.blocks[1](model.first(x)), model.last.weight).pow(2).mean() + model.shift @ x.mean(0)[:3]


def only_the_first_rank(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).pow(2).mean()
    is_first = torch.equal(x, batch_of(0, 0)) or torch.equal(x, batch_of(0, 1))
    return loss + model.scale * model.shift.sum() if is_first else loss


class Adjoint(torch.autograd.Function):
    """Runs a part of the model again in its backward, by a backward inside, as solvers of equations do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: nn.Module, *params: Tensor) -> Tensor:
        ctx.x, ctx.part = x, part
        return part(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            again = ctx.part(ctx.x)
        return None, None, *torch.autograd.grad(again, list(ctx.part.parameters()), grads)


def adjoint(model: nn.Module, x: Tensor) -> Tensor:
    """Gradients of parameters arrive when the backward inside, which is all of the model's, has ended."""
    return Adjoint.apply(x, model.blocks[1], *model.blocks[1].parameters()).pow(2).mean()


def adjoint_among_others(model: nn.Module, x: Tensor) -> Tensor:
    return adjoint(model, x.sin()) + model(x).pow(2).mean() + adjoint(model, x)


WHOLE: dict[str, Case] = {
    fn.__name__: Case(Scaled, fn, max_norm=0.1)
    for fn in (temperature, head_outside, only_the_first_rank, adjoint, adjoint_among_others)
}


def run(ways: tuple[Way, ...], cases: dict[str, Case]) -> dict[str, float]:
    return {f"{name} {way}": value for name, case in cases.items() for way, value in worst_of(case, ways).items()}


@pytest.mark.parametrize(
    ("world", "ways"),
    [(2, (WAYS[0], WAYS[3])), (3, (Way("zero2", "peer"), Way("ddp"))), (1, (Way("zero3"), Way("ddp")))],
)
def test_losses_over_parameters_equal_one_process(world: int, ways: tuple[Way, ...]) -> None:
    """Shards where ranks hold them; what needs whole parameters where they are whole."""
    for found in run_ranks(world, run, ways, SHARED) + run_ranks(world, run, ways[-1:], WHOLE):
        wrong = {name: value for name, value in found.items() if not value <= TOLERANCE}
        assert not wrong, wrong


def of_micro_batch(loss: Loss, model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
    return loss(model, batch_of(rank, 10 * step + micro))


def accumulated(strategy: str, accumulation: str) -> float:
    """Two micro-batches, of which only the first has the penalty that comes before."""

    def loss_of(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
        return (own_factors if micro else before_the_forward)(model, batch_of(rank, 10 * step + micro))

    recipe = Recipe("sgd", accumulation)
    expected = one_process(seeded(tied), dist.get_world_size(), replace(recipe, accumulation="each"), loss_of)
    return sharded(lamina.shard(seeded(tied), strategy, units=["blocks.*"], slots=1), expected, recipe, loss_of)


def ways_to_accumulate() -> Iterator[tuple[str, str]]:
    yield from (("zero3", accumulation) for accumulation in ("twice", "each", "defer"))
    yield from (("zero1", "each"), ("zero1", "defer"), ("zero2", "each"), ("ddp", "each"), ("ddp", "twice"))


def accumulated_in_all_ways() -> dict[Any, float]:
    return {way: accumulated(*way) for way in ways_to_accumulate()}


def test_losses_over_parameters_in_micro_batches() -> None:
    for found in run_ranks(2, accumulated_in_all_ways):
        assert max(found.values()) <= TOLERANCE, found


def narrow(strategy: str) -> float:
    """Compute in bf16: the gradient of a weight that only the loss reads is that of all ranks, relative error."""
    plain, own = (seeded(Scaled, torch.float32) for _ in range(2))
    model = lamina.shard(own, strategy, units=["blocks.*"], precision=lamina.Precision(compute=torch.bfloat16, keep=()))

    def loss(m: nn.Module, rank: int) -> Tensor:
        x = batch_of(rank, 0, torch.float32)
        return m(x).float().pow(2).mean() + x.std() * m.last.weight.pow(2).sum()

    for rank in range(2):
        (loss(plain, rank) / 2).backward()
    loss(model, dist.get_rank()).backward()
    grad, full = model.last.weight.grad, plain.last.weight.grad
    assert grad is not None and full is not None
    full = full.flatten()[grad.start : grad.stop] if isinstance(grad, lamina.Shard) else full
    mine = grad.local if isinstance(grad, lamina.Shard) else grad
    return ((mine - full).abs().max() / full.abs().max()).item() if mine.numel() else 0.0


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_losses_over_parameters_beside_narrow_copies(strategy: str) -> None:
    assert max(run_ranks(2, narrow, strategy)) <= 2e-2


def with_own_numbers() -> None:
    """A penalty that points to this rank's data."""
    model = lamina.shard(seeded(Scaled), units=["blocks.*"])
    x = batch_of(dist.get_rank(), 0)
    (model(x).pow(2).mean() + (model.shift - x.mean(0)[:3]).pow(2).sum()).backward()


def test_numbers_of_one_rank_inside_a_sum_over_shards_are_named() -> None:
    expect_error(3, with_own_numbers, error="Disagreement", contains=["`shift`", "ranks 1-2", "mine"], timeout=15)


def on_one_rank() -> None:
    """All ranks take the norm, and one adds it to its loss."""
    model = lamina.shard(seeded(Scaled), units=["blocks.*"])
    norm, loss = model.last.weight.norm(), model(batch_of(dist.get_rank(), 0)).pow(2).mean()
    (loss + norm if dist.get_rank() == 1 else loss).backward()


def test_a_loss_over_shards_on_one_rank_is_named() -> None:
    expect_error(2, on_one_rank, error="Disagreement", contains=["on some ranks only", "multiply it by 0"], timeout=15)
