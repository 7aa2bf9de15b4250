"""What a forward leaves beside its output, and losses of it.

Some layers leave features, losses of features, and heads on them in attributes (`Leaves`); hooks of the user's keep
what layers are given and return. A job adds losses of them to that of the output, or runs them backward by themselves:
before it, after it, without it, or for the gradient of the input. What a layer leaves where nobody looks (`STRANDED`)
is taken by no step: a backward through it is right, or refused on every rank.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.leaves import STRANDED, Leaves
from lamina.runtime.uses import tensors_in
from parity.reference import difference

ALONE_IN = 2  # step
ORDERS = ("with", "with", "first", "first", "then", "alone", "alone", "grad")
KEPT = ("output", "output", "args", "before")
WEIGHT = 0.1


@dataclasses.dataclass(frozen=True)
class Sides:
    """How losses take in what is left."""

    order: (
        str  # "with" the output's loss; backward by itself "first" or "then", or "alone" in one step; "grad" of input
    )
    turned: bool  # added before the loss of the output, the last one first
    twice: bool
    leaves_out: int | None  # ranks of this remainder add nothing
    hooks: tuple[tuple[int, str], ...]  # number of a module, what its hook keeps
    hooked: str  # "before" or "after" the model was sharded, or "late": in the second step, and removed in the third

    @property
    def features(self) -> set[str]:
        found = {f"sides {self.order}"} | {f"keeps {kind} {self.hooked}" for _, kind in self.hooks}
        return found | ({"sides of some ranks"} if self.leaves_out is not None else set())

    def parts(self, step: int, ranks: Sequence[Losses]) -> bool:
        """Whether what is left has a backward of its own: on all ranks, as which there are must agree over them."""
        if self.order == "with" or (self.order == "alone" and step != ALONE_IN):
            return False
        if self.order == "grad" and len({losses.sides_reach_inputs for losses in ranks}) > 1:
            return False
        return all(any(_leads_to_parameters(side) for side in losses.sides) for losses in ranks)


def _leads_to_parameters(loss: Tensor) -> bool:
    """And not to inputs alone."""
    return any(isinstance(leaf, nn.Parameter) for leaf in _leaves_below(loss))


def _leaves_below(loss: Tensor) -> Iterator[Tensor]:
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            waiting += [following for following, _ in node.next_functions]


@dataclasses.dataclass
class Losses:
    """Of some forwards on one rank's data."""

    own: Tensor  # of the outputs
    sides: list[Tensor]  # of what was left
    inputs: list[Tensor]

    @property
    def sides_reach_inputs(self) -> bool:
        return any(leaf is given for side in self.sides for leaf in _leaves_below(side) for given in self.inputs)

    @property
    def sum(self) -> Tensor:
        return sum(self.sides, self.own)

    def backwards(self, sides: Sides | None, parts: bool) -> list[tuple[Tensor, bool]]:
        """Losses to run backward, one after the other, and whether their graph is needed again."""
        if sides is None:
            return [(self.own, False)]
        terms = [side * side.detach() for side in self.sides[: 1 if sides.twice else 0]] + self.sides
        if parts and sides.order != "grad":
            side = sum(terms[1:], terms[0])
            orders = {"alone": [side], "first": [side, self.own], "then": [self.own, side]}
            losses = orders[sides.order]
            return [(loss, loss is not losses[-1]) for loss in losses]
        if sides.turned and terms:
            return [(sum(terms[-2::-1], terms[-1]) + self.own, False)]
        return [(sum(terms, self.own), False)]

    def of_inputs(self, sides: Sides | None, parts: bool) -> list[Tensor | None]:
        """Gradients of the inputs by what was left."""
        if sides is None or not parts or sides.order != "grad":
            return []
        side = sum(self.sides[1:], self.sides[0])
        return list(torch.autograd.grad(side, self.inputs, retain_graph=True, allow_unused=True))


def deviation_of_all(found: list[Tensor | None], wanted: list[Tensor | None]) -> float:
    assert [each is None for each in found] == [each is None for each in wanted], (found, wanted)
    return max((difference(f, w) for f, w in zip(found, wanted, strict=True) if f is not None), default=0.0)


def draw_sides(seed: int, is_exact: bool, leaves: bool) -> Sides | None:
    """`is_exact`: the sum of several backwards is not rounded; `leaves`: some layers of the model leave something."""
    draw = random.Random(f"sides {seed}")
    if draw.random() >= (0.8 if leaves else 0.3):
        return None
    order = draw.choice(ORDERS)
    return Sides(
        order=order if is_exact else "with",
        turned=draw.random() < 0.5,
        twice=draw.random() < 0.3,
        leaves_out=draw.randrange(3) if draw.random() < 0.3 else None,
        hooks=tuple(
            (draw.randrange(1000), draw.choice(KEPT))
            for _ in range(draw.choice([0, 0, 1, 2] if leaves else [1, 1, 2, 3]))
        ),
        hooked=draw.choice(["before", "after", "late"]),
    )


class Keeper:
    """Hooks of the user's on one model, and what they have kept."""

    def __init__(self, model: nn.Module, sides: Sides) -> None:
        self.model, self.sides = model, sides
        self.kept: list[Any] = []
        self.handles: list[Any] = []

    def hang(self) -> None:
        names = sorted(name for name, module in self.model.named_modules() if not isinstance(module, nn.ModuleList))
        for number, kind in self.sides.hooks:
            module = self.model.get_submodule(names[number % len(names)])
            if kind == "before":
                self.handles.append(module.register_forward_pre_hook(lambda module, args: self.keep(args)))
            elif kind == "args":
                self.handles.append(module.register_forward_hook(lambda module, args, output: self.keep(args)))
            else:
                self.handles.append(module.register_forward_hook(lambda module, args, output: self.keep(output)))

    def at(self, step: int) -> None:
        """A step begins."""
        if self.sides.hooked == "late" and step == 1:
            self.hang()
        elif self.sides.hooked == "late" and step == 2:
            self.take_down()

    def keep(self, value: Any) -> None:
        self.kept.append(value)

    def take_down(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    def forget(self) -> None:
        """A forward begins."""
        self.kept.clear()
        forget(self.model)

    def take(self, rank: int) -> list[Tensor]:
        """After a forward of that rank's data: losses of what it has left, in float64."""
        left = [leaf.take() for leaf in self.model.modules() if isinstance(leaf, Leaves)]
        found = [tensor for tensor in tensors_in([*left, *self.kept]) if tensor.is_floating_point()]
        terms = [_loss(tensor) for tensor in found if tensor.numel()]
        if self.sides.order == "with":
            return [] if self.sides.leaves_out == rank % 3 else terms
        return terms[rank % 2 :] or terms  # every rank has a backward if any has


def begin_step(model: nn.Module, step: int) -> None:
    for leaf in model.modules():
        if isinstance(leaf, Leaves):
            leaf.step = step


def forget(model: nn.Module) -> None:
    STRANDED.clear()
    for leaf in model.modules():
        if isinstance(leaf, Leaves):
            leaf.forget()


def take_stranded() -> Tensor:
    """The loss of what the last forward has left where nobody looks."""
    return sum(map(_loss, STRANDED), torch.zeros((), dtype=torch.float64))


def _loss(tensor: Tensor) -> Tensor:
    return tensor.double().pow(2).mean() * WEIGHT
