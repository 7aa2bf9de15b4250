"""What `p.grad` is while sums of micro-batches wait to be reduced.

A gradient that is not complete on any rank has no value to show. With None in its place `zero_grad()` would find
nothing to clear, and the sums of a step that was given up (an error, a loss that was not finite) would go into the next
one. So a place is held, without memory: clearing it gives the sums up, as in torch; whatever reads or writes it is told
that the last micro-batch is still to come.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lamina.errors import StateError

_ABOUT = frozenset(
    {"shape", "device", "dtype", "layout", "requires_grad", "grad_fn", "is_leaf", "is_sparse", "is_cuda"}
)
_ASIDE = frozenset(
    {Tensor.requires_grad_, Tensor.detach_, Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point}
)


class PendingGradient(Tensor):
    """Holds the place of one parameter's gradient; has its shape, dtype and device, and no values."""

    parameter_name: str
    given_up: bool  # zeroed in place

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ASIDE or (func.__name__ == "__get__" and getattr(func.__self__, "__name__", "") in _ABOUT):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        pending = next(value for value in _flat(args) if type(value) is PendingGradient)
        if func is Tensor.zero_:
            pending.given_up = True
            return pending
        if func is Tensor.__repr__:
            return f"<gradient of `{pending.parameter_name}`: complete after the last micro-batch>"
        raise StateError(
            f"the gradient of `{pending.parameter_name}` is not complete: sums of earlier micro-batches wait for the "
            "last one, inside `lamina.accumulate(model, last=True)`. Step, clip and read gradients after it; to give "
            "this step up, call `optimizer.zero_grad()` or `model.zero_grad()`"
        )


def pending_gradient(param: Tensor, name: str) -> PendingGradient:
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
        pending = made.as_subclass(PendingGradient)
    pending.parameter_name, pending.given_up = name, False
    return pending


def _flat(values: Any) -> Any:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
