"""What `lamina.capture` refuses to record: parts of a step, of which a graph would lose the gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import lamina
from harness import run_ranks
from lamina.optim.whole_step import WholeStep
from lamina.runtime.assemble import RUNTIMES

SAID = "put forward, backward, optimizer.step.. and zero_grad.. into one captured function"


def call(function: Callable[[], None]) -> None:
    """As an eager call of a captured function on a GPU."""
    whole = WholeStep(list(RUNTIMES.values()))
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: whole.check_update(optimizer))
    try:
        function()
    finally:
        handle.remove()
    whole.check_end()


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = lamina.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self) -> Tensor:
        return self.model(torch.ones(2, 4)).pow(2).mean()

    def backward(self) -> None:
        self.loss().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.loss()


def whole_steps() -> None:
    one, other = Training(), Training()

    def step() -> None:
        one.backward()
        one.update()

    def step_that_begins_with_zero_grad() -> None:
        one.optimizer.zero_grad()
        one.backward()
        one.optimizer.step()

    def step_of_one_through_another() -> None:
        one.loss().add(other.loss()).backward()
        one.update()

    for function in (step, step_that_begins_with_zero_grad, one.evaluate, step, step_of_one_through_another):
        for _ in range(3):
            call(function)
    other.optimizer.zero_grad()
    one.backward()
    call(one.evaluate)  # gradients are there, and none are made
    if dist.get_world_size() > 1:
        with pytest.raises(lamina.UsageError, match=f"SGD updates `0.weight`, whose gradient comes from out.*{SAID}"):
            call(one.update)
    one.optimizer.zero_grad()
    call(one.update)  # updates nothing
    with pytest.raises(lamina.UsageError, match=f"leaves the gradient of `0.weight` to an optimizer.*{SAID}"):
        call(one.backward)


@pytest.mark.parametrize("world", [1, 2])
def test_parts_of_a_step_are_refused(world: int) -> None:
    run_ranks(world, whole_steps)
