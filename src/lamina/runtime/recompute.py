"""Recomputing activations in backward, unit by unit.

torch's checkpoint around a whole unit would gather it twice for one backward; here it lies inside the unit's window:
the weights that backward needs anyway are there when the forward runs again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    is_count = isinstance(choice, int) and not isinstance(choice, bool) and choice > 0
    if choice in ("none", "full", "selective") or is_count:
        return
    raise UsageError(f"recompute={choice!r}: use 'none', 'full', 'selective', or n for every n-th block")


def apply_recompute(choice: str | int, blocks: Sequence[nn.Module]) -> None:
    """Let the forwards of the chosen blocks run again in backward."""
    if choice == "none":
        return
    every = choice if isinstance(choice, int) else 1
    for module in blocks[::every]:
        module.forward = RecomputedForward(module.forward, choice == "selective")  # type: ignore[method-assign]


@dataclass
class RecomputedForward:
    """A forward that runs again in backward. An object, not a closure: a deepcopy of the model copies `inner` too."""

    inner: Callable[..., Any]
    selective: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        if self.selective:
            kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_BY_SELECTIVE else CheckpointPolicy.PREFER_RECOMPUTE
