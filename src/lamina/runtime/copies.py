"""`copy.deepcopy` of a sharded model: an independent model on the same groups.

A runtime cannot be copied (process groups, slots that saved tensors point into), and a copy cannot be given one while
it is being made. So the copy's hooks are placeholders that remember the original's plans; the copy's first forward
turns them into a runtime of its own, around the values that were copied. A copy that was made inside `gathered()` holds
whole tensors: it is a plain module, and its first forward takes the placeholders off.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import nn

from lamina.core.control import Control
from lamina.core.shard_tensor import Shard
from lamina.errors import StateError
from lamina.runtime.access import LENT
from lamina.runtime.assemble import RUNTIMES, Runtime, build_engine, build_units_of_copy, place_slots, register_hooks
from lamina.runtime.hooks import EntryPoint, ModuleHooks, add_entry_point
from lamina.runtime.late_peers import wait_for_peers
from lamina.runtime.newcomers import Newcomers, parameters_beside
from lamina.runtime.publishing import open_peers


class CopiedHooks:
    """Stands for the hooks of one copied model until its first forward; one object for all of its modules.

    A copied bound method is `ModuleHooks.before` with this object as `self`: it opens the runtime, and everything else
    is answered by the hooks that the runtime has made.
    """

    def __init__(self, original: Runtime) -> None:
        self.original = original
        self.was_gathered = bool(LENT) and _is_lent(original.model())
        self.live: ModuleHooks | _TakenOff | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedHooks:
        made = copied_hooks(self.original, memo)
        if isinstance(self.live, _TakenOff):
            made.live = self.live
        return made

    def open(self, module: nn.Module, entry: str, call: FrameType) -> None:
        """The first forward of the copy begins."""
        make_plain(module)
        if isinstance(self.live, _TakenOff):
            return
        if self.original.refusal:
            raise StateError(self.original.refusal)
        self._check_root(module)
        revive(module, self.original)
        self.live = live = RUNTIMES[module].hooks[""]
        live.open(module, entry, call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.live, name)

    def _check_root(self, module: nn.Module) -> None:
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        if not {entry.path for unit in self.original.units for entry in unit.entries} <= names:
            raise StateError(
                f"this {type(module).__name__} is a part of a copied sharded model that has not "
                "run yet: call the copied "
                "model once before its parts"
            )


class _TakenOff:
    """What the call in which they were taken off still asks of hooks."""

    last = compute = None

    def come_last(self, module: nn.Module) -> None:
        pass

    def take_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    def close(self, output: Any) -> None:
        pass

    def settle(self, module: nn.Module, args: Any, output: Any) -> None:
        pass


def make_plain(model: nn.Module) -> None:
    """Take the placeholders off copies that were made inside `gathered()`: the model, or parts of it."""
    for module in model.modules():
        hooks = _placeholders_of(module)
        if hooks is None or not (isinstance(hooks.live, _TakenOff) or _is_whole(module, hooks)):
            continue
        hooks.live = _TakenOff()
        for each in module.modules():
            _remove_placeholders(each)
            for name in hooks.original.entry_points:
                if isinstance(each.__dict__.get(name), EntryPoint):
                    del each.__dict__[name]
            for param in each._parameters.values():
                if type(param) is torch.Tensor:
                    param.__class__ = nn.Parameter  # the same object: an optimizer may hold it


def _is_whole(module: nn.Module, hooks: CopiedHooks) -> bool:
    """Whether the copy was made inside `gathered()`. Of half of it, it raises: the rest is this rank's part.

    Its parameters may have been replaced since, as by torch's fusion of layers.
    """
    if _is_lent(module):
        raise StateError(
            f"this {type(module).__name__} is a copy of a sharded model and runs for the first time inside "
            "lamina.gathered(): call it once before, outside"
        )
    kinds = set(map(type, module.parameters()))
    if torch.Tensor in kinds and Shard in kinds:
        raise StateError(
            f"this {type(module).__name__} was copied while a part of the model was gathered: copy it inside "
            "`with lamina.gathered(model):` for a plain copy, outside for a sharded one"
        )
    return torch.Tensor in kinds or (hooks.was_gathered and Shard not in kinds)


def _is_lent(module: nn.Module | None) -> bool:
    """Whether `gathered()` shows its tensors in this module now."""
    return module is not None and not LENT.isdisjoint(map(id, module.parameters()))


def copied_hooks(runtime: Runtime, memo: dict[int, Any]) -> CopiedHooks:
    """The placeholder for one deepcopy of a model, the same for all of its modules."""
    key = id(runtime)
    if key not in memo:
        memo[key] = CopiedHooks(runtime)
    return memo[key]


def revive(model: nn.Module, old: Runtime) -> None:
    """Give a copied model its runtime. Collective: every rank calls its copy."""
    for module in model.modules():
        _remove_placeholders(module)
    with torch.inference_mode(False), torch.no_grad():
        control = Control(old.control.group, old.mesh.rank, old.mesh.world, f"copy-{old.control.name}-{next_copy()}")
        if old.mesh.share.lease is not None:
            old.mesh.share.lease.groups.used_by.append(control.key)
        units = build_units_of_copy(model, old)
        peers = None
        if old.transport == "peer" and not old.late_note:
            peers = open_peers(
                control, old.mesh, [u.layout for u in units], [u.mesh for u in units], old.precision.wire
            )
        arena = place_slots(units, old.packing, old.device)
        engine = build_engine(units, old.mesh, control, old.packing.slots, old.precision, peers)
    hooks = register_hooks(model, units, engine, old.precision)
    for name in old.entry_points:
        model.__dict__.pop(name, None)
        add_entry_point(hooks[""], model, name)
    RUNTIMES[model] = replace(
        old,
        model=weakref.ref(model),
        control=control,
        engine=engine,
        units=units,
        arena=arena,
        transport="c10d" if peers is None else "peer",
        transport_note=old.late_note or old.transport_note,
        hooks=hooks,
        ignored=parameters_beside(model, units),
        adopted=(),  # in the copy, all lie in one arena
        adopted_arena=None,
    )
    wait_for_peers(RUNTIMES[model])
    let_hooks_know(RUNTIMES[model])


def let_hooks_know(runtime: Runtime) -> None:
    """Of the units and the runtime that there are now."""
    model = runtime.model()
    runtime.engine.gradients.tokens.model = runtime.model
    if model is not None and runtime.mesh.world > 1:
        runtime.engine.newcomers = Newcomers(model, runtime.units)
    for hooks in runtime.hooks.values():
        hooks.copy = lambda memo, runtime=runtime: copied_hooks(runtime, memo)


_copies = 0


def next_copy() -> int:
    """A number for the copy, the same on all ranks."""
    global _copies
    _copies += 1
    return _copies


def has_placeholders(module: nn.Module) -> bool:
    return _placeholders_of(module) is not None


def _placeholders_of(module: nn.Module) -> CopiedHooks | None:
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, CopiedHooks)), None)


def _remove_placeholders(module: nn.Module) -> None:
    for registry in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(registry.items()):
            if isinstance(getattr(hook, "__self__", None), CopiedHooks):
                del registry[key]
                for marks in (
                    module._forward_pre_hooks_with_kwargs,
                    module._forward_hooks_with_kwargs,
                    module._forward_hooks_always_called,
                ):
                    marks.pop(key, None)
