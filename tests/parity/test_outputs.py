"""What a unit may return (C07), what a user may hang on parameters, and errors that the user catches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from parity.reference import TOLERANCE, difference, gradient_deviation, parameter_deviation
from parity.structures import WIDTH, Chain


class Custom:
    def __init__(self, value: Tensor) -> None:
        self.value = value


@dataclasses.dataclass
class Data:
    value: Tensor
    note: str = "nothing"


class Named(NamedTuple):
    value: Tensor
    other: None = None


PACK: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "custom object": (Custom, lambda out: out.value),
    "dataclass": (Data, lambda out: out.value),
    "dict of lists": (lambda y: {"a": [None, y], "b": None}, lambda out: out["a"][1]),
    "named tuple": (Named, lambda out: out.value),
    "view": (lambda y: y.view(-1), lambda out: out),
}


class Pair(nn.Module):
    """Two linears; keyword-only input; returns something of the kind `pack`."""

    def __init__(self, pack: str) -> None:
        super().__init__()
        self.one, self.two, self.pack = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), pack

    def forward(self, *, x: Tensor, scale: float = 1.0) -> Any:
        return PACK[self.pack][0](self.two(torch.tanh(self.one(x))) * scale)


class Parent(Chain):
    """Changes what a block returned in place, where that is a view."""

    def __init__(self, pack: str) -> None:
        super().__init__(*(Pair(pack) for _ in range(3)))
        self.pack = pack

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            y = PACK[self.pack][1](block(x=x, scale=0.5))
            if self.pack == "view":
                y += 1.0
            x = torch.tanh(y.view(-1, WIDTH))
        return self.last(x)


def data_of(rank: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def linears() -> nn.Module:
    return Chain(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def reference_step(plain: nn.Module, step: int = 0) -> None:
    """Mean gradients over the ranks, added to what is there."""
    for rank in range(dist.get_world_size()):
        (plain(data_of(rank, step)).pow(2).mean() / dist.get_world_size()).backward()


def own_step(model: nn.Module, step: int = 0) -> Tensor:
    loss = model(data_of(dist.get_rank(), step)).pow(2).mean()
    loss.backward()
    return loss


def grads(plain: nn.Module) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in plain.named_parameters()}


def values(plain: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach() for name, param in plain.named_parameters()}


def run_pack(pack: str) -> float:
    worst = 0.0
    for slots in (1, 3):
        plain = seeded(lambda: Parent(pack))
        model = lamina.shard(seeded(lambda: Parent(pack)), units=["blocks.*"], slots=slots)
        for step in range(2):
            reference_step(plain, step)
            own_step(model, step)
            worst = max(worst, gradient_deviation(model, grads(plain)))
    return worst


@pytest.mark.parametrize("pack", list(PACK))
def test_outputs_of_any_type(pack: str) -> None:
    assert max(run_ranks(2, run_pack, pack)) <= TOLERANCE


def hooks_fire_once() -> list[str]:
    model = lamina.shard(seeded(linears), units=["blocks.*"])
    fired: list[str] = []
    for name, param in model.named_parameters():
        note = lambda p, name=name: fired.append("early" if p.grad is None else name)  # noqa: E731
        param.register_post_accumulate_grad_hook(note)
    own_step(model, 0)
    own_step(model, 1)
    return sorted(fired)


def test_post_accumulate_hooks_fire_once_a_backward() -> None:
    expected = sorted(2 * [name for name, _ in linears().named_parameters()])
    assert run_ranks(2, hooks_fire_once) == [expected, expected]


def doubling_hook() -> float:
    """A tensor hook acts on the new gradient only, not on what had been accumulated before."""
    plain, model = seeded(linears), lamina.shard(seeded(linears), units=["blocks.*"])
    for step in range(2):
        reference_step(plain, step)
    weight = plain.last.weight.grad
    model.last.weight.register_hook(lambda grad: grad * 2)
    own_step(model, 0)
    own_step(model, 1)
    assert weight is not None
    return gradient_deviation(model, {**grads(plain), "last.weight": weight * 2})


def test_tensor_hooks_act_on_each_new_gradient() -> None:
    assert max(run_ranks(2, doubling_hook)) <= TOLERANCE


def surgery(strategy: str) -> float:
    """A gradient kept over zero_grad keeps its values (gradient surgery between tasks)."""
    plain, model = seeded(linears), lamina.shard(seeded(linears), strategy, units=["blocks.*"])
    worst = 0.0
    for _ in range(2):
        kept = []
        for m, take in ((plain, reference_step), (model, own_step)):
            m.zero_grad()
            take(m, 0)
            first = [p.grad for p in m.parameters()]
            m.zero_grad()
            take(m, 1)
            second = [p.grad for p in m.parameters()]
            m.zero_grad()
            take(m, 2)
            kept.append((first, second, [p.grad for p in m.parameters()]))
        for wanted, found in zip(*kept, strict=True):
            worst = max([worst, *(difference(f, w) for f, w in zip(found, wanted, strict=True))])
    return worst


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
def test_a_gradient_kept_over_zero_grad_keeps_its_values(strategy: str) -> None:
    assert max(run_ranks(2, surgery, strategy)) <= TOLERANCE


class Failing(Chain):
    """Raises in the forward or in the backward of its middle block when it is told to."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        if self.where == "forward":
            raise ValueError("meant")
        if self.where == "backward":
            x.register_hook(self._raise)
        return self.last(self.blocks[1](torch.tanh(x)))

    def _raise(self, grad: Tensor) -> None:
        raise ValueError("meant")


