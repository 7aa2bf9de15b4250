"""Room for gradients in the allocator of a GPU: made by the first forward of a training, used by its steps."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import lamina
from gpu.cards import most_ranks, take_card

pytestmark = pytest.mark.gpu

WIDTH, LAYERS = 2048, 16
GRADIENTS_BYTES = LAYERS * WIDTH * WIDTH * 4


def reserve(rank: int, world: int, folder: str) -> None:
    take_card(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    with torch.device("cuda"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    lamina.shard(model, precision="bf16", transport="c10d", start="broadcast")
    data = torch.randn(64, WIDTH, device="cuda")
    before = torch.cuda.memory_reserved()
    with torch.no_grad():
        model(data)
    assert torch.cuda.memory_reserved() - before < GRADIENTS_BYTES // world
    optimizer, reserved = lamina.optim.AdamW(model.parameters()), []
    for _ in range(4):
        model(data).pow(2).mean().backward()
        reserved.append(torch.cuda.memory_reserved())
        optimizer.step()
        optimizer.zero_grad()
    assert reserved[0] - before >= GRADIENTS_BYTES // world
    assert reserved[2] == reserved[3]
    dist.destroy_process_group()


def test_the_first_forward_of_a_training_makes_room() -> None:
    assert most_ranks() >= 2, "this test needs two GPUs"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(reserve, (2, folder), nprocs=2)
