"""Weights that a forward keeps, in a list or a closure: read where they are, they equal one process; elsewhere they are
refused by name, for other weights may lie in their memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lamina
from harness import run_ranks
from lamina.core.full_parameter import LockedParameter
from lamina.errors import StateError
from lamina.runtime.assemble import RUNTIMES
from parity.reference import TOLERANCE, gradient_deviation

DIM, BLOCKS, STEPS = 6, 4, 3
WAYS = [(1, "c10d"), (1, "peer"), (3, "c10d")]
Read = Callable[["Net", Tensor], Any]


class Block(nn.Module):
    """Keeps its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(DIM, DIM), [torch.empty(0)]

    def forward(self, x: Tensor) -> Tensor:
        self.kept[:] = [self.linear.weight]
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self, read: Read) -> None:
        super().__init__()
        self.blocks, self.read = nn.ModuleList(Block() for _ in range(BLOCKS)), read

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.read(self, x)


def kept_by(net: Net, number: int = 0) -> Tensor:
    return net.blocks[number].kept[0]  # type: ignore[union-attr, return-value]


READS: dict[str, Read] = {
    "a product": lambda net, x: x @ kept_by(net),
    "a view": lambda net, x: x @ kept_by(net).detach(),
    "a transposed view": lambda net, x: x @ kept_by(net).T,
    "data": lambda net, x: x @ kept_by(net).data,
    "an element": lambda net, x: kept_by(net)[0, 0],
    "a function": lambda net, x: nn.functional.linear(x, kept_by(net)),
    "a list": lambda net, x: torch.stack([kept_by(net), kept_by(net, 1)]).sum(),
    "a number": lambda net, x: float(kept_by(net).sum()),
    "a copy": lambda net, x: copy.deepcopy(kept_by(net)).clone(),
}


def said_after(slots: int, transport: str, grad: bool) -> dict[str, str]:
    """The error of each read."""
    found = {}
    for name, read in READS.items():
        torch.manual_seed(0)
        model = lamina.shard(Net(read).double(), units=["blocks.*"], slots=slots, transport=transport)
        try:
            with torch.set_grad_enabled(grad):
                model(torch.ones(2, DIM, dtype=torch.float64))
        except StateError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_read_behind_the_forward_is_named(way: tuple[int, str], grad: bool) -> None:
    for found in run_ranks(2, said_after, *way, grad):
        assert found.keys() == READS.keys()
        for said in found.values():
            assert "`blocks.0.linear.weight` was kept in a forward and is read after it" in said, said
            assert "lamina.keep" in said


def hang_on_the_output(net: Net, x: Tensor) -> int:
    """Runs before the backward of the block that has kept it."""
    x.register_hook(lambda grad: grad @ kept_by(net, BLOCKS - 1))
    return 0


def said_in_backward(slots: int, transport: str) -> str:
    model = lamina.shard(Net(hang_on_the_output).double(), units=["blocks.*"], slots=slots, transport=transport)
    output = model(torch.ones(2, DIM, dtype=torch.float64))
    try:
        output.sum().backward()
    except StateError as error:
        return str(error)
    return "nothing"


def test_a_read_before_the_backward_is_named() -> None:
    for way in WAYS:
        for said in run_ranks(2, said_in_backward, *way):
            assert "`blocks.3.linear.weight` was kept" in said, said


def nothing(net: Net, x: Tensor) -> int:
    return 0


def facts() -> list[str]:
    """What is asked of a kept parameter without its values, where the answer is another one than of the parameter."""
    model = lamina.shard(Net(nothing), units=["blocks.*"], slots=1)
    model(torch.ones(2, DIM)).sum().backward()
    kept, plain = kept_by(model), nn.Linear(DIM, DIM).weight
    assert type(kept) is LockedParameter and isinstance(kept, nn.Parameter)
    wrong = []
    for name in (
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "ndim",
        "nbytes",
        "itemsize",
        "layout",
    ):
        if getattr(kept, name) != getattr(plain, name):
            wrong.append(name)
    for name in ("size", "dim", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "__len__"):
        if getattr(kept, name)() != getattr(plain, name)():
            wrong.append(name)
    assert kept.grad is None and hash(kept) == id(kept) and copy.deepcopy(kept) is kept
    assert repr(kept) == f"{kept}" == "<`blocks.0.linear.weight`, gathered no longer>"
    copied = copy.deepcopy(model)
    copied(torch.ones(2, DIM)).sum().backward()
    return wrong


def test_what_it_is_may_be_asked() -> None:
    assert run_ranks(2, facts) == [[]] * 2


class Penalised(Block):
    """Reads what it has kept where it may: in its own backward, and in a recomputation."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept[:] = [self.linear.weight]
        y = checkpoint(nn.functional.linear, x, self.linear.weight, self.linear.bias, use_reentrant=False)
        y.register_hook(lambda grad: grad + grad @ self.kept[0])
        return torch.tanh(y)


def deviations(slots: int, transport: str, keeps: bool) -> list[float]:
    """Of gradients from one process; `keeps`: inside `lamina.keep`, where the model reads kept weights anywhere."""
    read: Read = READS["a product"] if keeps else nothing
    world, rank, found = dist.get_world_size(), dist.get_rank(), []

    def build() -> Net:
        torch.manual_seed(0)
        net = Net(read)
        net.blocks = nn.ModuleList(Penalised() for _ in range(BLOCKS))
        return net.double()

    plain, sharded = build(), lamina.shard(build(), units=["blocks.*"], slots=slots, transport=transport)
    batches = [torch.randn(3, DIM, generator=torch.Generator().manual_seed(r)).double() for r in range(world)]
    for _ in range(STEPS):
        plain.zero_grad()
        sharded.zero_grad()
        for x in batches:
            (plain(x).pow(2).sum() / world).backward()
        if keeps:
            with lamina.keep(sharded):
                sharded(batches[rank]).pow(2).sum().backward()
        else:
            sharded(batches[rank]).pow(2).sum().backward()
        found.append(gradient_deviation(sharded, {name: p.grad for name, p in plain.named_parameters()}))
    return found


@pytest.mark.parametrize("keeps", [False, True])
def test_reads_where_the_weights_are_equal_one_process(keeps: bool) -> None:
    for slots, transport in WAYS:
        for found in run_ranks(2, deviations, slots, transport, keeps):
            assert max(found) <= TOLERANCE, found


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def locked(recompute: str, compiled: bool) -> int:
    """Full parameters that are taken for kept while graphs are alive, though nobody keeps any."""
    model = lamina.shard(nn.Sequential(*[Plain() for _ in range(3)]), recompute=recompute, compile=compiled, slots=1)
    count, optimizer = 0, torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        for each in (model(torch.ones(2, DIM)), model(torch.ones(2, DIM))):
            each.sum().backward()
            units = RUNTIMES[model].units
            count += sum(type(full) is LockedParameter for u in units for s in u.slots for full in s.fulls)
        optimizer.step()
        optimizer.zero_grad()
    return count


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_graphs_keep_nothing(recompute: str) -> None:
    assert run_ranks(2, locked, recompute, False) == [0, 0]
