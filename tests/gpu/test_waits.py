"""The host never waits for the device in a step: torch's own check raises where it would."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lamina
from gpu.cards import most_ranks, run_on_cards, take_card
from gpu.test_nccl import Block, build
from lamina.train.data import Stream

pytestmark = pytest.mark.gpu


def steps(rank: int, folder: str, transport: str) -> None:
    take_card(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = lamina.shard(build().float(), units=[Block], precision="bf16", transport=transport)
    optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-2, max_norm=0.5)
    data, rows = torch.ones(4, 16, device="cuda"), Stream(bytes(range(100)), 8, "here")

    def loss_sum() -> Tensor:
        return model(data + rows.take([rank], data.device).tokens.float().mean()).pow(2).sum()

    def step(number: int) -> None:
        everything = lamina.total(8) if number % 2 else None
        for micro in range(2):
            with lamina.accumulate(model, last=micro == 1):
                lamina.token_mean(loss_sum(), 4, total=everything).backward()
        optimizer.step()
        optimizer.zero_grad()
        lamina.token_mean(loss_sum(), torch.tensor(3)).backward()
        lamina.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(4):
        step(number)
    torch.cuda.set_sync_debug_mode("error")
    for number in range(4):
        step(number)
    torch.cuda.set_sync_debug_mode("default")
    dist.destroy_process_group()


def steps_by_torch(rank: int, folder: str, transport: str) -> None:
    """A plain script: torch's optimizers and torch's clipping."""
    take_card(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = lamina.shard(build().float(), units=[Block], precision="bf16", transport=transport)
    params, data = list(model.parameters()), torch.ones(4, 16, device="cuda")
    optimizers = [torch.optim.AdamW(params, lr=1e-3, fused=fused) for fused in (True, False)]
    optimizers += [torch.optim.AdamW(params, lr=1e-3), torch.optim.SGD(params, lr=1e-3, momentum=0.9)]

    def step(optimizer: torch.optim.Optimizer) -> None:
        model(data).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for mode in ("default", "default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        for optimizer in optimizers:
            step(optimizer)
    torch.cuda.set_sync_debug_mode("default")
    dist.destroy_process_group()


@pytest.mark.parametrize("work", [steps, steps_by_torch])
@pytest.mark.parametrize("transport", ["c10d", "peer"])
def test_steps_do_not_wait(transport: str, work: Callable[..., None]) -> None:
    assert most_ranks() >= 2, "this test needs two GPUs"
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(2, work, folder, transport)
