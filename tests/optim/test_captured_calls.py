"""What `lamina.capture` does on the host, where there is no GPU: what would be recorded stands for the graph.

The recording itself runs, and each later run calls the function again, so kernels are the eager ones. What is looked at
is everything around them: which calls are recorded, what is given back and joined, and what is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from lamina.optim import capture
from lamina.runtime import gradients
from lamina.runtime.access import runtime_of
from lamina.runtime.assemble import RUNTIMES
from optim.training import Block, Model, batch, groups_of
from transport.test_symmetric import shard_symmetrically

CALLS = 10
CLOSE = {"rtol": 1e-6, "atol": 1e-8}  # the rate of a recorded step is a float32 on the device


class Stream:
    device = "cuda:0"

    def wait_stream(self, other: Stream) -> None: ...


class Graph:
    """Of a function that has just run: the first run is over, later ones call it."""

    def __init__(self) -> None:
        self.runs = 0
        self.again: Callable[[], Any] = lambda: None

    def replay(self) -> None:
        self.runs += 1
        if self.runs > 1:
            self.again()

    def reset(self) -> None: ...


class Torch:
    """torch, but for the parts of `torch.cuda` that a recording needs."""

    def __init__(self, note: Callable[[str], object]) -> None:
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            Stream=Stream,
            CUDAGraph=Graph,
            current_stream=Stream,
            stream=lambda stream: nullcontext(),
            device=lambda device: nullcontext(),
            graph=lambda graph, **how: nullcontext(note("records")),
            graph_pool_handle=lambda: (0, 0),
            get_sync_debug_mode=lambda: 0,
            set_sync_debug_mode=lambda mode: None,
            synchronize=lambda: None,
            empty_cache=lambda: note("empties the cache"),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def recording(note: Callable[[str], object] = lambda what: None) -> Iterator[None]:
    def run_again(captured: Any, leaves: list[Any]) -> None:
        captured.graph.again = lambda: captured._result.copy_(captured.step(*captured._inputs))
        replay(captured, leaves)

    replay = capture.Captured._replay
    with (
        patch.object(capture, "torch", Torch(note)),
        patch.object(capture, "_on_gpus", lambda: list(RUNTIMES.values())),
        patch.object(capture, "_own_memory", lambda number, leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf),
        patch.object(capture.Captured, "_replay", run_again),
    ):
        yield


class Training:
    def __init__(self, shard: Callable[..., nn.Module]) -> None:
        self.model = shard(Model(), "zero3", units=[Block])
        self.optimizer = lamina.optim.AdamW(groups_of(self.model), max_norm=0.5)
        gradients = runtime_of(self.model).engine.gradients
        gradients.gives_back, gradients.room_part = True, 0.5  # as on a GPU

    def step(self, data: Tensor) -> Tensor:
        loss = self.model(data).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def losses(self, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """With rates, evaluations and edits that change between the calls."""
        found = []
        for number in range(CALLS):
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + number)
            found.append(call(batch(number, dist.get_rank())).clone())
            if number in (1, 6):
                with torch.no_grad():
                    found.append(self.model(batch(99, dist.get_rank())).pow(2).mean())
            if number == 7:
                with lamina.gathered(self.model, write=True), torch.no_grad():
                    self.model.head.weight.mul_(0.9)
        return found + [param.local.clone() for param in self.model.parameters()]

    def has_gradients(self) -> bool:
        """Whether memory of any lies with the runtime."""
        units = runtime_of(self.model).units
        return any(grad.untyped_storage().nbytes() for unit in units for grad in unit.gradients.ranges)


WAYS = {"c10d": functools.partial(lamina.shard, transport="c10d"), "as on GPUs": shard_symmetrically}


def calls(name: str) -> list[str]:
    eager, captured = Training(WAYS[name]), Training(WAYS[name])
    happened: list[str] = []
    rooms: list[float] = []
    with (
        recording(lambda what: happened.append(f"{what}, {captured.has_gradients()}")),
        patch.object(gradients, "make_room", lambda part, sizes_bytes, _: rooms.append(part)),
    ):
        call = lamina.capture(captured.step)
        found = captured.losses(call)
        runs = 0 if call.graph is None else call.graph.runs
        call.release()
    wanted = eager.losses(eager.step)
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    assert rooms == [1.0], "in the graph's pool alone"
    assert runs == CALLS - capture.EAGER_CALLS and call.graph is None and call.calls == 0
    return happened


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("world", [2, 3])
def test_steps_are_the_eager_ones(world: int, name: str) -> None:
    """Before a recording no gradient lies with the runtime: see Note [Memory of a graph]."""
    assert run_ranks(world, calls, name) == [["empties the cache, True", "records, False"]] * world


def batches() -> Iterator[int]:
    """Rank 0 has fewer in the first of two epochs."""
    for count in (8 if dist.get_rank() else 5, 3):
        yield from lamina.even(range(count))


def run_out() -> list[int]:
    runs = []
    eager, captured = Training(lamina.shard), Training(lamina.shard)
    with recording():
        call = lamina.capture(captured.step)
        for number in batches():
            call(batch(number, dist.get_rank()))
            runs.append(0 if call.graph is None else call.graph.runs)
    for number in batches():
        eager.step(batch(number, dist.get_rank()))
    for one, other in zip(eager.model.parameters(), captured.model.parameters(), strict=True):
        torch.testing.assert_close(one.local, other.local, **CLOSE)
    return runs


def test_a_graph_is_not_run_where_ranks_have_run_out_of_data() -> None:
    assert run_ranks(2, run_out) == [[0, 0, 0, 1, 2, 2, 2, 2, 3, 4, 5]] * 2


def parts() -> None:
    training = Training(lamina.shard)
    x = batch(0, dist.get_rank())
    with recording():
        with pytest.raises(
            lamina.UsageError, match="leaves the gradient of `head.weight` to an optimizer outside of it"
        ):
            lamina.capture(lambda: training.model(x).sum().backward())()
        with pytest.raises(lamina.UsageError, match="AdamW updates `head.weight`, whose gradient comes from outside"):
            lamina.capture(training.optimizer.step)()
        training.optimizer.zero_grad()
        call = lamina.capture(training.step)
        for _ in range(CALLS):
            call(x)
        with pytest.raises(lamina.UsageError, match=r"shape \(4, 13\) as tensor 0, and now gets .*shape \(2, 13\)"):
            call(x[:2])
        training.optimizer.param_groups[0]["weight_decay"] = 0.5
        with pytest.raises(lamina.StateError, match="`weight_decay` of group 0 of AdamW was changed"):
            call(x)


def test_what_a_graph_would_not_do_again_is_refused() -> None:
    run_ranks(2, parts)
