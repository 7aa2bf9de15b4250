"""The small language model of the tests of units, and ways to look at plans."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.runtime.units import UnitPlan, check_units, plan_units


class Mlp(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Embedding and head as large as a block."""

    def __init__(self, vocabulary: int = 40, dim: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def body(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens))


LAYERS = ["layers.0", "layers.1", "layers.2"]


def titles(plans: tuple[UnitPlan, ...]) -> list[str]:
    return [plan.title for plan in plans]


def planned(model: nn.Module, *args: object, **kwargs: object) -> dict[str, UnitPlan]:
    plans = plan_units(model, *args, **kwargs)  # type: ignore[arg-type]
    check_units(model, plans, kwargs.get("ignore", ()))  # type: ignore[arg-type]
    return {plan.title: plan for plan in plans}


# --- auto ---
