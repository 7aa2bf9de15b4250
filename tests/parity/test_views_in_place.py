"""Views of weights that a forward keeps: where the weights are, reads equal one process; keeping alone is no error."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lamina
from harness import run_ranks
from lamina.core.keepers import KeptViews
from lamina.runtime.assemble import RUNTIMES
from parity.keeping import BLOCKS, DIM, STEPS, VIEWS, WAYS, Block, View, batch, shard, stack
from parity.reference import TOLERANCE, gradient_deviation


class Reading(Block):
    """Reads what it kept the last time, and in its own backward and recomputation what it keeps now."""

    def forward(self, x: Tensor) -> Tensor:
        before = [x * each.detach().sum() for each in self.kept]
        self.kept[:] = [self.view(self.linear.weight)]
        y = checkpoint(nn.functional.linear, x, self.linear.weight, self.linear.bias, use_reentrant=False)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * (1 + self.kept[0].detach().sum()))
        return torch.tanh(y + sum(before))


class Caching(Block):
    """Caches a view anew each time, and computes with it."""

    def forward(self, x: Tensor) -> Tensor:
        self.cached = self.linear.weight.t()
        return torch.tanh(x @ self.cached + self.linear.bias)


class Reader(nn.Module):
    """Reads what the first block has kept, anywhere."""

    def __init__(self, first: Block) -> None:
        super().__init__()
        self.first = [first]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.first[0].kept[0].detach().sum()


def build(kind: Callable[[View], Block], view: str, reads_anywhere: bool) -> nn.Sequential:
    model = stack(partial(kind, VIEWS[view]))
    return nn.Sequential(*model, Reader(model[0])) if reads_anywhere else model  # type: ignore[arg-type]


def deviations(kind: Callable[[View], Block], view: str, way: tuple[int, str], keeps: bool) -> list[float]:
    """Of gradients from one process, with an optimizer's steps in between; `keeps`: inside `lamina.keep`."""
    world, rank, found = dist.get_world_size(), dist.get_rank(), []
    plain, sharded = build(kind, view, keeps), shard(build(kind, view, keeps), way)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (plain, sharded)]
    batches = [torch.randn(3, DIM, generator=torch.Generator().manual_seed(r)).double() for r in range(world)]
    scope: Callable[[], Any] = partial(lamina.keep, sharded) if keeps else contextlib.nullcontext
    with torch.no_grad(), scope():  # the first time there is nothing to be read
        plain(batches[0])
        sharded(batches[0])
    for _ in range(STEPS):
        for x in batches:
            (plain(x).pow(2).sum() / world).backward()
        with scope():
            sharded(batches[rank]).pow(2).sum().backward()
        found.append(gradient_deviation(sharded, {name: p.grad for name, p in plain.named_parameters()}))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


def all_deviations(kind: Callable[[View], Block], keeps: bool) -> dict[tuple[str, tuple[int, str]], float]:
    views = ("detach", "t", "a row", "data of a view", "a parameter")
    return {(view, way): max(deviations(kind, view, way, keeps)) for view in views for way in WAYS}


@pytest.mark.parametrize(
    ("kind", "keeps"), [(Block, False), (Block, True), (Reading, False), (Reading, True), (Caching, False)]
)
def test_where_the_weights_are_reads_equal_one_process(kind: Callable[[View], Block], keeps: bool) -> None:
    for found in run_ranks(2, all_deviations, kind, keeps):
        assert max(found.values()) <= TOLERANCE, found


