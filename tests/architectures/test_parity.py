"""Three float64 steps on two ranks equal one process, for every architecture of the table, with automatic units."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from architectures.double import in_double
from architectures.models import ARCHITECTURES, Architecture
from harness import run_ranks

WORLD = 2
STEPS = 3
SAMPLES = 2  # of each rank
SEED = 11


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_three_steps_equal_one_process(name: str) -> None:
    for rank, worst in enumerate(run_ranks(WORLD, deviations, name)):
        assert max(worst.values()) <= 1e-10, (rank, worst)


def deviations(name: str) -> dict[str, float]:
    """Largest difference of each parameter, on this rank, between the sharded run and one process."""
    torch.set_default_dtype(torch.float64)
    entry = ARCHITECTURES[name]
    with in_double():
        model = entry.build()
        expected = one_process(entry, copy.deepcopy(model), dist.get_world_size())
        found = sharded(entry, model, dist.get_rank())
    assert found.keys() == expected.keys()
    return {key: (found[key] - expected[key]).abs().max().item() for key in found}


def one_process(entry: Architecture, model: nn.Module, world: int) -> dict[str, Tensor]:
    """The reference: each rank's part in turn (BatchNorm sees what it sees on a rank), gradients averaged."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        for rank in range(world):
            (entry.loss(model(**part_of(entry, step, rank))) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: parameter.detach() for key, parameter in model.named_parameters()}


def sharded(entry: Architecture, model: nn.Module, rank: int) -> dict[str, Tensor]:
    model = lamina.shard(model, strategy="zero3", precision=lamina.Precision(master=torch.float64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        entry.loss(model(**part_of(entry, step, rank))).backward()
        optimizer.step()
        optimizer.zero_grad()
    with lamina.gathered(model):
        return {key: parameter.detach().clone() for key, parameter in model.named_parameters()}


def part_of(entry: Architecture, step: int, rank: int) -> dict[str, Tensor]:
    batch = entry.batch(SEED + step, WORLD * SAMPLES)
    return {key: values[rank * SAMPLES : (rank + 1) * SAMPLES] for key, values in batch.items()}
