"""The values that `lamina.shard` starts from: the same at every number of ranks, one unit at a time, or an error."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from architectures.models import ARCHITECTURES
from harness import expect_error, run_ranks
from lamina.runtime import api

WORLDS = (1, 2, 3)
SEED = 0
Values = dict[str, Tensor]


class Gated(nn.Module):
    """A zero-initialisation by the parent, a drawn parameter, a buffer."""

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(dim) * 0.1)
        self.out = nn.Linear(dim, dim)
        nn.init.zeros_(self.out.weight)
        self.register_buffer("noise", torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.out(x + self.noise)


class Tied(nn.Module):
    """Embedding, blocks of two classes, a recurrent layer, a head with the embedding's weight."""

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, dim, padding_idx=1)
        self.blocks = nn.ModuleList(
            [Gated(dim), nn.TransformerEncoderLayer(dim, 2, 2 * dim, dropout=0.0, batch_first=True), Gated(dim)]
        )
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.lstm(x)[0])


class Old(nn.Module):
    """`_reset_parameters`, the older name, which nn.MultiheadAttention has too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(9, 7))
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        nn.init.xavier_normal_(self.weight)


class Resetting(nn.Module):
    """Everything has an initialiser of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.Linear(24, 6)) for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.old = Old()


class Forgetful(nn.Module):
    """The second block holds a parameter that nothing initialises on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), Gated(6), nn.Linear(6, 6)])


def hub_llama() -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    return transformers.LlamaForCausalLM(ARCHITECTURES["llama"].build().config)


BUILDERS: dict[str, Callable[[], nn.Module]] = {"tied": Tied, "resetting": Resetting, "llama": hub_llama}


def full_values(model: nn.Module) -> Values:
    with lamina.gathered(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()} | dict(model.named_buffers())


def start_deferred(name: str, strategy: str) -> tuple[Values, dict[str, str]]:
    torch.manual_seed(dist.get_rank() + 5)  # the state outside does not matter
    with lamina.deferred(seed=SEED):
        model = BUILDERS[name]()
    model = lamina.shard(model, strategy)
    return full_values(model), lamina.report(model).initialised


def start_on_meta(name: str, seed: int | None) -> tuple[Values, dict[str, str]]:
    torch.manual_seed(5 if dist.get_rank() == 0 else 6)  # without a seed, rank 0's counts
    with torch.device("meta"):
        model = BUILDERS[name]()
    model = lamina.shard(model, seed=seed)
    return full_values(model), lamina.report(model).initialised


def assert_same(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert value.dtype == expected[key].dtype and torch.equal(value, expected[key]), key


# -- the same values at every number of ranks


@pytest.mark.parametrize("name", list(BUILDERS))
@pytest.mark.parametrize("world", WORLDS)
def test_deferred_equals_eager_construction(world: int, name: str) -> None:
    with torch.random.fork_rng():
        ARCHITECTURES["llama"].build()  # the configuration's own draws, if any, before the seed
        torch.manual_seed(SEED)
        eager = BUILDERS[name]()
    expected = {key: p.detach() for key, p in eager.named_parameters()} | dict(eager.named_buffers())
    for strategy in ("zero3", "ddp") if world == 2 else ("zero3",):
        for values, initialised in run_ranks(world, start_deferred, name, strategy):
            assert_same(values, expected)
            assert initialised == {key: "deferred" for key, _ in eager.named_parameters()}


@pytest.mark.parametrize("name", ["resetting", "llama"])
@pytest.mark.parametrize("seed", [7, None])
def test_meta_modules_start_alike_at_every_world(name: str, seed: int | None) -> None:
    everyone = [answer for world in WORLDS for answer in run_ranks(world, start_on_meta, name, seed)]
    first, sources = everyone[0]
    for values, initialised in everyone:
        assert_same(values, first)
        assert initialised == sources
    with torch.device("meta"):
        names = {key for key, _ in BUILDERS[name]().named_parameters()}
    assert names <= sources.keys()
    assert set(sources.values()) == ({"_init_weights"} if name == "llama" else {"reset_parameters"})
    assert all(value.isfinite().all() for value in first.values())


def test_another_seed_gives_other_values() -> None:
    one, other = (run_ranks(2, start_on_meta, "resetting", seed)[0][0] for seed in (7, 8))
    assert not torch.equal(one["old.weight"], other["old.weight"])


# -- nothing left over


def build_forgetful(deferred: bool) -> nn.Module:
    with lamina.deferred(seed=SEED) if deferred else torch.device("meta"):
        model = Forgetful()
        if deferred:
            model.blocks[1].gate = nn.Parameter(torch.empty(6))
    return model


def shard_forgetful(deferred: bool) -> None:
    lamina.shard(build_forgetful(deferred), units=["blocks.*"])


def left_after_error() -> tuple[set[str], bool]:
    model = build_forgetful(False)
    with pytest.raises(lamina.InitialisationError):
        lamina.shard(model, units=["blocks.*"])
    kinds = {type(p).__name__ for p in model.parameters()}
    return kinds, all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("deferred", [False, True], ids=["meta", "deferred"])
def test_what_nothing_initialises_is_named_on_every_rank(deferred: bool) -> None:
    expect_error(2, shard_forgetful, deferred, error="InitialisationError", contains=["blocks.1.gate", "deferred"])


def test_after_that_error_nothing_is_half_done() -> None:
    assert run_ranks(2, left_after_error) == [({"Parameter"}, True)] * 2


def left_with_a_view() -> set[str]:
    """A view of the last unit's weight is alive on one rank only."""
    torch.manual_seed(SEED)
    model = Resetting()
    view = model.blocks[2][2].weight.view(-1) if dist.get_rank() == 1 else None
    with pytest.raises(lamina.LaminaError, match=r"`blocks.2.2.weight`.*on rank 1 of 2"):
        lamina.shard(model, units=["blocks.*"])
    del view
    kinds = {type(p).__name__ for p in model.parameters()}
    lamina.shard(model, units=["blocks.*"])  # the same model, once the view has gone
    return kinds


