"""Where a module's call meets the engine.

Hooks are registered when the model is sharded: ours is the first before a forward (the weights that older pre-hooks
read are there) and the last after it. A forward that raises leaves by the same door.
"""

from __future__ import annotations

import copy
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from lamina.core.program import FORWARD
from lamina.core.slots import Slot
from lamina.core.uncompiled import guard_hooks, uncompiled
from lamina.errors import LaminaError, StateError
from lamina.runtime.engine import Engine
from lamina.runtime.escapes import FILLED_LATER, Escapes, is_heard
from lamina.runtime.lookups import reads_weights
from lamina.runtime.phase import Phase
from lamina.runtime.precision import cast_tree
from lamina.runtime.unit import Unit
from lamina.runtime.uses import (
    Served,
    Use,
    any_beside,
    count_hooks,
    hides_tensors,
    hook_of,
    hooks_of,
    is_grad_enabled,
    nodes_of_inputs,
    nodes_of_outputs,
    serve_hooks,
    tensors_in,
)

P = ParamSpec("P")

_moments = itertools.count(1)  # of forwards that begin and end
next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]
# `peek_interpreter_stack` makes a stack for a thread that has none, and autograd copies it at every node from then on
are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def _outside_modes(act: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Hide what the runtime does from modes that see every operation.

    Selective recomputation counts the operations of a forward and of its second run: gathers, reductions and messages
    in between are none of them, and need not be the same both times.
    """
    with _disable_current_modes():
        act(*args, **kwargs)


@dataclass(slots=True)
class Frame:
    """One call of a hooked module."""

    module: nn.Module
    owns_phase: bool
    entered: list[tuple[Unit, Slot | None]]  # the units that it opens, and where each one's weights are
    inputs: list[Any]  # autograd nodes
    tensors: list[Tensor]  # differentiable inputs
    hooks_before: int  # that these had
    input_count: int
    error_before: BaseException | None  # being handled by the caller already
    opened: int  # number of the moment
    phase: Phase
    around: Frame | None
    lists: list[Any]  # among the arguments: the forward may append to them
    caught: list[Any]  # nodes of what the user's hooks were given in it
    graphless: list[weakref.ref[Tensor]]  # what they were given that had no node then
    first_node: int = 0  # number that autograd gives the next node


class ModuleHooks:
    """The two hooks of one module, for the units that its forward opens."""

    def __init__(self, engine: Engine, module: nn.Module, units: Sequence[Unit], compute: torch.dtype | None) -> None:
        self.engine, self.units, self.compute = engine, list(units), compute
        self.output: torch.dtype | None = None
        self.frames: list[Frame] = []
        self.copy: Callable[[dict[int, Any]], Any] | None = None  # what stands for them in a copied model
        self.title = type(module).__name__
        self.here = f"inside the forward of {self.title}"
        self.module = weakref.ref(module)
        self.escapes: Escapes | None = None  # made in the first forward with gradients
        self.left: list[Served] = []  # by the forward that has just ended, where others' hooks come behind ours
        self.held: list[tuple[Unit, Slot]] = []  # until theirs have been called
        self.settling: RemovableHandle | None = None  # of a hook of ours behind theirs
        self.last = self._register(module)  # number of our last hook

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        assert self.copy is not None
        return self.copy(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            f"a sharded {self.title} cannot be pickled, as its memory is spread over ranks: save it with "
            "`lamina.save(path, model)`, or pickle `model.state_dict()` inside `with lamina.gathered(model):`"
        )

    def _register(self, module: nn.Module) -> int:
        module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        return module.register_forward_hook(self.after, always_call=True).id

    @uncompiled
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if count_modes():
            _outside_modes(self.open, module, "forward", sys._getframe(1))
        else:
            self.open(module, "forward", sys._getframe(1))
        if next(reversed(module._forward_hooks), None) != self.last:
            self.come_last(module)
        args, kwargs = self.take_inputs(args, kwargs)
        return (args, kwargs) if self.compute is not None else None

    def come_last(self, module: nn.Module) -> None:
        """Others have registered hooks since: see what they will have done, once they have all been called."""
        if self.settling is not None:
            self.settling.remove()
        self.settling = module.register_forward_hook(self.settle, always_call=True)
        self.last = self.settling.id

    @uncompiled
    def settle(self, module: nn.Module, args: Any, output: Any) -> None:
        """Serve hooks that later ones have hung on the outputs; Note [Begin and end] 6."""
        left, self.left = self.left, []
        if left:
            tensors = _tensors_below(output)
            for served in left:
                served.again(tensors, self.engine.reference)
        phase = self.engine.phase
        while self.held:
            self.engine.residency.release(*self.held.pop(), phase is not None and phase.is_backward)

    def take_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast the inputs of the call that has been opened, and note the autograd nodes that made them."""
        if self.compute is not None:
            args, kwargs = cast_tree(args, self.compute), cast_tree(kwargs, self.compute)
        if is_grad_enabled():
            frame, escapes = self.frames[-1], self.escapes
            if escapes is None or escapes.made_for is not self.engine:
                escapes = self._escapes_of(frame.module)
            escapes.listen()
            frame.first_node = next_node()
            for each in (*args, *kwargs.values()) if kwargs else args:  # comprehensions are calls
                if isinstance(each, FILLED_LATER):
                    frame.lists.append(each)
            for tensor in _tensors_below((args, kwargs) if kwargs else args[0] if len(args) == 1 else args):
                if tensor.requires_grad:
                    frame.tensors.append(tensor)
            frame.inputs, frame.input_count = nodes_of_inputs(frame.tensors)
            if len(frame.tensors) > 1:
                hooks_of(frame.inputs, self.engine.reference)
                frame.hooks_before = count_hooks(frame.tensors, self.engine.reference)
        return args, kwargs

    def _escapes_of(self, module: nn.Module) -> Escapes:
        """What notices that something leaves a forward by other ways than its outputs."""
        if self.escapes is not None:
            self.escapes.remove()
        self.escapes = Escapes(module, self.engine, self._catch, opens_window)
        return self.escapes

    def _catch(self, seen: Any) -> None:
        """A hook on a module inside is given this. Only its nodes are noted: tensors may go before the forward ends."""
        if self.frames:
            frame, tensors = self.frames[-1], tensors_in(seen)
            frame.caught += nodes_of_outputs(tensors, ())
            # torch's reentrant checkpoint gives a node to what it has computed without
            frame.graphless += [weakref.ref(tensor) for tensor in tensors if tensor.grad_fn is None]

    @uncompiled
    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.frames or self.frames[-1].module is not module:
            return None  # our own pre-hook raised
        cast = cast_tree(output, self.output) if self.output is not None else output
        if count_modes():
            _outside_modes(self.close, cast)
        else:
            self.close(cast)
        return cast if cast is not output else None

    def open(self, module: nn.Module, entry: str, call: FrameType) -> None:
        """Begin a use of each unit, and the root forward if none is under way; `call` runs as long as the forward."""
        engine = self.engine
        phase = engine.phase
        error = sys.exc_info()[1]
        owns = False
        if phase is None or phase.was_left():
            owns = True
            refuse_transforms(self.title)
            guard_hooks()
            if engine.gatherer.late_peers is not None:
                engine.gatherer.late_peers.look()
                engine = self.engine  # another one, where they have come
            engine.begin_forward(self, f"{self.title}.{entry}", call)
            phase = engine.current()
        else:
            phase.refuse_other_threads()
        while self.frames and self.frames[-1].phase is not phase:
            self.frames.pop()  # of a forward that ended without a word
        entered: list[tuple[Unit, Slot | None]] = []
        has_graph = is_grad_enabled()
        frame = Frame(module, owns, entered, [], [], 0, 0, error, next(_moments), phase, phase.frame, [], [], [])
        phase.frame = frame
        self.frames.append(frame)
        try:
            for unit in self.units:
                slot = engine.enter(unit, FORWARD)
                entered.append((unit, slot))
                if slot is not None:
                    slot.is_saved |= has_graph  # also where the forward will fail
        except BaseException:
            self._abandon(self.frames.pop())
            raise

    def close(self, output: Any) -> None:
        """End the uses; make their backward known to autograd."""
        frame, self.left = self.frames.pop(), []
        frame.phase.frame = frame.around
        error = sys.exc_info()[1]
        failed = error is not None and error is not frame.error_before
        if failed and isinstance(error, LaminaError):
            self._abandon(frame)
            return
        if not failed:
            try:
                self._look_at(frame, output)
            except BaseException:
                self._abandon(frame)
                raise
        for unit, slot in reversed(frame.entered):
            if self.settling is not None and slot is not None and not frame.owns_phase:
                slot.pins += 1
                self.held.append((unit, slot))
            self.engine.leave(unit, slot)
        if frame.owns_phase:
            self.engine.end_forward()

    def _abandon(self, frame: Frame) -> None:
        """After an error of ours: the next root forward starts clean, and until then the model is as between steps."""
        self.engine.phase = None
        if frame.owns_phase:
            for unit in self.engine.units:
                if unit.windows and not unit.plain:
                    unit.swap_out()

    def _look_at(self, frame: Frame, output: Any) -> None:
        """Refuse what would be lost or read too late; watch for the backward."""
        tensors = _tensors_below(output)
        has_graph = is_grad_enabled()
        for unit, slot in frame.entered:
            if slot is not None:
                self._check_aliases(slot, tensors)
                if slot.counter._version != slot.version:
                    unit.refuse_writes(slot, self.here)
                unit.window.check_shown()
        if has_graph:
            self._watch(frame, output, tensors)
        elif frame.around is not None:
            heard = tensors if is_heard(frame.module) else []
            frame.around.graphless += [*frame.graphless, *map(weakref.ref, heard)]

    def _watch(self, frame: Frame, output: Any, tensors: list[Tensor]) -> None:
        nodes = nodes_of_outputs(tensors, frame.inputs, frame.first_node)
        if escaped := self._escaped(frame, output):
            nodes += [node for node in escaped if node not in nodes and node not in frame.inputs]
        if not nodes:
            if hides_tensors(output):
                raise StateError(
                    f"{self.title} returns a {type(output).__name__}, in which lamina finds no "
                    "tensor: its backward could "
                    "not be seen. Return tensors, containers of them, or an object with tensors as attributes"
                )
            return
        engine = self.engine
        closed = next(_moments)
        if escaped:
            self._begin_inside(escaped)
        if frame.owns_phase and engine.newcomers is not None:
            engine.newcomers.unregistered.look(nodes, tensors, frame.first_node, frame.inputs, frame.tensors)
        made = range(frame.first_node, next_node())
        ends, begins = hooks_of(frame.inputs, engine.reference), hooks_of(nodes, engine.reference)
        are_beside = any_beside(frame.tensors, tensors, ends, begins)
        for unit, slot in frame.entered:
            reads = slot is None or not unit.sharded or reads_weights(frame.module, self.after, slot, nodes, tensors)
            use = Use(unit, slot, frame.input_count, frame.opened, closed, reads)
            reference = weakref.ref(use)
            frame.phase.uses.append((made, reference))
            for hook in ends:
                hook.ends.append(reference)
            for hook in begins:
                hook.begins.append(use)
            if (are_beside or self.settling is not None) and slot is not None and unit.sharded:
                others = [t for t in tensors if t.requires_grad and t.grad_fn not in frame.inputs]
                serve_hooks(use, frame.tensors, frame.hooks_before, others, engine.reference)
                if self.settling is not None:
                    self.left.append(Served(use, frame.tensors, frame.hooks_before, others, frame.first_node))

    def _escaped(self, frame: Frame, output: Any) -> list[Any]:
        """Nodes of what has left the forward by other ways than its output. Forwards around it know of them, too."""
        if self.escapes is None:
            return []
        if is_heard(frame.module):
            frame.caught += nodes_of_outputs([*frame.tensors, *tensors_in(output)], ())
        if frame.lists:
            frame.caught += nodes_of_outputs(tensors_in(frame.lists), ())
        if frame.graphless:
            frame.caught += nodes_of_outputs([t for each in frame.graphless if (t := each()) is not None], ())
        escaped = self.escapes.found(frame.caught, frame.first_node)
        if frame.around is not None:
            frame.around.caught += [*frame.caught, *escaped]
            frame.around.graphless += frame.graphless
        return escaped

    def _begin_inside(self, escaped: list[Any]) -> None:
        """What was found here only may have been made in forwards that have ended before."""
        engine = self.engine
        for node in escaped:
            number = node._sequence_nr()
            for made, reference in engine.current().uses:
                if number in made and (use := reference()) is not None:
                    begins = hook_of(node, engine.reference).begins
                    if use not in begins:
                        begins.append(use)

    def _check_aliases(self, slot: Slot, tensors: list[Tensor]) -> None:
        """A view of a full parameter would show another unit's weights after the use."""
        for tensor in tensors:
            if _storage(tensor) == slot.storage:
                raise StateError(
                    f"{self.title} returns its own weight, or a view of it (shape {tuple(tensor.shape)}): the memory "
                    "is used for other weights after the forward. Return `weight.clone()`"
                )


def _tensors_below(value: Any) -> list[Tensor]:
    """What is in a nested value. Inside `torch.vmap` a tensor is a wrapper without a node, around what has one."""
    tensors = [value] if isinstance(value, Tensor) else tensors_in(value)
    if not are_transforms_active():
        return tensors
    found = []
    for tensor in tensors:
        while torch._C._functorch.is_batchedtensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        found.append(tensor)
    return found


def opens_window(module: nn.Module) -> bool:
    """Whether a module's forward is hooked by a sharded model."""
    return any(isinstance(getattr(hook, "__self__", None), ModuleHooks) for hook in module._forward_pre_hooks.values())


def _storage(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # tensor types without storage
        return None


def refuse_transforms(title: str) -> None:
    """`torch.func.grad` and its kin wrap every tensor and forbid gathering inside; so does `torch.jit.trace`."""
    if torch._C._is_tracing():
        raise StateError(f"{title} was called inside torch.jit.trace: trace the model before lamina.shard()")
    top = torch._C._functorch.peek_interpreter_stack() if are_transforms_active() else None
    if top is not None and top.key() in _DIFFERENTIATING:
        raise StateError(
            f"{title} was called inside torch.func.{top.key().name.lower()}, which cannot see through gathered "
            "weights: use loss.backward(), or torch.autograd.grad and torch.autograd.functional on inputs"
        )


_DIFFERENTIATING = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)


class EntryPoint:
    """A method of the model that runs compute: its call is a root forward like any other."""

    def __init__(self, hooks: ModuleHooks, module: nn.Module, name: str) -> None:
        self.hooks, self.module = hooks, weakref.ref(module)
        self.__name__, self.__doc__ = name, getattr(type(module), name).__doc__

    def __deepcopy__(self, memo: dict[int, Any]) -> EntryPoint:
        """The same method of the copied model, which gets its runtime at the first call of any."""
        return EntryPoint(copy.deepcopy(self.hooks, memo), memo[id(self.module())], self.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, hooks = self.module(), self.hooks
        if module is None:
            raise StateError(f"`{self.__name__}` is a method of a sharded model that is gone: keep the model")
        _outside_modes(hooks.open, module, self.__name__, sys._getframe())
        try:
            args, kwargs = hooks.take_inputs(args, kwargs)
            output = getattr(type(module), self.__name__)(module, *args, **kwargs)
        except BaseException:
            self._leave(module, None)
            raise
        self._leave(module, output)
        return output

    def _leave(self, module: nn.Module, output: Any) -> None:
        """torch calls no hooks of the module's: what comes behind them comes at once."""
        _outside_modes(self.hooks.close, output)
        self.hooks.settle(module, (), output)


def add_entry_point(hooks: ModuleHooks, module: nn.Module, name: str) -> None:
    """Let another method of the model be a root forward."""
    module.__dict__[name] = EntryPoint(hooks, module, name)
