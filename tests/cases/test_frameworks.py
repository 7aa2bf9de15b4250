"""What training frameworks and torch's own utilities do to a model of their own accord: right, or named."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize, prune
from torch.nn.utils.fusion import fuse_linear_bn_eval
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel

import lamina
from cases.training import TOLERANCE, WAYS, WIDTH, Way, batch_of
from harness import expect_error, run_ranks
from parity.reference import parameter_deviation
from parity.test_misuse import sharded
from parity.test_outputs import linears, own_step, reference_step, seeded, values


def wrapped_in_parallel(strategy: str, before: bool, accumulates: bool) -> None:
    """As Accelerate, transformers' Trainer and Lightning wrap what they are given."""
    model = seeded(linears)
    if not before:
        lamina.shard(model, strategy)
    wrapper = DistributedDataParallel(model)
    if before:
        lamina.shard(model, strategy)
    with wrapper.no_sync() if accumulates else contextlib.nullcontext():
        own_step(wrapper)
    own_step(wrapper)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_another_average_of_the_gradients_is_named(before: bool, accumulates: bool) -> None:
    words = ["DistributedDataParallel", "first.weight", "Leave it out"]
    expect_error(2, wrapped_in_parallel, "ddp", before, accumulates, error="StateError", contains=words)


def test_wrapping_shards_is_named() -> None:
    words = ["DistributedDataParallel", "first.weight", "Leave it out"]
    expect_error(2, wrapped_in_parallel, "zero3", False, False, error="ShardOpError", contains=words)


class Both(nn.Module):
    """A part that torch averages, in front of one that lamina does."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.behind = nn.Linear(WIDTH, WIDTH), linears()

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.front(x))


def side_by_side(way: Way) -> float:
    """Wrapped for the other part alone; then evaluated inside a wrapper that has taken all."""
    plain, model = seeded(Both), seeded(Both)
    lamina.shard(model.behind, way.strategy, units=["blocks.*"], transport=way.transport, slots=way.slots)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [f"behind.{name}" for name, _ in model.behind.named_parameters()]
    )
    wrapper = DistributedDataParallel(model)
    steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(2):
        reference_step(plain, step)
        own_step(wrapper, step)
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        seen = (wrapper(batch_of(0, 9)) - plain(batch_of(0, 9))).abs().max().item()
    return max(seen, parameter_deviation(model, values(plain)))


@pytest.mark.parametrize("way", WAYS)
def test_a_wrapper_for_other_parameters(way: Way) -> None:
    assert max(run_ranks(2, side_by_side, way)) <= TOLERANCE


class Whitening(torch.optim.SGD):
    """Needs whole matrices, as Muon, Shampoo and Adafactor of other libraries do."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.ndim == 2:
                p.sub_(self._root_mean_square(p.grad))

    def _root_mean_square(self, grad: Tensor) -> Tensor:
        return grad.pow(2).mean(dim=-1, keepdim=True).sqrt()


def matrix_optimizer() -> None:
    model = sharded()
    own_step(model)
    Whitening(model.parameters(), lr=0.1).step()


def closure_past_the_forward() -> None:
    model = sharded()
    Whitening(model.parameters(), lr=0.1).step(lambda: model.first.weight @ torch.ones(WIDTH, 1).double())