class Handing(Block):
    """Hangs a view of its weight, and the weight, on another unit's module, which never reads them."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.others: list[nn.Module] = []
        self.register_buffer("given", torch.zeros(1, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for other in self.others:
            view = self.view(self.linear.weight)
            other.again, other.given = [view, self.linear.weight], view.data  # type: ignore[assignment]
        return torch.tanh(self.linear(x))


def keep_alone(view: str, way: tuple[int, str]) -> list[float]:
    plain, sharded = stack(partial(Handing, VIEWS[view])), stack(partial(Handing, VIEWS[view]))
    for model in (plain, sharded):
        for number, block in enumerate(model):
            block.others.append(model[(number + 1) % BLOCKS])  # type: ignore[union-attr, arg-type]
    shard(sharded, way)
    found = []
    for step in range(STEPS):
        for model in (plain, sharded):
            model.zero_grad()
            model(batch()).sum().backward()
        found.append(gradient_deviation(sharded, {name: p.grad for name, p in plain.named_parameters()}))
        kept = sharded[1].again[0]
        assert "gathered no longer" in f"{kept} {kept!r} {sharded[1].given}" and kept.shape == plain[1].again[0].shape
        assert kept.requires_grad == plain[1].again[0].requires_grad and copy.deepcopy(kept) is kept
        if step == 1:
            sharded.eval().train()
            copied = copy.deepcopy(sharded)
            copied(batch()).sum().backward()
            found.append(gradient_deviation(copied, {name: p.grad for name, p in plain.named_parameters()}))
    return found


def keep_all_alone(way: tuple[int, str]) -> dict[str, float]:
    return {view: max(keep_alone(view, way)) for view in VIEWS}


@pytest.mark.parametrize("way", WAYS)
def test_keeping_alone_is_no_error(way: tuple[int, str]) -> None:
    for found in run_ranks(2, keep_all_alone, way):
        assert max(found.values()) <= TOLERANCE, found


class Product(torch.autograd.Function):
    """Reads in its own backward, in Python, a view that it has saved."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, view: Tensor) -> Tensor:
        return x @ view

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, view = ctx.saved_tensors
        return grad @ view.t(), x.t() @ grad


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Product.apply(x, self.linear.weight.t()) + x @ self.linear.weight.t() + self.linear.bias)


class Inside(nn.Module):
    """Custom blocks, some run again in the backward, several of them at once."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.blocks, self.recompute = nn.ModuleList(Custom() for _ in range(BLOCKS)), recompute

    def forward(self, x: Tensor) -> Tensor:
        first, second = nn.Sequential(*self.blocks[:2]), nn.Sequential(*self.blocks[2:])
        if self.recompute == "none":
            return second(first(x))
        if self.recompute == "each":
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x
        is_reentrant = self.recompute == "reentrant"
        return checkpoint(second, checkpoint(first, x, use_reentrant=is_reentrant), use_reentrant=is_reentrant)


def single(model: nn.Module, x: Tensor) -> None:
    model(x).pow(2).sum().backward()


def again(model: nn.Module, x: Tensor) -> None:
    loss = model(x).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def together(model: nn.Module, x: Tensor) -> None:
    (model(x).pow(2).sum() + model(2 * x).pow(2).sum()).backward()


def in_turn(model: nn.Module, x: Tensor) -> None:
    losses = [model(x).pow(2).sum(), model(2 * x).pow(2).sum()]
    with torch.no_grad():
        model(x)
    for loss in losses:
        loss.backward()


def mapped(model: nn.Module, x: Tensor) -> None:
    torch.vmap(model)(x.unsqueeze(1)).pow(2).sum().backward()


PASSES = [single, again, together, in_turn, mapped]
LEARN, LATER = 3, 3  # passes


def undisturbed(recompute: str, way: tuple[int, str]) -> list[str]:
    """What is wrong in ordinary passes: gradients, a view that is taken for kept, or objects gone through later on."""
    looks, wrong, find = [0], [], KeptViews._find

    def count(views: KeptViews, since: Any) -> list[Tensor]:
        looks[0] += 1
        return find(views, since)

    for run in PASSES:
        if run is mapped and recompute != "none":
            continue  # torch's own: no storage inside vmap
        torch.manual_seed(0)
        plain = Inside(recompute).double()
        sharded = copy.deepcopy(plain)
        lamina.shard(sharded, units=["blocks.*"], slots=way[0], transport=way[1])
        units, KeptViews._find = RUNTIMES[sharded].units, count  # type: ignore[method-assign]
        try:
            for number in range(LEARN + LATER):
                looks[0] = looks[0] if number > LEARN else 0
                for model in (plain, sharded):
                    model.zero_grad()
                    run(model, batch().requires_grad_())
                deviation = gradient_deviation(sharded, {name: p.grad for name, p in plain.named_parameters()})
                if deviation > TOLERANCE:
                    wrong.append(f"{run.__name__}: {deviation}")
                kept = [each for u in units for slot in u.slots for each, _ in slot.keepers._alive()]
                if kept:
                    wrong.append(f"{run.__name__}: kept {kept}")
        finally:
            KeptViews._find = find  # type: ignore[method-assign]
        if looks[0] and recompute != "several":  # torch keeps what was computed again until its backward comes
            wrong.append(f"{run.__name__}: {looks[0]} looks")
    return wrong


@pytest.mark.parametrize("recompute", ["none", "each", "several", "reentrant"])
@pytest.mark.parametrize("way", WAYS)
def test_graphs_keep_nothing(way: tuple[int, str], recompute: str) -> None:
    assert run_ranks(2, undisturbed, recompute, way) == [[], []]
