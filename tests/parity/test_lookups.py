"""An embedding whose backward needs no weights is not gathered for it; one whose backward reads them always is.

Freed slots hold NaN here, so that a gradient that was computed from one would show.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import lamina
from harness import run_ranks
from lamina.core.program import Program
from lamina.runtime.assemble import RUNTIMES
from lamina.runtime.phase import Kind
from lamina.runtime.programs import CLEAN_ENDS
from parity.reference import TOLERANCE, Recipe, one_process, sharded

WORDS, WIDTH, BLOCKS = 11, 5, 3


class Words(nn.Module):
    """Embedding, blocks, head: with one slot, each unit takes the place of the one before."""

    def __init__(self, embedding: nn.Embedding, times: int = 1, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding, self.times, self.checkpointed = embedding, times, checkpointed
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.zeros((), dtype=torch.float64)
        for _ in range(self.times):
            x = x + self.look_up(tokens)
            for block in self.blocks:
                x = torch.tanh(block(x))
        return self.head(x)

    def look_up(self, tokens: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.embedding, tokens, use_reentrant=False)
        return self.embedding(tokens)


class Scaled(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight) * self.weight.norm()


class Bounded(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return torch.tanh(weight)


def plain(model: type[nn.Embedding] = nn.Embedding, **options: Any) -> Words:
    return Words(model(WORDS, WIDTH), **options)


def tied() -> Words:
    model = plain()
    model.head.weight = model.embedding.weight
    return model


def parametrized() -> Words:
    model = plain()
    parametrize.register_parametrization(model.embedding, "weight", Bounded())
    return model


def checkpointed_inside() -> Words:
    model = plain()
    model.embedding.forward = functools.partial(checkpoint, model.embedding.forward, use_reentrant=False)
    return model


def hook_on_the_node() -> Words:
    """Backward multiplies by weights that a hook has taken along."""
    model = plain()

    def after(module: nn.Module, args: Any, output: Tensor) -> None:
        weight = module.weight
        output.grad_fn.register_hook(lambda inner, outer: (inner[0] * weight.detach().norm(),))

    model.embedding.register_forward_hook(after)
    return model


def hook_on_the_weight() -> Words:
    model = plain()

    def before(module: nn.Module, args: Any) -> None:
        weight = module.weight
        if not weight._backward_hooks:
            weight.register_hook(lambda grad: grad * weight.detach().norm())

    model.embedding.register_forward_pre_hook(before)
    return model


# Each with the gathers of the embedding's unit in a step, one slot: a lookup's backward takes none.
MODELS: dict[str, tuple[Callable[[], Words], int]] = {
    "plain": (plain, 1),
    "twice": (functools.partial(plain, times=2), 2),
    "tied": (tied, 1),  # belongs to the root, which stays
    "one unit with the head": (plain, 2),  # the head reads, where the weights lie already when backward begins
    "scaled": (functools.partial(plain, Scaled), 2),
    "parametrized": (parametrized, 2),
    "checkpointed": (functools.partial(plain, checkpointed=True), 2),  # looked up again in backward
    "checkpointed inside": (checkpointed_inside, 2),
    "hook on the node": (hook_on_the_node, 2),
    "hook on the weight": (hook_on_the_weight, 2),
}


def built(name: str) -> Words:
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def loss_of(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
    tokens = torch.randint(WORDS, (2, 4), generator=torch.Generator().manual_seed(100 * step + 10 * rank + micro))
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def train(name: str, transport: str) -> tuple[float, int]:
    recipe = Recipe("sgd")
    expected = one_process(built(name), dist.get_world_size(), recipe, loss_of)
    lamina.debug(True)
    inner = [["embedding", "head"]] if name == "one unit with the head" else ["embedding", "head"]
    model = lamina.shard(built(name), units=[*inner, "blocks.*"], slots=1, transport=transport)
    worst = sharded(model, expected, recipe, loss_of)
    return worst, lamina.report(model).units[0].gathers // recipe.steps


def train_all() -> dict[str, tuple[float, int]]:
    return {name: train(name, ("c10d", "peer")[number % 2]) for number, name in enumerate(MODELS)}


def test_an_embedding_is_gathered_for_its_backward_where_that_reads_it() -> None:
    for found in run_ranks(2, train_all):
        assert max(worst for worst, _ in found.values()) <= TOLERANCE, found
        assert {name: gathers for name, (_, gathers) in found.items()} == {name: row[1] for name, row in MODELS.items()}


def behind_a_hook_before(model: Words) -> list[RemovableHandle]:
    """A hook before the forward takes the weight along, and one behind it multiplies by that in backward."""
    taken: list[Tensor] = []

    def before(module: nn.Module, args: Any) -> None:
        taken[:] = [module.weight]

    def after(module: nn.Module, args: Any, output: Tensor) -> None:
        _multiply_by(taken[0], output)

    return [
        model.embedding.register_forward_pre_hook(before),
        model.embedding.register_forward_hook(after),
    ]


def behind_a_hook_on_all(model: Words) -> list[RemovableHandle]:
    """torch calls hooks on all modules before those of one."""

    def after(module: nn.Module, args: Any, output: Tensor) -> None:
        if module is model.embedding:
            _multiply_by(module.weight, output)

    return [nn.modules.module.register_module_forward_hook(after)]


def behind_the_forward(model: Words) -> list[RemovableHandle]:
    """It comes when the weight has gone."""
    return [model.embedding.register_forward_hook(lambda module, args, output: 2 * output)]


def _multiply_by(weight: Tensor, output: Tensor) -> None:
    output.grad_fn.register_hook(lambda inner, outer: (inner[0] * weight.detach().norm(),))


# Hooks that come when the model is sharded already, each with the gathers of the embedding's unit in a step.
LATE_HOOKS = {behind_a_hook_before: 2, behind_a_hook_on_all: 2, behind_the_forward: 1}


def train_hooked_late(hang: Callable[[Words], list[RemovableHandle]], transport: str) -> tuple[float, int]:
    recipe, plain_model = Recipe("sgd"), built("plain")
    handles = hang(plain_model)
    expected = one_process(plain_model, dist.get_world_size(), recipe, loss_of)
    for handle in handles:
        handle.remove()
    lamina.debug(True)
    model = lamina.shard(built("plain"), units=["embedding", "head", "blocks.*"], slots=1, transport=transport)
    handles = hang(model)
    worst = sharded(model, expected, recipe, loss_of)
    for handle in handles:
        handle.remove()
    return worst, lamina.report(model).units[0].gathers // recipe.steps


def train_all_hooked_late() -> list[tuple[float, int]]:
    return [train_hooked_late(hang, transport) for hang in LATE_HOOKS for transport in ("c10d", "peer")]


def test_an_embedding_whose_weight_a_late_hook_has_seen_is_gathered_for_its_backward() -> None:
    for found in run_ranks(2, train_all_hooked_late):
        assert max(worst for worst, _ in found) <= TOLERANCE, found
        assert [gathers for _, gathers in found] == [n for n in LATE_HOOKS.values() for _ in range(2)]


def scaled_late(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
    """Long after the ranks have agreed on a program, the embedding begins to read weights in its backward."""
    if step == CLEAN_ENDS + 1:
        model.embedding.forward = functools.partial(Scaled.forward, model.embedding)
    return loss_of(model, step, rank, micro)


def train_late() -> tuple[float, list[int]]:
    recipe = Recipe("sgd", steps=CLEAN_ENDS + 4, max_norm=None)
    expected = one_process(built("plain"), dist.get_world_size(), recipe, scaled_late)
    lamina.debug(True)
    model = lamina.shard(built("plain"), units=["embedding", "blocks.*", "head"], slots=1, transport="c10d")
    gathers = []

    def loss(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
        gathers.append(lamina.report(model).units[0].gathers)
        return scaled_late(model, step, rank, micro)

    worst = sharded(model, expected, recipe, loss)
    return worst, [after - before for before, after in itertools.pairwise(gathers)]


def test_an_embedding_that_reads_its_weights_late_is_gathered_late() -> None:
    for worst, gathers in run_ranks(2, train_late):
        assert worst <= TOLERANCE
        assert gathers == [1] * (CLEAN_ENDS + 1) + [2, 2], gathers


class Between(nn.Module):
    """Backward reaches the embedding while the block's weights lie in its place, and then the block once more."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(WIDTH))
        self.block, self.embedding = nn.Linear(WIDTH, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        before = torch.tanh(self.block(self.start))
        return self.head(torch.tanh(self.block(before + self.embedding(tokens))))


class Before(Between):
    """The block is not read once more."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.block(self.start + self.embedding(tokens))))


def built_between(model: type[Between], frozen: str) -> Between:
    torch.manual_seed(0)
    made = model().double()
    for name in filter(None, [frozen]):
        made.get_submodule(name).requires_grad_(False)
    return made


def train_between(model: type[Between], frozen: str, transport: str) -> tuple[float, str, int]:
    """The last also: the program of the backward that the ranks follow, and bytes beside the arena."""
    recipe = Recipe("sgd")
    expected = one_process(built_between(model, frozen), dist.get_world_size(), recipe, loss_of)
    lamina.debug(True)
    units = ["block", "embedding", "head"]
    made = lamina.shard(built_between(model, frozen), units=units, slots=1, transport=transport)
    worst = sharded(made, expected, recipe, loss_of)
    engine = RUNTIMES[made].engine
    (program,) = (Program(r.steps) for key, r in engine.programs.known.items() if key.kind is Kind.BACKWARD)
    return worst, program.text(), engine.reducer.buffer_bytes


# Backward programs in which the root is unit 0, the embedding unit 2; see Note [Program order] in core/program.py.
BETWEEN = {
    (Between, ""): "BWD3 BWD0 RS3 AG1 BWD1 BWD2 RS2 BWD1 RS0 RS1",
    (Between, "embedding"): "BWD3 BWD0 RS3 AG1 BWD1 BWD1 RS0 RS1",
    (Between, "block"): "BWD3 BWD0 RS3 AG1 BWD1 BWD2 RS2 AG1 BWD1 RS0",
    (Before, ""): "BWD3 BWD0 RS3 AG1 BWD1 RS1 BWD2 RS0 RS2",
    (Before, "block"): "BWD3 BWD0 RS3 AG1 BWD1 BWD2 RS0 RS2",
}


def train_all_between() -> list[list[tuple[float, str, int]]]:
    return [[train_between(*case, transport) for case in BETWEEN] for transport in ("c10d", "peer")]


def test_gradients_of_an_embedding_are_not_laid_over_weights_that_are_in_its_place() -> None:
    for by_transport in run_ranks(2, train_all_between):
        for found in by_transport:
            for (worst, program, _), text in zip(found, BETWEEN.values(), strict=True):
                assert worst <= TOLERANCE, found
                assert program == text
            bytes_of = dict(zip(BETWEEN, [row[2] for row in found], strict=True))
            assert bytes_of[Before, "block"] == bytes_of[Between, "block"] == bytes_of[Before, ""]
            assert bytes_of[Between, ""] > bytes_of[Before, ""], "laid out beside the place"


def test_a_plan_would_gather_the_block_again() -> None:
    """A plan lays gradients into the place: the one program that breaks this takes memory beside it."""

    def others(unit: int) -> list[int]:
        return [other for other in range(1, 4) if unit and other != unit]

    with pytest.raises(AssertionError, match="BWD1 at 7 finds its weights overwritten or let go by BWD2 at 5"):
        Program.parse(BETWEEN[Between, ""]).check(others, resident=[0, 3], lookups=[2])
    for case in [case for case in BETWEEN if case != (Between, "")]:
        Program.parse(BETWEEN[case]).check(others, resident=[0, 3], lookups=[2])
