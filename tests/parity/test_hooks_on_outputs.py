"""Hooks that a forward hangs on its inputs and outputs, and that hold full weights: gradients equal one process.

Such a hook runs before the node on which the backward of its unit begins, or after that on which it has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import RankFailure, run_ranks
from parity.reference import TOLERANCE, gradient_deviation

DIM, BLOCKS, STEPS = 8, 4, 3
WAYS: tuple[dict[str, object], ...] = (
    {"slots": 1, "transport": "c10d"},
    {"slots": 2, "transport": "peer"},
    {"slots": 3, "transport": "c10d", "recompute": "full"},
)
Hang = Callable[[Tensor, Tensor, Tensor], Tensor]  # a block's input, output and weight -> its output


def on_output(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    y.register_hook(lambda grad: grad @ weight)
    return y


def on_output_detached(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return on_output(x, y, weight.detach())


def on_view(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return on_output(x, y.view(-1, DIM), weight)


def on_base(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return on_output(x, y, weight).view(-1, DIM)


def on_node(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda grads: (grads[0] @ weight,))
    return y


def on_input(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad @ weight)
    return y


def on_input_node(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    assert x.grad_fn is not None
    x.grad_fn.register_prehook(lambda grads: (grads[0] @ weight,))
    return y


def on_both(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return on_output(x, on_input(x, y, weight), weight)


def on_both_nodes(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return on_node(x, on_input_node(x, y, weight), weight)


def without_weight(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    y.register_hook(lambda grad: grad * 2)
    return y


class Block(nn.Module):
    """A layer whose forward hangs hooks."""

    def __init__(self, hang: Hang) -> None:
        super().__init__()
        self.linear, self.hang = nn.Linear(DIM, DIM), hang

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return self.hang(x, y, self.linear.weight) if x.grad_fn is not None else y


class Two(nn.Module):
    """The same with two outputs."""

    def __init__(self, hang: Hang) -> None:
        super().__init__()
        self.linear, self.hang = nn.Linear(DIM, DIM), hang

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.tanh(self.linear(x)), x.sin()
        return torch.stack([first, self.hang(x, second, self.linear.weight)])


class Late(nn.Module):
    """Keeps its weight for a hook that is registered once the model is sharded."""

    def __init__(self, hang: Hang) -> None:
        super().__init__()
        self.linear, self.hang, self.kept = nn.Linear(DIM, DIM), hang, [torch.empty(0)]

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.linear.weight]
        return torch.tanh(self.linear(x))


class BothTimes(Late):
    """Hangs hooks itself, too."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return self.hang(x, y, self.linear.weight) if x.grad_fn is not None else y


def hang_late(block: Late, args: tuple[Tensor], output: Tensor) -> Tensor:
    return block.hang(args[0], output, block.kept.pop()) if args[0].grad_fn is not None else output


