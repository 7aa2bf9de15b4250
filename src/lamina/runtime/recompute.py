"""Recomputing activations in backward, unit by unit.

torch's checkpoint around a whole unit would gather it twice for one backward; here it lies inside the unit's window:
the weights that backward needs anyway are there when the forward runs again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lamina.errors import UsageError

_aten = torch.ops.aten
SAVED_BY_SELECTIVE = frozenset(
    {
        _aten.mm.default,
        _aten.bmm.default,
        _aten.addmm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten.convolution.default,
    }
)


def check_recompute(choice: str | int) -> None:
    if choice in ("none", "full", "selective") or (isinstance(choice, int) and not isinstance(choice, bool) and choice > 0):
        return
    raise UsageError(f"recompute={choice!r}: use 'none', 'full', 'selective', or n for every n-th block")


def apply_recompute(choice: str | int, blocks: Sequence[nn.Module]) -> None:
    """Let the forwards of the chosen blocks run again in backward."""
    if choice == "none":
        return
    every = choice if isinstance(choice, int) else 1
    for module in blocks[::every]:
        _recompute(module, selective=choice == "selective")


def _recompute(module: nn.Module, selective: bool) -> None:
    inner = module.forward
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, **options, **kwargs)

    module.forward = forward  # type: ignore[method-assign]


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_BY_SELECTIVE else CheckpointPolicy.PREFER_RECOMPUTE
