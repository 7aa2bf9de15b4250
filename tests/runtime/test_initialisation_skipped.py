"""Draws that are skipped by a jump of the generator, and replays in threads: still every bit of eager construction."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lamina.errors import InitialisationError
from lamina.runtime import mersenne, pieces, side_by_side, skipping
from lamina.runtime.deferred import deferred
from lamina.runtime.init_program import Node, replay
from lamina.runtime.materialise import materialise
from runtime.init_models import SEED, Owner, materialise_all
from runtime.test_initialisation import assert_equals_eager

aten = torch.ops.aten
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture
def jumps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Small draws are skipped too, nothing is known yet; the numbers skipped."""
    made: list[int] = []
    advance = mersenne.advance

    def counted(state: torch.Tensor, outputs: int) -> torch.Tensor:
        made.append(outputs)
        return advance(state, outputs)

    monkeypatch.setattr(skipping, "LEAST_OUTPUTS", 16)
    monkeypatch.setattr(skipping, "_kinds", {})
    monkeypatch.setattr(skipping, "_trusted", True)
    monkeypatch.setattr(mersenne, "advance", counted)
    yield made


# -- the jump


@pytest.mark.parametrize("outputs", [0, 1, 623, 624, 625, 1248, 20_000, 21_840, 22_464, 22_465, 200_003, 1 << 20])
def test_a_jump_ends_where_drawing_does(outputs: int) -> None:
    for before in (0, 1, 100, 623, 624, 625):
        generator = torch.Generator().manual_seed(SEED)
        torch.empty(before).uniform_(generator=generator)
        state = generator.get_state()
        torch.empty(outputs).uniform_(generator=generator)
        assert torch.equal(mersenne.advance(state, outputs), generator.get_state()), before


def test_the_polynomial_is_that_of_the_twister() -> None:
    state = torch.Generator().manual_seed(SEED).get_state()
    words = state[24 : 24 + 8 * 624].view(torch.int64).numpy().astype("uint32")
    later = mersenne._continued(words, 21_000)[1:]  # of the very first word one bit is state
    total = later[0] ^ later[0]
    for place in range(mersenne._DEGREE + 1):
        if mersenne.characteristic_polynomial() >> place & 1:
            total ^= later[place]
    assert total == 0


# -- the law


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("func", [aten.normal_.default, aten.uniform_.default], ids=["normal", "uniform"])
def test_the_law_of_each_draw(func: Any, dtype: torch.dtype) -> None:
    sizes = [*range(1, 50), 63, 64, 65, 639, 640, 641, 32_767, 32_768, 32_769, 100_003]
    for numel in sizes:
        target = torch.empty(numel, dtype=dtype)
        guesses = skipping.outputs_by_law(func, target)
        if not guesses:
            assert func is aten.normal_.default and numel < 16
            continue
        generator = torch.Generator().manual_seed(SEED)
        before = generator.get_state()
        func(target, 0.0, 0.5, generator=generator)
        after = generator.get_state()
        assert [torch.equal(mersenne.advance(before, outputs), after) for outputs in guesses].count(True) == 1, numel


def test_what_has_no_law_is_drawn() -> None:
    assert skipping.outputs_by_law(aten.normal_.default, torch.empty(40, 40).t()[:, 1:]) == ()
    assert skipping.outputs_by_law(aten.bernoulli_.float, torch.empty(64)) == ()
    assert skipping.outputs_by_law(aten.normal_.default, torch.empty(64, dtype=torch.complex64)) == ()
    kept = torch.Generator().manual_seed(SEED)
    torch.empty(3).normal_(generator=kept)  # made in pairs: one is left
    assert not mersenne.is_plain(kept.get_state())
    state = torch.Generator().manual_seed(SEED).get_state()
    assert mersenne.is_plain(state) and not mersenne.is_plain(state[:-8])
    state[8:16] = 77  # another layout, as far as can be seen
    assert not mersenne.is_plain(state)


# -- models


