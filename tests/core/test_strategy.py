"""Factors: every range has one owner, ranges nest, and counted bytes are the formulas of the page on plans."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.strategy import NAMES, Factors, Level, Strategy, resolve
from lamina.errors import UsageError


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def legal_triples(world: int) -> list[Factors]:
    return [
        Factors(params, grads, optimizer, world)
        for optimizer in divisors(world)
        for grads in divisors(optimizer)
        for params in divisors(grads)
    ]


ALL_FACTORS = [factors for world in range(1, 33) for factors in legal_triples(world)]


def range_of(factors: Factors, rank: int, depth: int) -> tuple[float, float]:
    """Part of a segment, as fractions, that `rank` holds after the first `depth` levels."""
    begin, length = 0.0, 1.0
    for level in factors.levels[:depth]:
        length /= level.size
        begin += level.place(rank) * length
    return begin, begin + length


def test_range_index_is_a_bijection_in_every_replica() -> None:
    for factors in ALL_FACTORS:
        factors.check()
        for replica in range(factors.world // factors.optimizer):
            ranks = range(replica * factors.optimizer, (replica + 1) * factors.optimizer)
            assert sorted(map(factors.range_index, ranks)) == list(range(factors.optimizer))


def test_replicas_hold_the_same_range() -> None:
    for factors in ALL_FACTORS:
        for rank in range(factors.world):
            members = factors.replicas.members(rank)
            assert len(members) == factors.world // factors.optimizer
            assert {factors.range_index(member) for member in members} == {factors.range_index(rank)}


def test_groups_of_every_level_partition_the_ranks_and_know_their_places() -> None:
    for factors in ALL_FACTORS:
        for level in (*factors.levels, factors.replicas):
            groups = {level.members(rank) for rank in range(factors.world)}
            assert sorted(rank for group in groups for rank in group) == list(range(factors.world))
            for group in groups:
                assert [level.place(rank) for rank in group] == list(range(level.size))
                assert {level.members(rank) for rank in group} == {group}


def test_ranges_nest_and_a_group_shares_what_it_splits() -> None:
    """A level cuts the range that its whole group holds after the level before: one contiguous piece of one buffer."""
    for factors in ALL_FACTORS:
        for depth, level in enumerate(factors.levels):
            for rank in range(factors.world):
                outer = range_of(factors, rank, depth)
                members = level.members(rank)
                assert {range_of(factors, member, depth) for member in members} == {outer}
                pieces = [range_of(factors, member, depth + 1) for member in members]
                assert pieces[0][0] == pytest.approx(outer[0]) and pieces[-1][1] == pytest.approx(outer[1])
                for (_, end), (begin, _) in pairwise(pieces):
                    assert end == pytest.approx(begin)


def test_range_index_counts_the_innermost_ranges_in_order() -> None:
    for factors in ALL_FACTORS:
        for rank in range(factors.world):
            begin, _ = range_of(factors, rank, 3)
            assert factors.range_index(rank) == pytest.approx(begin * factors.optimizer)


def test_a_level_of_eight_ranks_in_two_nodes() -> None:
    inner, outer = Level(4, 1), Level(2, 4)
    assert inner.members(6) == (4, 5, 6, 7) and inner.place(6) == 2
    assert outer.members(6) == (2, 6) and outer.place(6) == 1


@pytest.mark.parametrize(
    ("name", "world", "shard_size", "expected"),
    [
        ("ddp", 8, None, (1, 1, 1)),
        ("zero1", 8, None, (1, 1, 8)),
        ("zero2", 8, None, (1, 8, 8)),
        ("zero3", 8, None, (8, 8, 8)),
        ("hsdp", 8, 4, (4, 4, 4)),
        ("zero3", 8, 4, (4, 4, 4)),
        ("zero2", 8, 2, (1, 2, 2)),
        ("zero3", 8, 8, (8, 8, 8)),
        ("zero3", 1, None, (1, 1, 1)),
        ("hsdp", 1, None, (1, 1, 1)),
        ("hsdp", 1, 1, (1, 1, 1)),
        (Strategy(4, 4, None), 8, None, (4, 4, 8)),
        (Strategy(1, 2, 4), 8, None, (1, 2, 4)),
        (Strategy(0, 0, 0), 6, None, (6, 6, 6)),
    ],
)
def test_names_are_points_of_three_factors(
    name: str | Strategy, world: int, shard_size: int | None, expected: tuple[int, int, int]
) -> None:
    assert resolve(name, world, shard_size) == Factors(*expected, world)


def test_every_name_runs_in_a_world_of_one() -> None:
    for name in NAMES:
        factors = resolve(name, 1)
        assert not factors.uses_shards and not factors.shards_parameters
        assert factors.bytes_moved(1000, 2, 2) == {"gather": 0, "reduce": 0}


@given(st.integers(1, 32), st.integers(1, 32), st.integers(1, 32), st.integers(1, 32))
def test_illegal_factors_are_refused_and_legal_ones_kept(params: int, grads: int, optimizer: int, world: int) -> None:
    legal = grads % params == 0 and optimizer % grads == 0 and world % optimizer == 0
    strategy = Strategy(params, grads, optimizer)
    if legal:
        assert resolve(strategy, world) == Factors(params, grads, optimizer, world)
    else:
        with pytest.raises(UsageError, match="must divide"):
            resolve(strategy, world)


@pytest.mark.parametrize(
    ("strategy", "world", "words"),
    [
        ("zero4", 4, "use one of 'ddp', 'zero1'"),
        (None, 4, "unknown strategy None"),
        ("hsdp", 4, "Type strategy='zero3'"),
        (Strategy(-1, 1, 1), 4, r"Strategy\(params=-1\)"),
        (Strategy(1, 2.0, 4), 4, r"Strategy\(grads=2.0\)"),  # type: ignore[arg-type]
        (Strategy(1, 1, True), 4, r"Strategy\(optimizer=True\)"),
        (Strategy(3, 3, 3), 4, "optimizer=3 must divide the 4 data ranks"),
    ],
)
def test_messages_say_what_to_type(strategy: str | Strategy, world: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve(strategy, world)


def test_hsdp_on_one_node_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="zero3"):
        resolve("hsdp", 4, None)


def test_hsdp_on_a_mesh_of_one_replica_is_zero3() -> None:
    factors = resolve("hsdp", 4, 4)
    assert (factors.params, factors.grads, factors.optimizer) == (4, 4, 4)


def test_bytes_of_the_named_strategies() -> None:
    """N = parameter bytes; 16-bit compute and wire (2 bytes), sums after the first stage in fp32 (4 bytes)."""
    numel, parameter_bytes = 3200, 6400

    def moved(strategy: str | Strategy, shard_size: int | None = None) -> tuple[int, int]:
        counted = resolve(strategy, 8, shard_size).bytes_moved(numel, compute_bytes=2, gradient_bytes=2)
        return counted["gather"], counted["reduce"]

    assert moved("ddp") == (0, 2 * 4 * numel)  # the all-reduce across copies is fp32 and counts twice
    assert moved("zero1") == (parameter_bytes, parameter_bytes)
    assert moved("zero2") == (parameter_bytes, parameter_bytes)
    assert moved("zero3") == (2 * parameter_bytes, parameter_bytes)
    assert moved("hsdp", 4) == (2 * parameter_bytes, parameter_bytes + 2 * 4 * numel // 4)
    assert moved(Strategy(4, 4, 8)) == (2 * parameter_bytes + parameter_bytes // 4, parameter_bytes + 4 * numel // 4)
    two_stages_bytes = parameter_bytes // 2 + parameter_bytes  # the optimizer's ranges, then the gradients'
    assert moved(Strategy(1, 2, 4)) == (two_stages_bytes, parameter_bytes + 4 * numel // 2 + 2 * 4 * numel // 4)


def test_bytes_in_fp32_are_the_multiples_of_the_table() -> None:
    """With 4-byte parameters and gradients: 2N, 2N, 2N, 3N, and for hybrids 3N inside and 2N/F outside."""
    for world in (2, 4, 6, 8, 12):
        numel = 64 * world
        for name, multiple in (("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3)):
            assert sum(resolve(name, world).bytes_moved(numel, 4, 4).values()) == multiple * 4 * numel
        for inner in divisors(world)[1:-1]:
            for strategy in (Strategy(inner, inner, inner), Strategy(inner, inner, None)):
                total_bytes = sum(resolve(strategy, world).bytes_moved(numel, 4, 4).values())
                assert total_bytes == 3 * 4 * numel + 2 * 4 * numel // inner


def test_units_that_stay_gathered_are_gathered_once() -> None:
    assert resolve("zero3", 4).bytes_moved(100, 2, 2, regathers=1) == {"gather": 200, "reduce": 200}