class Rounded(torch.optim.SGD):
    """Weights of 16 bits in 32: rounded up or down by chance, as optimizers of bf16 models do without fp32 masters."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            new = (p - self.param_groups[0]["lr"] * p.grad).float()
            bits = torch.randint_like(new, 0, 1 << 16, dtype=torch.int32).add_(new.view(torch.int32))
            p.copy_(bits.bitwise_and_(-(1 << 16)).view(torch.float32))
            p.view(torch.int64).bitwise_and_(-(1 << 40))


def rounded_by_chance(way: Way) -> float:
    plain, model = seeded(linears), seeded(linears)
    lamina.shard(model, way.strategy, units=["blocks.*"], transport=way.transport, slots=way.slots)
    steps = [Rounded(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        for each, optimizer in zip((plain, model), steps, strict=True):
            torch.manual_seed(step)
            each(batch_of(0, step)).sum().backward()  # the same on each rank, so that rounding is the same
            optimizer.step()
            optimizer.zero_grad()
    return parameter_deviation(model, values(plain))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 3])
def test_steps_that_round_by_chance(world: int, way: Way) -> None:
    assert max(run_ranks(world, rounded_by_chance, way)) <= TOLERANCE


def average_made_before() -> None:
    model = seeded(linears)
    average = AveragedModel(model)
    lamina.shard(model)
    average.update_parameters(model)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


def parametrized() -> nn.Module:
    model = linears()
    parametrize.register_parametrization(model.first, "weight", Twice())
    weight_norm(model.last)
    prune.identity(model.blocks[0], "weight")
    return model


def in_gathered(change: Callable[[nn.Module], object]) -> None:
    model = lamina.shard(seeded(parametrized), units=["blocks.*"])
    with lamina.gathered(model, write=True):
        change(model)
    own_step(model)


def removed_linear_parametrization() -> None:
    in_gathered(lambda model: parametrize.remove_parametrizations(model.first, "weight"))


def removed_weight_norm() -> None:
    in_gathered(lambda model: parametrize.remove_parametrizations(model.last, "weight"))


def removed_pruning() -> None:
    in_gathered(lambda model: prune.remove(model.blocks[0], "weight"))


def bias_as_buffer(model: nn.Module) -> None:
    bias = model.blocks[1].bias
    del model.blocks[1].bias
    model.blocks[1].register_buffer("bias", bias)


def bias_made_a_buffer() -> None:
    in_gathered(bias_as_buffer)


def assigned_outside() -> None:
    model = lamina.shard(seeded(parametrized))
    model.first.weight = torch.ones(WIDTH, WIDTH).double()
    own_step(model)


def swapped() -> None:
    model = sharded()
    torch.utils.swap_tensors(model.last.bias, nn.Parameter(torch.ones(3).double()))
    own_step(model)


def steps_in_backward(strategy: str) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward  # it warns of torch.jit

    model = sharded(strategy)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    own_step(model)


@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
def test_optimizers_on_nodes_of_the_backward_are_named(strategy: str) -> None:
    words = ["first.weight", "register_post_accumulate_grad_hook"]
    expect_error(2, steps_in_backward, strategy, error="StateError", contains=words, timeout=15)


def step_at_once(optimizer: torch.optim.Optimizer, param: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def stepped_as_it_comes(way: Way) -> float:
    """What is to be typed instead: an optimizer a parameter, which steps when its gradient is there."""
    plain, model = seeded(linears), seeded(linears)
    lamina.shard(model, way.strategy, units=["blocks.*"], transport=way.transport, slots=way.slots)
    together = torch.optim.Adam(plain.parameters(), lr=0.01, eps=1e-3)
    for param in model.parameters():
        own = torch.optim.Adam([param], lr=0.01, eps=1e-3)
        param.register_post_accumulate_grad_hook(functools.partial(step_at_once, own))
    for step in range(3):
        reference_step(plain, step)
        together.step()
        together.zero_grad()
        own_step(model, step)
    return parameter_deviation(model, values(plain))


@pytest.mark.parametrize("way", WAYS)
def test_optimizers_that_step_in_the_backward(way: Way) -> None:
    assert max(run_ranks(2, stepped_as_it_comes, way)) <= TOLERANCE


def folded(way: Way) -> float:
    """torch's fusion copies a layer and gives it new parameters."""
    plain, model = (nn.Sequential(seeded(linears), nn.BatchNorm1d(3).double()).eval() for _ in range(2))
    lamina.shard(model, way.strategy, transport=way.transport, slots=way.slots)
    for each in (plain, model):
        each[1].running_var.fill_(3.0)
    with lamina.gathered(model):
        whole = fuse_linear_bn_eval(model[0].last, model[1])
    fused = fuse_linear_bn_eval(plain[0].last, plain[1])
    x = batch_of(dist.get_rank(), 0)
    worst = (whole(x) - fused(x)).abs().max().item()
    return max(worst, (model(x) - plain(x)).abs().max().item())


@pytest.mark.parametrize("way", WAYS)
def test_layers_are_fused_while_gathered(way: Way) -> None:
    assert max(run_ranks(2, folded, way)) <= TOLERANCE


