"""Views of weights that a forward keeps and that are read elsewhere: refused by name, as others may lie there."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import lamina
from harness import run_ranks
from lamina.errors import StateError
from lamina.runtime.assemble import RUNTIMES
from parity.keeping import BLOCKS, DIM, STEPS, VIEWS, WAYS, Block, View, batch, shard, stack


def said_of(view: Tensor) -> str:
    """The error of a read of its values, "" where there is none."""
    try:
        float(view.sum())
    except StateError as error:
        return str(error)
    return ""


def what_is_read(way: tuple[int, str], grad: bool, first_step: int) -> dict[str, list[str]]:
    """Of kept views: what is said when each is read after a forward, and after a backward."""
    found: dict[str, list[str]] = {}
    for name, view in VIEWS.items():
        model, said = shard(stack(partial(Block, view, first_step)), way), found.setdefault(name, [])
        for _ in range(first_step + STEPS):
            with torch.set_grad_enabled(grad):
                output = model(batch())
            said += [said_of(each) for block in model for each in block.kept]
            if grad:
                output.sum().backward()
                said += [said_of(each) for block in model for each in block.kept]
    return found


@pytest.mark.parametrize("first_step", [0, 2])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_read_behind_the_forward_is_named(way: tuple[int, str], grad: bool, first_step: int) -> None:
    for found in run_ranks(2, what_is_read, way, grad, first_step):
        assert found.keys() == VIEWS.keys()
        for name, said in found.items():
            assert len(said) == STEPS * BLOCKS * (1 + grad), name
            for number, each in enumerate(said):
                assert f"a view of `{number % BLOCKS}.linear.weight`" in each, (name, number, said)
                assert "was kept in a forward and is read after it" in each and "lamina.keep" in each


class Collected(Block):
    """Its view is no young object any more when the forward ends."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept[:] = [self.view(self.linear.weight)]
        gc.collect()
        return torch.tanh(self.linear(x))


class Saved(Block):
    """Keeps what its graph has saved."""

    def forward(self, x: Tensor) -> Tensor:
        view = self.linear.weight.t()
        self.kept[:] = [view]
        return torch.tanh(x @ view)


class SavedLater(Block):
    """Keeps what its graph has saved, where graphs as large were there before without anybody keeping a part."""

    def forward(self, x: Tensor) -> Tensor:
        view = self.linear.weight.t()
        if self.kept:
            self.kept[:] = [view]
        return torch.tanh(x @ view)


class Calling(Block):
    """Calls another one in whose memory it lies: that one is gathered elsewhere."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.others: list[Block] = []

    def forward(self, x: Tensor) -> Tensor:
        for other in self.others:
            x = other(x)
        return super().forward(x)


def what_is_said(kind: Callable[[View], Block], view: str, grad: bool) -> list[str]:
    model, said = stack(partial(kind, VIEWS[view])), []
    if kind is Calling:
        model[1].others.append(model[0])  # type: ignore[union-attr, arg-type]
    shard(model, (1, "c10d"))
    for _ in range(STEPS):
        with torch.set_grad_enabled(grad):
            output = model(batch())
        said += [said_of(each) for block in model for each in block.kept]
        if grad:
            output.sum().backward()
            said += [said_of(each) for block in model for each in block.kept]
    if kind is Calling:
        assert sum(unit.overflows for unit in RUNTIMES[model].units) > 0
    return said


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", [Collected, Saved, Calling])
def test_a_view_is_found_wherever_it_lies(kind: Callable[[View], Block], grad: bool) -> None:
    for view in ("detach",) if kind is Collected else ("detach", "t", "data of a view"):
        for said in run_ranks(2, what_is_said, kind, view, grad):
            assert len(said) == STEPS * BLOCKS * (1 + grad)
            assert all("linear.weight`" in each and "was kept in a forward" in each for each in said), said


def said_of_later_ones() -> list[str]:
    model, said = shard(stack(partial(SavedLater, Tensor.t)), (1, "c10d")), []
    for number in range(2 * STEPS):
        for block in model if number >= STEPS else ():
            block.kept.append(batch())  # type: ignore[union-attr, operator]
        output = model(batch())
        if number > STEPS:
            said += [said_of(each) for block in model for each in block.kept]
        output.sum().backward()
        said += [said_of(each) for block in model for each in block.kept if each.shape == (DIM, DIM)]
    return said


def test_what_graphs_hold_too_is_found_when_they_have_gone() -> None:
    for said in run_ranks(2, said_of_later_ones):
        assert len(said) == (2 * STEPS - 1) * BLOCKS
        assert all("was kept in a forward" in each for each in said), said


class Failing(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.kept[:] = [self.view(self.linear.weight)]
        if self.steps:
            raise ZeroDivisionError
        return torch.tanh(self.linear(x))


def said_after_an_error(in_backward: bool) -> list[str]:
    model, said = shard(stack(partial(Failing, Tensor.detach)), (1, "c10d")), []
    handle = model[2].linear.register_full_backward_hook(_fail) if in_backward else None  # type: ignore[union-attr]
    for number in range(STEPS):
        model[2].steps = number % 2 == 0 and not in_backward  # type: ignore[union-attr]
        try:
            model(batch()).sum().backward()
        except ZeroDivisionError:
            model.zero_grad()
        if not in_backward:
            said += [said_of(each) for block in model for each in block.kept]
        with torch.no_grad():
            model[3].steps = 0  # type: ignore[union-attr]
            model[2].steps = 0  # type: ignore[union-attr]
            model(batch())
        said += [said_of(each) for block in model for each in block.kept]
    if handle is not None:
        handle.remove()
    return said


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("in_backward", [False, True])
def test_views_are_found_after_an_error(in_backward: bool) -> None:
    for said in run_ranks(2, said_after_an_error, in_backward):
        assert len(said) >= STEPS * BLOCKS
        assert all("was kept in a forward" in each for each in said), said


class Array(Block):
    """Keeps what is no tensor."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept[:] = [self.linear.weight.detach().numpy()]  # type: ignore[list-item]
        return torch.tanh(self.linear(x))


def arrays(way: tuple[int, str]) -> list[float]:
    lamina.debug(True)
    try:
        model, found = shard(stack(partial(Array, Tensor.detach)), way), []
        for _ in range(STEPS):
            model(batch()).sum().backward()
            found += [float(each.sum()) for block in model for each in block.kept]
    finally:
        lamina.debug(False)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_in_debug_mode_what_is_no_tensor_shows_nan_never_other_weights(way: tuple[int, str]) -> None:
    for found in run_ranks(2, arrays, way):
        assert len(found) == STEPS * BLOCKS and all(math.isnan(each) for each in found), found
