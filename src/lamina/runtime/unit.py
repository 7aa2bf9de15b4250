"""One unit at work: its persistent parameters, masters and gradients, and the exchange with the full parameters.

`UnitPlan` and `UnitLayout` say which parameters belong together and where they lie; this object holds the tensors. The
user's own Parameter objects stay outside compute (`Shard`s, or plain where the optimizer state is not split); inside a
use the modules see the full parameters of a slot.

Note [Whose memory]
    masters[s]  (S,)  this rank's range of segment s, in master dtype; the optimizer writes it at any time
    grads[s]    (S,)  the same range of the gradient, float32 or wider; p.grad is a view of it
    published[s] (P,) compute-dtype copy of the wider range that the gathers read, only where optimizer state is split
                      further than parameters
    A *plain* unit (optimizer state not split, computed in master dtype) has no copies: its full parameters are the
    user's parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from operator import attrgetter, is_

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

from lamina.core.layout import ParamSpec, UnitLayout
from lamina.core.mesh import DataMesh
from lamina.core.shard_optim import COPIED
from lamina.core.shard_spec import DirtyFlag, GlobalSpec, ShardSpec
from lamina.core.shard_tensor import AS_PLAIN, Shard, convert_
from lamina.core.slots import WEIGHTY, Slot
from lamina.errors import ParameterChanged
from lamina.runtime.units import UnitPlan
from lamina.runtime.windows import Entry, refresh_flat_weights, windows_of

_is_trainable, _grad_of, _local_of = attrgetter("requires_grad"), attrgetter("grad"), attrgetter("local")
_hooks_of, _late_hooks_of = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


class Unit:
    """Tensors of one unit on this rank."""

    def __init__(
        self,
        index: int,
        plan: UnitPlan,
        layout: UnitLayout,
        mesh: DataMesh,
        params: Sequence[nn.Parameter],
        entries: Sequence[Entry],
        plain: bool,
    ) -> None:
        self.index, self.plan, self.layout, self.mesh = index, plan, layout, mesh
        self.name = plan.name or "root"
        self.params = list(params)  # the user's objects, in layout order
        self.entries = list(entries)
        self.module_windows = windows_of(entries, params)
        self.plain = plain
        self.sharded = mesh.factors.shards_parameters
        self.trainable = any(spec.trainable for spec in layout.params)
        self.communicates = mesh.factors.uses_shards
        self.dirty = DirtyFlag(True)
        self.version = 0  # counts changes of the weights, as root forwards see them
        self.expected = [spec.trainable for spec in layout.params]  # which gradients there is a place for
        self._versions = -1  # of the user's parameters when the last root forward began
        self.wanted = list(self.expected)  # which gradients a use should leave
        self.slot: Slot | None = None  # home; None for a plain unit
        self.requires = self.expected  # requires_grad of the user's parameters when the root forward began
        self._followed: dict[Slot, list[bool]] = {}  # the same of a slot's full parameters
        self._shown: dict[Slot, list[dict[str, nn.Parameter | None]]] = {}  # by window, what a use of the slot shows
        self.overflow: list[Slot] = []
        self.windows = 0  # open uses whose modules see full parameters
        self.kept = 0  # `keep` scopes that hold it
        self.alive_uses = 0  # forward visits whose graph may still be run backward
        self.gathers = self.reduces = self.overflows = 0
        self.recurrent: list[nn.RNNBase] = []  # modules that hold a list of their weights beside the dict
        self.masters: list[Tensor] = []
        self.published: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.grad_views: list[Tensor] = []  # what p.grad is, in layout order; empty where frozen
        self._grad_locals: list[Tensor] = []  # their `.local`, where they are Shards
        self._grads_are_away = False  # their memory is with the allocator
        self.had = [False] * len(self.params)  # p.grad was there when the current backward first reduced
        self.valid = [False] * len(self.params)  # the gradient buffer holds this parameter's accumulated gradient
        self.earlier: dict[int, Tensor] = {}  # gradients kept apart while tensor hooks see the new ones
        self.touched = [False] * len(self.params)  # this rank contributed in the current backward
        self.fresh = False  # plain units: p.grad holds this backward's gradients only
        self.locals: list[Tensor] = []  # what each parameter's memory was made, to see whether it still is

    @property
    def slots(self) -> list[Slot]:
        """Every place in which its weights may lie."""
        return self.overflow if self.slot is None else [self.slot, *self.overflow]

    @property
    def is_ready(self) -> bool:
        """Whether its weights are here, or on their way."""
        home = self.slot
        if home is None or home.state in WEIGHTY:
            return True
        return bool(self.overflow) and any(slot.has_weights for slot in self.overflow)

    # ---- masters -----------------------------------------------------------------------------------------------

    def adopt_values(self, values: Sequence[Tensor]) -> None:
        """Cut the full values into masters; the user's parameters become `Shard`s, or plain full masters."""
        index = self.mesh.range_index
        position = 0
        for segment in self.layout.segments:
            master = torch.zeros(segment.range_numel, dtype=segment.master, device=self.mesh.device)
            for i, spec in enumerate(segment.params):
                start, stop = segment.owned(i, index)
                offset = segment.offset_in_range(i, index)
                local = master[offset : offset + stop - start]
                local.copy_(values[position].detach().reshape(-1)[start:stop])
                self.locals.append(local)
                self._become(position, spec, local, [segment.owned(i, r) for r in range(segment.factor)])
                position += 1
            self.masters.append(master)
        self._make_published()

    def adopt_shards(self) -> None:
        """Make masters of parameters that are sharded already: a copied model's."""
        for segment in self.layout.segments:
            self.masters.append(torch.zeros(segment.range_numel, dtype=segment.master, device=self.mesh.device))
        self.locals = [local_of(param) for param in self.params]
        for param in self.params:
            if isinstance(param, Shard):
                param.spec = replace(param.spec, dirty=self.dirty, geometry=param.spec.geometry)
        self._make_published()
        self.re_home()

    def _make_published(self) -> None:
        factors = self.mesh.factors
        if factors.shards_parameters and factors.optimizer > factors.params:
            for segment in self.layout.segments:
                numel = segment.numel // factors.params
                self.published.append(torch.zeros(numel, dtype=segment.compute, device=self.mesh.device))

    def _become(self, position: int, spec: ParamSpec, local: Tensor, pieces: list[tuple[int, int]]) -> None:
        param = self.params[position]
        factors = self.mesh.factors
        if not factors.uses_shards:
            if not self.plain:
                COPIED[param] = self.dirty
            if param.data_ptr() != local.data_ptr():
                give_memory(param, local.view(spec.shape))
            return
        group = self.mesh.shard_group
        ranges = tuple(pieces[factors.range_index(rank)] for rank in range(factors.optimizer))
        outer, larger = _further_axes(param)
        shard_spec = ShardSpec(
            spec.name, torch.Size(spec.shape), ranges, group.place, group.pg, outer, larger, self.dirty
        )
        convert_(param, local, shard_spec)

    # ---- exchange ----------------------------------------------------------------------------------------------

    def swap_in(self, slot: Slot, forward: bool) -> None:
        """Let the modules see the full parameters of `slot`."""
        shown = self._shown.get(slot)
        if shown is None:
            shown = self._shown[slot] = [window.fulls(slot.fulls) for window in self.module_windows]
            self._followed[slot] = self.expected
        for window, values in zip(self.module_windows, shown, strict=True):
            if self.windows == 0:
                window.check()
            window.show(values)
        if forward and self._followed[slot] != self.requires:
            for position, (param, full) in enumerate(zip(self.params, slot.fulls, strict=True)):
                self._follow_requires_grad(position, full, param)
            self._followed[slot] = self.requires
        for module in self.recurrent:
            refresh_flat_weights(module)

    def shut_window(self) -> None:
        """One use less; with the last, the modules see the persistent parameters again."""
        if self.windows > 0:
            self.windows -= 1
            if self.windows == 0 and not self.plain:
                self.swap_out()

    def swap_out(self) -> None:
        for window in self.module_windows:
            window.shut()
        for module in self.recurrent:
            refresh_flat_weights(module)

    def _follow_requires_grad(self, position: int, full: nn.Parameter, param: nn.Parameter) -> None:
        full.requires_grad_(param.requires_grad)
        self.wanted[position] = param.requires_grad

    def look(self) -> bool:
        """Before a root forward: see what the user has done to the parameters; whether a frozen one trains from now on.

        Every one is still a view of its master: `.to()`, `.double()` and the like would have moved it.
        """
        with AS_PLAIN():
            requires = list(map(_is_trainable, self.params))
            if not (self.communicates or self.plain):
                self._look_at_versions()
        if not (self.plain or self._untouched()):
            self.check_masters()
        if requires == self.requires:
            return False
        self.requires = requires
        if self.plain:
            self.wanted = list(requires)
        thawed = [i for i, (now, place) in enumerate(zip(requires, self.expected, strict=True)) if now and not place]
        if thawed:
            self._thaw(thawed)
        return bool(thawed)

    def _look_at_versions(self) -> None:
        """Notice writes to plain parameters of which copies are made; optimizer steps are marked by a hook."""
        seen = sum(param._version for param in self.params)
        if seen != self._versions:
            self._versions = seen
            self.dirty.mark()

    def _thaw(self, positions: Sequence[int]) -> None:
        """Give parameters that were frozen a place for their gradients; the bytes of the unit stay as they are."""
        for position in positions:
            spec = self.layout.params[position]
            if gradient_dtype(spec.master) is not spec.master:
                raise ParameterChanged(
                    f"`{spec.name}` was frozen when the model was sharded and requires a gradient now: its master is "
                    f"kept in {spec.master}, too coarse for an optimizer. Set requires_grad before lamina.shard() and "
                    "freeze it afterwards, or shard the model anew"
                )
        before, self.layout = self.layout, self.layout.thawed(positions)
        for slot in self.slots:
            slot.layout = self.layout
        self.trainable, self.expected = True, [spec.trainable for spec in self.layout.params]
        if self.grads:
            for number, (old, new) in enumerate(zip(before.segments, self.layout.segments, strict=True)):
                if new.trainable and not old.trainable:
                    self._make_gradient(number)

    def check_masters(self) -> None:
        """Raise if a parameter was cast or moved; take back values that were given other memory."""
        if self.plain or self._untouched():
            return
        for param, spec in zip(self.params, self.layout.params, strict=True):
            if param.dtype is not spec.master:
                raise ParameterChanged(
                    f"`{spec.name}` was cast from {spec.master} to {param.dtype} after lamina.shard(): cast the model "
                    "before it, or use precision="
                )
            if param.device != self.mesh.device:
                raise ParameterChanged(
                    f"`{spec.name}` was moved from {self.mesh.device} to {param.device} after lamina.shard(): move the "
                    "model before it"
                )
        self.re_home()

    def _untouched(self) -> bool:
        """The quick look: the same tensor objects as when the masters were made."""
        if not self.communicates:
            return self._in_place()
        return all(map(is_, map(_local_of, self.params), self.locals))

    def _in_place(self) -> bool:
        position = 0
        for segment, master in zip(self.layout.segments, self.masters, strict=True):
            storage = master.untyped_storage().data_ptr()
            for _ in segment.params:
                local = local_of(self.params[position])
                if local.numel() and local.untyped_storage().data_ptr() != storage:
                    return False
                position += 1
        return True

    def re_home(self) -> None:
        """Copy values that were given other memory (`.data =`, no-op casts) back into the masters."""
        index, position = self.mesh.range_index, 0
        with torch.no_grad():
            for segment, master in zip(self.layout.segments, self.masters, strict=True):
                for i, spec in enumerate(segment.params):
                    start, stop = segment.owned(i, index)
                    offset = segment.offset_in_range(i, index)
                    place = master[offset : offset + stop - start]
                    param = self.params[position]
                    place.copy_(local_of(param).reshape(-1))
                    self.locals[position] = place
                    if isinstance(param, Shard):
                        param.local = place
                    else:
                        param.data = place.view(spec.shape)
                    position += 1
        self.dirty.mark()

    # ---- gradients ---------------------------------------------------------------------------------------------

    def make_gradients(self) -> None:
        """Allocate the gradient ranges, once."""
        if self.grads:
            if self._grads_are_away:
                for grad in self.grads:
                    grad.untyped_storage().resize_(grad.numel() * grad.itemsize)
                self._grads_are_away = False
            return
        nothing = torch.empty(0, device=self.mesh.device)
        self.grads = [nothing] * len(self.layout.segments)
        self.grad_views = [nothing] * len(self.params)
        self._grad_locals = [nothing] * (len(self.params) if self.communicates else 0)
        for number in range(len(self.layout.segments)):
            self._make_gradient(number)

    def give_back_gradients(self) -> None:
        """Give the memory of gradients that nobody has any more back to the allocator, until the next reduction."""
        if not self.grads or self._grads_are_away:
            return
        with AS_PLAIN():
            if any(grad is not None for grad in map(_grad_of, self.params)):
                return
        held = self._held_elsewhere() or ()
        for position, is_held in enumerate(held):
            if is_held:
                self._leave_to_the_user(position)
        for grad in self.grads:
            grad.untyped_storage().resize_(0)
        self._grads_are_away = True

    def _make_gradient(self, number: int) -> None:
        """The gradient range of one segment, and the views of it that p.grad will be."""
        segment, index = self.layout.segments[number], self.mesh.range_index
        numel = segment.range_numel if segment.trainable else 0
        grad = torch.zeros(numel, dtype=gradient_dtype(segment.master), device=self.mesh.device)
        self.grads[number] = grad
        first = sum(len(before.params) for before in self.layout.segments[:number])
        for i, spec in enumerate(segment.params):
            start, stop = segment.owned(i, index) if segment.trainable else (0, 0)
            offset = segment.offset_in_range(i, index)
            local = grad[offset : offset + stop - start]
            param = self.params[first + i]
            if isinstance(param, Shard):
                self.grad_views[first + i] = Shard(local, param.spec.derived)
                self._grad_locals[first + i] = local
            else:
                self.grad_views[first + i] = local.view(spec.shape) if segment.trainable else local

    def note_existing_gradients(self) -> None:
        """Before the first reduction of a backward: which gradients are there to be added to."""
        self.make_gradients()
        held = self._held_elsewhere()
        with AS_PLAIN():
            grads = list(map(_grad_of, self.params))
        for i, grad in enumerate(grads):
            self.valid[i] = self.had[i] = grad is not None
            if grad is None:
                if held is not None and held[i]:
                    self._leave_to_the_user(i)
                continue
            if not self.plain and self.params[i]._backward_hooks:
                self.valid[i] = False  # hooks are to see the new gradient alone
                self.earlier[i] = local_of(grad).clone()
            view = self.grad_views[i]
            if grad is not view:
                local_of(view).copy_(local_of(grad) if isinstance(grad, Shard) else grad)

    def _held_elsewhere(self) -> list[bool] | None:
        """Which gradients anybody else refers to, as the object or as its `.local`; None: none of them."""
        views = list(map(sys.getrefcount, self.grad_views))
        locals_ = list(map(sys.getrefcount, self._grad_locals))
        if views.count(_ALONE) == len(views) and locals_.count(_ALONE_LOCAL) == len(locals_):
            return None
        return [v > _ALONE or p > _ALONE_LOCAL for v, p in zip_longest(views, locals_, fillvalue=0)]

    def _leave_to_the_user(self, position: int) -> None:
        """A gradient that is still referenced elsewhere keeps its values: the user's object gets memory of its own."""
        view = self.grad_views[position]
        if isinstance(view, Shard):
            place = view.local
            view.local = place.clone()
            self.grad_views[position] = Shard(place, view.spec)
            self._grad_locals[position] = place
        else:
            place = view.detach()
            view.set_(view.clone().untyped_storage(), 0, view.shape, view.stride())
            self.grad_views[position] = place

    def bind_gradients(self, used: Sequence[bool]) -> None:
        """After the last reduction of a backward: p.grad where any rank used the parameter; the user's hooks."""
        with AS_PLAIN():
            for param, grad, is_used in zip(self.params, self.grad_views, used, strict=True):
                if is_used and param.grad is not grad:
                    param.grad = grad
            hooked = not self.plain and (any(map(_hooks_of, self.params)) or any(map(_late_hooks_of, self.params)))
        if hooked:
            for position, is_used in enumerate(used):
                if is_used:
                    self._call_hooks(position, self.params[position], self.grad_views[position])

    def _call_hooks(self, position: int, param: nn.Parameter, grad: Tensor) -> None:
        """The user's hooks on a parameter see the reduced shard: tensor hooks the new part, others p.grad."""
        for hook in list((param._backward_hooks or {}).values()):
            changed = hook(grad)
            if changed is not None and changed is not grad:
                local_of(grad).copy_(local_of(changed))
        earlier = self.earlier.pop(position, None)
        if earlier is not None:
            local_of(grad).add_(earlier)
        for hook in list((param._post_accumulate_grad_hooks or {}).values()):
            hook(param)


