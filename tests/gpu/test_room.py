"""Room for gradients in the allocator of a GPU: taken by the first forward of a training, and by no other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lamina
from gpu.cards import most_ranks, run_on_cards, take_card
from lamina.core import room

pytestmark = pytest.mark.gpu

WIDTH, LAYERS, WORLD = 2048, 16, 2
ROOM_BYTES = room.room_bytes(room.KEPT, [LAYERS * WIDTH * WIDTH * 4 // WORLD])


def taken_by(forward: Callable[[], object]) -> int:
    """Bytes that a forward has had at once, beyond those before it."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward()
    return torch.cuda.max_memory_allocated() - before


def train(rank: int, folder: str) -> None:
    take_card(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    with torch.device("cuda"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    lamina.shard(model, precision="bf16", transport="c10d", start="broadcast")
    data, optimizer = torch.randn(8, WIDTH, device="cuda"), lamina.optim.AdamW(model.parameters())
    with torch.no_grad():
        assert taken_by(lambda: model(data)) < ROOM_BYTES
    assert taken_by(lambda: model(data)) >= ROOM_BYTES
    for _ in range(2):
        model(data).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert taken_by(lambda: model(data)) < ROOM_BYTES
    dist.destroy_process_group()


def test_only_the_first_forward_of_a_training_makes_room() -> None:
    assert most_ranks() >= WORLD, "this test needs two GPUs"
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(WORLD, train, folder)
