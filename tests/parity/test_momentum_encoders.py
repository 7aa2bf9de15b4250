"""A second encoder that follows the first, in one model or beside it: momentum contrast, BYOL, targets of critics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import lamina
from harness import run_ranks
from parity.reference import TOLERANCE, parameter_deviation

WIDTH, INSIDE, STEPS, KEEP = 12, 40, 4, 0.9


def encoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, INSIDE), nn.Tanh(), nn.Linear(INSIDE, 20), nn.Tanh(), nn.Linear(20, WIDTH))


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


# -- moved between steps, where both are cut differently


class Online(nn.Module):
    """What follows has the shape of a part of it, and so lies elsewhere in its unit."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.predictor = encoder(), nn.Sequential(nn.Linear(WIDTH, 90), nn.Linear(90, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.predictor(self.body(x))


class Latent(nn.Module):
    """BYOL: both in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = Online(), encoder()
        self.target.load_state_dict(self.online.body.state_dict())
        self.target.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.online(x) - self.target(x.flip(0))).pow(2).mean()


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def halves_of_four() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))


def are_cut_differently(first: Any, second: Any) -> bool:
    return first.spec.ranges != second.spec.ranges


def followed(way: int, strategy: str, transport: str) -> float:
    world, plain = dist.get_world_size(), seeded(Latent)
    mesh = halves_of_four() if strategy == "hsdp" else None
    model = lamina.shard(seeded(Latent), strategy, transport=transport, mesh=mesh, units=["online", "target"])
    assert any(map(are_cut_differently, model.target.parameters(), model.online.body.parameters()))
    pairs = [(each, torch.optim.Adam(each.online.parameters(), lr=0.03)) for each in (plain, model)]
    for step in range(STEPS):
        for rank in range(world):
            (plain(data_of(rank, step)) / world).backward()
        model(data_of(dist.get_rank(), step)).backward()
        for each, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                WAYS[way](list(each.target.parameters()), list(each.online.body.parameters()))
    deviation = parameter_deviation(model, dict(plain.named_parameters()))
    for each, _ in pairs:
        each.target.load_state_dict(each.online.body.state_dict())
    assert all(map(torch.equal, model.target.parameters(), model.online.body.parameters()))
    return max(deviation, parameter_deviation(model, dict(plain.named_parameters())))


def two_models_followed(way: int) -> float:
    """The target is a model of its own, with another layout."""
    target, online = seeded(encoder_only), seeded(Online)
    expected = [
        KEEP * t.detach() + (1 - KEEP) * s.detach()
        for t, s in zip(target.parameters(), online.body.parameters(), strict=True)
    ]
    lamina.shard(online, "zero3", units=["body.*"])
    lamina.shard(target, "zero1", transport="c10d")
    with torch.no_grad():
        WAYS[way](list(target.parameters()), list(online.body.parameters()))
    return parameter_deviation(target, dict(zip(dict(target.named_parameters()), expected, strict=True)))


def encoder_only() -> nn.Module:
    return encoder()


def followed_in_all_ways(strategy: str, transport: str) -> list[float]:
    return [followed(way, strategy, transport) for way in range(len(WAYS))]


@pytest.mark.parametrize(
    ("world", "strategy", "transport"),
    [(2, "zero3", "c10d"), (3, "zero3", "peer"), (2, "zero2", "peer"), (3, "zero1", "c10d"), (4, "hsdp", "peer")],
)
def test_a_part_that_is_cut_differently_is_followed(world: int, strategy: str, transport: str) -> None:
    for found in run_ranks(world, followed_in_all_ways, strategy, transport):
        assert max(found) <= TOLERANCE, found


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_a_model_of_another_layout_is_followed(way: int) -> None:
    assert max(run_ranks(2, two_models_followed, way)) <= TOLERANCE


def in_losses() -> list[str]:
    """A backward through what is cut differently would gather at another moment on each rank."""
    model = lamina.shard(seeded(Latent), units=["online", "target"])
    position = list(map(are_cut_differently, model.target.parameters(), model.online.body.parameters())).index(True)
    online, target = list(model.online.body.parameters())[position], list(model.target.parameters())[position]
    said = []
    for loss in (lambda: (online - target).pow(2).sum(), lambda: (target.mul(online)).sum()):
        with pytest.raises(lamina.errors.ShardOpError) as error:
            loss().backward()
        said.append(str(error.value))
    product = torch.dot(target.view(-1), online.detach().view(-1))
    assert torch.allclose(product, (target.full() * online.full()).sum())
    return said


def test_in_losses_they_are_refused_by_name() -> None:
    for said in run_ranks(2, in_losses):
        assert all("target." in each and "online.body." in each for each in said), said
