"""C13: blocks whose forward runs again in backward. Ranks have the same rows: what blocks keep is each rank's own."""

from __future__ import annotations

import random
from typing import Any

import torch
from cases_of_paths import WIDTH, data
from systems import differences, make, twin
from torch import Tensor, nn

STEPS = 4


class Normed(nn.Module):
    """Running values, which move in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return self.norm(self.linear(x)).tanh()


class Spectral(nn.Module):
    """A power iteration a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return self.linear(x).tanh()


class Cached(nn.Module):
    """Adds to what it is given, and reads all that is there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        given["cache"].append(x)
        return self.linear(torch.stack(given["cache"]).mean(0)).tanh()


class Jittered(nn.Module):
    """Numbers of Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return (self.linear(x) * random.uniform(0.5, 1.5)).tanh()


class Sum(nn.Module):
    """Reads a sum in a dict, which its caller adds the output to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return self.linear((given["sum"] * 2).sin()).tanh()


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.adds = nn.Linear(WIDTH, WIDTH), kind is Sum
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        given = {"cache": [], "sum": x * 1.0}
        for block in self.blocks:
            x = block(x, given)
            if self.adds:
                given["sum"] += x
        return x


KINDS: dict[str, type[nn.Module]] = {each.__name__: each for each in (Normed, Spectral, Cached, Jittered, Sum)}


def train(model: nn.Module) -> None:
    random.seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(data(0, step)).pow(2).mean().backward()
        optimizer.step()


def recomputed(name: str, kind: str) -> float:
    system = make(name)
    plain, model = twin(lambda: Model(KINDS[kind]).double())
    model = system.shard(model, list(model.blocks), recompute=True)
    train(plain)
    train(model)
    pairs = zip(model.buffers(), plain.buffers(), strict=True)
    return max([differences(system, model, plain), *(float((one - other).abs().max()) for one, other in pairs)])
