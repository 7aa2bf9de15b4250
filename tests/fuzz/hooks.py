"""Hooks of the user's on parameters and modules: the same, by name, on the sharded model and on the plain one.

All are linear in what they get, so that it does not matter whether a gradient is the mean of all ranks or one rank's.
"""

from __future__ import annotations

import random
from typing import Any

from torch import Tensor, nn

from fuzz.layers import Layer


def add_hooks(model: nn.Module, seed: int) -> None:
    draw = random.Random(f"hooks {seed}")
    params = sorted(name for name, p in model.named_parameters() if p.requires_grad and p.numel())
    for name in draw.sample(params, min(2, len(params))):
        model.get_parameter(name).register_hook(_scale)
    layers = sorted(name for name, module in model.named_modules() if isinstance(module, Layer))
    for name in draw.sample(layers, min(2, len(layers))):
        module, kind = model.get_submodule(name), draw.choice(["before", "after", "backward"])
        if kind == "before":
            module.register_forward_pre_hook(_change_input)
        elif kind == "after":
            module.register_forward_hook(_change_output)
        else:
            module.register_full_backward_hook(_change_gradient)
    _hook_tables(model, random.Random(f"hooks of tables {seed}"))


def _hook_tables(model: nn.Module, draw: random.Random) -> None:
    names = sorted(
        name for name, module in model.named_modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    )
    for name in names:
        if draw.random() < 0.5:
            after = draw.choice([_scale_rows, _scale_rows_in_place, _scale_gradient_of_rows, _look])
            model.get_submodule(name).register_forward_hook(after)


def _scale(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def _change_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[0] * 0.75, *args[1:]


def _change_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + 0.25 * args[0]


def _change_gradient(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    return tuple(None if gradient is None else gradient * 0.5 for gradient in grad_input)


def _scale_rows(table: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 0.75


def _scale_rows_in_place(table: nn.Module, args: Any, output: Tensor) -> None:
    output.mul_(0.75)


def _scale_gradient_of_rows(table: nn.Module, args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(_scale)


def _look(table: nn.Module, args: Any, output: Tensor) -> None: ...
