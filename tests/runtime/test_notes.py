"""Hooks and freezing are noticed however and whenever they are said: parameters tell, nobody looks at every step."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lamina
from harness import run_ranks

WIDTH = 6
Hook = Callable[[Tensor], Tensor | None]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])


def sharded(model: nn.Module, strategy: str) -> nn.Module:
    return lamina.shard(model, strategy, units=["0", "1", "2"], slots=2)


def step(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)).square().mean().backward()


def as_method(param: Tensor, hook: Hook) -> None:
    param.register_hook(hook)


def as_function(param: Tensor, hook: Hook) -> None:
    torch.Tensor.register_hook(param, hook)


def as_dict(param: Tensor, hook: Hook) -> None:
    param._backward_hooks = OrderedDict({0: hook})


def as_another(param: Tensor, hook: Hook) -> None:
    param.register_hook(lambda grad: None).remove()
    param.register_hook(hook)


def after_all(param: Tensor, hook: Hook) -> None:
    def halve(param: Tensor) -> None:
        assert param.grad is not None
        made = hook(param.grad)
        assert made is not None
        param.grad.copy_(made)

    param.register_post_accumulate_grad_hook(halve)


WAYS = [as_method, as_function, as_dict, as_another, after_all]
MOMENTS = ["before", "after", "between steps", "inside the forward", "of a copy"]


def deviation_with_hook(hang: Callable[[Tensor, Hook], None], moment: str, strategy: str) -> float:
    """Of the hooked gradient, which is halved, from half of one process's."""
    plain, model, calls = net(), net(), [0]
    step(plain)

    def hook(grad: Tensor) -> Tensor:
        calls[0] += 1
        return grad * 0.5

    if moment == "before" and hang is not as_dict:  # a dict alone is nothing to autograd where a graph may come
        hang(model[1].weight, hook)
    model = sharded(model, strategy)
    if moment == "between steps":
        step(model)
        step(model)
    if moment == "of a copy":
        step(model)
        model = copy.deepcopy(model)
    param = model[1].weight
    if moment == "inside the forward":
        handle = model[2].register_forward_pre_hook(lambda *_: hang(param, hook))
        step(model)
        handle.remove()
    else:
        if moment != "before" or hang is as_dict:
            hang(param, hook)
        step(model)
    assert calls == [1] and param.grad is not None
    full = param.grad.full() if isinstance(param.grad, lamina.Shard) else param.grad
    return float((full - plain[1].weight.grad / 2).abs().max())


@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
def test_hooks_are_called_however_they_were_hung(strategy: str) -> None:
    assert max(run_ranks(2, all_ways, strategy)) <= 1e-6


def all_ways(strategy: str) -> float:
    return max(deviation_with_hook(hang, moment, strategy) for hang in WAYS for moment in MOMENTS)


def by_method(param: Tensor, flag: bool) -> None:
    param.requires_grad_(flag)


def by_attribute(param: Tensor, flag: bool) -> None:
    param.requires_grad = flag


def past_the_type(param: Tensor, flag: bool) -> None:
    """Nobody tells of this; the next forward looks."""
    torch.Tensor.requires_grad_(param, flag)


def grads_there(strategy: str, freeze: Callable[[Tensor, bool], None]) -> list[bool]:
    """After steps in which a weight trains, is frozen, and trains again; then frozen inside the forward, and not."""
    model = sharded(net(), strategy)
    param, found = model[1].weight, []
    for flag in (True, False, True):
        freeze(param, flag)
        step(model)
        found.append(param.grad is not None)
    if freeze is past_the_type:
        return [*found, False, True]
    handle = model[0].register_forward_hook(lambda *_: freeze(param, False))
    step(model)
    found.append(param.grad is not None)
    handle.remove()
    freeze(param, True)
    step(model)
    return [*found, param.grad is not None]


@pytest.mark.parametrize("freeze", [by_method, by_attribute, past_the_type])
@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
def test_freezing_is_followed_however_it_was_said(strategy: str, freeze: Callable[[Tensor, bool], None]) -> None:
    assert run_ranks(2, grads_there, strategy, freeze) == [[True, False, True, False, True]] * 2


def test_what_a_shard_says_of_hooks_and_freezing_is_what_torch_says() -> None:
    from lamina.core.shard_spec import Notes, ShardSpec

    notes = Notes()
    shard = lamina.Shard(torch.ones(4), ShardSpec("a", torch.Size([4]), ((0, 4),), 0, None, notes=notes), True)
    plain = torch.ones(4, requires_grad=True)
    assert shard._backward_hooks is None and shard.requires_grad is True and not notes.are_hooked
    for each in (shard, plain):
        each.register_hook(print).remove()
        assert each.requires_grad_(False) is each
    assert shard._backward_hooks == plain._backward_hooks and shard.requires_grad == plain.requires_grad
    assert notes.are_hooked and notes.freezes == 1
    with pytest.raises(RuntimeError, match="floating point"):
        lamina.Shard(torch.ones(4, dtype=torch.int32), shard.spec).requires_grad_()
