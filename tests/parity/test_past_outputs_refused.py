"""Backwards past a unit's outputs through what lamina does not find, or what is of weights that have gone.

Weights are never read that are not there, and nothing stays: no gradients of a backward that has failed, and no model.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from parity.leaving import BLOCKS, WAYS, batch, features, left, net, run
from parity.reference import TOLERANCE, gradient_deviation


def messages() -> list[str]:
    """By way, of a backward through what nobody finds; the next step is right."""
    said = []
    for way in WAYS[:3]:
        model = lamina.shard(net("elsewhere"), units=[*map(str, range(BLOCKS + 1))], **way)
        left.clear()
        model(batch(0, 0))
        with pytest.raises(lamina.LaminaError) as raised:
            left[1].square().mean().backward()
        said.append(str(raised.value))
        model.zero_grad()
        if "recompute" in way:
            continue  # inside keep() a forward that runs again finds no weights in its modules
        with lamina.keep(model):
            left.clear()
            model(batch(0, 0))
            left[1].square().mean().backward()
        plain = net("elsewhere")
        left.clear()
        plain(batch(0, 0))
        left[1].square().mean().backward()
        assert gradient_deviation(model, {n: p.grad for n, p in plain.named_parameters()}) <= TOLERANCE
    return said


def hooked_by_hand() -> list[bool]:
    """By way: whether a backward through what such a hook keeps is refused."""
    refused = []
    for way in WAYS[:3]:
        model = lamina.shard(net(""), units=[*map(str, range(BLOCKS + 1))], **way)
        kept: list[Tensor] = []
        for step in range(3):
            if step == 2:
                model[1].down._forward_hooks[-1] = lambda _, args, out, kept=kept: kept.append(out)  # type: ignore[misc]
            model(batch(0, step))
        with pytest.raises(lamina.LaminaError, match="left in a list or another object"):
            kept[0].square().mean().backward()
        kept.clear()  # a graph that the model itself holds would hold the model for good
        refused.append(True)
    return refused


def test_what_a_hook_without_a_handle_keeps_is_refused() -> None:
    assert run_ranks(2, hooked_by_hand) == [[True] * 3] * 2


def test_weights_that_are_not_there_are_named() -> None:
    for said in run_ranks(2, messages):
        for message in said:
            assert "past the outputs" in message and "1.up.weight" in message and "lamina.keep(model)" in message


def clean_starts() -> list[float]:
    """Of the step after a backward that ended in an error, when some of its gradients were there."""
    found, rank, world = [], dist.get_rank(), dist.get_world_size()
    for way in WAYS[:3]:
        model, plain = (net("recomputed") for _ in range(2))
        lamina.shard(model, units=[*map(str, range(BLOCKS + 1))], **(way | {"slots": BLOCKS}))
        left.clear()
        model(batch(rank, 0))
        with contextlib.suppress(lamina.LaminaError):
            left[-1].square().mean().backward()
        model.zero_grad()
        run(model, [model(batch(rank, 1)).square().mean()], 1)
        for other in range(world):
            run(plain, [plain(batch(other, 1)).square().mean()], world)
        found.append(gradient_deviation(model, {n: p.grad for n, p in plain.named_parameters()}))
    return found


def test_nothing_stays_of_a_backward_that_has_failed() -> None:
    for found in run_ranks(2, clean_starts):
        assert max(found) <= TOLERANCE, found


def stale() -> str:
    """A graph of the step before, whose unit is gathered again with other weights."""
    model = lamina.shard(net("attribute"), units=[*map(str, range(BLOCKS + 1))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0, 0)).sum().backward(retain_graph=True)
    old = features(model)[2]
    optimizer.step()
    model(batch(0, 1))
    with pytest.raises(lamina.StateError) as raised:
        old.sum().backward()
    return str(raised.value)


def test_graphs_of_the_step_before_are_named() -> None:
    assert all("changed between its forward and this backward" in said for said in run_ranks(2, stale))


class Failing(nn.Module):
    """Its first forward fails behind what it has left in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        left.append(torch.tanh(self.down(torch.tanh(self.up(x)))))
        self.calls += 1
        if self.calls == 1:
            raise ValueError("of the user's")
        return left[-1]


def failed_and_edited(strategy: str) -> list[str]:
    """Who refuses: the plain model, and the sharded one."""
    said = []
    for is_sharded in (False, True):
        left.clear()
        model = nn.Sequential(Failing(), nn.Linear(4, 4)).double()
        if is_sharded:
            model = lamina.shard(model, strategy, units=["0", "1"])
        x = torch.ones(2, 4, dtype=torch.float64)
        with pytest.raises(ValueError):
            model(x)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
            model(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation|were changed between|is not gathered"):
            left[0].sum().backward()
        said.append("sharded" if is_sharded else "plain")
    left.clear()
    return said


@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
def test_what_a_first_forward_that_failed_has_left_is_not_run_with_other_weights(strategy: str) -> None:
    assert run_ranks(2, failed_and_edited, strategy) == [["plain", "sharded"]] * 2


def script(kind: str) -> weakref.ref[nn.Module]:
    """Holds its loss, its hooks and its model together."""
    names: dict[str, Any] = {"model": lamina.shard(net(kind), units=[*map(str, range(BLOCKS + 1))])}

    def look(*_: object) -> None:
        names.get("loss")

    names["model"][1].register_forward_hook(look)
    for index in range(2):
        names["loss"] = names["model"](batch(0, index)).sum()
        names["loss"].backward()
    return weakref.ref(names["model"])


def what_stays() -> list[str]:
    stays = []
    for kind in ("attribute", "elsewhere"):
        model = script(kind)
        left.clear()
        gc.collect()
        stays += [kind] if model() is not None else []
    return stays


def test_a_model_goes_with_what_holds_it() -> None:
    """Autograd holds hooks of lamina's, and the garbage collector does not see what autograd holds."""
    assert run_ranks(2, what_stays) == [[], []]
