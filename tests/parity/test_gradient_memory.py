"""On a GPU the memory of gradients goes back to the allocator while there are none; here the same code runs on the CPU.

Everything that reads gradients must find them as if their memory had stayed.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from lamina.runtime.assemble import RUNTIMES
from parity.models import UNITS, build, language_batch, language_loss
from parity.reference import TOLERANCE, Recipe, gradient_deviation, of_language, sharded


def giving_back(model: nn.Module, strategy: str, units: Any = UNITS) -> nn.Module:
    model = lamina.shard(model, strategy, units=units)
    RUNTIMES[model].engine.gradients.gives_back = True
    return model


def train(strategy: str, recipe: Recipe) -> tuple[float, list[int]]:
    model = giving_back(build(), strategy)
    seen: list[int] = []
    model.register_forward_hook(lambda *_: seen.append(lamina.report(model).memory.get("gradients", 0)))
    worst = sharded(model, of_language(dist.get_world_size(), recipe), recipe)
    seen.append(lamina.report(model).memory.get("gradients", 0))
    return worst, seen


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
def test_training_equals_one_process_and_forwards_have_the_memory(strategy: str) -> None:
    for worst, seen in run_ranks(2, train, strategy, Recipe("adamw", "twice")):
        assert worst <= TOLERANCE
        assert seen[-1] > 0
        assert seen[0::2][:-1] == [0] * 3  # the first forward of each step
        assert all(size == seen[-1] for size in seen[1::2])  # the second, with gradients of the first there


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_gradients_that_stay_keep_their_memory(strategy: str) -> None:
    for worst, seen in run_ranks(2, train, strategy, Recipe("sgd", "none")):  # zeroed in place
        assert worst <= TOLERANCE
        assert set(seen[1:]) == {seen[-1]}


def keep_a_gradient(strategy: str) -> float:
    """A gradient that is still held keeps its values when its memory goes, and while the next one comes."""
    model = giving_back(build(), strategy)
    loss = language_loss(model, language_batch(dist.get_rank(), 2))
    loss.backward()
    held = model.blocks[1].up.weight.grad
    before = local(held).clone()
    model.zero_grad()
    (2 * language_loss(model, language_batch(dist.get_rank(), 2))).backward()
    assert local(model.blocks[1].up.weight.grad).data_ptr() != local(held).data_ptr() or before.numel() == 0
    twice = (local(model.blocks[1].up.weight.grad) - 2 * before).abs().sum()
    return ((local(held) - before).abs().sum() + twice).item()


def local(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, lamina.Shard) else tensor


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_gradient_that_is_held_keeps_its_values(strategy: str) -> None:
    assert max(run_ranks(2, keep_a_gradient, strategy)) <= TOLERANCE


def flat_optimizer() -> float:
    """lamina's own optimizer and clipping hold ranges of the gradients' memory from step to step."""
    models = [giving_back(build(), "zero3"), lamina.shard(build(), "zero3", units=UNITS)]
    optimizers = [lamina.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            language_loss(model, language_batch(10 * step + dist.get_rank(), 2)).backward()
            lamina.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return max((a.local - b.local).abs().sum().item() for a, b in pairs)


def test_the_flat_optimizer_finds_them() -> None:
    assert max(run_ranks(2, flat_optimizer)) == 0.0


class Parts(nn.Module):
    """Parameters of odd sizes, some of which a forward leaves out: what lies between them is read with them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 5, dtype=torch.float64), nn.Linear(5, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: Tensor, uses_bias: bool) -> Tensor:
        hidden = torch.tanh(nn.functional.linear(x, self.first.weight, self.first.bias if uses_bias else None))
        return self.second(hidden * self.scale)


def norms_and_kept_gradients(strategy: str, kept: bool) -> float:
    """Two forwards a step; gradients are cleared in place and by leaving, parameters come and go."""
    lamina.debug(True)  # memory comes back as NaN
    try:
        plain = Parts()
        model = giving_back(Parts(), strategy, units="auto")
        worst = 0.0
        for step in range(6):
            data = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            with lamina.keep(model.first) if kept else contextlib.nullcontext():
                for half in (0, 1):
                    for m in (model, plain):
                        loss = m(data + half, step % 3 > 0).pow(2).sum()
                        (loss + m.first.weight.pow(2).sum() if step % 3 else loss).backward()
            norms = [lamina.clip_grad_norm_(m, 0.1) for m in (model, plain)]
            worst = max(worst, (norms[0] - norms[1]).abs().item())
            worst = max(worst, gradient_deviation(model, {name: p.grad for name, p in plain.named_parameters()}))
            for m in (model, plain):
                m.zero_grad(set_to_none=step % 2 == 0)
    finally:
        lamina.debug(False)
    return worst if worst == worst else float("inf")


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
def test_what_comes_back_is_never_read(strategy: str, kept: bool) -> None:
    assert max(run_ranks(2, norms_and_kept_gradients, strategy, kept)) <= TOLERANCE
