"""`lamina.adopt`: a model that gains parameters while it trains equals one process that gains them.

Every job trains two steps, changes the model, and trains three more. The same function makes the change on both sides;
the optimizer that was there goes on, and gets a group for what is new.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import lamina
from harness import run_ranks
from parity.models import HIDDEN, UNITS, VOCABULARY, WIDTH, Block, LanguageModel
from parity.reference import TOLERANCE, gradient_deviation, language_loss_of, parameter_deviation


class LowRank(nn.Module):
    """An adapter in peft's manner: it holds the layer that it adapts."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Linear(base.in_features, 3, bias=False)
        self.lora_b = nn.Linear(3, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_b(self.lora_a(x))


class Beside(nn.Module):
    """An adapter that takes the layer's weight over, and drops the layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.low = nn.Parameter(torch.randn(3, base.in_features) * 0.2)
        self.high = nn.Parameter(torch.randn(base.out_features, 3) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias) + x @ self.low.t() @ self.high.t()


class Thick(nn.Module):
    """A head large enough for a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(WIDTH, 3 * HIDDEN), nn.Linear(3 * HIDDEN, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.up(x)))


def freeze_and_wrap(model: nn.Module) -> None:
    """The common case: a frozen base, and adapters in every block."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.up, block.mix = LowRank(block.up), LowRank(block.mix)


def wrap_everywhere(model: nn.Module) -> None:
    """A trained base; the layer that is wrapped is a unit by itself, or the weight moves into the adapter."""
    model.head = LowRank(model.head)
    model.blocks[0].down = Beside(model.blocks[0].down)
    model.blocks[2] = nn.Sequential(model.blocks[2], nn.Linear(WIDTH, WIDTH))


def replace_head(model: nn.Module) -> None:
    model.head = Thick()


def add_block(model: nn.Module) -> None:
    model.blocks.append(Block())
    model.blocks[0].norm.requires_grad_(False)


def grow_twice(model: nn.Module) -> None:
    """Called a second time, adds to what it has added."""
    block = model.blocks[1]
    block.up = LowRank(block.up.base_layer if isinstance(block.up, LowRank) else block.up)


CHANGES = {f.__name__: f for f in (freeze_and_wrap, wrap_everywhere, replace_head, add_block)}


class Way(NamedTuple):
    strategy: str
    transport: str = "c10d"
    slots: int = 3
    optimizer: str = "torch"


class Job:
    """One side of the comparison."""

    def __init__(self, way: Way | None) -> None:
        torch.manual_seed(0)
        self.way, self.model = way, LanguageModel().double()
        if way is not None:
            mesh = None
            if way.strategy == "hsdp":
                mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            lamina.shard(self.model, way.strategy, mesh=mesh, units=UNITS, transport=way.transport, slots=way.slots)
        kind = lamina.optim.AdamW if way is not None and way.optimizer == "lamina" else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)

    def change(self, change: Callable[[nn.Module], None], **adopt: str) -> None:
        before = set(self.model.parameters())
        torch.manual_seed(7)
        torch.set_default_dtype(torch.float64)
        try:
            change(self.model)
        finally:
            torch.set_default_dtype(torch.float32)
        new = [p for p in self.model.parameters() if p not in before]
        if self.way is not None:
            assert {id(p) for p in lamina.adopt(self.model, self.model, **adopt)} == {id(p) for p in new}
        self.optimizer.add_param_group({"params": new})

    def end_step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(plain: Job, job: Job, steps: range) -> float:
    """The largest difference of gradients and parameters on this rank."""
    worst = 0.0
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    for step in steps:
        for other in range(world):
            (language_loss_of(plain.model, step, other, 0) / world).backward()
        language_loss_of(job.model, step, rank, 0).backward()
        worst = max(worst, gradient_deviation(job.model, {n: p.grad for n, p in plain.model.named_parameters()}))
        plain.end_step()
        job.end_step()
        worst = max(worst, parameter_deviation(job.model, {n: p.detach() for n, p in plain.model.named_parameters()}))
    return worst


def run(name: str, ways: list[Way]) -> dict[str, float]:
    found = {}
    for way in ways:
        plain, job = Job(None), Job(way)
        worst = train(plain, job, range(2))
        for each in (plain, job):
            each.change(CHANGES[name])
        worst = max(worst, train(plain, job, range(2, 5)))
        lamina.check(job.model)
        found[f"{name} {way}"] = worst
    return found


TWO = [Way("zero3", slots=1), Way("zero3", "peer", optimizer="lamina"), Way("zero1"), Way("ddp"), Way("zero2", "peer")]


@pytest.mark.parametrize("name", CHANGES)
def test_adopted_parameters_train_as_in_one_process(name: str) -> None:
    for found in run_ranks(2, run, name, TWO):
        assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("name", ["freeze_and_wrap", "wrap_everywhere"])
def test_on_four_ranks_and_on_one(name: str) -> None:
    ways = [Way("zero3", optimizer="lamina"), Way("hsdp", "peer")]
    assert max(value for found in run_ranks(4, run, name, ways) for value in found.values()) <= TOLERANCE
    assert max(run(name, [Way("zero3")]).values()) <= TOLERANCE
