"""Every strategy x accumulation x kind of recomputation equals one process in float64; every legal triple as well.

One call on the ranks runs a whole row of the matrix: starting processes and importing torch would cost more than
training. World 2 runs every combination of the named strategies; slots (1, 2, 3) and debug mode rotate along the rows,
so that each pair of strategy and recomputation runs in both modes. The other worlds show less: one or two kinds of
recomputation, and on four ranks, which share two cores, half of the accumulations of a named strategy, one in each
mode. Triples without a name take one accumulation a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch.distributed as dist

import lamina
from harness import run_ranks
from parity.models import UNITS, LanguageModel, build
from parity.reference import TOLERANCE, Recipe, Trace, of_language, parameter_deviation, sharded

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


def is_named(triple: tuple[int, int, int], world: int) -> bool:
    """Whether a strategy's name stands for it: ddp, zero1, zero2, zero3, hsdp."""
    params, grads, optimizer = triple
    return params == grads == optimizer or triple in ((1, 1, world), (1, world, world))


def cases_of(world: int, recompute: str | int) -> Iterator[tuple[Case, list[Recipe]]]:
    """Named strategies: some accumulations in each mode. Other triples: one case, one accumulation a row.

    The same model trains once a kind of accumulation, from the start weights; programs are kept, state is not.
    """
    row = RECOMPUTE.index(recompute)
    for number, triple in enumerate(TRIPLES[world]):
        named = is_named(triple, world)
        for debug in (False, True) if named else (row % 2 == 0,):
            slots = 1 + (number + row + debug) % 3
            turn = number + row + debug
            whole = named and world < 4
            chosen = ACCUMULATION[turn % 2 :: 2] if whole else ACCUMULATION[turn % 4 : turn % 4 + 1]
            yield Case(triple, recompute, slots, debug), [Recipe(accumulation=name) for name in chosen]


def run_row(recompute: str | int) -> list[tuple[Case, Recipe, float]]:
    world = dist.get_world_size()
    expected = references(world)
    results = []
    for case, recipes in cases_of(world, recompute):
        results += run_case(case, recipes, expected)
    return results


def references(world: int) -> dict[int, Trace]:
    """The run in one process, by number of micro-batches."""
    recipes = (Recipe(), Recipe(accumulation="each"))
    return {recipe.micro_batches: of_language(world, recipe) for recipe in recipes}


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


FEW = {1: ("none",), 3: ("full",), 4: ("non-reentrant",)}  # world 2 takes all
ROWS = [(world, kind) for world in sorted(TRIPLES) for kind in FEW.get(world, RECOMPUTE)]


@pytest.mark.parametrize(("world", "recompute"), ROWS)
def test_three_steps_equal_one_process(world: int, recompute: str | int) -> None:
    for results in run_ranks(world, run_row, recompute, timeout=120):
        check(results)


def run_peers() -> list[tuple[Case, Recipe, float]]:
    world = dist.get_world_size()
    recipes = [Recipe(accumulation=accumulation) for accumulation in ACCUMULATION]
    expected, results = references(world), []
    for number, recompute in enumerate(RECOMPUTE if world < 4 else RECOMPUTE[::2]):
        for triple in (t for t in TRIPLES[world] if t[0] == t[2] > 1):
            case = Case(triple, recompute, 1 + number % 3, number % 2 == 0, "peer")
            results += run_case(case, recipes[number % 2 :: 2], expected)
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_peer_transport_equals_one_process(world: int) -> None:
    for results in run_ranks(world, run_peers, timeout=120):
        check(results)


def run_momentum() -> list[tuple[Case, Recipe, float]]:
    world = dist.get_world_size()
    recipe = Recipe("sgd", "each")
    expected = {2: of_language(world, recipe)}
    cases = [Case(triple, "none", 2, debug=False) for triple in TRIPLES[world]]
    return [result for case in cases for result in run_case(case, [recipe], expected)]


@pytest.mark.parametrize("world", [2])
def test_momentum_with_gradients_zeroed_in_place(world: int) -> None:
    for results in run_ranks(world, run_momentum):
        check(results)


def run_named(strategy: str) -> tuple[float, list[str]]:
    world = dist.get_world_size()
    recipe = Recipe()
    model = lamina.shard(build(), strategy, units=UNITS)
    worst = sharded(model, of_language(world, recipe), recipe)
    with lamina.gathered(model):
        kinds = sorted({type(p).__name__ for p in model.parameters()})
        reference = of_language(world, recipe)
        return max(worst, parameter_deviation(model, reference.params[-1])), kinds


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_named_strategies(world: int, strategy: str) -> None:
    for worst, kinds in run_ranks(world, run_named, strategy):
        assert worst <= TOLERANCE
        assert "Shard" not in kinds  # inside gathered() values are plain