def _blocks() -> nn.Module:
    """Kinds that come again, among draws of other kinds, buffers that are drawn, and reads."""
    model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 24, batch_first=True) for _ in range(3)))
    model.register_buffer("noise", torch.randn(5))
    for index in range(4):
        owner = Owner(lambda w: nn.init.normal_(w, std=0.02), (7, 9))
        nn.init.trunc_normal_(owner.w, generator=torch.Generator().manual_seed(index))
        model.append(owner)
        model.append(Owner(lambda w: nn.init.normal_(w.data, std=0.5), (7, 9)))
        model.append(nn.Linear(3, 5).double())
        model.append(nn.Linear(12, 9, dtype=torch.bfloat16))
    model.register_buffer("later", torch.rand(3) + model[-1].weight.norm())
    return model


def test_skipped_draws_equal_eager(jumps: list[int]) -> None:
    assert_equals_eager(_blocks)
    assert len(jumps) > 15
    jumps.clear()
    assert_equals_eager(_blocks, backwards=True)
    assert len(jumps) > 15


def test_a_draw_is_made_before_its_kind_is_skipped(jumps: list[int]) -> None:
    with deferred(SEED):
        nn.Linear(10, 10, bias=False)
        assert jumps == []
        nn.Linear(10, 10, bias=False)
        assert jumps == [100, 100]  # the proof on the first draw, and the second
        nn.Linear(10, 11, bias=False)
        nn.Linear(10, 10, bias=False)
    assert jumps == [100, 100, 100]


@pytest.mark.parametrize("error", [-1, 1, 624])
def test_a_wrong_law_costs_time_and_no_number(monkeypatch: pytest.MonkeyPatch, jumps: list[int], error: int) -> None:
    law = skipping.outputs_by_law

    def wrong(func: Any, target: torch.Tensor) -> tuple[int, ...]:
        return tuple(outputs + error for outputs in law(func, target))

    monkeypatch.setattr(skipping, "outputs_by_law", wrong)
    assert_equals_eager(_blocks)
    assert jumps and not any(kind.outputs for kind in skipping._kinds.values())


def test_a_state_that_keeps_a_normal_is_not_jumped_from(jumps: list[int]) -> None:
    """Normals of fewer than 16 leave one for the next. No draw that is skipped takes it, as far as is known."""

    def build() -> nn.Module:
        return nn.Sequential(*(Owner(nn.init.normal_, shape) for shape in [(3,), (64,), (64,), (3,), (64,), (64,)]))

    assert_equals_eager(build)
    assert jumps == [64, 64]  # six normals in pairs leave none: the last draw, and the proof before it


def test_a_replay_that_ends_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch, jumps: list[int]) -> None:
    """As no torch does: a draw takes more numbers than the first of its kind did."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(3)))

    advance = mersenne.advance
    with monkeypatch.context() as patch, deferred(SEED):
        first = nn.Linear(10, 10, bias=False)
        second = nn.Linear(10, 10, bias=False)
        patch.setattr(mersenne, "advance", lambda state, outputs: advance(state, outputs + 1))
        third = nn.Linear(10, 10, bias=False)
    with pytest.raises(InitialisationError, match=r"`2.weight` cannot be computed.*build the model again"):
        materialise_all(nn.Sequential(first, second, third))
    jumps.clear()
    assert_equals_eager(build)
    assert not jumps


# -- threads


def test_replays_in_threads_equal_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large draws go to threads, what else there is stays in order, and no more values are made ahead than threads."""
    used: set[int] = set()
    made: list[Node] = []

    def noted(node: Node) -> torch.UntypedStorage:
        used.add(threading.get_ident())
        made.append(node)
        return replay(node)

    monkeypatch.setattr(side_by_side, "replay", noted)
    monkeypatch.setattr(side_by_side, "LEAST_NUMEL", 16)
    monkeypatch.setattr(side_by_side, "thread_count", lambda: 3)
    torch.manual_seed(SEED)
    eager = _blocks()
    with deferred(SEED):
        lazy = _blocks()
    outside = torch.get_rng_state()
    values = materialise_all(lazy).values
    assert torch.equal(outside, torch.get_rng_state())
    for name, parameter in eager.named_parameters():
        assert torch.equal(values[name], parameter), name
    assert threading.get_ident() in used and len(used) > 1
    nodes = list(dict.fromkeys(made))
    made.clear()
    for handed_out, _ in enumerate(side_by_side.replay_each(nodes), 1):
        assert len(made) <= handed_out + 3


