"""Every legal triple of factors x kind of recomputation x accumulation equals one process, in float64.

One call on the ranks runs a whole row of the matrix: starting processes and importing torch would cost more than
training. Slots (1, 2, 3) rotate along the rows, and so do the halves of the accumulations that run in debug mode: every
pair of triple and recomputation, and every pair of recomputation and accumulation, runs in both modes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch.distributed as dist

import lamina
from harness import run_ranks
from parity.models import UNITS, LanguageModel, build
from parity.reference import TOLERANCE, Recipe, Trace, one_process, parameter_deviation, sharded

NAMES = ("ddp", "zero1", "zero2", "zero3")
TRIPLES = {
    1: [(1, 1, 1)],
    2: [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2)],
    3: [(1, 1, 1), (1, 1, 3), (1, 3, 3), (3, 3, 3)],
    4: [(1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 2, 2), (1, 2, 4), (1, 4, 4), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4)],
}
BY_USER = ("reentrant", "non-reentrant")  # torch's own checkpoint around blocks
RECOMPUTE = ("none", "full", "selective", 2, *BY_USER)
ACCUMULATION = ("none", "twice", "each", "defer")


class Case(NamedTuple):
    triple: tuple[int, int, int]
    recompute: str | int
    slots: int
    debug: bool
    transport: str = "c10d"

    def shard(self) -> LanguageModel:
        by_user = self.recompute in BY_USER
        lamina.debug(self.debug)
        return lamina.shard(
            build(str(self.recompute) if by_user else "none"),
            lamina.Strategy(*self.triple),
            units=UNITS,
            recompute="none" if by_user else self.recompute,
            slots=self.slots,
            transport=self.transport,
            start="trust",
        )


def cases_of(world: int, recompute: str | int) -> Iterator[Case]:
    for number, triple in enumerate(TRIPLES[world]):
        for debug in (False, True):
            slots = 1 + (number + RECOMPUTE.index(recompute) + debug) % 3
            yield Case(triple, recompute, slots, debug)


def recipes_of(world: int, case: Case) -> list[Recipe]:
    """The same model trains once a kind of accumulation, from the start weights; programs are kept, state is not."""
    parity = TRIPLES[world].index(case.triple) + RECOMPUTE.index(case.recompute) + case.debug
    return [Recipe("adamw", accumulation) for accumulation in ACCUMULATION[parity % 2 :: 2]]


def run_row(recompute: str | int) -> list[tuple[Case, Recipe, float]]:
    world = dist.get_world_size()
    expected = references(world)
    results = []
    for case in cases_of(world, recompute):
        results += run_case(case, recipes_of(world, case), expected)
    return results


def references(world: int) -> dict[int, Trace]:
    """The run in one process, by number of micro-batches."""
    recipes = (Recipe(), Recipe(accumulation="each"))
    return {recipe.micro_batches: one_process(build(), world, recipe) for recipe in recipes}


def run_case(case: Case, recipes: list[Recipe], expected: dict[int, Trace]) -> list[tuple[Case, Recipe, float]]:
    model = case.shard()
    start = build().state_dict()
    results = []
    for recipe in recipes:
        model.load_state_dict(start)
        try:
            worst = sharded(model, expected[recipe.micro_batches], recipe)
        except Exception as error:
            error.add_note(f"in {case} {recipe}")
            raise
        results.append((case, recipe, worst))
    return results


def check(results: list[tuple[Case, Recipe, float]]) -> None:
    wrong = [f"{case} {recipe}: {worst:.1e}" for case, recipe, worst in results if not worst <= TOLERANCE]
    assert not wrong, f"{len(wrong)} of {len(results)} differ from one process: {wrong[:5]}"


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("world", sorted(TRIPLES))
def test_three_steps_equal_one_process(world: int, recompute: str | int) -> None:
    for results in run_ranks(world, run_row, recompute, timeout=120):
        check(results)


def run_peers() -> list[tuple[Case, Recipe, float]]:
    world = dist.get_world_size()
    recipes = [Recipe(accumulation=accumulation) for accumulation in ACCUMULATION]
    expected, results = references(world), []
    for number, recompute in enumerate(RECOMPUTE):
        for triple in (t for t in TRIPLES[world] if t[0] == t[2] > 1):
            case = Case(triple, recompute, 1 + number % 3, number % 2 == 0, "peer")
            results += run_case(case, recipes[number % 2 :: 2], expected)
    return results


@pytest.mark.parametrize("world", [2, 3, 4])
def test_peer_transport_equals_one_process(world: int) -> None:
    for results in run_ranks(world, run_peers, timeout=120):
        check(results)


def run_momentum() -> list[tuple[Case, Recipe, float]]:
    world = dist.get_world_size()
    recipe = Recipe("sgd", "each")
    expected = {2: one_process(build(), world, recipe)}
    cases = [Case(triple, "none", 2, debug=False) for triple in TRIPLES[world]]
    return [result for case in cases for result in run_case(case, [recipe], expected)]


@pytest.mark.parametrize("world", [2, 4])
def test_momentum_with_gradients_zeroed_in_place(world: int) -> None:
    for results in run_ranks(world, run_momentum):
        check(results)


def run_named(strategy: str) -> tuple[float, list[str]]:
    world = dist.get_world_size()
    recipe = Recipe()
    model = lamina.shard(build(), strategy, units=UNITS)
    worst = sharded(model, one_process(build(), world, recipe), recipe)
    with lamina.gathered(model):
        kinds = sorted({type(p).__name__ for p in model.parameters()})
        reference = one_process(build(), world, recipe)
        return max(worst, parameter_deviation(model, reference.params[-1])), kinds


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_named_strategies(world: int, strategy: str) -> None:
    for worst, kinds in run_ranks(world, run_named, strategy):
        assert worst <= TOLERANCE
        assert "Shard" not in kinds  # inside gathered() values are plain
