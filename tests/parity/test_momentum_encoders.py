"""A second encoder that follows the first, in one model or beside it: momentum contrast, BYOL, targets of critics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from parity.reference import TOLERANCE, parameter_deviation

WIDTH, STEPS, KEEP = 6, 4, 0.9


def encoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, WIDTH))


def by_data(target: list[Tensor], source: list[Tensor]) -> None:
    for t, s in zip(target, source, strict=True):
        t.data = t.data * KEEP + s.data * (1 - KEEP)


def by_lerp(target: list[Tensor], source: list[Tensor]) -> None:
    for t, s in zip(target, source, strict=True):
        t.lerp_(s, 1 - KEEP)


def by_copy(target: list[Tensor], source: list[Tensor]) -> None:
    for t, s in zip(target, source, strict=True):
        t.copy_(KEEP * t + (1 - KEEP) * s)


def by_lists(target: list[Tensor], source: list[Tensor]) -> None:
    torch._foreach_mul_(target, KEEP)
    torch._foreach_add_(target, source, alpha=1 - KEEP)


WAYS = (by_data, by_lerp, by_copy, by_lists)


class Contrast(nn.Module):
    """The second encoder is moved at a place of the forward: before it, between both, or behind."""

    def __init__(self, move: Any, where: str) -> None:
        super().__init__()
        self.query, self.key, self.move, self.where = encoder(), encoder(), move, where
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)

    def follow(self) -> None:
        with torch.no_grad():
            self.move(list(self.key.parameters()), list(self.query.parameters()))

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "first":
            self.follow()
        query = self.query(x)
        if self.where == "between":
            self.follow()
        with torch.no_grad():
            key = self.key(x.flip(0))
        if self.where == "last":
            self.follow()
        return (query - key).pow(2).mean() + query.sin().mean()


def built(move: Any, where: str) -> Contrast:
    torch.manual_seed(0)
    return Contrast(move, where).double()


def data_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def in_the_forward(move: Any, where: str, **arguments: Any) -> float | str:
    """The deviation from one process, or what it was refused with."""
    world, plain = dist.get_world_size(), built(move, where)
    model = lamina.shard(built(move, where), **arguments)
    theirs, ours = (torch.optim.SGD(each.parameters(), lr=0.3) for each in (plain, model))
    plain.where = "outside"  # once a step, not once a rank
    try:
        for step in range(STEPS):
            if where != "last":
                plain.follow()
            for rank in range(world):
                (plain(data_of(rank, step)) / world).backward()
            if where == "last":
                plain.follow()
            model(data_of(dist.get_rank(), step)).backward()
            for optimizer in (theirs, ours):
                optimizer.step()
                optimizer.zero_grad()
    except lamina.errors.StateError as error:
        return str(error)
    return parameter_deviation(model, dict(plain.named_parameters()))


LAYOUTS = [
    {"strategy": strategy, "transport": transport, "slots": slots, "units": ["query.*", "key.*"]}
    for strategy, transport in (
        ("zero3", "c10d"),
        ("zero3", "peer"),
        ("zero2", "peer"),
        ("zero1", "c10d"),
        ("ddp", "c10d"),
    )
    for slots in (1, 3)
]


def all_in_the_forward(way: int, where: str) -> list[float | str]:
    return [in_the_forward(WAYS[way], where, **arguments) for arguments in LAYOUTS]


@pytest.mark.parametrize("where", ["first", "between", "last"])
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_parameters_changed_inside_a_forward_are_right_or_refused(way: int, where: str) -> None:
    found = run_ranks(2, all_in_the_forward, way, where)
    for outcomes in found:
        for arguments, outcome in zip(LAYOUTS, outcomes, strict=True):
            if isinstance(outcome, str):
                assert arguments["strategy"] != "ddp", outcome
                assert "were changed inside this forward" in outcome, outcome
                assert "key." in outcome, outcome
            else:
                assert outcome <= TOLERANCE, (arguments, outcome)
    assert [type(each) for each in found[0]] == [type(each) for each in found[1]]


def with_copies_for_compute(where: str) -> str:
    found = in_the_forward(by_lerp, where, strategy="ddp", precision="bf16", units=["query.*", "key.*"])
    return found if isinstance(found, str) else ""


@pytest.mark.parametrize("where", ["first", "between"])
def test_whole_parameters_changed_inside_a_forward_that_reads_copies_are_refused(where: str) -> None:
    for found in run_ranks(2, with_copies_for_compute, where):
        assert "were changed inside this forward" in found
