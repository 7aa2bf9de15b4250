"""Objects of the user's that run code where an attribute is read: a forward is given them, keeps them, returns them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import expect_error, run_ranks

WIDTH = 4


class Odd(RuntimeError):
    """Raised by code that nobody has asked to run."""


class Guarded:
    """Reading anything but `scale` raises, as transformers' configurations do for sizes that differ by layer."""

    def __init__(self, scale: Tensor) -> None:
        self.scale, self.inner = scale, {"forbidden": scale}

    def __getattribute__(self, name: str) -> Any:
        if name in ("scale", "__class__"):
            return object.__getattribute__(self, name)
        raise Odd(name)


class Answering:
    """Answers for attributes that it has not."""

    __slots__ = ("never", "scale")

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    def __getattr__(self, name: str) -> Any:
        raise Odd(name)


@dataclasses.dataclass
class Lazy:
    scale: Tensor

    @property
    def made(self) -> Tensor:
        raise Odd("made")

    def __getattribute__(self, name: str) -> Any:
        if name == "forbidden":
            raise Odd(name)
        return object.__getattribute__(self, name)


@dataclasses.dataclass
class Refusing:
    """A field that may not be read in general."""

    scale: Tensor
    forbidden: int = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "forbidden":
            raise Odd(name)
        return object.__getattribute__(self, name)


KINDS: tuple[Callable[[Tensor], Any], ...] = (Guarded, Answering, Lazy, Refusing)


class Block(nn.Module):
    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.kind, self.kept = nn.Linear(WIDTH, WIDTH), kind, kind(torch.ones(()))

    def forward(self, x: Any) -> Any:
        y = torch.tanh(self.linear(x.scale * self.kept.scale))
        self.kept = self.kind(1 + y.detach().mean())
        return self.kind(y)


class Model(nn.Module):
    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.blocks, self.kind = nn.Sequential(*(Block(kind) for _ in range(3))), kind

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.kind(x)).scale


def gradients(model: nn.Module, parts: list[Tensor]) -> None:
    for _ in range(4):
        torch.stack([model(part).square().sum() for part in parts]).mean().backward()


def differs(kind: Callable[[Tensor], Any], recompute: str) -> float:
    """Every rank has the same rows, as the state that blocks keep is each rank's own."""
    rows = torch.linspace(-1, 1, 3 * WIDTH, dtype=torch.float64).view(3, WIDTH)
    torch.manual_seed(0)
    plain = Model(kind).double()
    torch.manual_seed(0)
    model = lamina.shard(Model(kind).double(), units=[Block], recompute=recompute)
    gradients(plain, [rows])
    gradients(model, [rows])
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    return max(float((one.grad - other.grad.full()).abs().max()) for one, other in pairs)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("kind", KINDS)
def test_objects_that_run_code_of_their_own(kind: Callable[[Tensor], Any], recompute: str) -> None:
    assert max(run_ranks(2, differs, kind, recompute)) < 1e-12


class Casting(nn.Module):
    """As routers of transformers' mixtures of experts do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.dtype = nn.Linear(WIDTH, WIDTH), dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.linear.to(self.dtype)(x.to(self.dtype))


def cast(dtype: torch.dtype) -> float:
    torch.manual_seed(0)
    model = lamina.shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), Casting(dtype)), units=[Casting])
    loss = model(torch.ones(2, WIDTH) + dist.get_rank()).sum()
    loss.backward()
    return float(model[1].linear.bias.grad.full().sum())


def test_layers_that_cast_their_weights_in_the_forward() -> None:
    assert run_ranks(2, cast, torch.float32) == [2.0 * WIDTH] * 2, "where it changes nothing"
    words = ["`1.linear.weight`", "float64 and shape (4, 4)", "gathered as float32", "Precision(keep="]
    expect_error(2, cast, torch.float64, error="StateError", contains=words)
