"""Layers that look rows up in tables: by what is computed on the way, by position, twice, or not at all.

lamina does not gather an `nn.Embedding` for its backward, which reads no weights. `Words` has such lookups; what the
other layers do comes near.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuzz.layers import WIDTH, Layer

ROWS = (4, 9, 9, 60)
NARROW = 2


class Own(nn.Embedding):
    """A class of the user's that changes nothing."""


class Scaled(nn.Embedding):
    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) * 1.5


class Normed(nn.Embedding):
    """Its backward reads its weight."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) / (1 + self.weight.norm())


def draw_table(draw: random.Random, width: int = WIDTH) -> nn.Embedding:
    kind = draw.choice([nn.Embedding] * 5 + [Own, Scaled, Normed])
    by_frequency, sparse = draw.choice([(False, False)] * 6 + [(True, False), (False, True)])
    padding = draw.choice([None, None, 0, -1])
    rows = draw.choice(ROWS)
    table = kind(rows, width, padding, scale_grad_by_freq=by_frequency, sparse=sparse, _weight=small(rows, width))
    return table.requires_grad_(draw.random() < 0.85)


def make_dense(model: nn.Module) -> None:
    """Let gradients be whole ones. On one rank sparse ones stay so, as in torch, and few optimizers take them."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = False


def add(x: Tensor, found: Tensor) -> Tensor:
    """What layers make of what they have found: numbers stay near 1, where differences are told from roundings."""
    return x + 0.5 * torch.tanh(found)


def small(rows: int, width: int = WIDTH) -> Tensor:
    """Values whose sums stay near 1."""
    return torch.randn(rows, width) * 0.3


# ---- which rows, of (samples, WIDTH): (samples, 1 or WIDTH) ----------------------------------------------------------


def _buckets(x: Tensor, rows: int) -> Tensor:
    return torch.bucketize(x.detach().contiguous(), torch.linspace(-1.5, 1.5, rows - 1, dtype=x.dtype, device=x.device))


def _largest(x: Tensor, rows: int) -> Tensor:
    return x.argmax(-1, keepdim=True) % rows


def _positions(x: Tensor, rows: int) -> Tensor:
    return torch.arange(len(x), device=x.device)[:, None] % rows


SOURCES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "buckets": _buckets,
    "largest": _largest,
    "positions": _positions,
}


# ---- calls of a table ------------------------------------------------------------------------------------------------


def _write_over(found: Tensor) -> Tensor:
    found[..., 0] = 0.5
    return found.mul_(0.75)


def _write_over_view(found: Tensor) -> Tensor:
    found.flatten(0, 1)[:1].mul_(2)
    return found


AFTERWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "once": lambda found: found,
    "detached": lambda found: found.detach(),
    "written over": _write_over,
    "view written over": _write_over_view,
}
CALLS = (*AFTERWARDS, "once", "once", "twice", "half detached", "without gradient", "recomputed")


class Words(Layer):
    """A table of the rows that its input names, beside that input. Some ranks may look nothing up."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.way, self.source = draw.choice(CALLS), draw.choice(list(SOURCES))
        width = NARROW if draw.random() < 0.2 else WIDTH
        self.table = draw_table(draw, width)
        self.up = nn.Linear(NARROW, WIDTH, bias=False) if width == NARROW else None
        self.idle = draw.randrange(3) if draw.random() < 0.15 else None  # ranks of this remainder

    def forward(self, x: Tensor, rank: int) -> Tensor:
        rows = SOURCES[self.source](x, self.table.num_embeddings)
        found = self.look_up(rows[:, :0] if self.idle == rank % 3 else rows).sum(1)
        return add(x, found if self.up is None else self.up(found))

    def look_up(self, rows: Tensor) -> Tensor:
        """(samples, tokens, width) of (samples, tokens)."""
        if self.way == "twice":
            return self.table(rows) + 0.5 * self.table(rows.flip(0))
        if self.way == "half detached":
            return self.table(rows) + 0.5 * self.table(rows.flip(0)).detach()
        if self.way == "without gradient":
            with torch.no_grad():
                return self.table(rows)
        if self.way == "recomputed":
            return checkpoint(self.table, rows, use_reentrant=False)
        return AFTERWARDS[self.way](self.table(rows))


class Instead(Layer):
    """Rows of two tables, without the input: no gradient comes to what lies before."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.words, self.places = draw_table(draw), nn.Embedding(3, WIDTH, _weight=small(3))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        found = self.words(_buckets(x, self.words.num_embeddings)).sum(1)
        return torch.tanh(found) + self.places(_positions(x, 3)[:, 0])


class Bag(Layer):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.mode, self.is_flat = draw.choice(["sum", "mean", "max"]), draw.random() < 0.3
        self.is_weighed = self.mode == "sum" and draw.random() < 0.5
        rows, padding = draw.choice(ROWS), draw.choice([None, 0])
        self.bag = nn.EmbeddingBag(rows, WIDTH, mode=self.mode, padding_idx=padding, _weight=small(rows))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        rows = _buckets(x, self.bag.num_embeddings)
        weights = torch.sigmoid(x) if self.is_weighed else None  # their gradients are made of the table
        if not self.is_flat:
            return add(x, self.bag(rows, per_sample_weights=weights))
        starts = torch.arange(0, rows.numel(), WIDTH, device=x.device)
        return add(x, self.bag(rows.flatten(), starts, None if weights is None else weights.flatten()))


