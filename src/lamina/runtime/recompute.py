"""Recomputing activations in backward, unit by unit.

torch's checkpoint around a whole unit would gather it twice for one backward; here it lies inside the unit's window:
the weights that backward needs anyway are there when the forward runs again. What else it finds then:
second_forwards.py.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lamina.core.slots import outlived
from lamina.core.uncompiled import interpreted, uncompiled
from lamina.errors import StateError, UsageError
from lamina.runtime.assemble import RUNTIMES
from lamina.runtime.insides import Insides
from lamina.runtime.second_forwards import Found, SecondForwards

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


def apply_recompute(choice: str | int, modules: Mapping[str, nn.Module], blocks: Sequence[str]) -> None:
    """Let the forwards of the chosen blocks, of these names, run again in backward."""
    if choice == "none":
        return
    every = choice if isinstance(choice, int) else 1
    for name in blocks[::every]:
        module = modules[name]
        module.forward = RecomputedForward(module, name, choice == "selective")  # type: ignore[method-assign]


class RecomputedForward:
    """A module's forward, to run again in backward. The module holds it; neither it nor a graph holds the module."""

    def __init__(self, module: nn.Module, name: str, selective: bool) -> None:
        self.module, self.name, self.selective = weakref.ref(module), name, selective
        self.second_forwards = SecondForwards()
        self.replaced: Callable[..., Any] | None = vars(module).get("forward")  # None: the class's own forward runs

    def __getstate__(self) -> tuple[Any, ...]:
        """For copies and pickles of the module."""
        return self.module(), self.name, self.selective, self.replaced

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        module, self.name, self.selective, self.replaced = state
        self.module, self.second_forwards = weakref.ref(module), SecondForwards()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        in_transform = torch._C._are_functorch_transforms_active()  # torch's checkpoint cannot be mapped
        if in_transform or not torch.is_grad_enabled():
            return self.run(args, kwargs)
        contexts: dict[str, Any] = {"context_fn": _selective_contexts} if self.selective else {}
        run = functools.partial(_run_selectively if self.selective else _run, weakref.ref(self), [])
        return checkpoint(run, *args, use_reentrant=False, **contexts, **kwargs)

    def run_first(self, found: list[Found], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """And tell what it has found, before anything of it has run: a backward inside may run it again."""
        module = self.module()
        assert module is not None
        with _disable_current_modes():  # to note that is no operation of the forward
            found.append(self.second_forwards.find(module, args, kwargs))
        result = self.run(args, kwargs)
        with _disable_current_modes():
            self.second_forwards.learn(found[0])
        return result

    def run_again(self, found: Found, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in found.written():
            if not _is_gathered(tensor):
                raise StateError(
                    f"the forward of `{self.name}` runs again in backward, and a tensor of shape {tuple(tensor.shape)} "
                    f"that it finds then ({_where(tensor, args, kwargs)}) has been written to in place since it began: "
                    "write to a copy (`x.clone()`, `x = x + y` for `x += y`), or choose other blocks in recompute="
                )
        self.second_forwards.learn_late(found)
        with found.put_back():
            return self.run(args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.module()
        assert module is not None
        return (
            type(module).forward(module, *args, **kwargs) if self.replaced is None else self.replaced(*args, **kwargs)
        )


@interpreted
def _run(reference: weakref.ref[RecomputedForward], found: list[Found], *args: Any, **kwargs: Any) -> Any:
    """What torch's checkpoint hangs on the graph. `found` is empty before the first forward."""
    forward = reference()
    if forward is None:
        raise outlived("a recomputed block")
    if torch.compiler.is_compiling():  # a forward that changes anything is left to the interpreter, and comes again
        return forward.run(args, kwargs)
    return forward.run_again(found[0], args, kwargs) if found else forward.run_first(found, args, kwargs)


@uncompiled
def _run_selectively(reference: weakref.ref[RecomputedForward], found: list[Found], *args: Any, **kwargs: Any) -> Any:
    """What is kept is told by operations that run, which the compiler does not follow."""
    return _run(reference, found, *args, **kwargs)


def _is_gathered(tensor: Tensor) -> bool:
    """Whether it lies in memory that units are gathered into."""
    storage = tensor.untyped_storage()._cdata
    slots = (slot for runtime in RUNTIMES.values() for unit in runtime.units for slot in unit.slots)
    return any(storage in (slot.storage, slot.buffer.untyped_storage()._cdata) for slot in slots)


def _where(tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    names = [(f"argument {number}", value) for number, value in enumerate(args)]
    names += [(f"argument `{name}`", value) for name, value in kwargs.items()]
    for name, value in names:
        held: list[Tensor] = []
        if any(each is tensor for each in (*Insides([value], held.append).tensors, *held)):
            return name
    return "in a buffer or an attribute of its modules"


def _selective_contexts() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """For the first forward, and for the one in backward."""
    keeping, giving = create_selective_checkpoint_contexts(_policy)
    return _nested(keeping, CopyOnWrite(keeping)), giving


@contextlib.contextmanager
def _nested(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


class CopyOnWrite(TorchDispatchMode):
    """Copies a kept product before it is written in place.

    torch keeps the tensor itself. If the forward writes to it, the second forward would start from what was written:
    torch names that where it can see it, and not where the write goes through a view that does not share the version
    counter, as inside a GRU: there gradients are wrong without an error.
    """

    def __init__(self, keeping: Any) -> None:
        super().__init__()
        self.keeping = keeping

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op._schema.is_mutable:
            for argument, value in zip(op._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._save_what_lies_in(value)
            for argument in op._schema.arguments:
                if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write:
                    self._save_what_lies_in(kwargs[argument.name])
        return op(*args, **kwargs)

    def _save_what_lies_in(self, written: Any) -> None:
        places = {leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves(written) if isinstance(leaf, Tensor)}
        for entries in self.keeping.storage.values():
            for entry in entries.values() if isinstance(entries, dict) else entries:
                for kept in pytree.tree_leaves(entry):
                    value = getattr(kept, "val", None)
                    if isinstance(value, Tensor) and value.untyped_storage()._cdata in places:
                        with _disable_current_modes():  # the copy is no operation of the forward
                            kept.val = value.clone()
                        kept.version = kept.val._version


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_BY_SELECTIVE else CheckpointPolicy.PREFER_RECOMPUTE