class Chain(nn.Module):
    """Blocks one after the other."""

    def __init__(self, kind: type[nn.Module], hang: Hang) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.blocks = nn.ModuleList(kind(hang) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            x = x.sum(0) if x.dim() > 2 else x
        return self.last(x)


class Cross(nn.Module):
    """Takes what another part of the model gives to all blocks, too."""

    def __init__(self, hang: Hang) -> None:
        super().__init__()
        self.linear, self.hang = nn.Linear(DIM, DIM), hang

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        return self.hang(given, torch.tanh(self.linear(x) + given), self.linear.weight)


class Crossed(nn.Module):
    """Blocks that all take one tensor, which a hook of the model's own is on; its gradient is picked last."""

    def __init__(self, kind: type[nn.Module], hang: Hang) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.blocks = nn.ModuleList(kind(hang) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        given = self.first(x)
        given.register_hook(lambda grad: grad * 2)
        x = given * 2
        for block in self.blocks:
            x = block(x, given)
        return self.last(x)


def deviations(
    model: type[nn.Module], kind: type[nn.Module], hang: Hang, ways: Sequence[dict[str, object]]
) -> list[float]:
    """The largest of each way."""
    return [deviation(model, kind, hang, way) for way in ways]


def deviation(model: type[nn.Module], kind: type[nn.Module], hang: Hang, way: dict[str, object]) -> float:
    """Of gradients, after some backwards."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    plain = model(kind, hang).double()
    torch.manual_seed(0)
    units = ["first", "blocks.*", "last"]
    sharded = lamina.shard(model(kind, hang).double(), units=units, **way)  # type: ignore[arg-type]
    for block in (block for m in (plain, sharded) for block in m.modules() if isinstance(block, Late)):
        block.register_forward_hook(hang_late)
    batches = [torch.randn(3, DIM, generator=torch.Generator().manual_seed(r)).double() for r in range(world)]
    worst = 0.0
    for _ in range(STEPS):
        plain.zero_grad()
        sharded.zero_grad()
        for x in batches:
            (plain(x).pow(2).sum() / world).backward()
        sharded(batches[rank]).pow(2).sum().backward()
        worst = max(worst, gradient_deviation(sharded, {name: p.grad for name, p in plain.named_parameters()}))
    return worst


@pytest.mark.parametrize(
    "hang",
    [on_output, on_output_detached, on_view, on_base, on_node, on_input, on_input_node, without_weight],
    ids=lambda hang: hang.__name__,
)
@pytest.mark.parametrize("kind", [Block, Two, Late, BothTimes])
def test_hooks_find_the_weights_that_the_forward_read(kind: type[nn.Module], hang: Hang) -> None:
    for worst in run_ranks(2, deviations, Chain, kind, hang, WAYS):
        assert max(worst) <= TOLERANCE, worst


@pytest.mark.parametrize("hang", [on_both, on_both_nodes], ids=lambda hang: hang.__name__)
def test_hooks_of_two_units_on_one_tensor_find_both(hang: Hang) -> None:
    for worst in run_ranks(2, deviations, Chain, Block, hang, WAYS[1:]):
        assert max(worst) <= TOLERANCE, worst
    with pytest.raises(RankFailure) as caught:  # one slot holds one unit's weights
        run_ranks(2, deviation, Chain, Block, hang, WAYS[0])
    assert {(error.type_name, "slots=" in error.message) for error in caught.value.errors.values()} == {
        ("StateError", True)
    }


@pytest.mark.parametrize("hang", [on_input, on_input_node], ids=lambda hang: hang.__name__)
def test_hooks_on_an_input_that_many_units_take(hang: Hang) -> None:
    ways = [{"slots": BLOCKS + 2, "transport": transport} for transport in ("c10d", "peer")]
    for worst in run_ranks(2, deviations, Crossed, Cross, hang, ways):
        assert max(worst) <= TOLERANCE, worst
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, deviation, Crossed, Cross, hang, WAYS[1])
    assert all("slots=" in error.message for error in caught.value.errors.values())


def test_hooks_that_know_no_weight_cost_no_slot() -> None:
    for worst in run_ranks(2, deviations, Crossed, Cross, without_weight, WAYS):
        assert max(worst) <= TOLERANCE, worst


class Encoder(nn.Module):
    """Computes in a method as well, for which torch calls no hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(DIM, DIM), nn.Parameter(torch.ones(DIM))

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x).sum()


def is_let_go(calls_method: bool) -> bool:
    """Whether an output that nobody keeps is gone, though a hook has been registered behind the runtime's."""
    model = lamina.shard(Encoder(), entry_points=["encode"])
    model.register_forward_hook(lambda module, args, output: output * 2)
    for call in (model, model.encode if calls_method else model):
        output = call(torch.ones(2, DIM))
    gone = weakref.ref(output)
    del output
    return gone() is None


@pytest.mark.parametrize("calls_method", [False, True])
def test_no_output_is_held_for_later_hooks(calls_method: bool) -> None:
    assert run_ranks(2, is_let_go, calls_method) == [True] * 2