def caught(where: str, strategy: str, slots: int) -> float:
    """An error on all ranks that the user catches, in the second backward of a step; the next step is clean."""
    build = lambda: Failing(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))  # noqa: E731
    plain, model = seeded(build), lamina.shard(seeded(build), strategy, units=["blocks.*"], slots=slots)
    worst, params = 0.0, list(model.parameters())
    for step in range(4):
        if step in (0, 2):
            own_step(model, step)
            model.where = where
            try:
                own_step(model, step)
            except ValueError:
                pass
            else:
                raise AssertionError("the error was swallowed")
            model.where = ""
            assert all(p is q for p, q in zip(model.parameters(), params, strict=True)), "gathered copies are shown"
            model.zero_grad()
            assert all(p.grad is None for p in params)
        reference_step(plain, step)
        own_step(model, step)
        worst = max(worst, gradient_deviation(model, grads(plain)))
        for m in (plain, model):
            m.zero_grad()
    return worst


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_caught_error_leaves_a_clean_start(where: str, strategy: str) -> None:
    for slots in (1, 3):
        assert max(run_ranks(2, caught, where, strategy, slots)) <= TOLERANCE


def skipped_loss() -> float:
    """`if not isfinite(loss): continue`: forwards without backwards in between, and their graphs kept for a while."""
    plain, model = seeded(linears), lamina.shard(seeded(linears), units=["blocks.*"], slots=2)
    kept = []
    for step in range(4):
        loss = model(data_of(dist.get_rank(), step)).pow(2).mean()
        if step % 2 == 0:
            kept.append(loss)
            continue
        loss.backward()
        reference_step(plain, step)
    return gradient_deviation(model, grads(plain))


def test_a_forward_without_a_backward_is_forgotten() -> None:
    assert max(run_ranks(2, skipped_loss)) <= TOLERANCE


def copied() -> tuple[float, float]:
    """deepcopy gives a second model that trains apart from the first (C12)."""
    plain, model = seeded(linears), lamina.shard(seeded(linears), units=["blocks.*"])
    reference_step(plain)
    own_step(model)
    twins = [(plain, model), (copy.deepcopy(plain), copy.deepcopy(model))]
    found = []
    for number, (reference, sharded) in enumerate(twins):
        for m, step in ((reference, reference_step), (sharded, own_step)):
            optimizer = torch.optim.SGD(m.parameters(), lr=0.1 * (number + 1))
            m.zero_grad()
            step(m, 1 + number)
            optimizer.step()
    for reference, sharded in twins:
        found.append(parameter_deviation(sharded, values(reference)))
    return found[0], found[1]


def test_a_deepcopy_trains_apart_from_the_original() -> None:
    for first, second in run_ranks(2, copied):
        assert first <= TOLERANCE and second <= TOLERANCE