def test_a_thread_starts_no_team_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    with deferred(SEED):
        plain = Owner(nn.init.normal_, (600, 600))
        scaled = Owner(lambda w: w.data.normal_().mul_(0.02), (600, 600))
        small = Owner(nn.init.normal_, (20, 20))
    nodes = [model.w._lamina_recorded.value.node for model in (plain, scaled, small)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert [side_by_side.is_mostly_a_draw(node) for node in nodes] == [True, False, False]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert [side_by_side.is_mostly_a_draw(node) for node in nodes] == [True, True, False]


def test_an_error_in_a_thread_names_the_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(node: Node) -> torch.UntypedStorage:
        raise InitialisationError("no")

    with deferred(SEED):
        model = nn.Sequential(*(Owner(nn.init.normal_, (600, 600)) for _ in range(3)))
    monkeypatch.setattr(side_by_side, "thread_count", lambda: 2)
    monkeypatch.setattr(side_by_side, "replay", failing)
    with pytest.raises(InitialisationError, match="`0.w` cannot be computed: no"):
        materialise_all(model)


# -- pieces


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Threads and pieces for small draws too; where the pieces drawn began."""
    began: list[int] = []
    draw_piece = pieces.draw_piece

    def noted(call: Any, flat: torch.Tensor, start: int, state: torch.Tensor) -> None:
        began.append(start)
        draw_piece(call, flat, start, state)

    monkeypatch.setattr(pieces, "draw_piece", noted)
    monkeypatch.setattr(pieces, "PIECE_NUMEL", 64)
    monkeypatch.setattr(pieces, "_proofs", {})
    monkeypatch.setattr(side_by_side, "LEAST_NUMEL", 16)
    monkeypatch.setattr(side_by_side, "thread_count", lambda: 3)
    yield began


def _large() -> nn.Module:
    model = nn.Sequential()
    for dtype in (torch.float64, torch.bfloat16):
        for _ in range(2):
            model.append(nn.Linear(16, 13, dtype=dtype))
            model.append(nn.Embedding(19, 16, padding_idx=3, dtype=dtype))
            model.append(Owner(lambda w: nn.init.normal_(w, 1.0, 0.3), (16, 17)).to(dtype))
            model.append(Owner(lambda w: nn.init.uniform_(w, -2.0, 3.0), (16, 16)))
            table = nn.Parameter(torch.empty(16, 20, dtype=dtype))
            model[-1].table = nn.Parameter(nn.init.normal_(table, generator=torch.Generator().manual_seed(3)))
    return model


def _one_by_one(model: nn.Module) -> dict[str, torch.Tensor]:
    """Each parameter a unit of its own, so that the proof for one is there for the next."""
    return {name: materialise(model, [(name, p)], "cpu").values[name] for name, p in model.named_parameters()}


def test_pieces_make_up_the_whole(in_pieces: list[int], jumps: list[int]) -> None:
    torch.manual_seed(SEED)
    eager = dict(_large().named_parameters())
    for compute in (_one_by_one, lambda model: materialise_all(model).values):
        in_pieces.clear()
        with deferred(SEED):
            lazy = _large()
        for name, value in compute(lazy).items():
            assert torch.equal(value, eager[name]), name
        assert {0, 64, 128, 192, 256} <= set(in_pieces)


@pytest.mark.parametrize("error", [-1, 1])
def test_pieces_that_differ_are_not_used(monkeypatch: pytest.MonkeyPatch, in_pieces: list[int], error: int) -> None:
    advance = mersenne.advance
    monkeypatch.setattr(mersenne, "advance", lambda state, outputs: advance(state, outputs + error))
    torch.manual_seed(SEED)
    eager = dict(_large().named_parameters())
    with deferred(SEED):
        lazy = _large()
    for name, value in _one_by_one(lazy).items():
        assert torch.equal(value, eager[name]), name
    assert not in_pieces and pieces._proofs and not any(pieces._proofs.values())
