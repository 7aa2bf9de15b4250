"""Blocks that leave what they compute on the way where a training loop may find it, or where nobody looks."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DIM, BLOCKS = 8, 4
WAYS: tuple[dict[str, Any], ...] = (
    {"slots": 1, "transport": "c10d"},
    {"transport": "peer"},
    {"slots": 1, "recompute": "full"},
    {"strategy": "zero1"},
)
left: list[Tensor] = []


@dataclasses.dataclass
class Kept:
    feature: Tensor


class Bag:
    def __init__(self, feature: Tensor) -> None:
        self.items = [feature]


class Down(nn.Linear):
    """Appends to a list that it is given."""

    def forward(self, x: Tensor, found: list[Tensor] | None = None) -> Tensor:
        if found is not None:
            found.append(x * self.weight.sum())
        return super().forward(x)


class Block(nn.Module):
    def __init__(self, keep: str) -> None:
        super().__init__()
        self.up, self.down, self.keep = nn.Linear(DIM, 2 * DIM), Down(2 * DIM, DIM), keep
        self.head = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1))
        self.up.kept = None
        self.inner = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) if keep == "reentrant" else None
        self.kept: Any = 0.0 if keep == "zero" else None
        self.register_buffer("beside", torch.zeros(()))
        self.above: tuple[Any, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        if self.keep == "reentrant":
            return checkpoint(self.inner, x, use_reentrant=True).detach() + self.up(x).mean()
        h = (checkpoint(self.up, x, use_reentrant=False) if self.keep == "recomputed" else self.up(x)).tanh()
        found: list[Tensor] = []
        y = x + (self.down(h, found) if self.keep == "argument" else self.down(h))
        if self.keep == "attribute":
            self.kept = h
        elif self.keep == "container":
            self.kept = {"features": [h]}
        elif self.keep == "head":
            self.kept = self.head(y.detach())
        elif self.keep == "inside":
            self.up.kept = h
        elif self.keep == "dataclass":
            self.kept = Kept(h)
        elif self.keep == "object":
            self.kept = Bag(h)
        elif self.keep == "buffer":
            self.beside = h.square().mean()
        elif self.keep == "above":
            self.above[0].found.append(h)
        elif self.keep == "argument":
            self.above[0].found += found
        elif self.keep == "recomputed":
            left.append(self.down(h))
        elif self.keep == "elsewhere":
            left.append(h)
        return y


def net(keep: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(keep) for _ in range(BLOCKS)), nn.Linear(DIM, DIM)).double()
    model.found = []
    for block in list(model)[:BLOCKS]:
        block.above = (model,)
    return model


def features(model: nn.Module) -> list[Tensor]:
    blocks = [block for block in model if isinstance(block, Block)]
    if blocks[0].keep in ("above", "argument"):
        return model.found[-BLOCKS:]
    return [block.beside if block.keep == "buffer" else _in(block.kept) for block in blocks]


def _in(kept: Any) -> Any:
    if isinstance(kept, Kept):
        return kept.feature
    return kept.items[0] if isinstance(kept, Bag) else kept["features"][0] if isinstance(kept, dict) else kept


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def run(model: nn.Module, losses: list[Tensor], share: int) -> None:
    for number, loss in enumerate(losses):
        (loss / share).backward(retain_graph=number + 1 < len(losses))
