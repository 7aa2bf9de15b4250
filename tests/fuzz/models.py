"""Random models: trees of layers, drawn from a seed.

A model is drawn twice from one seed, once to be sharded and once as it is.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from fuzz.layers import (
    WIDTH,
    Again,
    Branches,
    Calls,
    Chain,
    Coarse,
    Counting,
    Cut,
    Dense,
    Detached,
    Layer,
    Lora,
    Mixed,
    Pair,
    Reads,
    Recomputed,
    Recurrent,
    Skipped,
    Small,
    Twice,
    Unused,
    Wide,
    differs,
)
from fuzz.leaves import Leaves

LEAVES = (Dense, Wide, Small, Lora, Unused, Detached, Counting, Recurrent, Mixed, Coarse)


class Maker:
    """Draws layers; `features` names what it has drawn."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.features = draw, set[str]()

    def leaf(self) -> Layer:
        kind = self.draw.choice(LEAVES)
        self.features.add(kind.__name__)
        return kind(self.draw)

    def layer(self, depth: int) -> Layer:
        if depth == 0 or self.draw.random() < 0.35:
            return self.leaf()
        kind = self.draw.choice(["Chain", "Skipped", "Twice", "Recomputed", "Reads", "Pair"])
        self.features.add(kind)
        if kind == "Chain":
            return Chain([self.layer(depth - 1) for _ in range(self.draw.randint(1, 3))])
        if kind == "Skipped":
            return Skipped(self.layer(depth - 1), self.draw.randrange(3))
        if kind == "Twice":
            return Twice(self.layer(depth - 1), self.draw.random() < 0.3)
        if kind == "Recomputed":
            return Recomputed(self.layer(depth - 1), self.draw.random() < 0.4)
        if kind == "Reads":
            return Reads(self.draw.random() < 0.5)
        return Pair(self.layer(depth - 1))


class RandomModel(nn.Module):
    """An input layer, drawn blocks, and a head; some weights are tied or frozen, the head's never.

    So every rank's loss needs gradients: which backwards there are must agree over ranks.
    """

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        maker = Maker(draw)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(maker.layer(draw.choice([1, 1, 2, 3])) for _ in range(draw.randint(1, 5)))
        self.head = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5)
        if draw.random() < 0.3:
            self.head.weight = self.first.weight
            maker.features.add("tied head")
        dense = [module for module in self.modules() if isinstance(module, Dense)]
        if len(dense) > 1 and draw.random() < 0.4:
            dense[-1].linear.weight = dense[0].linear.weight
            maker.features.add("tied blocks")
        if draw.random() < 0.3:
            frozen = draw.choice(list(self.blocks))
            frozen.requires_grad_(False)
            maker.features.add("frozen block")
        if draw.random() < 0.15 and self.head.weight is not self.first.weight:
            self.first.requires_grad_(False)
            maker.features.add("frozen first")
        if draw.random() < 0.15:
            place = draw.randrange(len(self.blocks))
            self.blocks[place] = Cut(self.blocks[place], draw.randrange(3))
            maker.features.add("Cut")
        beside = random.Random(f"beside {seed}")
        if beside.random() < 0.15:
            place = beside.randrange(len(self.blocks))
            self.blocks[place] = Branches(self.blocks[place], Wide(beside))
            maker.features.add("Branches")
        again = random.Random(f"again {seed}")
        if again.random() < 0.12:
            self.blocks.insert(again.randrange(len(self.blocks)), Again(again))
            maker.features.add("Again")
        if again.random() < 0.12:
            self.blocks.append(Calls(again, again.choice(list(self.blocks))))
            maker.features.add("Calls")
        self._leave(random.Random(f"leaves {seed}"), maker)
        self.gain = nn.Parameter(torch.tensor(1.2))  # always trains: every rank's loss has a gradient
        if differs(self):
            maker.features.add("differs")
        self.features = frozenset(maker.features)
        self._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
        for module in self.modules():
            if isinstance(module, (Mixed, Coarse)):
                module.keep_dtypes()

    def _leave(self, draw: random.Random, maker: Maker) -> None:
        """Let some blocks leave what they compute on the way."""
        for _ in range(draw.choice([0, 0, 0, 1, 1, 2])):
            place, around = (
                draw.randrange(len(self.blocks)),
                draw.choice(["", "", "", "", "Recomputed", "Twice", "Skipped"]),
            )
            layer: Layer = Leaves(draw, self.blocks[place], self)
            maker.features.add(f"leaves {layer.way}")
            if around == "Recomputed":
                layer = Recomputed(layer, draw.random() < 0.3)
            elif around == "Twice":
                layer = Twice(layer, draw.random() < 0.3)
            elif around == "Skipped":
                layer = Skipped(layer, draw.randrange(3))
            maker.features.update({around} - {""})
            self.blocks[place] = layer

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x, rank)
        return self.head(x) * self.gain
