"""Peers that come with the optimizer, on two GPUs whose lanes drift apart, and that go again."""

from __future__ import annotations

import tempfile
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lamina
from gpu.cards import most_ranks, run_on_cards, take_card
from gpu.test_nccl import Block, build
from lamina.runtime import api, publishing
from lamina.runtime.access import runtime_of

pytestmark = pytest.mark.gpu


def data_of(number: int, rank: int) -> Tensor:
    if (number + rank) % 2:  # ranks drift apart, on the device
        torch.cuda._sleep(20_000_000)
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(number)).cuda() + rank


def much_is_published() -> Any:
    """More than is granted, but little where masters lie in halves."""
    model = lamina.shard(build().float(), units=[Block], precision="bf16", transport="c10d")
    units = runtime_of(model).units
    layouts, meshes = [unit.layout for unit in units], [unit.mesh for unit in units]
    granted_bytes = publishing._extra_bytes(layouts, meshes, lamina.Precision(torch.bfloat16)) - 1.0
    return patch.object(api, "grant", lambda control, mesh: granted_bytes)


def train(rank: int, world: int, folder: str) -> None:
    take_card(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    ends: dict[str, list[Tensor]] = {}
    for way in ("peer", "late", "averaged", "c10d"):
        with much_is_published():
            transport = {"late": "auto", "averaged": "auto"}.get(way, way)
            model = lamina.shard(build().float(), units=[Block], precision="bf16", transport=transport)
            with torch.no_grad():
                model(data_of(99, rank))  # NCCL's gathers have begun
            optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-2, max_norm=0.5)
            average, seen = [p.detach().clone() for p in model.parameters()], []
            for number in range(8):
                seen.append(lamina.report(model).transport)
                model(data_of(number, rank)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if way == "averaged":
                    torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)
        units = runtime_of(model).units
        seen.append(lamina.report(model).transport)
        wanted = {"late": ["c10d"] + ["peer"] * 8, "averaged": ["c10d", "peer", "peer"] + ["c10d"] * 6}.get(
            way, [way] * 9
        )
        assert seen == wanted, (way, seen, lamina.report(model).notes)
        assert all(bool(unit.halved) is (way in ("peer", "late")) for unit in units)
        ends[way] = [master.clone() for unit in units for master in unit.read_masters()]
    assert all(map(torch.equal, ends["peer"], ends["late"]))
    for averaged, plain in zip(ends["averaged"], ends["c10d"], strict=True):  # but for ties in its first steps
        torch.testing.assert_close(averaged, plain, rtol=1e-3, atol=1e-3)
    dist.destroy_process_group()


def test_they_come_with_the_optimizer_and_go_where_masters_are_touched() -> None:
    assert most_ranks() >= 2, "this test needs two GPUs"
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(2, train, 2, folder)
