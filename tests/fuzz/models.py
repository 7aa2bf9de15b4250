"""Random models: trees of layers, drawn from a seed.

A model is drawn twice from one seed, once to be sharded and once as it is.
"""

from __future__ import annotations

import random
from itertools import combinations

import torch
from torch import Tensor, nn

from fuzz.layers import (
    WIDTH,
    Again,
    Branches,
    Buffered,
    Calls,
    Chain,
    Coarse,
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
from fuzz.lookups import LOOKUPS, Instead, Own, Tied, Words, features_of_tables

LOOKUPS_FROM = 50_000  # models of seeds below have no tables
LEAVES = (Dense, Wide, Small, Lora, Unused, Detached, Buffered, Recurrent, Mixed, Coarse)
NESTS = ("Chain", "Skipped", "Twice", "Recomputed", "Reads", "Pair")
AROUND = ("", "", "", "", "Recomputed", "Twice", "Skipped")  # a layer that is there already


class Maker:
    """Draws layers; `features` names what it has drawn."""

    def __init__(self, draw: random.Random, has_tables: bool) -> None:
        self.draw, self.features = draw, set[str]()
        self.leaves = (*LEAVES, *LOOKUPS) if has_tables else LEAVES
        self.nests = (*NESTS, "Tied") if has_tables else NESTS

    def leaf(self) -> Layer:
        kind = self.draw.choice(self.leaves)
        self.features.add(kind.__name__)
        return kind(self.draw)

    def layer(self, depth: int) -> Layer:
        if depth == 0 or self.draw.random() < 0.35:
            return self.leaf()
        kind = self.draw.choice(self.nests)
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
        if kind == "Tied":
            return Tied(self.layer(depth - 1), self.draw.random() < 0.5)
        return Pair(self.layer(depth - 1))

    def wrap(self, layer: Layer, around: str, draw: random.Random) -> Layer:
        """A layer that is there already."""
        self.features.update({around} - {""})
        if around == "Recomputed":
            return Recomputed(layer, draw.random() < 0.3)
        if around == "Twice":
            return Twice(layer, draw.random() < 0.3)
        return Skipped(layer, draw.randrange(3)) if around else layer


class RandomModel(nn.Module):
    """An input layer, drawn blocks, and a head; some weights are tied or frozen, the head's never.

    So every rank's loss needs gradients: which backwards there are must agree over ranks.
    """

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        maker = Maker(draw, seed >= LOOKUPS_FROM)
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
        if seed >= LOOKUPS_FROM:
            self._look_up(random.Random(f"tables {seed}"), maker)
        self._leave(random.Random(f"leaves {seed}"), maker)
        for module in self.modules():
            if isinstance(module, Recomputed) and any(isinstance(inner, Instead) for inner in module.modules()):
                module.reentrant = False  # torch refuses a checkpoint of that kind to which no gradient comes
        self.gain = nn.Parameter(torch.tensor(1.2))  # always trains: every rank's loss has a gradient
        if differs(self):
            maker.features.add("differs")
        self.features = frozenset(maker.features | features_of_tables(self))
        self._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
        for module in self.modules():
            if isinstance(module, (Mixed, Coarse)):
                module.keep_dtypes()

    def _look_up(self, draw: random.Random, maker: Maker) -> None:
        """Begin with a table, or have more of them; tie some, freeze a block beside them."""
        for _ in range(draw.choice([0, 1, 1, 2])):
            place, around = draw.choice([0, draw.randint(0, len(self.blocks))]), draw.choice(AROUND)
            self.blocks.insert(place, maker.wrap(Words(draw), around, draw))
            maker.features.add("Words")
        tables = [module for module in self.modules() if type(module) in (nn.Embedding, Own)]
        pairs = [(one, other) for one, other in combinations(tables, 2) if one.weight.shape == other.weight.shape]
        if pairs and draw.random() < 0.3:
            one, other = draw.choice(pairs)
            other.weight = one.weight
            maker.features.add("tied tables")
        if tables and draw.random() < 0.3:
            draw.choice(list(self.blocks)).requires_grad_(False)
            maker.features.add("frozen block")

    def _leave(self, draw: random.Random, maker: Maker) -> None:
        """Let some blocks leave what they compute on the way."""
        for _ in range(draw.choice([0, 0, 0, 1, 1, 2])):
            place, around = draw.randrange(len(self.blocks)), draw.choice(AROUND)
            layer = Leaves(draw, self.blocks[place], self)
            maker.features.add(f"leaves {layer.way}")
            self.blocks[place] = maker.wrap(layer, around, draw)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x, rank)
        return self.head(x) * self.gain
