"""Which dtype each parameter computes in, is mastered in, and travels in.

`torch.autocast` casts again at every operation and leaves 32-bit gathers; casting the whole model loses the masters.
Here masters are wide, the gathered copy is narrow, patterns stay wide within the same unit, and inputs are cast once at
each unit's border, never in place. Buffers are not touched.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from lamina.core.layout import ParamSpec
from lamina.core.strategy import Factors
from lamina.errors import UsageError

SHORT_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Precision:
    """Dtypes of a sharded model.

    Args:
        compute: dtype of forward and backward; None: each parameter's own.
        keep: names or patterns of parameters that compute in the wide dtype all the same, frozen ones too; their
            modules get wide inputs, and their outputs are cast back.
        output: dtype of the model's floating outputs; None: as they come.
        wire: dtype in which gradients travel; None: the dtype they are computed in (sums are in the master's dtype).
        master: dtype of what the optimizer updates, at least float32; wider parameters keep theirs.
        halves: keep each fp32 master as the bf16 weight that peers read and 16 bits more: 2 bytes less an element that
            this rank owns. None: on GPUs, where peers read weights and a `lamina.optim.AdamW(max_norm=...)` updates
            all of a unit. True needs `transport="peer"` ("auto" is), and as many ranks for parameters as for optimizer
            state; on one rank there is nothing to save. See docs/decisions/halves.md.
    """

    compute: torch.dtype | None = None
    keep: Sequence[str] = ("*norm*",)
    output: torch.dtype | None = None
    wire: torch.dtype | None = None
    master: torch.dtype = torch.float32
    halves: bool | None = None


def resolve_precision(given: str | Precision | None) -> Precision:
    if given is None:
        return Precision(keep=())
    if isinstance(given, Precision):
        return given
    if isinstance(given, str) and given in SHORT_NAMES:
        return Precision(compute=SHORT_NAMES[given])
    raise UsageError(
        f"precision={given!r}: use one of {', '.join(map(repr, SHORT_NAMES))}, or "
        "lamina.Precision(compute=torch.bfloat16)"
    )


def check_halves(precision: Precision, factors: Factors, transport: str) -> None:
    """Refuse what cannot be halved. See runtime/halved.py.

    Raises:
        UsageError: other dtypes than bf16 and fp32; a strategy or transport under which nobody reads published weights.
    """
    if not precision.halves:
        return
    if precision.compute is not torch.bfloat16 or precision.master is not torch.float32:
        raise UsageError(
            f"Precision(halves=True, compute={precision.compute}, master={precision.master}): the upper half of an "
            "fp32 number is a bf16 one. Type compute=torch.bfloat16 and master=torch.float32, or leave halves out"
        )
    if factors.world == 1:
        return
    if transport == "c10d":
        raise UsageError(
            "Precision(halves=True) keeps masters beside the weights that peers read, and with transport='c10d' they "
            "read none: type transport='peer', or leave halves out"
        )
    if not factors.shards_parameters or factors.optimizer != factors.params:
        raise UsageError(
            f"Precision(halves=True) needs parameters that are split like their optimizer state, not over "
            f"{factors.params} and {factors.optimizer} ranks: type strategy='zero3' or 'hsdp', or leave halves out"
        )


def spec_of(name: str, param: nn.Parameter, precision: Precision) -> ParamSpec:
    """The dtypes of one parameter. Integers and frozen parameters keep their own bytes as masters."""
    dtype = param.dtype
    compute = master = dtype
    if dtype.is_floating_point:
        if param.requires_grad:
            master = torch.promote_types(dtype, precision.master) if dtype.itemsize < 8 else dtype
        if precision.compute is not None:
            compute = precision.compute
            if is_kept(name, precision):  # wide also where it is frozen and came narrow: its module computes so
                compute = dtype if dtype.itemsize == 1 else torch.promote_types(dtype, precision.master)
            elif not param.requires_grad and compute.itemsize > dtype.itemsize:
                compute = dtype
    return ParamSpec(name, tuple(param.shape), compute, master, param.requires_grad)


def is_kept(name: str, precision: Precision) -> bool:
    return any(fnmatch(name, pattern) for pattern in precision.keep)


def cast_tree(value: Any, dtype: torch.dtype) -> Any:
    """A copy of a nested value with its floating tensors cast; the value itself where nothing changes."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype is not dtype else value
    if isinstance(value, dict) and type(value) is dict:
        cast: Any = {key: cast_tree(item, dtype) for key, item in value.items()}
        return cast if any(cast[key] is not value[key] for key in value) else value
    if isinstance(value, (list, tuple)):
        items = [cast_tree(item, dtype) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return _cast_object(value, dtype)


def _cast_object(value: Any, dtype: torch.dtype) -> Any:
    """Registered containers, such as the outputs of transformers."""
    from torch.utils import _pytree as pytree

    if isinstance(value, (type(None), bool, int, float, str)):
        return value
    leaves, spec = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return value
    cast = [cast_tree(leaf, dtype) for leaf in leaves]
    return value if all(a is b for a, b in zip(cast, leaves, strict=True)) else pytree.tree_unflatten(cast, spec)


def wide_dtype(module: nn.Module, precision: Precision) -> torch.dtype:
    """The dtype in which a module whose parameters are all kept computes."""
    wide = precision.master
    for param in module.parameters(recurse=False):
        if param.dtype.is_floating_point:
            wide = torch.promote_types(wide, param.dtype)
    return wide


@dataclass
class WideForward:
    """A module whose parameters all stay wide computes wide: inputs are cast, outputs cast back to what came in.

    For modules whose forward somebody has replaced. An object, not a closure: in a deepcopy of the model, `inner`
    becomes the copied module's.
    """

    inner: Callable[..., Any]
    wide: torch.dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _computed_wide(self.inner, self.wide, args, kwargs)


def _computed_wide(inner: Callable[..., Any], wide: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
    came = next((t.dtype for t in tensors if t.is_floating_point()), None)
    result = inner(*cast_tree(args, wide), **cast_tree(kwargs, wide))
    return result if came is None or came is wide else cast_tree(result, came)


def _wide_method(kind: type[nn.Module], wide: torch.dtype) -> Callable[..., Any]:
    """The forward of a class, computed wide.

    A method, not an object: compiled code asks of an object whether it is the same one, so every layer of a model would
    be compiled by itself, and after eight of them none; of a method it asks whether the function is.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _computed_wide(functools.partial(kind.forward, self), wide, args, kwargs)

    forward.computes_wide = True  # type: ignore[attr-defined]
    return forward


def computes_wide(module: nn.Module) -> bool:
    """Whether `wrap_kept_module` was here before."""
    return isinstance(module.forward, WideForward) or getattr(module.forward, "computes_wide", False)


def wrap_kept_module(module: nn.Module, wide: torch.dtype) -> None:
    """Let a module compute in a wide dtype."""
    own = "forward" in vars(module)
    wrapped = WideForward(module.forward, wide) if own else types.MethodType(_wide_method(type(module), wide), module)
    module.forward = wrapped  # type: ignore[method-assign]
