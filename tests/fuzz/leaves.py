"""A layer that leaves features, and losses of them, where a training loop will find them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.layers import WIDTH, Layer


@dataclasses.dataclass
class Features:
    hidden: Tensor
    losses: list[Tensor]


class Bag:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Deep(nn.Module):
    """Appends its hidden values to a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:
        hidden = torch.tanh(self.up(x))
        found.append(hidden)
        return self.down(hidden)


LEFT_IN = (
    "attribute",
    "loss",
    "list",
    "appended",
    "dict",
    "dataclass",
    "object",
    "inside",
    "buffer",
    "zero",
    "no_grad",
    "head",
    "head of detached",
    "above",
    "argument",
    "stranded",
    "stranded",
    "stranded",
)
STRANDED: list[Tensor] = []  # what was left where nobody looks


class Leaves(Layer):
    """Leaves what it computes on the way, where `way` says."""

    def __init__(self, draw: random.Random, layer: Layer, above: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.up, self.deep, self.down = nn.Linear(WIDTH, WIDTH), Deep(), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.way, self.starts = draw.choice(LEFT_IN), draw.choice([0, 0, 1, 2])
        self.step = 0  # set by who trains it
        self.above = (above,)  # in a tuple: not registered
        self.register_buffer("beside", torch.zeros(()), persistent=False)
        self.forget()

    def forget(self) -> None:
        """Before a forward."""
        self.kept: Any = 0.0 if self.way == "zero" else None
        self.found: list[Tensor] = []
        self.down.kept = None
        self.above[0].found = []
        self.beside = torch.zeros(())

    def forward(self, x: Tensor, rank: int) -> Tensor:
        hidden = torch.tanh(self.up(x))
        deep: list[Tensor] = []
        inner = self.layer(hidden, rank) + 0.5 * self.deep(hidden, deep)
        y = x + self.down(inner)
        if self.step >= self.starts and self.way in _BY_WAY:
            _BY_WAY[self.way](self, hidden, inner, y, deep)
        return y

    def take(self) -> list[Any]:
        """After a forward."""
        return [self.kept, self.found, self.down.kept, self.above[0].found, self.beside]

    # ---- ways --------------------------------------------------------------------------------------------------

    def _keep(self, value: Any) -> None:
        self.kept = value


def _leave_beside(self: Leaves, hidden: Tensor) -> None:
    self.beside = _loss(hidden)


def _leave_inside(self: Leaves, hidden: Tensor) -> None:
    self.down.kept = hidden


def _without_gradient(self: Leaves, y: Tensor) -> None:
    with torch.no_grad():
        self.kept = self.head(y)


def _loss(hidden: Tensor) -> Tensor:
    return hidden.double().pow(2).mean()


_Way = Callable[[Leaves, Tensor, Tensor, Tensor, list[Tensor]], Any]
_BY_WAY: dict[str, _Way] = {
    "attribute": lambda self, hidden, inner, y, deep: self._keep(hidden),
    "loss": lambda self, hidden, inner, y, deep: self._keep(_loss(inner) + _loss(hidden)),
    "list": lambda self, hidden, inner, y, deep: self._keep([hidden, inner]),
    "appended": lambda self, hidden, inner, y, deep: self.found.append(hidden),
    "dict": lambda self, hidden, inner, y, deep: self._keep({"features": (hidden,), "losses": [_loss(inner)]}),
    "dataclass": lambda self, hidden, inner, y, deep: self._keep(Features(hidden, [_loss(inner)])),
    "object": lambda self, hidden, inner, y, deep: self._keep(Bag(hidden)),
    "inside": lambda self, hidden, inner, y, deep: _leave_inside(self, hidden),
    "buffer": lambda self, hidden, inner, y, deep: _leave_beside(self, hidden),
    "zero": lambda self, hidden, inner, y, deep: self._keep(self.kept + _loss(hidden)),
    "no_grad": lambda self, hidden, inner, y, deep: _without_gradient(self, y),
    "head": lambda self, hidden, inner, y, deep: self._keep(self.head(y)),
    "head of detached": lambda self, hidden, inner, y, deep: self._keep(self.head(y.detach())),
    "above": lambda self, hidden, inner, y, deep: self.above[0].found.append(hidden),
    "argument": lambda self, hidden, inner, y, deep: self._keep(deep),
    "stranded": lambda self, hidden, inner, y, deep: STRANDED.append(hidden),
}