def test_a_view_that_forbids_sharding_leaves_every_parameter_as_it_was() -> None:
    assert run_ranks(2, left_with_a_view) == [{"Parameter"}] * 2


# -- start="check", "broadcast", "trust"


def start_apart(start: str) -> Values:
    """One weight of the third block differs on rank 1, in one bit; of two ranks, it is rank 1 that holds it."""
    torch.manual_seed(SEED)
    model = Resetting()
    if dist.get_rank() == 1:
        weight = model.blocks[2][2].weight
        weight.data[3, 2] = torch.nextafter(weight.data[3, 2], torch.tensor(9.0))
    return full_values(lamina.shard(model, start=start))


def test_check_names_the_weight_and_the_rank() -> None:
    words = ["`blocks.2.2.weight`", "rank 1", "start='broadcast'"]
    expect_error(3, start_apart, "check", error="Disagreement", contains=words)


@pytest.mark.parametrize("start", ["broadcast", "trust"])
def test_broadcast_takes_rank_0_and_trust_takes_each_share(start: str) -> None:
    torch.manual_seed(SEED)
    mine = dict(Resetting().named_parameters())
    for values in run_ranks(2, start_apart, start):
        differing = {key for key, p in mine.items() if not torch.equal(p, values[key])}
        assert differing == (set() if start == "broadcast" else {"blocks.2.2.weight"})


def meta_on_one(start: str) -> Values:
    """Rank 0 holds weights, as from a checkpoint; rank 1 built on meta."""
    torch.manual_seed(SEED)
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = Resetting()
    return full_values(lamina.shard(model, start=start))


def test_weights_on_rank_0_only_are_broadcast() -> None:
    torch.manual_seed(SEED)
    mine = {key: p.detach() for key, p in Resetting().named_parameters()}
    for values in run_ranks(2, meta_on_one, "broadcast"):
        assert_same({key: values[key] for key in mine}, mine)


def test_meta_on_some_ranks_is_named_by_the_check() -> None:
    expect_error(2, meta_on_one, "check", error="Disagreement", contains=["rank 1", "meta"])


# -- memory


def peak_of_shard(blocks: int, deferred: bool) -> tuple[float, float]:
    """In blocks: what making the shards leaves behind, and its peak above that.

    Without the arena, which is set aside after it and stays: it is larger than any transient, and would hide it.
    """
    width = 256
    build_units = api.build_units
    changes: list[tuple[int, int]] = []

    def profiled(*args: Any) -> Any:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            made = build_units(*args)
        events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        changes.extend((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        return made

    with lamina.deferred(seed=SEED) if deferred else torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(blocks)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "build_units", profiled)
        lamina.shard(model, units=["*"])
    now_bytes, peak_bytes = 0, 0
    for _, nbytes in sorted(changes):
        now_bytes += nbytes
        peak_bytes = max(peak_bytes, now_bytes)
    block_bytes = width * width * 4
    return now_bytes / block_bytes, (peak_bytes - now_bytes) / block_bytes


@pytest.mark.parametrize("deferred", [False, True], ids=["meta", "deferred"])
def test_extra_memory_is_one_unit_whatever_the_model(deferred: bool) -> None:
    for blocks in (3, 9):
        for left, extra in run_ranks(2, peak_of_shard, blocks, deferred):
            assert left == pytest.approx(blocks / 2, abs=0.01)  # the shards; else the measurement is not to be trusted
            assert 0.4 < extra < 1.01  # half of the block that is being cut is counted in `left`
