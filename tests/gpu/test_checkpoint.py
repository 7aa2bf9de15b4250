"""Checkpoints of models on GPUs: pinned copies that are queued behind the step, states of the device, other worlds.

One GPU is enough; on two, ranks share the state and what two have saved is read by one.
"""

from __future__ import annotations

import os
import tempfile
import unittest.mock
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from gpu.cards import most_ranks, run_on_cards, take_card
from lamina.checkpoint.background import BACKGROUND
from lamina.checkpoint.datafile import Item
from lamina.checkpoint.host_copy import HostCopy

pytestmark = pytest.mark.gpu

WIDTH = 512
CYCLES = 200_000_000  # of a kernel that only waits: about a tenth of a second


class Block(nn.Module):
    """A buffer that is another one on each rank, and dropout: random numbers of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.lerp_(x.detach().float().mean(0), 0.1)
        return x + nn.functional.dropout(torch.tanh(self.inner(self.norm(x))), 0.1)


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(4))).cuda()


def start(kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    strategy = "zero3" if dist.is_initialized() and dist.get_world_size() > 1 else "ddp"
    model = lamina.shard(build(seed), strategy, units=[Block], precision="bf16", start="trust")
    if kind == "lamina":
        return model, lamina.optim.AdamW(model.parameters(), lr=1e-3)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=kind == "fused")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> list[float]:
    losses = []
    for step in steps:
        data = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).cuda()
        loss = model(data).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def own_bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors = [*model.parameters(), *model.buffers()]
    for param in model.parameters():
        state = optimizer.state[param]
        tensors += [state[key] for key in sorted(state) if isinstance(state[key], Tensor)]
    return [(t.local if isinstance(t, lamina.Shard) else t.detach()).cpu().clone() for t in tensors]


def begin(rank: int, world: int, folder: str) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    take_card(rank)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(init_method=f"file://{folder}/store", rank=rank, world_size=world)


def take_late(copy: HostCopy, items: Sequence[Item], original: Any = HostCopy.take) -> list[Item]:
    """The device has not come to the copies yet when the next steps are queued."""
    torch.cuda._sleep(CYCLES)
    return original(copy, items)


def save_and_go_on(rank: int, world: int, folder: str, kind: str) -> None:
    begin(rank, world, folder)
    model, optimizer = start(kind)
    train(model, optimizer, range(2), rank)
    for wait in (True, False, False):  # the second time in the background: into memory that is there
        path = f"{folder}/{kind}-{wait}"
        saved = own_bits(model, optimizer)
        with unittest.mock.patch.object(HostCopy, "take", take_late):
            lamina.save(path, model, optimizer, extra={"at": torch.arange(3).cuda()}, wait=wait)
        if not wait:
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.add_(1)
                    tensor.sub_(1)  # may round: what follows starts from what is there now
        going_on = None if not wait else train(model, optimizer, range(2, 5), rank)
        lamina.checkpoint.finish()
        other, other_optimizer = start(kind, seed=4)
        extra = lamina.load(path, other, other_optimizer)
        assert extra["at"].tolist() == [0, 1, 2]
        train(other, other_optimizer, range(1), rank)
        lamina.load(path, other, other_optimizer)  # over states that are there
        for found, expected in zip(own_bits(other, other_optimizer), saved, strict=True):
            assert torch.equal(found, expected)
        if going_on is not None:  # dropout: the device's random states were restored as well
            assert train(other, other_optimizer, range(2, 5), rank) == going_on
    assert BACKGROUND._of[model].own.buffer.is_pinned()
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["lamina", "fused", "torch"])
def test_training_goes_on_alike_and_changes_nothing_that_is_saved(kind: str) -> None:
    world = min(2, most_ranks())
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(world, save_and_go_on, world, folder, kind)


def load_alone(rank: int, folder: str, path: str) -> None:
    take_card(rank)
    model, optimizer = start("lamina", seed=4)
    lamina.load(path, model, optimizer)
    whole = torch.load(f"{folder}/whole.pt")
    for name, param in model.named_parameters():
        assert torch.equal(param.detach().cpu(), whole[name]), name


def save_on_all(rank: int, world: int, folder: str) -> None:
    begin(rank, world, folder)
    model, optimizer = start("lamina")
    train(model, optimizer, range(2), rank)
    with lamina.gathered(model):
        whole = {name: param.detach().cpu().clone() for name, param in model.named_parameters()}
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")
    lamina.save(f"{folder}/two", model, optimizer, wait=False)
    lamina.checkpoint.finish()
    lamina.export(f"{folder}/exported", model)
    dist.destroy_process_group()


def test_one_gpu_and_plain_safetensors_read_what_all_have_saved() -> None:
    from safetensors.torch import load_file

    world = min(2, most_ranks())
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(world, save_on_all, world, folder)
        run_on_cards(1, load_alone, folder, f"{folder}/two")
        read: dict[str, Tensor] = {}
        for file in Path(folder, "exported").glob("*.safetensors"):
            read |= load_file(file)
        whole = torch.load(f"{folder}/whole.pt")
        assert all(torch.equal(read[name], value) for name, value in whole.items())


def fail_beside(rank: int, world: int, folder: str) -> None:
    """Memory that cannot be pinned is no error; a folder that cannot be written is, at the next call."""
    begin(rank, world, folder)
    torch.cuda.cudart().cudaHostRegister = lambda *arguments: 1
    model, optimizer = start("lamina")
    train(model, optimizer, range(1), rank)
    lamina.save(f"{folder}/a", model, optimizer, extra=1, wait=False)
    assert lamina.load(f"{folder}/a", model, optimizer) == 1
    assert not BACKGROUND._of[model].own.buffer.is_pinned()
    Path(f"{folder}/file").write_text("in the way")
    lamina.save(f"{folder}/file/a", model, optimizer, wait=False)
    with pytest.raises(lamina.CheckpointError, match="File exists"):
        lamina.checkpoint.finish()
    dist.destroy_process_group()


def test_errors_beside_come_back() -> None:
    world = min(2, most_ranks())
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(world, fail_beside, world, folder)


if __name__ == "__main__":
    for optimizer_kind in ("lamina", "fused", "torch"):
        test_training_goes_on_alike_and_changes_nothing_that_is_saved(optimizer_kind)
        print(optimizer_kind, "equal")
    test_one_gpu_and_plain_safetensors_read_what_all_have_saved()
    test_errors_beside_come_back()
    print("all equal")
