"""The layers of random models, of every kind whose structure sharding runtimes have got wrong.

A forward takes (samples, WIDTH) inputs and the number of the rank whose data they are: some layers are skipped, or used
twice, by some ranks.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Layer(nn.Module):
    """A layer that may look at whose data it sees."""

    def forward(self, x: Tensor, rank: int) -> Tensor:
        raise NotImplementedError


class Dense(Layer):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return torch.tanh(self.linear(x))


class Wide(Layer):
    """Two matrices of unequal sizes and a norm."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        hidden = draw.choice([3, 7, 40])
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Small(Layer):
    """A scalar, an empty parameter, and one of odd shape."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.odd = nn.Parameter(torch.randn(1, WIDTH, 1) * 0.3)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return x * self.scale + self.odd[0, :, 0] + self.nothing.sum()


class Lora(Layer):
    """A frozen matrix with a trainable pair: it is read after the gradients of the pair are there."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH) * 0.3), nn.Parameter(torch.randn(WIDTH, 2) * 0.3)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return torch.tanh(self.base(x) + F.linear(F.linear(x, self.a), self.b))


class Unused(Layer):
    """Parameters that no rank uses, beside one that all do."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.spare, self.used = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return x - torch.sin(self.used(x))


class Detached(Layer):
    """Its weight is read once with, and once without gradient."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return torch.tanh(x @ self.weight + 0.5 * (x @ self.weight.detach().t()))


class Buffered(Layer):
    """A buffer that scales."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.9))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.linear(x) * self.scale.to(x.dtype)


class Recurrent(Layer):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return x + self.rnn(x[:, None])[0][:, 0]


class Mixed(Layer):
    """Complex, integer and half-precision parameters beside one of the model's dtype."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(3, WIDTH, dtype=torch.complex128) * 0.3)
        self.base = nn.Parameter(torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.coarse = nn.Parameter(torch.randn(WIDTH).half(), requires_grad=False)
        self.gain = nn.Parameter(torch.randn(WIDTH) * 0.3)

    def keep_dtypes(self) -> None:
        self.coarse.data = self.coarse.data.half()

    def forward(self, x: Tensor, rank: int) -> Tensor:
        turned = (x.to(torch.complex128) @ self.phase.t()) @ self.phase.conj()
        read = x @ self.base.to(x.dtype) / 20 + self.gain * self.coarse.to(x.dtype)
        return torch.tanh(turned.real.to(x.dtype) + read)


class Coarse(Layer):
    """Trainable matrices of 16 and of 32 bits, beside one of the model's dtype."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.narrow, self.middle, self.own = (nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3) for _ in range(3))

    def keep_dtypes(self) -> None:
        self.narrow.data, self.middle.data = self.narrow.data.bfloat16(), self.middle.data.float()

    def forward(self, x: Tensor, rank: int) -> Tensor:
        parts = [(x.to(weight.dtype) @ weight).to(x.dtype) for weight in (self.narrow, self.middle, self.own)]
        return torch.tanh(torch.stack(parts).sum(0))


class Chain(Layer):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for layer in self.layers:
            x = layer(x, rank)
        return x


class Skipped(Layer):
    """Some ranks leave its layer out."""

    def __init__(self, layer: Layer, remainder: int) -> None:
        super().__init__()
        self.layer, self.remainder = layer, remainder

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return x if rank % 3 == self.remainder else self.layer(x, rank)


class Twice(Layer):
    """Its layer is used two times; by some ranks once only."""

    def __init__(self, layer: Layer, uneven: bool) -> None:
        super().__init__()
        self.layer, self.uneven = layer, uneven

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.layer(x, rank)
        return x if self.uneven and rank % 2 else self.layer(x, rank)


class Recomputed(Layer):
    """torch's own checkpoint around a layer."""

    def __init__(self, layer: Layer, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return checkpoint(self.layer, x, rank, use_reentrant=self.reentrant)


class Cut(Layer):
    """Some ranks let no gradient pass: nothing before it is trained by them."""

    def __init__(self, layer: Layer, remainder: int) -> None:
        super().__init__()
        self.layer, self.remainder = layer, remainder

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.layer(x, rank)
        return x.detach() if rank % 3 == self.remainder else x


class Branches(Layer):
    """Two layers side by side, which every second rank uses in the other order."""

    def __init__(self, one: Layer, other: Layer) -> None:
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x: Tensor, rank: int) -> Tensor:
        if rank % 2:
            other = self.other(x, rank)
            return self.one(x, rank) + other
        return self.one(x, rank) + self.other(x, rank)


class Reads(Layer):
    """The parent reads the weight of a child, beside calling it or instead."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.child, self.calls = nn.Linear(WIDTH, WIDTH), calls

    def forward(self, x: Tensor, rank: int) -> Tensor:
        read = torch.tanh(F.linear(x, self.child.weight))
        return read + self.child(x) if self.calls else read


class Pair(Layer):
    """Gives its parts to the parent as a dict, of which one is not used."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer, self.other = Outputs(layer), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        parts = self.layer(x, rank)
        return parts["main"] + 0.1 * self.other(parts["side"][0])


class Outputs(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer, self.side = layer, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int) -> dict[str, object]:
        x = self.layer(x, rank)
        return {"main": x, "side": (self.side(x), None), "unused": x * 2}


class Again(Layer):
    """Calls itself while it is open, in torch's reentrant checkpoint: a backward of its own in the middle of one."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor, rank: int, depth: int = 1) -> Tensor:
        x = torch.tanh(x @ self.weight)
        return x + checkpoint(self, x, rank, depth - 1, use_reentrant=True) if depth else x


class Calls(Layer):
    """Calls a block of the model, too, while its own weights are in use: it is no part of this layer."""

    def __init__(self, draw: random.Random, other: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.called = (other,)  # in a tuple: not registered again

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return x + self.down(self.called[0](torch.tanh(self.up(x)), rank))


def has_reentrant(model: nn.Module) -> bool:
    return any(isinstance(m, Again) or (isinstance(m, Recomputed) and m.reentrant) for m in model.modules())


def differs(model: nn.Module) -> bool:
    """Whether ranks compute different things."""
    return any(isinstance(m, (Skipped, Cut, Branches)) or (isinstance(m, Twice) and m.uneven) for m in model.modules())
