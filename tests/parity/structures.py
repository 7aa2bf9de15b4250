"""Models whose structure has broken other sharding runtimes; each with its units and a loss.

A structure is trained like any other model: `loss(model, data, rank)` on (samples, WIDTH) inputs of one rank. With
`rank`, ranks take different paths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 5
Loss = Callable[[nn.Module, Tensor, int], Tensor]


@dataclass(frozen=True)
class Structure:
    build: Callable[[], nn.Module]
    units: Any = ("blocks.*",)
    loss: Loss = lambda model, data, rank: model(data).pow(2).mean()


class Chain(nn.Module):
    """Blocks one after the other, between two layers of the root."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:  # (samples, WIDTH) -> (samples, 3)
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Lora(nn.Module):
    """Frozen base (a plain matrix, or int8), low-rank trainable pair: the base is read after A's and B's gradients."""

    def __init__(self, int8: bool) -> None:
        super().__init__()
        base = torch.randn(WIDTH, WIDTH)
        if int8:
            base = (base * 20).round().clamp(-127, 127).to(torch.int8)
        self.base = nn.Parameter(base, requires_grad=False)
        self.a = nn.Parameter(torch.randn(2, WIDTH) * 0.3)
        self.b = nn.Parameter(torch.randn(WIDTH, 2) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        base = self.base if self.base.is_floating_point() else self.base.to(x.dtype) / 20
        return torch.tanh(F.linear(x, base) + F.linear(F.linear(x, self.a), self.b))


class Detached(nn.Module):
    """Reads its weight once more without a gradient: after the weight's gradient has come, it is still needed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight.detach())), self.weight)


class Crossing(nn.Module):
    """A decoder block: two inputs, whose paths backward end at different times."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(memory).t()
        return x + torch.softmax(scores, -1) @ self.value(memory)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.blocks = nn.ModuleList(Crossing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for layer in self.encoder:
            memory = torch.tanh(layer(memory))
        y = x
        for block in self.blocks:
            y = block(y, memory=memory)
        return y


class Nested(nn.Module):
    """Reentrant checkpoints inside a unit, one in the other's input and one in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def _inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(x))))

    def _outer(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=True) + x

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self._inner, checkpoint(self._inner, x, use_reentrant=True), use_reentrant=True)
        return checkpoint(self._outer, x, use_reentrant=True)


class Checkpointed(Chain):
    """Torch's checkpoint around pairs of units, nested."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        def pair(y: Tensor, start: int) -> Tensor:
            y = checkpoint(self.blocks[start], y, use_reentrant=self.reentrant)
            return self.blocks[start + 1](y)

        x = torch.tanh(self.first(x))
        for start in range(0, len(self.blocks), 2):
            x = checkpoint(pair, x, start, use_reentrant=self.reentrant)
        return self.last(x)


class CheckpointedWithoutReentry(Checkpointed):
    reentrant = False


class Looped(Chain):
    """The same blocks again and again (weights shared over depth)."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            for block in self.blocks:
                x = torch.tanh(block(x))
        return self.last(torch.tanh(self.blocks[0](x)))


class Tied(nn.Module):
    """C02: embedding and head share a weight, across units."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, WIDTH)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mid(self.emb(tokens))))


def tied_loss(model: nn.Module, data: Tensor, rank: int) -> Tensor:
    tokens = (data.abs() * 10).long() % 7
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


class Skipping(Chain):
    """C01: each rank leaves out another layer."""

    def forward(self, x: Tensor, skip: int) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number != skip:
                x = torch.tanh(block(x))
        return x


class Experts(Chain):
    """Each rank uses one expert only, and nobody the last one: that one has no gradient."""

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        return self.last(torch.tanh(self.blocks[chosen](self.first(x))))


class Unused(nn.Module):
    """Holds a parameter that no rank uses beside one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Sometimes(nn.Module):
    """One parameter of a unit that rank 0 only uses."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        y = self.always(x)
        return y * self.scale if rank == 0 else y


class SometimesChain(Chain):
    def forward(self, x: Tensor, rank: int) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x, rank))
        return self.last(self.first(x))


class Motley(nn.Module):
    """Every kind of parameter in one unit: 0-dim, empty, int8, complex, float32 beside float64, frozen beside not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.codes = nn.Parameter(torch.arange(WIDTH, dtype=torch.int8), requires_grad=False)
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))
        self.narrow = nn.Parameter(torch.randn(WIDTH, dtype=torch.float32), requires_grad=False)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.scale + self.codes.to(x.dtype) * 0.1 + self.empty.sum()
        return torch.tanh(y * self.phase.real + self.phase.imag * self.narrow.to(x.dtype) + self.frozen)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


def frozen_first() -> nn.Module:
    model = Chain(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for part in (model.first, model.blocks[0], model.blocks[2]):
        part.requires_grad_(False)
    return model


def bit_fit() -> nn.Module:
    """Only biases train; weights and norms are frozen."""
    model = Chain(*(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("bias") and ".0." not in name)
    return model


def linears(kind: type[Chain], count: int) -> Callable[[], nn.Module]:
    return lambda: kind(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


STRUCTURES: dict[str, Structure] = {
    "lora": Structure(lambda: Chain(*(Lora(int8=False) for _ in range(3)))),
    "lora int8": Structure(lambda: Chain(*(Lora(int8=True) for _ in range(3)))),
    "bitfit": Structure(bit_fit),
    "detached": Structure(lambda: Chain(*(Detached() for _ in range(3)))),
    "two inputs": Structure(EncoderDecoder, units=("encoder.*", "blocks.*")),
    "nested reentrant": Structure(lambda: Chain(*(Nested() for _ in range(3)))),
    "checkpointed pairs, reentrant": Structure(linears(Checkpointed, 4)),
    "checkpointed pairs": Structure(linears(CheckpointedWithoutReentry, 4)),
    "looped": Structure(linears(Looped, 3)),
    "frozen first": Structure(frozen_first),
    "tied": Structure(Tied, units=("emb", "mid", "head"), loss=tied_loss),
    "skipping": Structure(
        linears(Skipping, 4), loss=lambda model, data, rank: model(data, skip=rank + 1).pow(2).mean()
    ),
    "experts": Structure(linears(Experts, 5), loss=lambda model, data, rank: model(data, rank).pow(2).mean()),
    "unused": Structure(lambda: Chain(*(Unused() for _ in range(3)))),
    "sometimes": Structure(
        lambda: SometimesChain(*(Sometimes() for _ in range(3))),
        loss=lambda model, data, rank: model(data, rank).pow(2).mean(),
    ),
    "motley": Structure(lambda: Chain(*(Motley() for _ in range(3)))),
    "batch norm": Structure(lambda: Chain(*(Normed() for _ in range(3)))),
}


def build_structure(name: str) -> nn.Module:
    """In float64 where it floats, the same at every call."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        return STRUCTURES[name].build()
    finally:
        torch.set_default_dtype(before)
