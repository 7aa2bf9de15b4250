"""A layer of 64 experts in one unit, of sizes that no number of ranks divides: the model of a row of gpu_step."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from lamina.core.layout import padding_bound_numel
from lamina.runtime.access import runtime_of

FILE = Path(__file__).parents[2] / "benchmarks" / "gpu_step" / "model.py"
TOKENS = 20


def build() -> nn.Module:
    spec = importlib.util.spec_from_file_location("gpu_step_model", FILE)
    assert spec is not None and spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    torch.manual_seed(0)
    model: nn.Module = models.Model("experts-tiny").double()
    for block in model.blocks:  # type: ignore[union-attr]
        nn.init.normal_(block.experts.router.weight)  # else all experts are much alike, and few are full
    return model


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(101, (2, TOKENS + 1), generator=torch.Generator().manual_seed(10 * step + rank))
    return tokens[:, :-1], tokens[:, 1:]


def train(transport: str) -> dict[str, Any]:
    """Three clipped steps beside one process; what lies here and what was moved."""
    plain = build()
    model = lamina.shard(copy.deepcopy(plain), "zero3", transport=transport)
    optimizers = [torch.optim.AdamW(plain.parameters(), lr=1e-3), lamina.optim.AdamW(model.parameters(), lr=1e-3)]
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(3):
        for other in range(world):
            (plain(*batch(step, other)) / world).backward()
        model(*batch(step, rank)).backward()
        for trained, optimizer in zip((plain, model), optimizers, strict=True):
            lamina.clip_grad_norm_(trained, 0.1)
            optimizer.step()
            optimizer.zero_grad()
    before = lamina.report(model)
    model(*batch(3, rank)).backward()
    after = lamina.report(model)
    units = [unit for unit in runtime_of(model).units if ".experts." in unit.layout.text()]
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    apart = [(p.full() - q.detach()).abs().max().item() for p, q in pairs]
    return {
        "apart": max(apart),
        "experts": [[spec.name for spec in unit.layout.params if ".experts." in spec.name] for unit in units],
        "padding": [segment.padding_numel for unit in units for segment in unit.layout.segments],
        "bound": [padding_bound_numel(segment) for unit in units for segment in unit.layout.segments],
        "gathered": after.bytes_gathered - before.bytes_gathered,
        "whole": sum(unit.layout.buffer_bytes for unit in runtime_of(model).units),
    }


@pytest.mark.parametrize(("world", "transport"), [(2, "peer"), (3, "c10d")])
def test_odd_experts_equal_one_process(world: int, transport: str) -> None:
    for found in run_ranks(world, train, transport):
        assert found["apart"] < 1e-12, found["apart"]
        assert [len(names) for names in found["experts"]] == [4, 4], "a layer's experts and router lie in one unit"
        assert all(0 < p <= bound for p, bound in zip(found["padding"], found["bound"], strict=True)), found
        assert found["gathered"] == found["whole"], "each unit once: three have a place, and the embedding goes first"
