"""Recomputed forwards find what the first ones found: against the same models without recomputation, in float64."""

from __future__ import annotations

import collections
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import expect_error, run_ranks

WIDTH, ROWS, STEPS = 4, 3, 5  # steps: longer than it learns
TOLERANCE = 1e-12


class Block(nn.Module):
    """Something of it changes in each forward, and counts in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.make()

    def make(self) -> None: ...

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        return torch.tanh(self.linear(x) * self.scale(x, *given))

    def scale(self, x: Tensor, *given: Any) -> Any:
        raise NotImplementedError


class Number(Block):
    def make(self) -> None:
        self.calls = 0

    def scale(self, x: Tensor) -> float:
        self.calls += 1
        return 1.0 + self.calls / 8


class Made(Block):
    """An attribute that the first forward makes."""

    def scale(self, x: Tensor) -> float:
        self.calls = getattr(self, "calls", 0) + 1
        return 1.0 + self.calls / 8


class Written(Block):
    def make(self) -> None:
        self.register_buffer("calls", torch.zeros(()))

    def scale(self, x: Tensor) -> Tensor:
        self.calls += 1
        return 1.0 + self.calls / 8


class Replaced(Block):
    def make(self) -> None:
        self.register_buffer("calls", torch.zeros(()))

    def scale(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return 1.0 + self.calls / 8


class State(Block):
    """A plain tensor, of the forward before."""

    def make(self) -> None:
        self.state = torch.zeros(ROWS, WIDTH)

    def scale(self, x: Tensor) -> Tensor:
        before = self.state.clone()
        self.state.copy_(x.detach())
        return 1.0 + before


class Kept(Block):
    def make(self) -> None:
        self.before: list[Tensor] = []

    def scale(self, x: Tensor) -> Tensor:
        self.before.append(x.detach())
        return 1.0 + torch.stack(self.before[-3:]).sum(0)


class InObject(Block):
    def make(self) -> None:
        self.kept = types.SimpleNamespace(counts={"calls": 0}, seen=set())

    def scale(self, x: Tensor) -> float:
        self.kept.counts["calls"] += 1
        self.kept.seen.add(self.kept.counts["calls"])
        return 1.0 + len(self.kept.seen) / 8


class BatchNorm(Block):
    def make(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def scale(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Functional(Block):
    """Running values that no module of torch's keeps, and no count beside them."""

    def make(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def scale(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.variance, training=True) + self.mean


class Spectral(Block):
    def make(self) -> None:
        self.other = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def scale(self, x: Tensor) -> Tensor:
        return self.other(x)


class Behind(Block):
    """A hook on the block, behind its forward."""

    def make(self) -> None:
        self.register_buffer("seen", torch.zeros(()))
        self.register_forward_hook(Behind.count)

    def count(self, args: Any, output: Tensor) -> None:
        self.seen += 1

    def scale(self, x: Tensor) -> Tensor:
        return 1.0 + self.seen / 8


class Drawn(Block):
    """Random numbers of other sources than torch's own."""

    def make(self) -> None:
        self.torchs, self.pythons = torch.Generator().manual_seed(5), random.Random(5)
        self.numpys = {"new": np.random.default_rng(5), "old": np.random.RandomState(5)}

    def scale(self, x: Tensor) -> Tensor:
        drawn = random.random() + np.random.rand() + self.pythons.random()
        drawn += self.numpys["new"].random() + self.numpys["old"].rand()
        return drawn + torch.rand(x.shape, generator=self.torchs, dtype=x.dtype)


class Inner(Block):
    """What changes lies in a module inside."""

    def make(self) -> None:
        self.inner = Number()

    def scale(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Cached(Block):
    """Of an object that all blocks are given: what they have put there, as caches of keys and values do."""

    def scale(self, x: Tensor, cache: Any) -> Tensor:
        cache.entries.append(x)
        cache.by_name.setdefault("sums", []).append(x.sum())
        return torch.stack(cache.entries).mean(0) + sum(cache.by_name["sums"])


class Sealed(collections.OrderedDict[str, Tensor]):
    """Takes single entries only, as the outputs of transformers do."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("sealed")

    def copy(self) -> Any:
        raise RuntimeError("sealed")

    clear = pop = copy  # type: ignore[assignment]


class InSealed(Block):
    def scale(self, x: Tensor, cache: Any) -> Tensor:
        for holder in (cache.sealed, cache.ordered):
            holder[f"after {len(holder)}"] = x.sum()
        cache.last.append(x)
        cache.seen.add(len(cache.seen))
        return sum(cache.sealed.values()) + list(cache.ordered.values())[-1] + torch.stack(list(cache.last)).mean(0)


KINDS: tuple[type[Block], ...] = (
    *(Number, Made, Written, Replaced, State, Kept, InObject, BatchNorm, Functional, Spectral, Behind, Drawn, Inner),
    *(Cached, InSealed),
)


class Model(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(3))
        self.is_cached = kind in (Cached, InSealed)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.cache = types.SimpleNamespace(entries=[], by_name={}, seen=set(), last=collections.deque(maxlen=2))
        self.cache.sealed, self.cache.ordered = Sealed(), collections.OrderedDict()
        for block in self.blocks:
            x = block(x, self.cache) if self.is_cached else block(x)
        return x


def data(step: int) -> Tensor:
    draw = torch.Generator().manual_seed(2 * step + dist.get_rank())
    return torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64)


def made(kind: type[Block], recompute: str | int) -> nn.Module:
    torch.manual_seed(0)
    random.seed(0), np.random.seed(0)
    return lamina.shard(Model(kind).double(), units=[kind], recompute=recompute)


def each_step(model: nn.Module) -> Iterator[Tensor]:
    """Steps; two forwards before their backwards; an evaluation; a backward that runs twice."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = model(data(step)).square().sum()
        if step == 1:
            loss = loss + model(data(step + 9)).square().sum()
        loss.backward()
        yield loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            model.eval()
            with torch.no_grad():
                evaluated = model(data(7))
            model.train()
            yield evaluated


def whole(model: nn.Module) -> list[Tensor]:
    with lamina.gathered(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def left_by(model: Model) -> list[Tensor]:
    """Everything that forwards have left."""
    left = [*whole(model), *model.buffers()]
    for block in model.blocks:
        left += [torch.tensor(getattr(block, "calls", 0.0)), *getattr(block, "before", ())]
        left += [block.state] if isinstance(block, State) else []
    cache = model.cache
    return left + [*cache.entries, *cache.sealed.values(), *cache.last, torch.tensor(len(cache.seen))]


def outcome(kind: type[Block], recompute: str | int) -> list[Tensor]:
    model = made(kind, recompute)
    return [*each_step(model), *left_by(model)]


def differs(kind: type[Block], recompute: str | int) -> list[str]:
    wrong = []
    for number, (one, other) in enumerate(zip(outcome(kind, "none"), outcome(kind, recompute), strict=True)):
        if one.shape != other.shape or (one - other).abs().max() > TOLERANCE:
            wrong.append(f"{number}: {one} is {other}")
    return wrong


@pytest.mark.parametrize("recompute", ["full", "selective", 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2])
def test_what_forwards_change_changes_once(world: int, kind: type[Block], recompute: str | int) -> None:
    assert run_ranks(world, differs, kind, recompute) == [[]] * world


class Dropped(Block):
    def make(self) -> None:
        self.drop = nn.Dropout(0.5)

    def scale(self, x: Tensor) -> Tensor:
        return self.drop(x)


def evaluated_before_its_backward(recompute: str) -> list[Tensor]:
    model = made(Dropped, recompute)
    torch.manual_seed(1)
    loss = model(data(0)).square().sum()
    model.eval()
    loss.backward()
    assert not any(module.training for module in model.modules())
    return [parameter.grad.full() for parameter in model.parameters()]


def test_modes_are_those_of_the_forward() -> None:
    wanted, found = (run_ranks(2, evaluated_before_its_backward, recompute) for recompute in ("none", "full"))
    for one, other in zip(wanted[0], found[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


def twice(recompute: str) -> list[Tensor]:
    model = made(Written, recompute)
    loss = model(data(0)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return left_by(model) + [parameter.grad.full() for parameter in model.parameters()]


def test_a_backward_that_runs_twice() -> None:
    wanted, found = (run_ranks(2, twice, recompute) for recompute in ("none", "full"))
    for one, other in zip(wanted[0], found[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


# ---- models of transformers, which fill caches unless told otherwise -------------------------------------------------


def pretrained(name: str, recompute: str) -> list[Tensor]:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "use_cache": True}
    attention = {"num_attention_heads": 2, "intermediate_size": 24}
    config, kind = {
        "llama": lambda: (transformers.LlamaConfig(**sizes, **attention), transformers.LlamaForCausalLM),
        "gemma": lambda: (
            transformers.Gemma3TextConfig(**sizes, **attention, num_key_value_heads=1, head_dim=8, sliding_window=4),
            transformers.Gemma3ForCausalLM,
        ),
        "mamba": lambda: (transformers.MambaConfig(**sizes, state_size=4), transformers.MambaForCausalLM),
    }[name]()
    torch.manual_seed(0)
    model = lamina.shard(kind(config).double(), recompute=recompute)
    tokens = torch.arange(12).view(1, 12) + dist.get_rank()
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
    return [parameter.grad.full() for parameter in model.parameters()]


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("name", ["llama", "gemma", "mamba"])
def test_caches_of_keys_and_values(name: str, recompute: str) -> None:
    wanted, found = (run_ranks(2, pretrained, name, how) for how in ("none", recompute))
    for one, other in zip(wanted[0], found[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


# ---- what cannot be put back ----------------------------------------------------------------------------------------


class Given(Block):
    def scale(self, x: Tensor, given: Any) -> Tensor:
        return torch.sin(get(given) * 2)


def get(given: Any) -> Tensor:
    while not isinstance(given, Tensor):
        given = next(iter(given.values() if isinstance(given, dict) else vars(given).values()))
    return given


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda x: {"x": x},
    "object": lambda x: types.SimpleNamespace(x=x),
    "object in a dict": lambda x: {"a": types.SimpleNamespace(x=x)},
}


def write_to_an_argument(way: str, recompute: str) -> None:
    block = made(Given, recompute).blocks[0]
    x = data(0)
    y = block(data(1), WAYS[way](x)).sum()
    x += 1.0  # allowed without recomputation: its sine has saved something else
    y.backward()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_arguments_that_were_written_to(way: str, recompute: str) -> None:
    run_ranks(2, write_to_an_argument, way, "none")
    words = ["the forward of `blocks.0` runs again", "shape (3, 4)", "argument 1", "x = x + y"]
    expect_error(2, write_to_an_argument, way, recompute, error="StateError", contains=words)


class Steady(Block):
    def make(self) -> None:
        self.register_buffer("factor", torch.ones(5000))

    def scale(self, x: Tensor) -> Tensor:
        return torch.sin(self.factor.mean() * 2)


def write_to_what_is_steady(recompute: str, forwards: int) -> None:
    model = made(Steady, recompute)
    for _ in range(forwards):
        model(data(0)).sum().backward()
    y = model(data(0)).sum()
    model.blocks[1].factor += 1.0
    y.backward()


@pytest.mark.parametrize("forwards", [0, 4])
def test_buffers_that_others_have_written_to(forwards: int) -> None:
    run_ranks(2, write_to_what_is_steady, "none", forwards)
    words = ["the forward of `blocks.1` runs again", "shape (5000,)", "a buffer or an attribute of its modules"]
    expect_error(2, write_to_what_is_steady, "full", forwards, error="StateError", contains=words)
