"""Three float64 steps of an architecture on some ranks, beside the same steps in one process.

Every rank runs the whole reference by itself, so the comparison needs no communication that could hide a fault.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from architectures.double import in_double
from architectures.models import ARCHITECTURES, Architecture

WORLD = 2
STEPS = 3
SAMPLES = 2  # of each rank
SEED = 11
RATE = 1e-3
TOLERANCE = 1e-10

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Parity:
    """How one architecture came out on one rank."""

    name: str
    worst: dict[str, float]  # by parameter: largest difference from one process; NaN counts as infinite
    still: tuple[str, ...]  # parameters that three steps of AdamW did not move: their parity proves nothing
    gathers: int
    refusal: str = ""  # the named error with which `lamina.shard` refused it

    @property
    def word(self) -> str:
        """What the table of the docs says."""
        if self.refusal:
            return "refused"
        worst = max(self.worst.values())
        return "equal" if worst <= TOLERANCE else f"off by {worst:.0e}"


def compare(names: Sequence[str], same_data: bool = False) -> list[Parity]:
    """To be run on every rank; the models are built here. `same_data`: all ranks train on rank 0's part, a fault."""
    torch.set_default_dtype(torch.float64)
    found = []
    for name in names:
        try:
            with in_double():
                found.append(_compare(ARCHITECTURES[name], 0 if same_data else dist.get_rank()))
        except Exception as error:
            error.add_note(f"in {name}")
            raise
    return found


def _compare(entry: Architecture, rank: int) -> Parity:
    model = entry.build()
    start = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    plain = copy.deepcopy(model)
    try:
        model = lamina.shard(model, "zero3", precision=lamina.Precision(master=torch.float64))
    except lamina.UnitError as error:
        return Parity(entry.name, {}, (), 0, str(error))
    expected = train_alone(entry, plain, dist.get_world_size())
    found = train_sharded(entry, model, rank)
    assert found.keys() == expected.keys()
    worst = {key: _difference(found[key], expected[key]) for key in found}
    still = tuple(key for key in start if torch.equal(start[key], expected[key]))
    return Parity(entry.name, worst, still, lamina.report(model).gathers)


def _difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape and found.dtype == expected.dtype == torch.float64
    worst = (found - expected).abs().max().item()
    return worst if worst == worst else float("inf")


def train_alone(entry: Architecture, model: nn.Module, world: int) -> Tensors:
    """The reference: each rank's part in turn (BatchNorm sees what it sees on a rank), gradients averaged."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(STEPS):
        for rank in range(world):
            (entry.loss(model(**part_of(entry, step, rank))) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: parameter.detach() for key, parameter in model.named_parameters()}


def train_sharded(entry: Architecture, model: nn.Module, rank: int) -> Tensors:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(STEPS):
        entry.loss(model(**part_of(entry, step, rank))).backward()
        optimizer.step()
        optimizer.zero_grad()
    with lamina.gathered(model):
        return {key: parameter.detach().clone() for key, parameter in model.named_parameters()}


def part_of(entry: Architecture, step: int, rank: int) -> Tensors:
    batch = entry.batch(SEED + step, WORLD * SAMPLES)
    return {key: values[rank * SAMPLES : (rank + 1) * SAMPLES] for key, values in batch.items()}
