"""Recomputed forwards find what the first ones found: against the same models without recomputation, in float64."""

from __future__ import annotations

import collections
import gc
import logging
import queue
import random
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import expect_error, run_ranks
from lamina.runtime.insides import ENTRIES, LOOKS, Insides

WIDTH, ROWS, STEPS = 4, 3, 5  # steps: longer than it learns
TOLERANCE = 1e-12


class Block(nn.Module):
    """Something of it changes in each forward, and counts in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.make()

    takes_cache = False

    def make(self) -> None: ...

    def prepare(self, x: Tensor) -> None:
        """What the model does to the block before it calls it."""

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

    takes_cache = True

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
    takes_cache = True

    def scale(self, x: Tensor, cache: Any) -> Tensor:
        for holder in (cache.sealed, cache.ordered):
            holder[f"after {len(holder)}"] = x.sum()
        cache.last.append(x)
        cache.seen.add(len(cache.seen))
        return sum(cache.sealed.values()) + list(cache.ordered.values())[-1] + torch.stack(list(cache.last)).mean(0)


class CountedInDict(Block):
    """A tensor in a container, written in place."""

    def make(self) -> None:
        self.counts = {"calls": torch.zeros(())}

    def scale(self, x: Tensor) -> Tensor:
        self.counts["calls"] += 1
        return 1.0 + self.counts["calls"] / 8


class CountedInArgument(Block):
    takes_cache = True

    def scale(self, x: Tensor, cache: Any) -> Tensor:
        cache.counts["calls"] += 1
        return 1.0 + cache.counts["calls"] / 8


class View(Block):
    """Of a tensor that is written in place."""

    def make(self) -> None:
        self.state = torch.zeros(ROWS, WIDTH)
        self.window = self.state[1:]

    def scale(self, x: Tensor) -> Tensor:
        self.state.add_(x.detach())
        return 1.0 + self.window.mean()


class Shared(Block):
    """One tensor is the buffer of two modules."""

    def make(self) -> None:
        self.one, self.other = nn.Module(), nn.Module()
        self.one.register_buffer("calls", torch.zeros(1, dtype=torch.float64))
        self.other.register_buffer("calls", self.one.calls)

    def scale(self, x: Tensor) -> Tensor:
        self.one.calls += 1
        return 1.0 + self.other.calls.clone() / 8


class Context(Block):
    """A tensor with a graph, put there by the model."""

    def make(self) -> None:
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def prepare(self, x: Tensor) -> None:
        self.context = x * 2

    def scale(self, x: Tensor) -> Tensor:
        return self.context * self.gain


class ContextInObject(Context):
    def prepare(self, x: Tensor) -> None:
        self.held = types.SimpleNamespace(context=x * 2, calls=0)

    def scale(self, x: Tensor) -> Tensor:
        self.held.calls += 1
        self.held.context = self.held.context * self.gain + self.held.calls
        return self.held.context


class Moved(Block):
    """Ordered as its owner has moved the entries."""

    takes_cache = True

    def scale(self, x: Tensor, cache: Any) -> Tensor:
        first, second = cache.moved.values()
        return first + second * x


class Differentiates(Block):
    """Has a backward in its forward."""

    def make(self) -> None:
        self.calls = 0

    def scale(self, x: Tensor) -> Tensor:
        self.calls += 1
        energy = (torch.sin(self.linear(x)) * (1.0 + self.calls / 8)).square().sum()
        self.calls += 1
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force * (1.0 + self.calls / 8)


class Node:
    def __init__(self, following: Any) -> None:
        self.following = following


class Refuses(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.clone, Tensor.detach, torch.equal):
            raise NotImplementedError("no copies")
        return super().__torch_function__(function, kinds, args, kwargs or {})


class Target(dict[str, Any]):
    """What proxies may lead to."""


class Odd(Block):
    """Holds, and is given, objects that answer for others, refuse, lead far or belong to several threads."""

    takes_cache = True

    def make(self) -> None:
        self.target, self.tensor = Target(), torch.zeros(2)

    def prepare(self, x: Tensor) -> None:
        chain = None
        for _ in range(1500):
            chain = Node(chain)
        self.odd = [
            chain,
            torch.zeros(2).as_subclass(Refuses),
            torch.eye(2).to_sparse_csr(),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            weakref.proxy(self.target),
            weakref.proxy(self.tensor),
            (threading.Lock(), queue.Queue(), threading.current_thread(), logging.getLogger(), torch),
        ]
        self.odd.append(self.odd)

    def scale(self, x: Tensor, cache: Any) -> float:
        cache.odd = self.odd
        self.odd.append(len(self.odd))
        return 1.0 + len(self.odd) / 8


KINDS: tuple[type[Block], ...] = (
    *(Number, Made, Written, Replaced, State, Kept, InObject, BatchNorm, Functional, Spectral, Behind, Drawn, Inner),
    *(Cached, InSealed, CountedInDict, CountedInArgument, View, Shared, Context, ContextInObject, Moved, Odd),
)


class Model(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.cache = types.SimpleNamespace(entries=[], by_name={}, seen=set(), last=collections.deque(maxlen=2))
        self.cache.sealed, self.cache.ordered = Sealed(), collections.OrderedDict()
        self.cache.moved = collections.OrderedDict(one=x.new_ones(WIDTH), other=x.new_full((WIDTH,), 2.0))
        self.cache.moved.move_to_end("one")
        self.cache.counts = {"calls": torch.zeros(())}
        for block in self.blocks:
            block.prepare(x)
            x = block(x, self.cache) if block.takes_cache else block(x)
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
        left += [block.state] if isinstance(block, (State, View)) else []
    cache = model.cache
    left += [cache.counts["calls"], *(getattr(block, "counts", cache.counts)["calls"] for block in model.blocks)]
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


HOW = [(1, "full"), (2, "full"), (2, "selective")]


@pytest.mark.parametrize(("world", "recompute"), HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_what_forwards_change_changes_once(world: int, kind: type[Block], recompute: str) -> None:
    assert run_ranks(world, differs, kind, recompute) == [[]] * world


@pytest.mark.parametrize("kind", [Number, Cached])
def test_where_every_second_block_is_recomputed(kind: type[Block]) -> None:
    assert run_ranks(2, differs, kind, 2) == [[]] * 2


def differentiated(recompute: str) -> list[Tensor]:
    model = made(Differentiates, recompute)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        model(data(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return left_by(model)


@pytest.mark.parametrize("world", [1, 2])
def test_a_backward_inside_of_the_forward(world: int) -> None:
    wanted, found = (run_ranks(world, differentiated, recompute) for recompute in ("none", "full"))
    for one, other in zip(wanted[0], found[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


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


def write_to_an_argument(way: str, rows: int, recompute: str) -> list[Tensor]:
    block = made(Given, recompute).blocks[0]
    x = data(0).repeat(rows, 1)
    y = block(data(1).repeat(rows, 1), WAYS[way](x)).sum()
    x += 1.0  # allowed without recomputation: its sine has saved something else
    y.backward()
    return [parameter.grad.full() for parameter in block.parameters()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_arguments_that_were_written_to(way: str, recompute: str) -> None:
    """Small ones are copied."""
    wanted, found = (run_ranks(2, write_to_an_argument, way, 1, how) for how in ("none", recompute))
    for one, other in zip(wanted[0], found[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    run_ranks(2, write_to_an_argument, way, 500, "none")
    words = ["the forward of `blocks.0` runs again", "shape (1500, 4)", "argument 1", "x = x + y"]
    expect_error(2, write_to_an_argument, way, 500, recompute, error="StateError", contains=words)


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


# ---- what keeping costs ---------------------------------------------------------------------------------------------


class Probed(Block):
    """A value with a graph that no backward runs through."""

    def make(self) -> None:
        self.probe = nn.Linear(WIDTH, WIDTH)

    def scale(self, x: Tensor) -> float:
        self.probed = torch.tanh(self.probe(x))
        return 1.0


class ProbedInObject(Probed):
    def make(self) -> None:
        super().make()
        self.held = types.SimpleNamespace()

    def scale(self, x: Tensor) -> float:
        self.held.probed = torch.tanh(self.probe(x))
        return 1.0


def alive_after_steps(kind: type[Block], has_backward: bool) -> int:
    model = made(kind, "full")
    seen = []
    for step in range(8):
        loss = model(data(step)).sum()
        block = model.blocks[0]
        seen.append(weakref.ref(getattr(block, "held", block).probed))
        if has_backward:
            loss.backward()
        del loss
    gc.collect()
    return sum(reference() is not None for reference in seen)


@pytest.mark.parametrize("has_backward", [True, False])
@pytest.mark.parametrize("kind", [Probed, ProbedInObject])
def test_no_graph_holds_those_of_forwards_before(kind: type[Block], has_backward: bool) -> None:
    assert run_ranks(2, alive_after_steps, kind, has_backward) == [1, 1]


@pytest.mark.parametrize("value", [list(range(10**6)), [{"tokens": [1, 2]} for _ in range(900)], [[]] * 10**6])
def test_what_is_looked_at_is_limited(value: Any) -> None:
    for values in ([value], [types.SimpleNamespace(value=value)]):
        holders = Insides(values, list).holders
        assert len(holders) <= 2 * LOOKS and sum(len(before) for _, before in holders) <= ENTRIES


def test_a_long_list_is_kept() -> None:
    value = [{"number": number} for number in range(5000)]
    assert Insides([value], list).holders == [(value, value)]


def test_what_several_threads_use_is_left_alone() -> None:
    shared = [queue.Queue(), threading.Condition(), {"lock": threading.RLock()}, logging.getLogger()]
    assert [holder for holder, _ in Insides(shared, list).holders] == []


class Computes(dict[str, Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("not to be read")

    __len__ = keys = values = items = __iter__  # type: ignore[assignment]


class Unhashable(type):
    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = None  # type: ignore[assignment]


class OfUnhashable(metaclass=Unhashable):
    pass


def test_what_a_class_of_the_users_answers_is_not_asked() -> None:
    target = Target(entry=1)
    computes = Computes(entry=1)
    odd = [computes, OfUnhashable(), mock.NonCallableMock(spec=dict), weakref.proxy(target)]
    holders = Insides(odd, list).holders
    assert holders[0][0] is computes and holders[0][1] == {"entry": 1}
    assert not any(holder is target for holder, _ in holders)
