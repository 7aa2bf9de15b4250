"""Whole programs of users who write, move, freeze and hook what is sharded: on all data at once, and on ranks.

`training.py` compares gradients of one loss. Here a program is run as it stands, once plainly on the batches of all
ranks, once sharded on its own, and every parameter that it leaves is compared; or every rank must name what it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lamina
from cases.training import TOLERANCE, WAYS, WIDTH, Way, batch_of, seeded
from harness import expect_error, run_ranks
from parity.reference import parameter_deviation
from parity.structures import Chain

ROWS = len(batch_of(0, 0))  # of one rank
Program = Callable[[nn.Module, Callable[[int], Tensor]], None]


def linears() -> Chain:
    return Chain(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).pow(2).mean().backward()


def train(model: nn.Module, data: Callable[[int], Tensor], steps: Iterable[int], optimizer: Any = None) -> None:
    optimizer = optimizer or sgd(model)
    for step in steps:
        optimizer.zero_grad()
        backward(model, data(step))
        optimizer.step()


def emptied(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    """`to_empty` with gradients and an optimizer at hand, values given afterwards."""
    optimizer = sgd(model)
    train(model, data, range(2), optimizer)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.1)
    train(model, data, range(2, 5), optimizer)


def copied_memory(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    """`.data =` of parameters between steps."""
    for step in range(3):
        train(model, data, [step])
        for param in model.parameters():
            param.data = param.data.clamp(-0.3, 0.3)


def gradients_assigned(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    """Noise and clipping in the style of old code: `p.grad.data =`, over micro-batches and steps."""
    optimizer = sgd(model)
    for step in range(4):
        backward(model, data(step))
        for param in model.parameters():
            param.grad.data = param.grad.data * 0.5 + 0.01
        if step % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)


def gradients_assigned_ours(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    """The same before our clipping and our optimizer, which read flat ranges."""
    is_sharded = len(data(0)) == ROWS
    clip = lamina.clip_grad_norm_ if is_sharded else nn.utils.clip_grad_norm_
    make = lamina.optim.AdamW if is_sharded else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=0.01, eps=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, data(step))
        for param in model.parameters():
            param.grad.data = param.grad.data * 0.5 + 0.01
        clip(model.parameters(), 0.1)
        optimizer.step()


def frozen_late(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    """Frozen between forward and backward, thawed before the next step."""
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(data(step)).pow(2).mean()
        part = (model.first, model.blocks[0], model.last)[step]
        part.requires_grad_(False)
        loss.backward()
        optimizer.step()
        part.requires_grad_(True)
    assert all(param.grad is None for param in model.last.parameters())


def hooked(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    """Hooks that are not linear see the mean over ranks, each backward's own, once; one is removed on the way."""
    counts = [0]

    def count(param: Tensor) -> None:
        counts[0] += 1

    model.first.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    model.blocks[1][0].weight.register_hook(lambda grad: grad * grad.norm())
    removed = model.blocks[0][0].bias.register_hook(lambda grad: grad.sign() * 0.1)
    model.last.bias.register_post_accumulate_grad_hook(count)
    optimizer = sgd(model)
    for step in range(4):
        backward(model, data(step))
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            removed.remove()
    backward(model, data(4))
    model.blocks[0](data(5)).pow(2).mean().backward()  # the others' gradients stand, their hooks rest
    optimizer.step()
    assert counts == [5]


