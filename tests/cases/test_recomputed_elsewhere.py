"""Recomputed layers whose weights find their place taken by the layer behind them, whose backward is under way.

They lie elsewhere until that backward ends, for what is computed a second time may point there: also where hooks that
were registered after `shard()` come behind the runtime's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cases.training import TOLERANCE, WIDTH, Case, Way, worst_of
from harness import run_ranks

WAYS = (
    Way("zero3", slots=1),
    Way("zero3", slots=2),
    Way("zero3", "peer", slots=1),
    Way("zero2", "peer", slots=1),
    Way("zero1", slots=1),
)


class Normed(nn.Module):
    """Its backward reads all of its weights, in several nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() / (1 + self.linear.weight.norm())


class Recomputed(nn.Module):
    """Layers that are computed again together, once the backward of the last one has begun."""

    def __init__(self, layers: int, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = nn.Sequential(*(Normed() for _ in range(layers))), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)


class Model(nn.Module):
    """Hooks come to its layers in its first forward."""

    def __init__(self, hang: Callable[[nn.Module], object], layers: int, reentrant: bool) -> None:
        super().__init__()
        self.first, self.hang, self.is_hung = nn.Linear(WIDTH, WIDTH), hang, False
        self.blocks = nn.Sequential(*(Recomputed(layers, reentrant) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hung:
            self.is_hung = True
            for module in self.modules():
                if isinstance(module, Normed):
                    self.hang(module)
        return self.blocks(self.first(x))


def nothing(module: nn.Module) -> None:
    pass


def behind(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: None)


def changing(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: output * 1.5)


def around(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    behind(module)


def below(module: nn.Module) -> None:
    behind(module.linear)
    changing(module)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("hang", [nothing, behind, changing, around, below])
def test_weights_that_lie_elsewhere_stay_until_the_backward_ends(
    hang: Callable[[nn.Module], object], layers: int, reentrant: bool
) -> None:
    case = Case(functools.partial(Model, hang, layers, reentrant), units=("blocks.*.layers.*",))
    for found in run_ranks(2, worst_of, case, WAYS):
        assert max(found.values()) < TOLERANCE, found
