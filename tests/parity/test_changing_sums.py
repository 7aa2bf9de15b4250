"""What writes the means of a reduction is made ready once; all that it depends on may change from one step to the next:
whether gradients are there to be added to (all, some or none), over how many ranks they are means, whether a norm wants
their squares, whether sums of micro-batches wait, which parameters train.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import lamina
from harness import run_ranks

WIDTH, SEEDS = 6, 4
CHANGES = ("clear", "add", "clear some", "norm", "micro-batches", "deferred", "freeze", "thaw", "run out")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block()).double()


def data_of(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(strategy: str | lamina.Strategy, seed: int, slots: int) -> None:
    """Steps with changes in an order of the seed's, beside one process that sees all ranks' data."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, plain = model_of(), model_of()
    lamina.shard(model, strategy, units=[Block], slots=slots)
    number = 0
    for what in random.Random(seed).choices(CHANGES, k=24):
        change(model, what)
        change(plain, what)
        batches = [data_of(number + i, rank) for i in range(2)]
        number += 2
        if what == "run out":
            for i, batch in enumerate(lamina.even(batches[: 1 if rank == 0 else 2])):
                model(batch).square().mean().backward()
                having = [r for r in range(world) if r > 0 or i == 0]
                sum(loss_of(plain, number - 2 + i, r) / len(having) for r in having).backward()  # type: ignore[union-attr]
        elif what in ("micro-batches", "deferred"):
            for i, batch in enumerate(batches):
                with lamina.accumulate(model, last=i == 1, defer=what == "deferred"):
                    model(batch).square().mean().backward()
                sum(loss_of(plain, number - 2 + i, r) / world for r in range(world)).backward()  # type: ignore[union-attr]
        else:
            model(batches[0]).square().mean().backward()
            sum(loss_of(plain, number - 2, r) / world for r in range(world)).backward()  # type: ignore[union-attr]
        if what == "norm":
            norm = lamina.clip_grad_norm_(model, 1e9)
            torch.testing.assert_close(norm.double(), nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
        for (name, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (param.grad is None) == (wanted.grad is None), f"{name}, {what}"
            if param.grad is not None:
                full = param.grad.full() if isinstance(param.grad, lamina.Shard) else param.grad
                torch.testing.assert_close(full, wanted.grad, rtol=1e-10, atol=1e-12, msg=f"{name}, {what}")


def loss_of(plain: nn.Module, number: int, rank: int) -> Tensor:
    return plain(data_of(number, rank)).square().mean()


def change(model: nn.Module, what: str) -> None:
    """Before a step."""
    params = list(model.parameters())
    if what in ("freeze", "thaw"):
        params[1].requires_grad_(what == "thaw")
    if what == "clear some":
        for param in params[::2]:
            param.grad = None
    elif what != "add":
        model.zero_grad()


@pytest.mark.parametrize("strategy, slots", [("zero3", 1), ("zero3", 3), ("zero2", 3), ("zero1", 3), ("ddp", 3)])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_means_are_right_whatever_has_changed(strategy: str, slots: int, seed: int) -> None:
    run_ranks(2, trained, strategy, seed, slots)


@pytest.mark.parametrize("factors", [(2, 2, 4), (1, 2, 4), (2, 2, 2)])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_those_of_several_levels_are(factors: tuple[int, int, int], seed: int) -> None:
    """Where gradients are split over some ranks only, sums of micro-batches wait half way."""
    params, grads, optimizer = factors
    run_ranks(4, trained, lamina.Strategy(params=params, grads=grads, optimizer=optimizer), seed, 3)