class Coded(nn.Module):
    """A frozen layer that writes its weight anew when it is first called, as those of bitsandbytes do."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(WIDTH, WIDTH) * 9, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.is_coded = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_coded:
            self.codes.data.copy_(self.codes.data.t().round())
            self.is_coded = True
        return torch.tanh(x @ self.codes / 9 + self.bias)


def coded() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Coded(), nn.Linear(WIDTH, 3))


def coded_while_gathered() -> None:
    own_step(lamina.shard(seeded(coded)))


def coded_by_itself(way: Way) -> float:
    plain, model = seeded(coded), seeded(coded)
    lamina.shard(model, way.strategy, transport=way.transport, slots=way.slots, ignore=["1.codes"])
    for each, take in ((plain, reference_step), (model, own_step)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(2):
            take(each, step)
            optimizer.step()
            optimizer.zero_grad()
    return parameter_deviation(model, values(plain))


@pytest.mark.parametrize("way", WAYS)
def test_layers_that_rewrite_frozen_weights_are_left_alone(way: Way) -> None:
    assert max(run_ranks(2, coded_by_itself, way)) <= TOLERANCE


NAMED: dict[Callable[[], None], tuple[str, list[str]]] = {
    matrix_optimizer: ("ShardOpError", ["`Whitening`", "first.weight", "lamina.optim.AdamW", 'strategy="ddp"']),
    average_made_before: ("ShardOpError", ["first.weight", "copy the model after lamina.shard()"]),
    removed_linear_parametrization: ("StateError", ["`first.weight`", "ParametrizationList", "before lamina.shard()"]),
    removed_weight_norm: ("StateError", ["`last.weight`", "ParametrizationList", "before lamina.shard()"]),
    removed_pruning: ("StateError", ["`weight_orig`", "deleted", "before lamina.shard()"]),
    bias_made_a_buffer: ("StateError", ["`bias`", "deleted", "before lamina.shard()"]),
    coded_while_gathered: ("StateError", ["1.codes", "lamina.shard(..., ignore=)"]),
    assigned_outside: ("ParameterChanged", ["first.parametrizations.weight.original", "gathered(model, write=True)"]),
    swapped: ("ParameterChanged", ["last.bias", "swap_tensors"]),
}


@pytest.mark.parametrize("misuse", NAMED, ids=lambda misuse: misuse.__name__)
def test_is_named_on_every_rank(misuse: Callable[[], None]) -> None:
    error, words = NAMED[misuse]
    expect_error(2, misuse, error=error, contains=words, timeout=15)


def test_a_closure_is_the_users_own() -> None:
    errors = expect_error(2, closure_past_the_forward, error="ShardOpError", contains=["first.weight"], timeout=15)
    assert not [error for error in errors.values() if "Whitening" in error.message]


def computed_by_hooks() -> nn.Module:
    model = linears()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of the older kind; many models of audio use it
        nn.utils.weight_norm(model.first)
    prune.l1_unstructured(model.blocks[0], "weight", 0.3)
    prune.l1_unstructured(model.blocks[0], "bias", 0.3)
    nn.utils.spectral_norm(model.last)
    return model


def cast_before(way: Way) -> float:
    """`.double()` in `seeded` has given the parameters new nodes; the computed weights still lead to the old ones."""
    plain, model = seeded(computed_by_hooks), seeded(computed_by_hooks)
    lamina.shard(model, way.strategy, units=["blocks.*"], transport=way.transport, slots=way.slots)
    steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(2):
        plain(batch_of(0, step)).sum().backward()
        model(batch_of(0, step)).sum().backward()  # one forward a step: each is an iteration of the spectral norm
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    return parameter_deviation(model, values(plain))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [1, 2])
def test_weights_that_hooks_compute_of_a_model_that_was_cast(world: int, way: Way) -> None:
    assert max(run_ranks(world, cast_before, way)) <= TOLERANCE


def assigned_inside(way: Way) -> float:
    """A parametrized weight is assigned while whole, and blocks are dropped; then both train."""
    plain, model = seeded(parametrized), seeded(parametrized)
    lamina.shard(model, way.strategy, units=["blocks.*"], transport=way.transport, slots=way.slots)
    new = batch_of(0, 5)[:1].expand(WIDTH, WIDTH).contiguous()
    for each, scope in ((plain, contextlib.nullcontext()), (model, lamina.gathered(model, write=True))):
        with scope:
            each.first.weight = new
            each.last.parametrizations.weight.original1.data.mul_(0.5)
            each.blocks = each.blocks[:2]
    steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(2):
        reference_step(plain, step)
        own_step(model, step)
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    return parameter_deviation(model, values(plain))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 3])
def test_parametrizations_are_assigned_while_gathered(world: int, way: Way) -> None:
    assert max(run_ranks(world, assigned_inside, way)) <= TOLERANCE
