"""Gradients that peers read from each other's memory: whoever is late or early, sums are of what belongs together."""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist
from torch import nn

import lamina
from harness import expect_error, run_ranks
from lamina.runtime.assemble import RUNTIMES
from lamina.transport.pulled import Pulls

NUMEL = 6 * 512


def shard_by_peer() -> tuple[nn.Module, Pulls]:
    torch.manual_seed(0)
    model = lamina.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), units=["0", "1"], transport="peer")
    transport = RUNTIMES[model].engine.reducer.transport
    assert isinstance(transport, Pulls)
    return model, transport


def exchange_late_and_early(count: int) -> bool:
    """Exchanges of several sizes; each rank begins and reads some late. Every part is what was offered in that one."""
    _, transport = shard_by_peer()
    world, me = dist.get_world_size(), dist.get_rank()
    control, pauses, right = transport.peers.control, random.Random(me), True
    source = torch.empty(NUMEL)
    assert transport.takes(transport.group, 0, source.nbytes) and not transport.takes(transport.group, 0, 1 << 20)
    sources = [source]
    for number in range(count):
        if number % 4 == 3:  # elsewhere, as when a buffer was replaced by a larger one
            source = torch.empty(NUMEL)
            sources.append(source)
        numel = NUMEL // (1, 4, 2, 1)[number % 4]  # a small one comes while a large one is read
        torch.arange(numel, out=source[:numel], dtype=torch.float32).add_(1000.0 * number).mul_(me + 1)
        time.sleep(pauses.choice((0, 0, 2e-3)))
        key = ("source", numel) if number % 3 else None
        work, rows = transport.offer(0, source[:numel], tag=number, key=key)
        control.wait(work)  # type: ignore[arg-type]
        time.sleep(pauses.choice((0, 0, 2e-3)))
        own = slice(me * numel // world, (me + 1) * numel // world)
        whole = torch.arange(numel, dtype=torch.float32).add_(1000.0 * number)[own]
        right = right and all(torch.equal(row, whole * (rank + 1)) for rank, row in enumerate(rows))
    return right


def test_each_exchange_brings_what_was_offered_in_it() -> None:
    assert run_ranks(3, exchange_late_and_early, 60) == [True] * 3


def reduce_other_units() -> None:
    _, transport = shard_by_peer()
    work, _ = transport.offer(0, torch.zeros(NUMEL), tag=dist.get_rank())
    transport.peers.control.wait(work)  # type: ignore[arg-type]


def test_ranks_that_reduce_other_units_are_named() -> None:
    expect_error(2, reduce_other_units, error="Disagreement", contains=["reduced the gradients of another unit"])
