"""Weights put aside by their `.data` and set by it, as averages of weights do while they evaluate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from lamina.errors import ParameterChanged
from parity.reference import TOLERANCE, difference, parameter_deviation

WIDTH, STEPS = 24, 4


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, 5)).double()


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    return model(x.to(next(model.parameters()).dtype)).sin().mean()


def by_data(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.data for name, p in model.named_parameters()}


def by_detach(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def by_state_dict(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.state_dict())


def by_flat_views(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.data.view(-1) for name, p in model.named_parameters()}


ASIDE: tuple[Callable[[nn.Module], dict[str, Tensor]], ...] = (by_data, by_detach, by_state_dict, by_flat_views)


class Averaged:
    """The class that notebooks hand on."""

    def __init__(self, model: nn.Module, put_aside: Callable[[nn.Module], dict[str, Tensor]]) -> None:
        self.model, self.put_aside = model, put_aside
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters()}
        self.backup: dict[str, Tensor] = {}

    def update(self) -> None:
        for name, p in self.model.named_parameters():
            self.shadow[name] = (0.5 * p.data + 0.5 * self.shadow[name]).clone()

    def apply_shadow(self) -> None:
        self.backup = self.put_aside(self.model)
        for name, p in self.model.named_parameters():
            p.data = self.shadow[name]

    def restore(self) -> None:
        for name, p in self.model.named_parameters():
            p.data = self.backup[name].view(p.shape)
        self.backup = {}


def averages(strategy: str, transport: str, way: int) -> float:
    world, plain = dist.get_world_size(), built()
    model = lamina.shard(built(), strategy, transport=transport)
    kinds = (torch.optim.AdamW, lamina.optim.AdamW if way % 2 else torch.optim.AdamW)
    optimizers = [kind(each.parameters(), lr=0.03) for kind, each in zip(kinds, (plain, model), strict=True)]
    means = [Averaged(each, ASIDE[way]) for each in (plain, model)]
    worst = 0.0
    for step in range(STEPS):
        for rank in range(world):
            (loss_of(plain, rank, step) / world).backward()
        loss_of(model, dist.get_rank(), step).backward()
        for optimizer, mean in zip(optimizers, means, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            mean.update()
            mean.apply_shadow()
        lamina.check(model)
        with torch.no_grad():
            worst = max(worst, (loss_of(model, 0, 99) - loss_of(plain, 0, 99)).abs().item())
        for mean in means:
            mean.restore()
        worst = max(worst, parameter_deviation(model, dict(plain.named_parameters())))
    return worst


def averages_in_all_ways(strategy: str, transport: str) -> list[float]:
    return [averages(strategy, transport, way) for way in range(len(ASIDE))]


@pytest.mark.parametrize(
    ("world", "strategy", "transport"),
    [
        (2, "zero3", "c10d"),
        (3, "zero3", "peer"),
        (2, "zero2", "peer"),
        (3, "zero1", "c10d"),
        (2, "ddp", "c10d"),
        (1, "zero3", "c10d"),
    ],
)
def test_what_is_put_aside_keeps_its_values(world: int, strategy: str, transport: str) -> None:
    for found in run_ranks(world, averages_in_all_ways, strategy, transport):
        assert max(found) <= TOLERANCE, found


def shared_with(model: nn.Module) -> list[Any]:
    """What else holds a parameter's memory, before and behind `p.data = value`, and is written to in between."""
    p, seen = model[0].weight, []
    first, second = p.data, p.detach()
    first.add_(1.0)  # p's memory
    seen += [first, second, p.data]
    p.data = torch.full_like(p, 3.0)
    first.mul_(2.0)  # memory of their own
    seen += [first, second, p.data]
    third = p.data
    third.sub_(1.0)  # p's again
    seen += [first, second, third, p.data]
    p.data = p.data
    p.data.mul_(2.0)
    p.grad = torch.ones_like(p)
    kept = p.grad.data
    p.grad.data = torch.zeros_like(p)
    return [*seen, p.data, kept, p.grad]


def compared(strategy: str) -> float:
    plain, model = built(), lamina.shard(built(), strategy)
    found = shared_with(model)
    worst = max(difference(ours, theirs) for ours, theirs in zip(found, shared_with(plain), strict=True))
    model(torch.ones(1, WIDTH, dtype=torch.float64))  # reads what was set
    return max(worst, parameter_deviation(model, dict(plain.named_parameters())))


@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
def test_who_shares_memory_is_as_in_torch(strategy: str) -> None:
    assert max(run_ranks(2, compared, strategy)) <= TOLERANCE


def with_copies(way: int) -> list[float]:
    """The outputs of a model in 16 bit, of the average and of what is trained; masters are whole, copies compute."""
    model = lamina.shard(built().float(), "ddp", precision="bf16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    mean = Averaged(model, ASIDE[way])
    wrong, x = [], torch.ones(2, WIDTH)
    for step in range(STEPS):
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
        mean.update()
        trained = {name: p.detach().clone() for name, p in model.named_parameters()}
        for expected in (mean.shadow, trained):
            plain = built().to(torch.bfloat16)
            plain.load_state_dict({name: value.detach().clone() for name, value in expected.items()})
            if expected is mean.shadow:
                mean.apply_shadow()
            else:
                mean.restore()
            with torch.no_grad():
                wrong.append((model(x).float() - plain(x.to(torch.bfloat16)).float()).abs().max().item())
        wrong += [(p - trained[name]).abs().max().item() for name, p in model.named_parameters()]
    return wrong


def with_copies_in_all_ways() -> float:
    return max(max(with_copies(way)) for way in range(len(ASIDE)))


@pytest.mark.parametrize("world", [1, 2])
def test_what_computes_with_copies_reads_what_was_set(world: int) -> None:
    assert max(run_ranks(world, with_copies_in_all_ways)) == 0.0


def of_other_shapes() -> list[str]:
    """One that could be spread over the parameter's own would be no error of torch's."""
    model = lamina.shard(nn.Linear(3, 3), strategy="ddp", precision="bf16")
    said = []
    for value in (torch.zeros(1, 3), torch.zeros(2, 2), torch.zeros(3), torch.zeros(())):
        model.weight.data = value
        with pytest.raises(ParameterChanged) as caught:
            model(torch.ones(2, 3))
        said.append(str(caught.value))
    return said


def test_values_of_another_shape_are_refused_by_name() -> None:
    for said in run_ranks(2, of_other_shapes):
        assert all("`weight` got the shape" in text and "wanted (3, 3)" in text for text in said), said