class Nearest(Layer):
    """A codebook: reads its table without gradient, and calls it for the row that is nearest to the input."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.codes, self.pull = draw_table(draw), draw.choice([0.0, 0.5])

    def forward(self, x: Tensor, rank: int) -> Tensor:
        with torch.no_grad():
            row = (x[:, None] - self.codes.weight).pow(2).sum(-1).argmin(-1)
        found = self.codes(row)
        return x + (found - x).detach() + self.pull * found


class Read(Layer):
    """Reads the weight of its table, beside calling it or instead."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.table, self.calls = draw_table(draw), draw.random() < 0.5

    def forward(self, x: Tensor, rank: int) -> Tensor:
        rows = _buckets(x, self.table.num_embeddings)
        found = self.table(rows) if self.calls else F.embedding(rows, self.table.weight, padding_idx=0)
        return add(x, found.sum(1) * self.table.weight.mean())


class Tied(Layer):
    """A table before a layer and its weight behind it, read, or as that of a linear layer."""

    def __init__(self, layer: Layer, calls: bool) -> None:
        super().__init__()
        self.layer, self.words = layer, nn.Embedding(9, WIDTH, _weight=small(9))
        self.scores = nn.Linear(WIDTH, 9, bias=False) if calls else None
        if self.scores is not None:
            self.scores.weight = self.words.weight

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.layer(add(x, self.words(_buckets(x, 9)).sum(1)), rank)
        scores = F.linear(x, self.words.weight) if self.scores is None else self.scores(x)
        return add(x, scores.logsumexp(-1, keepdim=True))


class Adapted(Layer):
    """A frozen table with a trainable pair."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        rows = draw.choice(ROWS)
        self.base = nn.Embedding(rows, WIDTH, _weight=small(rows)).requires_grad_(False)
        self.a, self.b = nn.Parameter(small(rows, NARROW)), nn.Parameter(small(WIDTH, NARROW))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        rows = _buckets(x, self.base.num_embeddings)
        found = self.base(rows) + F.linear(F.embedding(rows, self.a), self.b)
        return add(x, found.sum(1))


# ---- rows of a parameter: (samples, tokens, WIDTH) of (rows, WIDTH) and (samples, tokens) ----------------------------


def _pieces(weight: Tensor, rows: Tensor) -> Tensor:
    return torch.stack([torch.stack([weight[row] for row in some]) for some in rows.tolist()])


READINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": lambda weight, rows: F.embedding(rows, weight),
    "padded": lambda weight, rows: F.embedding(rows, weight, padding_idx=0),
    "index": lambda weight, rows: weight[rows],
    "select": lambda weight, rows: weight.index_select(0, rows.flatten()).view(*rows.shape, WIDTH),
    "slice": lambda weight, rows: weight[: len(rows) % len(weight)].sum(0).expand(*rows.shape, WIDTH),
    "pieces": _pieces,
    "one hot": lambda weight, rows: F.one_hot(rows, len(weight)).to(weight.dtype) @ weight,
    "bag": lambda weight, rows: F.embedding_bag(rows, weight, mode="sum")[:, None],
    "detached too": lambda weight, rows: F.embedding(rows, weight) + F.embedding(rows.flip(0), weight.detach()),
    "and product": lambda weight, rows: torch.tanh(F.embedding(rows, weight) @ weight.t()) @ weight,
}


class Weights(Layer):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.weight = nn.Parameter(small(draw.choice(ROWS)))
        self.way, self.source = draw.choice(list(READINGS)), draw.choice(list(SOURCES))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        rows = SOURCES[self.source](x, len(self.weight))
        return add(x, READINGS[self.way](self.weight, rows).sum(1))


LOOKUPS = (Words, Words, Words, Instead, Bag, Nearest, Read, Adapted, Weights, Weights)


def features_of_tables(model: nn.Module) -> set[str]:
    found = set[str]()
    for module in model.modules():
        if isinstance(module, (Words, Weights)):
            found |= {f"looks up: {module.way}", f"rows by {module.source}"}
        elif isinstance(module, Bag):
            found.add(f"bag {module.mode}, weighed" if module.is_weighed else f"bag {module.mode}")
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            options = {"padding": module.padding_idx is not None, "by frequency": module.scale_grad_by_freq}
            options |= {"sparse": module.sparse, "frozen": not module.weight.requires_grad}
            found |= {f"table {name}" for name, is_drawn in options.items() if is_drawn}
            found |= {"tables", f"table {type(module).__name__}"}
    if found & {"looks up: twice", "looks up: pieces", "looks up: and product", "table Normed"}:
        found.add("rows added")  # gradients are sums
    return found