def with_states_from_the_start(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    """Adagrad makes its states of the parameters when it is built."""
    train(model, data, range(3), torch.optim.Adagrad(model.parameters(), lr=0.05))


def hooked_and_regularised(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    """A hook that is not linear sees a gradient once, also where a penalty outside the forward has a part in it."""
    counts = [0]

    def clamp(grad: Tensor) -> Tensor:
        counts[0] += 1
        return grad.clamp(-0.02, 0.02)

    model.first.weight.register_hook(clamp)
    for step in range(3):
        penalty = model.first.weight.pow(2).sum() + model.last.bias.sum()
        (penalty + model(data(step)).pow(2).mean()).backward()
        sgd(model).step()
        model.zero_grad()
    assert counts == [3]


def stepped_in_backward(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    """An optimizer for each parameter, stepped by its hook."""
    optimizers = {param: torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in model.parameters()}

    def step_of(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_of)
    for step in range(3):
        backward(model, data(step))


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("on purpose")


def hooked_and_failed(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    """A backward that fails leaves the hooks where they were."""
    optimizer = sgd(model)
    model.first.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    with pytest.raises(ValueError, match="on purpose"):
        model(Failing.apply(data(9).requires_grad_())).pow(2).mean().backward()
    train(model, data, range(2), optimizer)


def double_weight(module: nn.Module, args: Any) -> None:
    module[0].weight.data.mul_(2.0)


def refused_once(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    """After a forward that was refused the model is as between steps: an optimizer built then holds its parameters."""
    if isinstance(model.first.weight, lamina.Shard):
        handle = model.blocks[1].register_forward_pre_hook(double_weight)
        with pytest.raises(lamina.StateError, match="in place"):
            model(data(9))
        handle.remove()
    train(model, data, range(2))


def marked(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    """What a user notes on a parameter is there while it is gathered, too."""
    model.first.weight.scale = 2.0
    model.first.register_forward_hook(lambda m, args, out: out * m.weight.scale)
    train(model, data, range(2))


def mapped(model: nn.Module, data: Callable[[int], Tensor]) -> None:
    """`torch.vmap` over samples, of the model and of a part of it, once nested."""
    optimizer = sgd(model)
    losses: list[Callable[[Tensor], Tensor]] = [
        lambda x: torch.vmap(model)(x),
        lambda x: torch.vmap(lambda row: model(row[None])[0].pow(2))(x),
        lambda x: torch.vmap(torch.vmap(model))(x.view(-1, 2, WIDTH)),
        lambda x: torch.vmap(model.blocks[1])(model.blocks[0](x)),
    ]
    for step, loss in enumerate(losses):
        optimizer.zero_grad()
        loss(data(step)).pow(2).mean().backward()
        optimizer.step()


RIGHT: tuple[Program, ...] = (
    emptied,
    copied_memory,
    gradients_assigned,
    gradients_assigned_ours,
    frozen_late,
    hooked,
    hooked_and_regularised,
    with_states_from_the_start,
    stepped_in_backward,
    hooked_and_failed,
    refused_once,
    marked,
    mapped,
)


def run_programs(programs: tuple[Program, ...], ways: tuple[Way, ...]) -> dict[str, float]:
    """Largest deviation of any parameter that a program leaves, by program and way."""
    found = {}
    rank, world = dist.get_rank(), dist.get_world_size()
    for program in programs:
        plain = seeded(linears)
        program(plain, lambda step: torch.cat([batch_of(r, step) for r in range(world)]))
        expected = {name: param.detach().clone() for name, param in plain.named_parameters()}
        for way in ways:
            model = lamina.shard(
                seeded(linears), way.strategy, units=["blocks.*"], transport=way.transport, slots=way.slots
            )
            program(model, lambda step: batch_of(rank, step))
            found[f"{program.__name__} {way}"] = parameter_deviation(model, expected)
    return found


THREE = (emptied, gradients_assigned, frozen_late, hooked, mapped)


@pytest.mark.parametrize(
    ("world", "programs", "ways"), [(2, RIGHT, (WAYS[0], Way("ddp"))), (3, THREE, (Way("zero2", "peer"),))]
)
def test_programs_equal_one_process(world: int, programs: tuple[Program, ...], ways: tuple[Way, ...]) -> None:
    for found in run_ranks(world, run_programs, programs, ways):
        wrong = {name: value for name, value in found.items() if not value <= TOLERANCE}
        assert not wrong, wrong


class Clamping(nn.Linear):
    """Writes its weight in the forward, past the version counter of a plain parameter."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Normalising(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = F.normalize(self.weight.data, dim=1)
        return super().forward(x)


class Quantising(nn.Module):
    """A codebook that is a frozen parameter and moves in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(4, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        self.codes.data[nearest] += 0.1 * (x.detach() - self.codes[nearest])
        return x + (self.codes[nearest] - x).detach()


class Shrinking(nn.Module):
    """A parent that writes its child's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.inner.weight.data *= 0.9
        return y


def written(build: Callable[[], nn.Module], way: Way, grad: bool) -> None:
    model = lamina.shard(
        seeded(lambda: Chain(build())), way.strategy, units=["blocks.*"], transport=way.transport, slots=way.slots
    )
    with torch.set_grad_enabled(grad):
        model(batch_of(dist.get_rank(), 0))


def clamping() -> nn.Module:
    return Clamping(WIDTH, WIDTH)


def normalising() -> nn.Module:
    return Normalising(WIDTH, WIDTH)


def doubled_by_hook() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    module.register_forward_pre_hook(double_weight)
    return module


WRITERS = {
    clamping: "blocks.0.weight",
    normalising: "blocks.0.weight",
    doubled_by_hook: "blocks.0.0.weight",
    Quantising: "blocks.0.codes",
    Shrinking: "blocks.0.inner.weight",
}


@pytest.mark.parametrize("build", list(WRITERS), ids=lambda fn: fn.__name__)
def test_a_write_through_data_in_a_forward_is_named(build: Callable[[], nn.Module]) -> None:
    for way, grad in ((WAYS[0], True), (WAYS[2], False)):
        words = [WRITERS[build], "in place"]
        expect_error(2, written, build, way, grad, error="StateError", contains=words, timeout=15)


class Replacing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight = nn.Parameter(self.weight.detach() * 0.9)
        return super().forward(x)


def replaced_in_forward() -> None:
    written(lambda: Replacing(WIDTH, WIDTH), WAYS[0], grad=True)


def cast_copies() -> None:
    model = lamina.shard(seeded(linears), "ddp")
    model.half()
    backward(model, batch_of(0, 0).half())


def renormed_copies() -> None:
    lamina.shard(nn.Sequential(nn.Embedding(11, WIDTH, max_norm=0.5), nn.Linear(WIDTH, WIDTH)), "ddp")


def scripted() -> None:
    lamina.shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(nn.Linear(WIDTH, WIDTH))))


NAMED: dict[Callable[[], None], tuple[str, list[str]]] = {
    replaced_in_forward: ("ParameterChanged", ["blocks.0.weight", "replaced"]),
    cast_copies: ("ParameterChanged", ["float16", "weight"]),
    renormed_copies: ("UsageError", ["0.weight", "max_norm"]),
    scripted: ("UsageError", ["`1`", "torch.jit"]),
}


@pytest.mark.parametrize("misuse", list(NAMED), ids=lambda fn: fn.__name__)
def test_is_named_on_every_rank(misuse: Callable[[], None]) -> None:
    error, words = NAMED[misuse]
    expect_error(2, misuse, error=error, contains=words, timeout=15)
