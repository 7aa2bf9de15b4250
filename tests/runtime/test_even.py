"""`lamina.even` with micro-batches and with several models, against one process."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import lamina
from harness import run_ranks


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch_of(rank: int, number: int) -> Tensor:
    """Of one to four tokens."""
    generator = torch.Generator().manual_seed(10 * rank + number)
    return torch.randn(1 + (3 * rank + number) % 4, 5, dtype=torch.float64, generator=generator)


def loss_sum(model: nn.Module, data: Tensor) -> Tensor:
    return model(data).pow(2).sum()


def assert_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        here = p.grad.full() if isinstance(p.grad, lamina.Shard) else p.grad
        torch.testing.assert_close(here, wanted.grad, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def micro_batches_run_out(strategy: str, scope: str, tokens: str) -> None:
    """A batch of `even` is a micro-batch: rank 1 runs out in the middle of the second step."""
    rank, micro_batches, counts = torch.distributed.get_rank(), 3, (6, 4)
    model, plain = lamina.shard(build(), strategy, units=[nn.Linear]), build()
    for number, data in enumerate(lamina.even([batch_of(rank, batch) for batch in range(counts[rank])])):
        step, micro = divmod(number, micro_batches)
        there = [r for r in (0, 1) if number < counts[r]]
        seen = sum(len(batch_of(r, n)) for n in range(step * 3, step * 3 + 3) for r in (0, 1) if n < counts[r])
        for r in there:
            weight = 1 / seen if tokens == "all" else 1 / (len(there) * len(batch_of(r, number)) * micro_batches)
            (loss_sum(plain, batch_of(r, number)) * weight).backward()
        last = micro == micro_batches - 1
        with lamina.accumulate(model, last, scope == "defer") if scope else contextlib.nullcontext():
            loss = loss_sum(model, data)
            mean = loss / (len(data) * micro_batches) if tokens != "all" else lamina.token_mean(loss, len(data))
            mean.backward()
        if last:
            assert_gradients(model, plain)
            model.zero_grad()
            plain.zero_grad()


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "ddp"])
def test_even_of_micro_batches(strategy: str) -> None:
    for scope in ("", "each", "defer"):
        run_ranks(2, micro_batches_run_out, strategy, scope, "own")
    for scope in ("each", "defer"):
        run_ranks(2, micro_batches_run_out, strategy, scope, "all")


def made_in_the_loop(how: str) -> None:
    """A model that is made after the loop has begun, or was there and did not run, has the same share."""
    rank, plain = torch.distributed.get_rank(), build()
    model, other = lamina.shard(build()), lamina.shard(build()) if how == "before" else None
    model(batch_of(rank, 0))
    for number, _ in enumerate(lamina.even(range(2 - rank))):
        if number == 1:
            if other is None:
                other = copy.deepcopy(model) if how == "copy" else lamina.shard(build())
            (loss_sum(plain, batch_of(0, 1))).backward()
            loss_sum(other, batch_of(rank, 1)).backward()
            assert_gradients(other, plain)


@pytest.mark.parametrize("how", ["before", "copy", "new"])
def test_even_counts_for_models_that_are_made_in_the_loop(how: str) -> None:
    run_ranks(2, made_in_the_loop, how)


def beside_an_older_model() -> None:
    """One of other data ranks ran last, and may be garbage on some ranks: the new model's are counted."""
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "shard"))
    older = lamina.shard(build(), mesh=mesh)
    older(batch_of(rank, 0))
    model = lamina.shard(build())
    steps = 0
    for _ in lamina.even(range(1 + rank)):
        loss_sum(model, batch_of(rank, steps)).backward()
        steps += 1
        if steps == 1:
            with pytest.raises(lamina.StateError, match="data ranks are others"):
                loss_sum(older, batch_of(rank, 0)).backward()
            older.zero_grad()
    assert steps == 4
    loss_sum(older, batch_of(rank, 0)).backward()


def test_even_goes_over_the_ranks_of_the_newest_model() -> None:
    run_ranks(4, beside_an_older_model)
