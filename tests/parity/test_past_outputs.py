"""Backwards that come into a unit past its outputs: by attributes, hooks on layers inside, lists of the user's.

Auxiliary losses, losses of features, heads on detached features. What lamina finds equals one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from parity.leaving import BLOCKS, WAYS, batch, features, net, run
from parity.reference import TOLERANCE, gradient_deviation


def hear(model: nn.Module) -> list[Tensor]:
    heard: list[Tensor] = []
    for block in list(model)[:BLOCKS]:
        block.down.register_forward_hook(lambda module, args, output: heard.append(output))
    return heard


# Each gives the losses of one rank's batch, to be run backward one after the other.


def of_attribute(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    model(x)
    return [features(model)[1].square().mean()]


def of_first_attribute(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    """No unit's output is on the way of this backward."""
    model(x)
    return [features(model)[0].square().mean()]


def of_all_attributes(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    model(x)
    return [torch.stack([each.square().mean() for each in features(model)]).sum()]


def of_attribute_first(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    y = model(x)
    return [features(model)[1].square().mean(), y.square().mean()]


def of_output_first(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    y = model(x)
    return [y.square().mean(), features(model)[1].square().mean()]


def of_late_attribute(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    for block in list(model)[:BLOCKS]:
        block.keep = "attribute" if step == 4 else ""
    y = model(x)
    return [features(model)[1].square().mean() if step == 4 else y.square().mean()]


def of_late_attribute_of_layer(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    """A layer of torch's own gets it, from the fifth step on."""
    for block in list(model)[:BLOCKS]:
        block.keep = "inside" if step == 4 else ""
    y = model(x)
    return [model[1].up.kept.square().mean() if step == 4 else y.square().mean()]


def of_hooks(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    if step == 0:
        model.heard = hear(model)
    model.heard.clear()
    y = model(x)
    return [model.heard[1].square().mean() + (y.sum() if step == 2 else 0)]


def of_late_hooks(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    if step != 1:
        return of_hooks(model, x, step)
    heard = hear(model)
    model(x)
    return [heard[1].square().mean() + 2 * model.heard[-1].square().mean()]


def of_frozen_features(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    """The loss is that of the input's features; only the first block trains."""
    model[1:].requires_grad_(False)
    return of_hooks(model, x, step)


def of_layer(
    model: nn.Module, keep: Callable[[nn.Module, Callable[[Tensor], None]], Any]
) -> Callable[[Tensor], Tensor]:
    """A loss of what hooks on a layer of the second block keep of one forward."""

    def loss(x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        handles = keep(model[1].down, kept.append)
        model(x)
        for handle in handles if isinstance(handles, tuple) else (handles,):
            handle.remove()
        return kept[0].square().mean()

    return loss


def of_what_a_hook_is_given(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    return [of_layer(model, lambda m, keep: m.register_forward_hook(lambda _, args, out: keep(args[0])))(x)]


def of_what_comes_in(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    return [of_layer(model, lambda m, keep: m.register_forward_pre_hook(lambda _, args: keep(args[0])))(x)]


def of_what_another_hook_changes(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    def hang(layer: nn.Module, keep: Callable[[Tensor], None]) -> Any:
        first = layer.register_forward_hook(lambda _, args, out: keep(out))
        return first, layer.register_forward_hook(lambda _, args, out: 2 * out.detach())

    return [of_layer(model, hang)(x)]


def of_output_of_layer(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    return [of_layer(model, lambda m, keep: m.register_forward_hook(lambda _, args, out: keep(out)))(x)]


def of_checkpoint(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    """The hook sees a tensor that gets its node afterwards, and the output is cut off."""
    kept: list[Tensor] = []
    handle = model[1].inner.register_forward_hook(lambda _, args, out: kept.append(out))
    model(x)
    handle.remove()
    return [kept[0].square().mean()]


def of_hook_on_all(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    def hang(layer: nn.Module, keep: Callable[[Tensor], None]) -> Any:
        def look(module: nn.Module, args: Any, out: Tensor) -> None:
            if module is layer:
                keep(out)

        return nn.modules.module.register_module_forward_hook(look)

    return [of_layer(model, hang)(x)]


SEEN: dict[str, tuple[str, Callable[[nn.Module, Tensor, int], list[Tensor]]]] = {
    "attribute": ("attribute", of_attribute),
    "attribute of the first": ("attribute", of_first_attribute),
    "container": ("container", of_all_attributes),
    "attribute, then output": ("attribute", of_attribute_first),
    "output, then attribute": ("attribute", of_output_first),
    "head on a detached feature": ("head", of_output_first),
    "late attribute": ("", of_late_attribute),
    "hooks": ("", of_hooks),
    "more hooks": ("", of_late_hooks),
    "frozen features": ("", of_frozen_features),
    "dataclass": ("dataclass", of_first_attribute),
    "object": ("object", of_first_attribute),
    "buffer": ("buffer", of_first_attribute),
    "0 at first": ("zero", of_late_attribute),
    "attribute of a layer of torch's": ("", of_late_attribute_of_layer),
    "list of the model": ("above", of_attribute),
    "list that is given": ("argument", of_attribute),
    "given to a layer": ("", of_what_a_hook_is_given),
    "before a layer": ("", of_what_comes_in),
    "changed by another hook": ("", of_what_another_hook_changes),
    "reentrant": ("reentrant", of_checkpoint),
    "hook on all": ("", of_hook_on_all),
    "unit in a unit": ("", of_output_of_layer),
}

NESTED = ("unit in a unit", "list that is given")  # layers of a block are units, too


def deviations(cases: list[str]) -> dict[str, float]:
    """Of gradients, by case and way."""
    found, rank, world = {}, dist.get_rank(), dist.get_world_size()
    for name in cases:
        keep, make = SEEN[name]
        number = list(SEEN).index(name)
        for way in WAYS if number < 10 else (WAYS[number % 4], WAYS[(number + 1) % 4]):
            plain = net(keep)
            inner = [f"{number}.down" for number in range(BLOCKS)] if name in NESTED else []
            model = lamina.shard(net(keep), units=[*map(str, range(BLOCKS + 1)), *inner], **way)
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
            worst = 0.0
            for step in range(5):
                for other in range(world):
                    run(plain, make(plain, batch(other, step), step), world)
                run(model, make(model, batch(rank, step), step), 1)
                wanted = {n: p.grad for n, p in plain.named_parameters()}
                worst = max(worst, gradient_deviation(model, wanted))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            found[f"{name}, {way}"] = worst
    return found


@pytest.mark.parametrize("cases", [list(SEEN)[:5], list(SEEN)[5:10], list(SEEN)[10:16], list(SEEN)[16:]])
def test_gradients_are_those_of_one_process(cases: list[str]) -> None:
    for found in run_ranks(2, deviations, cases):
        assert max(found.values()) <= TOLERANCE, {name: worst for name, worst in found.items() if worst > TOLERANCE}
