"""Blocks that keep views of their weights beyond the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lamina

DIM, BLOCKS, STEPS = 6, 4, 3
WAYS = [(1, "c10d"), (1, "peer"), (3, "c10d")]
View = Callable[[Tensor], Tensor]


class Subclass(Tensor):
    pass


def written_beneath(weight: Tensor) -> Tensor:
    with torch.inference_mode():
        return weight.mT


VIEWS: dict[str, View] = {
    "detach": Tensor.detach,
    "t": Tensor.t,
    "a row": lambda weight: weight[0],
    "an element": lambda weight: weight[0, 0],
    "data": lambda weight: weight.data,
    "data of a view": lambda weight: weight.t().data,
    "a view of a view": lambda weight: weight.view(-1)[2:7].view(5, 1),
    "a parameter": lambda weight: nn.Parameter(weight.detach()),
    "one of several": lambda weight: weight.split(2)[1],
    "a larger one": lambda weight: weight.unsqueeze(0).expand(3, -1, -1),
    "of a subclass": lambda weight: weight.detach().as_subclass(Subclass),
    "in inference mode": written_beneath,
}


class Block(nn.Module):
    """Keeps a view of its weight, from a step on."""

    def __init__(self, view: View, first_step: int = 0) -> None:
        super().__init__()
        self.linear, self.view, self.first_step, self.steps = nn.Linear(DIM, DIM), view, first_step, 0
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        y = torch.tanh(self.linear(x))
        if self.steps > self.first_step:
            self.kept[:] = [self.view(self.linear.weight)]
        return y


def stack(make: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[make() for _ in range(BLOCKS)]).double()


def shard(model: nn.Sequential, way: tuple[int, str], **options: Any) -> nn.Sequential:
    return lamina.shard(
        model, units=[str(number) for number in range(BLOCKS)], slots=way[0], transport=way[1], **options
    )


def batch() -> Tensor:
    return torch.ones(2, DIM, dtype=torch.float64)
