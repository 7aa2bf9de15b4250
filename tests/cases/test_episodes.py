"""Policies that play: each rank its own episodes, as long as these happen to be."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from cases.training import TOLERANCE
from harness import expect_error, run_ranks
from parity.reference import parameter_deviation

SEES, DOES, EPISODES = 6, 3, 4


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(SEES, 8), nn.Linear(8, DOES)

    def forward(self, seen: Tensor) -> Tensor:  # (moments, SEES) -> (moments, DOES)
        return self.head(torch.tanh(self.body(seen))).log_softmax(-1)


def built() -> Policy:
    torch.manual_seed(0)
    return Policy().double()


def play(policy: nn.Module, rank: int, episode: int) -> tuple[Tensor, Tensor]:
    """What was seen and done, another number of moments on each rank."""
    generator = torch.Generator().manual_seed(10 * episode + rank)
    seen = [torch.randn(SEES, generator=generator, dtype=torch.float64)]
    done = []
    for _ in range(2 + rank + episode % 2):
        with torch.no_grad():
            done.append(policy(seen[-1][None]).argmax())
        seen.append(torch.roll(seen[-1], int(done[-1]) + 1) * 0.9)
    return torch.stack(seen[:-1]), torch.stack(done)


def loss_of(policy: nn.Module, seen: Tensor, done: Tensor) -> Tensor:
    return -policy(seen).gather(1, done[:, None]).mean()


def by_a_plain_copy(strategy: str, transport: str) -> float:
    world, plain = dist.get_world_size(), built()
    acting = built()
    model = lamina.shard(built(), strategy, transport=transport)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (plain, model)]
    for episode in range(EPISODES):
        for rank in range(world):
            (loss_of(plain, *play(copy.deepcopy(plain), rank, episode)) / world).backward()
        with lamina.gathered(model):
            acting.load_state_dict(model.state_dict())
        loss_of(model, *play(acting, dist.get_rank(), episode)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return parameter_deviation(model, dict(plain.named_parameters()))


@pytest.mark.parametrize(
    ("world", "strategy", "transport"), [(2, "zero3", "peer"), (3, "zero3", "c10d"), (2, "ddp", "c10d")]
)
def test_a_plain_copy_plays_as_long_as_it_likes(world: int, strategy: str, transport: str) -> None:
    assert max(run_ranks(world, by_a_plain_copy, strategy, transport)) <= TOLERANCE


def by_the_model_itself(strategy: str, transport: str) -> None:
    model = lamina.shard(built(), strategy, transport=transport)
    for episode in range(EPISODES):
        loss_of(model, *play(model, dist.get_rank(), episode)).backward()


@pytest.mark.parametrize(("strategy", "transport"), [("zero3", "peer"), ("zero3", "c10d"), ("ddp", "c10d")])
def test_the_model_itself_does_not_and_says_so(strategy: str, transport: str) -> None:
    expect_error(2, by_the_model_itself, strategy, transport, error="Disagreement", contains=["plain copy"], timeout=30)


def with_gradients(strategy: str) -> None:
    """Every moment's forward is part of the loss."""
    model = lamina.shard(built(), strategy)
    seen = torch.ones(1, SEES, dtype=torch.float64)
    sum(model(seen).sum() for _ in range(24 + 4 * dist.get_rank())).backward()


@pytest.mark.parametrize("strategy", ["zero1", "ddp"])
def test_how_often_each_has_run_is_said(strategy: str) -> None:
    words = ["Rank 1 has begun 29", "rank 0 25", "forwards and backwards", "plain copy"]
    expect_error(2, with_gradients, strategy, error="Disagreement", contains=words, timeout=30)