def give_memory(param: nn.Parameter, value: Tensor) -> None:
    """Let a plain parameter lie in `value`, which may have another dtype or device (one on meta has no memory yet)."""
    grad, param.grad = param.grad, None
    if param.device.type == value.device.type:
        param.data = value
    else:
        made = nn.Parameter(value, requires_grad=param.requires_grad)
        torch._C._swap_tensor_impl(param, made)
    if grad is not None:
        param.grad = grad.to(param.device, param.dtype)


def _references_when_alone() -> tuple[int, int]:
    """What `sys.getrefcount`, mapped over a list, says of a view and of its local tensor that nobody else holds."""
    shard = Shard(torch.zeros(1), ShardSpec("alone", torch.Size([1]), ((0, 1),), 0, None))
    views, locals_ = [shard], [shard.local]
    del shard
    return next(map(sys.getrefcount, views)), next(map(sys.getrefcount, locals_))


def local_of(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, Shard) else tensor


def gradient_dtype(master: torch.dtype) -> torch.dtype:
    """Gradients are summed in float32, or in the master's dtype where that is wider."""
    if not master.is_floating_point and not master.is_complex:
        return master
    return torch.float32 if master.itemsize == 1 else torch.promote_types(master, torch.float32)  # no float8 promotes


def _further_axes(param: nn.Parameter) -> tuple[tuple, GlobalSpec | None]:
    """Groups and global shape of a parameter that is itself a part of something larger (tensor parallelism)."""
    part = PARTS.get(param)
    return ((part[0],), part[1]) if part is not None else ((), None)


_ALONE, _ALONE_LOCAL = _references_when_alone()
PARTS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> (group, GlobalSpec)


def split_parameter(param: nn.Parameter, dim: int, group: ProcessGroup) -> nn.Parameter:
    """Say, before `shard()`, that a parameter is one rank's part of a larger one (tensor parallelism).

    Norms, reductions and checkpoints then count the larger tensor once.

    Args:
        param: this rank's part, of equal shape on all ranks of `group`.
        dim: tensor dim along which the larger tensor is split.
        group: the ranks that hold the parts, in order.
    """
    shape = list(param.shape)
    dim = dim % len(shape)
    start = shape[dim] * group.rank()
    shape[dim] *= group.size()
    PARTS[param] = (group, GlobalSpec(torch.Size(shape), dim, start))
    return param
