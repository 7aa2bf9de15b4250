"""Optimizers of other kinds: states of every type come back as they were, in whatever dtype, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lamina
from harness import expect_error, run_ranks
from lamina.checkpoint.commands import main

WIDTH = 40


class ManyStates(torch.optim.Optimizer):
    """Momentum as codes of 8 bits with a mask, a tensor for the rows, counts, a list and a text."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (p for group in self.param_groups for p in group["params"]):
            state = self.state[param]
            if not state:
                state["codes"] = torch.zeros_like(param, dtype=torch.uint8)
                state["mask"] = torch.zeros_like(param, dtype=torch.bool)
                state["wide"] = torch.zeros_like(param, dtype=torch.float64)
                state["rows"] = torch.zeros(len(param), dtype=torch.int16)
                state.update(calls=0, count=torch.tensor(0), history=[], kind="signs")
            state["codes"].add_(1)
            state["mask"].logical_not_()
            state["wide"].add_(param.grad)
            state["rows"] += 1
            state["count"] += 1
            state["calls"] += 1
            state["history"].append(state["calls"] / 2)
            param.sub_(state["wide"].sign().float(), alpha=0.01)


class OwnBlocks(torch.optim.Optimizer):
    """Codes of this rank's elements, and a scale for each 16 of them, as optimizers of 8 bits keep them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (p for group in self.param_groups for p in group["params"]):
            state, local = self.state[param], getattr(param, "local", param.view(-1))
            if not state:
                state["codes"] = torch.zeros(local.numel(), dtype=torch.int8)
                state["scales"] = torch.zeros(-(-local.numel() // 16))
            state["codes"] += torch.arange(local.numel()).to(torch.int8)
            state["scales"] += local[::16]
            local.sub_(state["codes"] * 1e-4)


KINDS = {"many": ManyStates, "own": OwnBlocks}


def built(kind: str, strategy: str, seed: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = lamina.shard(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)), strategy)
    return model, KINDS[kind](model.parameters())


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, WIDTH)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    (param,) = model.parameters()
    found = {"parameter": param, **optimizer.state[param]}
    return {
        key: (value.full() if isinstance(value, lamina.Shard) else value).detach().clone()
        if isinstance(value, Tensor)
        else value
        for key, value in found.items()
    }


def saved(path: str, kind: str, strategy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state at the save, and that of a step later."""
    model, optimizer = built(kind, strategy, 0)
    step_once(model, optimizer)
    lamina.save(path, model, optimizer)
    at_save = values_of(model, optimizer)
    at_save["history"] = list(at_save.get("history", ()))
    step_once(model, optimizer)
    return at_save, values_of(model, optimizer)


def loaded(path: str, kind: str, strategy: str, is_new: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizer = built(kind, strategy, 1)
    if not is_new:
        step_once(model, optimizer)
    lamina.load(path, model, optimizer)
    at_load = values_of(model, optimizer)
    at_load["history"] = list(at_load.get("history", ()))
    step_once(model, optimizer)
    return at_load, values_of(model, optimizer)


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert sorted(found) == sorted(wanted)
    for key, value in wanted.items():
        if isinstance(value, Tensor):
            assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


def test_states_keep_their_types(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    wanted = run_ranks(2, saved, path, "many", "zero3")[0]
    for world, strategy, is_new in ((2, "zero3", False), (2, "zero3", True), (1, "ddp", True)):
        for found in run_ranks(world, loaded, path, "many", strategy, is_new):
            assert_same(found[0], wanted[0])
            assert_same(found[1], wanted[1])


def test_states_of_a_rank_go_to_the_same_rank_or_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    wanted = run_ranks(2, saved, path, "own", "zero3")
    assert wanted[0][0]["codes"].shape != wanted[1][0]["codes"].shape
    for is_new in (False, True):
        for found, want in zip(run_ranks(2, loaded, path, "own", "zero3", is_new), wanted, strict=True):
            assert_same(found[0], want[0])
            assert_same(found[1], want[1])
    words = ["state 'codes' of 0.weight is each rank's own", "'scales'"]
    expect_error(2, loaded, path, "own", "ddp", True, error="CheckpointError", contains=words)
    expect_error(1, loaded, path, "own", "zero3", True, error="CheckpointError", contains=words)
    assert main(["convert", path, str(tmp_path / "b")]) == 1 and not (tmp_path / "b").exists()


class Unusual(torch.optim.Optimizer):
    """States of a rank's elements without shape, full states that every rank keeps, a count that is no parameter's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.factor = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        counts = self.state["all of them"]
        counts["steps"] = counts.get("steps", 0) + 1
        self.factor *= 0.5
        for param in (p for group in self.param_groups for p in group["params"]):
            state, local = self.state[param], getattr(param, "local", param.view(-1))
            gradient = param.grad.full() if isinstance(param.grad, lamina.Shard) else param.grad
            start = getattr(param, "start", 0)
            if not state:
                state["flat"] = torch.zeros(local.numel())
                state["full"] = torch.zeros(param.shape)
            state["full"] += gradient
            state["flat"] += gradient.reshape(-1)[start : start + local.numel()]
            change = state["flat"] + state["full"].reshape(-1)[start : start + local.numel()]
            local.sub_(change, alpha=0.01 * counts["steps"] * self.factor)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "factor": self.factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.factor = state_dict["factor"]
        super().load_state_dict(state_dict)


def go_on_unusually(path: str) -> list[bool]:
    def made(seed: int) -> tuple[nn.Module, Unusual]:
        torch.manual_seed(seed)
        model = lamina.shard(nn.Sequential(nn.Linear(WIDTH, 5)), "zero3")
        return model, Unusual(model.parameters())

    model, optimizer = made(0)
    bias = next(p for name, p in model.named_parameters() if name.endswith("bias"))
    owned = (bias.start, bias.stop)  # type: ignore[attr-defined]
    step_once(model, optimizer)
    step_once(model, optimizer)
    lamina.save(path, model, optimizer)
    step_once(model, optimizer)
    wanted, equal = [p.full() for p in model.parameters()], [owned in ((0, 5), (0, 0), (5, 5))]
    for used in (False, True):
        model, optimizer = made(1)
        if used:
            step_once(model, optimizer)
        lamina.load(path, model, optimizer)
        step_once(model, optimizer)
        equal += [torch.equal(p.full(), w) for p, w in zip(model.parameters(), wanted, strict=True)]
        equal += [optimizer.state["all of them"] == {"steps": 3}, optimizer.factor == 0.125]
    return equal


def test_plain_states_beside_shards_and_states_of_no_parameter(tmp_path: Path) -> None:
    """One rank holds all of the bias: its flat state has the bias' shape, and is none that is to be cut."""
    assert all(all(equal) for equal in run_ranks(2, go_on_unusually, str(tmp_path / "a")))


class Keeps(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "large": torch.zeros(100)}


def test_what_an_optimizer_keeps_beside_is_saved_or_refused(tmp_path: Path) -> None:
    model = lamina.shard(nn.Linear(3, 3))
    with pytest.raises(lamina.UsageError, match="Keeps keeps 'large' beside its parameters' states"):
        lamina.save(tmp_path / "a", model, Keeps(model.parameters(), lr=0.1))
