"""lamina's own AdamW kernel against torch's, on one GPU and on two."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from gpu.cards import most_ranks, run_on_cards, take_card

pytestmark = pytest.mark.gpu


def ranges(sizes: list[int], offset: int) -> list[Tensor]:
    """One tensor of each size, all in one buffer, `offset` elements from its begin."""
    buffer = torch.randn(offset + sum(sizes), device="cuda")
    return list(buffer[offset:].split(sizes))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.3, "betas": (0.5, 0.9999), "eps": 1e-5}, {"maximize": True}, {"betas": (0.0, 0.99)}],
)
def test_equals_torchs_kernel(options: dict[str, Any], offset: int) -> None:
    from lamina.optim import adamw_kernel  # Triton is there on GPUs only

    torch.manual_seed(0)
    sizes = [1, 2047, 600_003, 4096]  # the third takes three rows of the table
    params = ranges(sizes, offset)
    plain = [nn.Parameter(p.double()) for p in params]
    optimizer = torch.optim.AdamW(plain, lr=1e-2, **options)
    grads, means, squares = ranges(sizes, offset), ranges(sizes, offset), ranges(sizes, offset)
    for moment in (*means, *squares):
        moment.zero_()
    steps = list(torch.zeros(len(sizes), device="cuda").unbind())
    table = adamw_kernel.Table((params, grads, means, squares, steps))
    chosen = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "maximize": False} | options
    scale, overflow = torch.tensor(0.25, device="cuda"), torch.ones(1, device="cuda")
    for number in range(4):
        for grad, param in zip(grads, plain, strict=True):
            grad.normal_()
            param.grad = grad.double() * 0.25
        before = [grad.clone() for grad in grads]
        adamw_kernel.launch(table, 7.0, scale, overflow, **chosen)  # left out
        torch._foreach_add_(steps, 1)
        lr = torch.tensor(1e-2, device="cuda") if number % 2 else 1e-2
        adamw_kernel.launch(table, lr, scale, None, **chosen)
        optimizer.step()
        assert all(map(torch.equal, grads, before)), "gradients stay"
    for ours, theirs in ((params, plain), (means, [optimizer.state[p]["exp_avg"] for p in plain])):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.double(), b.detach(), rtol=2e-6, atol=2e-7)
    for a, param in zip(squares, plain, strict=True):
        torch.testing.assert_close(a.double(), optimizer.state[param]["exp_avg_sq"], rtol=2e-6, atol=0)


def test_gradients_may_move() -> None:
    from lamina.optim import adamw_kernel

    param, grad, mean, square = (torch.zeros(64, device="cuda") for _ in range(4))
    table = adamw_kernel.Table(([param], [grad], [mean], [square], [torch.ones((), device="cuda")]))
    adamw_kernel.launch(table, 1.0, None, None, (0.9, 0.99), 1e-8, 0.0, False)
    grad.untyped_storage().resize_(0)
    elsewhere = torch.zeros(64, device="cuda")  # takes the memory
    grad.untyped_storage().resize_(256)
    grad.fill_(1.0)
    adamw_kernel.launch(table, 1.0, None, None, (0.9, 0.99), 1e-8, 0.0, False)
    torch.testing.assert_close(param, torch.full_like(param, -1.0))
    assert not elsewhere.any()


def train(rank: int, world: int, folder: str, max_norm: float) -> None:
    take_card(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.LayerNorm(65), nn.Linear(65, 7)).cuda()
    model = lamina.shard(copy.deepcopy(plain), "zero3")
    ours = lamina.optim.AdamW(model.parameters(), lr=1e-2, max_norm=max_norm)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(5):
        data = torch.randn(4 * world, 33, generator=torch.Generator().manual_seed(step)).cuda()
        model(data[4 * rank : 4 * rank + 4]).pow(2).mean().backward()
        plain(data).pow(2).mean().backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(ours.grad_norm, norm, rtol=1e-4, atol=0)
    with lamina.gathered(model):
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-4)
    dist.destroy_process_group()


def test_clipping_in_the_step_on_two_gpus() -> None:
    assert most_ranks() >= 2, "this test needs two GPUs"
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(2, train, 2, folder, 0.1)
