"""The runtime over NCCL on two GPUs, against one process on one GPU."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lamina
from fuzz import walks
from fuzz.play import play_all
from gpu.cards import most_ranks, run_on_cards, take_card
from harness import run_ranks, shutdown
from lamina.runtime import direct, summing
from lamina.runtime.assemble import RUNTIMES
from parity.reference import TOLERANCE

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), *[Block(32) for _ in range(5)], nn.Linear(32, 8)).double().cuda()


def train(rank: int, world: int, folder: str, strategy: str, slots: int, recompute: str, transport: str) -> None:
    take_card(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    lamina.debug(True)
    direct.LEAST_PIECE_BYTES = 1 << 20 if rank else 0  # one rank pushes gradients from where they are, others do not
    mesh = init_device_mesh("cuda", (world // 2, 2), mesh_dim_names=("replicate", "shard")) if world > 2 else None
    chosen = lamina.Strategy(2, 2, 4) if strategy == "2-2-4" else strategy
    choices = {"units": [Block], "slots": slots, "recompute": recompute, "transport": transport}
    model = lamina.shard(build(), chosen, mesh if strategy == "hsdp" else None, **choices)
    assert lamina.report(model).transport == transport
    plain = build()
    optimizer, plain_optimizer = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    for step in range(4):
        data = torch.randn(4 * world, 16, generator=torch.Generator().manual_seed(step)).double().cuda()
        for half in (data[: 2 * world], data[2 * world :]):
            model(half[2 * rank : 2 * rank + 2]).pow(2).mean().backward()
            plain(half).pow(2).mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        plain_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(norm, plain_norm, rtol=0, atol=1e-10)
        for o in (optimizer, plain_optimizer):
            o.step()
            o.zero_grad()
    with lamina.gathered(model):
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=0, atol=1e-10, msg=name)
    dist.destroy_process_group()


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(
    ("strategy", "transport"),
    [("zero3", "c10d"), ("zero3", "peer"), ("zero2", "c10d"), ("zero1", "c10d"), ("ddp", "c10d")],
)
def test_equals_one_process(strategy: str, transport: str, slots: int) -> None:
    assert most_ranks() >= 2, "this test needs two GPUs"
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(2, train, 2, folder, strategy, slots, "full" if slots == 3 else "none", transport)


@pytest.mark.parametrize("strategy", ["zero3", "hsdp", "2-2-4"])
def test_peers_of_four_gpus_equal_one_process(strategy: str) -> None:
    if most_ranks() < 4:
        pytest.skip("this test needs four GPUs")
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(4, train, 4, folder, strategy, 2, "none", "peer")


def train_in_16_bit(rank: int, world: int, folder: str, sleeps: bool, max_norm: float | None) -> None:
    """With `max_norm` the optimizer writes what peers read; edits between steps have to be published all the same."""
    take_card(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    lamina.debug(True)
    direct.LEAST_PIECE_BYTES = 0
    # NCCL sums float32 over more than two ranks in an order of its own: no wide norms then, and no sums that wait
    # with `max_norm`, masters over peers would lie in halves, whose weights round ties away from zero, as no cast does
    precision = lamina.Precision(torch.bfloat16, halves=False, **({} if world == 2 else {"keep": ()}))
    ends = []
    for transport in ("c10d", "peer"):
        model = lamina.shard(build().float(), units=[Block], precision=precision, transport=transport)
        optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-2, max_norm=max_norm)
        for step in range(8):
            for micro in range(2):
                with lamina.accumulate(model, last=micro == 1, defer=step % 2 == 1 and world == 2):
                    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).cuda() + rank
                    if sleeps and (step + rank) % 2:  # ranks drift apart, on the device
                        torch.cuda._sleep(20_000_000)
                    model(data).pow(2).mean().backward()
            if max_norm is None:
                lamina.clip_grad_norm_(model, 0.5)
            optimizer.step()
            if transport == "peer" and max_norm is not None:
                units = [unit for runtime in RUNTIMES.values() for unit in runtime.units if unit.lanes is not None]
                assert all(unit.dirty.published for unit in units if unit.published), step
            optimizer.zero_grad()
            with torch.no_grad():
                if step == 3:
                    next(model.parameters()).mul_(0.5)
                model(data)
                if step == 5:
                    list(model.parameters())[-1].add_(0.1)
        ends.append([p.local.clone() for p in model.parameters()])
    for by_c10d, by_peer in zip(*ends, strict=True):
        assert torch.equal(by_c10d, by_peer)
    dist.destroy_process_group()


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("sleeps", [False, True])
def test_peer_is_bitwise_what_nccl_gives(sleeps: bool, max_norm: float | None) -> None:
    world = most_ranks()
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(world, train_in_16_bit, world, folder, sleeps, max_norm)


# What the ranks of a world have gone wrong in once, or hung, and on GPUs only, is among them.
WALKS = {2: list(range(12)), 4: [3, 12, 14, 39]}
JOBS = {1: [300, 452], 2: list(range(100, 120)), 3: [322, 426], 4: [79, 479]}


@pytest.mark.parametrize("world", WALKS)
def test_ranks_whose_paths_part_equal_one_process(world: int) -> None:
    """Nested blocks in overflow slots, and jobs of which a rank owns no element of a unit."""
    if most_ranks() < world:
        pytest.skip("so many GPUs, or a card that ranks may share")
    for found in run_ranks(world, walks.play_all, WALKS[world], "cuda", timeout=180):
        assert max(found) <= TOLERANCE
    shutdown()


@pytest.mark.parametrize("world", JOBS)
def test_random_jobs_equal_one_process(world: int) -> None:
    if most_ranks() < world:
        pytest.skip("so many GPUs, or a card that ranks may share")
    for outcomes in run_ranks(world, play_all, JOBS[world], "cuda", timeout=180):
        assert all(outcome.is_right for outcome in outcomes), outcomes
    shutdown()


def choose(rank: int, world: int, folder: str) -> None:
    take_card(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    report = lamina.report(lamina.shard(build(), "zero3", units=[Block]))
    (note,) = report.notes
    assert note.startswith(f"transport {report.transport}, for a gather of") and "by NCCL" in note, report
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 4])
def test_auto_times_gathers(world: int) -> None:
    if most_ranks() < world:
        pytest.skip("so many GPUs, or a card that ranks may share")
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(world, choose, world, folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("numel", [1, 255, 4096, 100_003])
def test_the_kernel_sums_as_the_passes_do(dtype: torch.dtype, accumulate: bool, numel: int) -> None:
    assert summing._fused() is not None
    for count in (1, 2, 3, 8, 11, 2, 8):  # the second time by another way
        for shift in (0, 1):
            everything = torch.randn(count, numel + shift, device="cuda").to(dtype)
            rows = [row[shift:] for row in everything]
            before = torch.randn(numel + shift, device="cuda")[shift:]
            found, wanted = before.clone(), before.double()
            squares = summing.make_squares(found)
            assert squares is not None
            summing.add_rows(found, rows, 1.0 / 3, accumulate, squares)
            torch.testing.assert_close(squares.double().sum(), found.double().pow(2).sum(), rtol=1e-5, atol=0)
            exact = sum(row.double() for row in rows) / 3 + (wanted if accumulate else 0)
            torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=2e-6)


def distill(rank: int, world: int, folder: str) -> None:
    """Two models on the same ranks share groups and lanes: a student learns from a teacher that learns as well."""
    take_card(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    models = [lamina.shard(build(), "zero3", units=[Block]) for _ in range(2)]
    plains = [build() for _ in range(2)]
    steps = [[torch.optim.SGD(m.parameters(), lr=1e-2) for m in pair] for pair in (models, plains)]
    for step in range(4):
        data = torch.randn(2 * world, 16, generator=torch.Generator().manual_seed(step)).double().cuda()
        for (teacher, student), optimizers, part in (
            (models, steps[0], data[2 * rank : 2 * rank + 2]),
            (plains, steps[1], data),
        ):
            wanted = teacher(part)
            (student(part * 2) - wanted).pow(2).mean().backward()  # through both graphs, in turns
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for model, plain in zip(models, plains, strict=True):
        with lamina.gathered(model):
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p, q.detach(), rtol=0, atol=1e-10, msg=name)
    dist.destroy_process_group()


def test_two_models_equal_one_process() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(2, distill, 2, folder)


if __name__ == "__main__":  # where pytest is not installed
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    for name in ("zero3", "zero2", "zero1", "ddp"):
        for count in (1, 3):
            test_equals_one_process(name, "c10d", count)
            print(name, count, "equal")
    test_two_models_equal_one_process()
