"""Captured steps on two GPUs or on one: what eager steps give, bit for bit; what would be frozen is fresh or named."""

from __future__ import annotations

import gc
import tempfile
import time
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from gpu.cards import most_ranks, run_on_cards, take_card
from lamina.runtime.gradients import Gradients

pytestmark = pytest.mark.gpu
WORLD = min(2, most_ranks())
give_back = Gradients.give_back


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), *[Block(32) for _ in range(5)], nn.Linear(32, 8)).cuda()


def steps(transport: str, strategy: str, captures: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Twelve steps with a schedule, evaluations and an edit in between; losses, and parts of the parameters."""
    torch.manual_seed(1)
    model = lamina.shard(build(), strategy, units=[Block], precision="bf16", transport=transport)
    optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-2)

    def step(data: Tensor) -> Tensor:
        loss = model(nn.functional.dropout(data, 0.1)).pow(2).mean()
        loss.backward()
        lamina.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    call = lamina.capture(step) if captures else step
    losses = []
    for number in range(12):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (number + 1)
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(number)).cuda() + dist.get_rank()
        losses.append(call(data).clone())
        if number in (2, 7):
            with torch.no_grad():
                losses.append(model(data).pow(2).mean())
        if number == 8:
            with lamina.gathered(model, write=True), torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
    return losses, [p.local.clone() if isinstance(p, lamina.Shard) else p.detach().clone() for p in model.parameters()]


def compare(rank: int, folder: str, transport: str, strategy: str) -> None:
    take_card(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    eager, captured = (steps(transport, strategy, captures) for captures in (False, True))
    for name, wanted, found in zip(("loss", "parameter"), eager, captured, strict=True):
        for number, (a, b) in enumerate(zip(wanted, found, strict=True)):
            # the rate is a float32 on the device, and a double on the host
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6, msg=f"{name} {number}: {a} {b}")
    dist.destroy_process_group()


@pytest.mark.parametrize(("transport", "strategy"), [("c10d", "zero3"), ("peer", "zero3"), ("c10d", "zero1")])
def test_equals_eager_steps(transport: str, strategy: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(WORLD, compare, folder, transport, strategy)


class Training:
    """Captured steps with a norm, which meets the other ranks inside of the graph."""

    def __init__(self, transport: str) -> None:
        torch.manual_seed(1)
        self.model = lamina.shard(build(), units=[Block], precision="bf16", transport=transport)
        self.optimizer = lamina.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.call = lamina.capture(self.step)

    def step(self, data: Tensor) -> Tensor:
        loss = self.model(data).pow(2).mean()
        loss.backward()
        lamina.clip_grad_norm_(self.model, 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def losses(self, calls: int, release_after: int = -1) -> list[float]:
        found = []
        for number in range(calls):
            found.append(self.call(torch.full((8, 16), number / calls, device="cuda")).item())
            if number == release_after:
                self.call.release()
                assert self.call.graph is None
        return found


def in_the_recording(gradients: Gradients) -> None:
    if gradients.lanes.is_recording:
        give_back(gradients)


def count_memory(rank: int, folder: str) -> None:
    take_card(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    reserved_bytes = []
    for keeps in (True, False):
        model = lamina.shard(nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16))).cuda(), "zero3")
        optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-4, max_norm=1.0)

        def step(data: Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model(data).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        captured, data = lamina.capture(step), torch.randn(8, 2048, device="cuda")
        for _ in range(3):
            captured(data)
        with patch.object(Gradients, "give_back", in_the_recording) if keeps else nullcontext():
            captured(data)
        reserved_bytes.append(torch.cuda.memory_reserved())
        captured.release()
        del model, optimizer, step, captured
        gc.collect()
        torch.cuda.empty_cache()
    gradient_bytes = 16 * 2048 * 2048 * 4 // WORLD
    assert reserved_bytes[0] - reserved_bytes[1] > 0.8 * gradient_bytes, reserved_bytes
    dist.destroy_process_group()


def test_gradients_do_not_lie_in_the_graph_and_beside_it() -> None:
    if WORLD < 2:
        pytest.skip("gradients of one GPU are torch's own")
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(WORLD, count_memory, folder)


def run_out(rank: int, folder: str) -> None:
    """Rank 0 has more batches than the other: the last steps are means over one rank."""
    take_card(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    ends = []
    for captures in (False, True):
        training = Training("c10d")
        call = training.call if captures else training.step
        for _ in range(2):  # epochs
            for number in lamina.even(range(6 if rank else 9)):
                call(torch.full((8, 16), (number + rank) / 9, device="cuda"))
        assert not captures or training.call.graph is not None
        ends.append([p.local.clone() for p in training.model.parameters()])
    for eager, captured in zip(*ends, strict=True):
        torch.testing.assert_close(captured, eager, rtol=1e-5, atol=1e-6)
    dist.destroy_process_group()


def test_batches_that_some_ranks_do_not_have() -> None:
    if WORLD < 2:
        pytest.skip("one rank has all batches")
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(WORLD, run_out, folder)


def end_with_a_graph(rank: int, folder: str, transport: str) -> None:
    take_card(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    training = Training(transport)
    training.losses(6)
    began = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - began < 15.0 and (WORLD == 1 or transport == "peer" or training.call.graph is None)


@pytest.mark.parametrize("transport", ["c10d", "peer"])
def test_groups_go_while_a_captured_step_is_kept(transport: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(WORLD, end_with_a_graph, folder, transport)


def go_on_after_a_release(rank: int, folder: str) -> None:
    take_card(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    released, kept = Training("c10d").losses(12, release_after=5), Training("c10d").losses(12)
    assert released == pytest.approx(kept, rel=1e-5)
    dist.destroy_process_group()


def test_a_released_step_is_recorded_anew() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(WORLD, go_on_after_a_release, folder)


def misuse(rank: int, folder: str) -> None:
    take_card(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    model = lamina.shard(build(), units=[Block])
    optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-2)

    def train(data: Tensor) -> Tensor:
        loss = model(data).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def schedule(data: Tensor) -> Tensor:
        optimizer.param_groups[0]["lr"] *= 0.9
        return train(data)

    data = torch.ones(4, 16, device="cuda")
    call = lamina.capture(schedule)
    with pytest.raises(lamina.UsageError, match="sets the learning rate of group 0"):
        for _ in range(2):
            call(data)
    call = lamina.capture(lambda data: train(data).item())
    with pytest.raises(lamina.StateError, match="reading a value from the device"):
        for _ in range(4):
            call(data)
    call = lamina.capture(lambda data: train(data))  # a recording that failed has left nothing behind
    for _ in range(5):
        call(data)
    with pytest.raises(lamina.UsageError, match=r"shape \(4, 16\).*shape \(2, 16\)"):
        call(data[:2])
    with pytest.raises(lamina.UsageError, match="leaves the gradient of `0.weight` to an optimizer outside"):
        lamina.capture(lambda: model(data).sum().backward())()
    if WORLD > 1:
        with pytest.raises(lamina.UsageError, match="AdamW updates `0.weight`, whose gradient comes from outside"):
            lamina.capture(optimizer.step)()
    optimizer.zero_grad()
    optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(lamina.StateError, match="weight_decay.*capture it anew"):
        call(data)
    dist.destroy_process_group()


def test_what_a_graph_would_freeze_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(WORLD, misuse, folder)
