"""Gradients of one unit on this rank: the ranges that reductions write, and `p.grad` as views of them.

torch makes a gradient's memory anew at every backward. Here one range a segment stays, what the optimizer and the norm
read is contiguous, and `p.grad` is bound to the same objects each time. What torch promises holds all the same: a
gradient that somebody still refers to keeps its values, and hooks on parameters see what they would see there.

Note [Squares]
    What a reduction writes it can also square and sum, so that the norm need not read all gradients again. That sum is
    the norm's as long as nobody has written to them since: we say so where we do (`has_squares = False`), and everybody
    else comes by `.local`, which opens `reach` for good, as a view of that memory may have been kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, is_, or_
from typing import Any

import torch
from torch import Tensor, nn

from lamina.core.layout import UnitLayout
from lamina.core.parameter_loops import are_same, bind_gradients, gradients_of, has_gradient, held_elsewhere
from lamina.core.shard_aliases import Reach
from lamina.core.shard_ops import slice_of
from lamina.core.shard_spec import Notes, ShardSpec
from lamina.core.shard_tensor import AS_PLAIN, Shard
from lamina.core.slots import DebugMode
from lamina.runtime.pending_gradient import PendingGradient, pending_gradient
from lamina.runtime.summing import make_squares, split_squares

_local_of = attrgetter("_local")
_hooks_of, _late_hooks_of = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


class UnitGradients:
    """Ranges, views and what is known of each parameter's gradient, in layout order."""

    def __init__(
        self, params: Sequence[nn.Parameter], layout: UnitLayout, device: torch.device, range_index: int, plain: bool
    ) -> None:
        self.params, self.layout, self.device, self.range_index = params, layout, device, range_index
        self.plain = plain  # autograd writes p.grad itself
        self.ranges: list[Tensor] = []  # by segment, (S,) of the gradient, float32 or wider; empty until the first
        self.views: list[Tensor] = []  # what p.grad is; empty where frozen
        self._locals: list[Tensor] = []  # their `.local`, where they are Shards
        self._places: list[tuple[int, int]] = []  # of views that are plain: segment, offset in bytes
        self._are_away = False  # their memory is with the allocator
        self._gaps: list[list[Tensor]] = []  # by segment, what lies between parameters
        self.had = [False] * len(params)  # p.grad was there when the current backward first reduced
        self.valid = [False] * len(params)  # the range holds this parameter's accumulated gradient
        self.earlier: dict[int, Tensor] = {}  # kept apart while tensor hooks see the new ones
        self.arrived: dict[int, Tensor] = {}  # in the current backward, past the full parameters; see outside.py
        self.held: dict[int, Tensor] = {}  # the same, from micro-batches whose sums wait
        self.touched = [False] * len(params)  # this rank contributed in the current backward
        self.pending: dict[int, PendingGradient] = {}  # what p.grad is while sums of micro-batches wait
        self.standing: dict[int, tuple[int, int]] = {}  # sums wait beside a gradient: its id and version
        self.reach = Reach()  # of the views
        self.squares: list[Tensor] = []  # by segment, whose sum is that of its squares; empty: not noted so far
        self._stretches: list[tuple[tuple[int, ...], Sequence[Tensor]]] = []  # sizes, and their parts of `squares`
        self.wants_squares = False  # whoever asked for the norm would have liked them
        self.has_squares = False  # of what the ranges hold now, unless `reach` is open
        self.fresh = False  # plain: p.grad holds this backward's gradients only
        self.hidden: list[tuple[dict[int, Any], dict[int, Any]]] = []  # the user's hooks, and where they belong
        self.notes = Notes()  # of parameters that are Shards

    def make(self) -> None:
        """Allocate the gradient ranges, once."""
        if self.ranges:
            if self._are_away:
                self._take_back()
            return
        nothing = torch.empty(0, device=self.device)
        self.ranges = [nothing] * len(self.layout.segments)
        self._gaps = [[] for _ in self.layout.segments]
        self.views = [nothing] * len(self.params)
        self._locals = [nothing] * sum(isinstance(param, Shard) for param in self.params)
        self._places = [(0, 0)] * (len(self.params) - len(self._locals))
        for number in range(len(self.layout.segments)):
            self._make_range(number)

    def thaw(self, layout: UnitLayout) -> None:
        """Segments of the same places may have become trainable."""
        before, self.layout = self.layout, layout
        for number, (old, new) in enumerate(zip(before.segments, layout.segments, strict=True)):
            if self.ranges and new.trainable and not old.trainable:
                self._make_range(number)

    def _take_back(self) -> None:
        """The memory comes as the allocator has it; whoever reads a whole range finds zeros between parameters."""
        for grad in self.ranges:
            grad.untyped_storage().resize_(grad.numel() * grad.itemsize)
            if DebugMode.enabled and (grad.is_floating_point() or grad.is_complex()):
                grad.fill_(float("nan"))
        self._are_away = False
        if gaps := self.gaps():
            torch._foreach_zero_(gaps)

    def gaps(self) -> list[Tensor]:
        """What lies between parameters: zeros, for whoever reads whole ranges."""
        return [] if self._are_away else [gap for gaps in self._gaps for gap in gaps]

    def give_back(self) -> None:
        """Give the memory of gradients that nobody has any more back to the allocator, until the next reduction."""
        if not self.ranges or self._are_away or self.fresh:  # fresh: what p.grad was is set aside there
            return
        if any(grad is not None and type(grad) is not PendingGradient for grad in gradients_of(self.params)):
            return
        held = held_elsewhere(self.views, self._locals) or ()
        for position, is_held in enumerate(held):
            if is_held:
                self._leave_to_the_user(position)
        for grad in self.ranges:
            grad.untyped_storage().resize_(0)
        self._are_away = True

    def _make_range(self, number: int) -> None:
        """The gradient range of one segment, and the views of it that p.grad will be."""
        segment, index = self.layout.segments[number], self.range_index
        numel = segment.range_numel if segment.trainable else 0
        grad = torch.zeros(numel, dtype=gradient_dtype(segment.master), device=self.device)
        self.ranges[number], self.squares, self.has_squares = grad, [], False
        first = sum(len(before.params) for before in self.layout.segments[:number])
        end, self._gaps[number] = 0, []
        for i, spec in enumerate(segment.params):
            start, stop = segment.owned(i, index) if segment.trainable else (0, 0)
            offset = segment.offset_in_range(i, index)
            if start < stop:
                self._gaps[number].append(grad[end:offset])
                end = offset + stop - start
            local = grad[offset : offset + stop - start]
            param = self.params[first + i]
            if isinstance(param, Shard):
                self.views[first + i] = self._shard(local, param.spec.derived)
                self._locals[first + i] = local
            else:
                self.views[first + i] = local.view(spec.shape) if segment.trainable else local
                self._places[first + i] = number, offset * local.itemsize
        self._gaps[number] = [gap for gap in (*self._gaps[number], grad[end:]) if gap.numel()]

    def note_existing(self) -> None:
        """Before the first reduction of a backward: which gradients are there to be added to."""
        self.make()
        self.replace_moved_views()
        self.earlier, self.has_squares = {}, False
        held, params = held_elsewhere(self.views, self._locals), self.params
        if held is None and not has_gradient(params):
            self.valid, self.had = [False] * len(params), [False] * len(params)
        else:
            self._note(gradients_of(params), held)
        if self.plain:
            self.hide_hooks()

    def _note(self, grads: Sequence[Tensor | None], held: Sequence[bool] | None) -> None:
        hooked = {id(registry) for registry, _ in self.hidden}
        for i, grad in enumerate(grads):
            if type(grad) is PendingGradient:
                grad = None
            self.valid[i] = self.had[i] = grad is not None
            if grad is None:
                if held is not None and held[i]:
                    self._leave_to_the_user(i)
                continue
            if id(self.params[i]._backward_hooks) in hooked or self.params[i]._backward_hooks:
                self.valid[i] = False  # hooks are to see the new gradient alone
                self.earlier[i] = local_of(grad).clone()
            view = self.views[i]
            if grad is not view:
                local_of(view).copy_(self._part_of(grad, i))

    def _part_of(self, grad: Tensor, position: int) -> Tensor:
        """The elements of a gradient that lie on this rank."""
        param = self.params[position]
        if isinstance(grad, Shard) or not isinstance(param, Shard):
            return local_of(grad)
        return slice_of(grad.to_dense() if grad.is_sparse else grad, param.spec, torch.ops.aten.copy_.default)

    def arrive(self, position: int, grad: Tensor) -> None:
        """A gradient has come past the full parameter; autograd may go on using its memory."""
        part = self._part_of(grad.detach(), position)
        before = self.arrived.get(position)
        self.arrived[position] = part.clone() if before is None else before + part

    def take_in(self, sums_wait: bool) -> None:
        """What has arrived and was not bound with reduced gradients joins `p.grad`, or waits if sums do."""
        arrived, self.arrived = self.arrived, {}
        for position, value in arrived.items():
            before = self.held.get(position)
            self.held[position] = value if before is None else before + value
        for position in list(self.held):
            param = self.params[position]
            with AS_PLAIN():
                grad = param.grad
            if grad is None and sums_wait:  # `zero_grad` on any rank gives it up
                grad = self.pending[position] = pending_gradient(param, self.layout.params[position].name)
                with AS_PLAIN():
                    param.grad = grad
            if type(grad) is PendingGradient:
                continue
            value = self.held.pop(position)
            assert isinstance(param, Shard)
            value = self._after_tensor_hooks(param, self._shard(value, param.spec.derived))
            if isinstance(grad, Shard):
                self.has_squares = False
                local_of(grad).add_(value)
            else:  # none, or a full one that the user has put there
                self._begin_gradient(position, value if grad is None else value + self._part_of(grad, position))
            for hook in list((param._post_accumulate_grad_hooks or {}).values()):
                hook(param)

    def _begin_gradient(self, position: int, local: Tensor) -> None:
        """p.grad where there is none, without a reduction."""
        self.make()
        self.replace_moved_views()
        held = held_elsewhere(self.views, self._locals)
        if held is not None and held[position]:
            self._leave_to_the_user(position)
        view, self.has_squares = self.views[position], False
        local_of(view).copy_(local)
        with AS_PLAIN():
            self.params[position].grad = view

    def replace_moved_views(self) -> None:
        """`p.grad.data = ...`, `model.to_empty()` and the like give a view memory of its own: it is the user's then."""
        if not self._locals:
            at_home = self.in_place(range(len(self.views)))
        elif all(map(is_, map(_local_of, self.views), self._locals)):
            return
        else:
            at_home = are_same(map(_local_of, self.views), self._locals)
        for position, is_at_home in enumerate(at_home):
            if not is_at_home:
                self.views[position] = self._view(position)

    def in_place(self, positions: Sequence[int]) -> list[bool]:
        """Which views of plain parameters still lie in the ranges."""
        starts = list(map(Tensor.data_ptr, self.ranges))
        found = [self.views[i].data_ptr() for i in positions]
        places = [self._places[i] for i in positions]
        return [at == starts[number] + byte or at == 0 for (number, byte), at in zip(places, found, strict=True)]

    def _view(self, position: int) -> Tensor:
        """A new view of one parameter's part of the ranges."""
        param = self.params[position]
        if isinstance(param, Shard):
            return self._shard(self._locals[position], param.spec.derived)
        number, byte = self._places[position]
        spec, grad = self.layout.params[position], self.ranges[number]
        start = byte // grad.itemsize
        return grad[start : start + spec.numel].view(spec.shape)

    def _shard(self, local: Tensor, spec: ShardSpec) -> Shard:
        made = Shard(local, spec)
        made._reach = self.reach
        return made

    def squares_of(self, number: int, numels: tuple[int, ...]) -> Sequence[Tensor] | None:
        """Where the reduction of a segment, written in stretches of these sizes, notes their squares.

        None where nobody wants them, or it cannot.
        """
        if not self.wants_squares:
            return None
        if not self.squares:
            made = [
                make_squares(grad, len(segment.params))
                for grad, segment in zip(self.ranges, self.layout.segments, strict=True)
            ]
            if any(squares is None for squares in made):
                self.wants_squares = False
                return None
            self.squares = made  # type: ignore[assignment]
            self._stretches = [((), ())] * len(made)
        before, places = self._stretches[number]
        if before != numels:
            squares = self.squares[number].zero_()  # not all of it is written every time
            places = split_squares(squares, numels)
            self._stretches[number] = numels, places
        return places

    def sums_of_squares(self) -> Sequence[Tensor] | None:
        """Note [Squares]; None: they are not known."""
        self.wants_squares = not self.reach.is_open
        return self.squares if self.has_squares and self.wants_squares else None

    def notes_of(self, position: int) -> Notes:
        """For the spec of a parameter; hooks that it has already are noted."""
        param = self.params[position]
        if param._backward_hooks is not None or param._post_accumulate_grad_hooks is not None:
            self.notes.are_hooked = True
        return self.notes

    def hide_hooks(self) -> None:
        """During a backward autograd would call the user's hooks itself, with a part of the gradient."""
        if not self.notes.are_hooked:
            return
        with AS_PLAIN():
            registries = [*map(_hooks_of, self.params), *map(_late_hooks_of, self.params)]
        for registry in registries if any(registries) else ():
            if registry:
                self.hidden.append((registry, dict(registry)))
                registry.clear()

    def show_hooks(self) -> None:
        for registry, hooks in self.hidden:
            registry.update(hooks | registry)
        self.hidden = []

    def _leave_to_the_user(self, position: int) -> None:
        """A gradient that is still referenced elsewhere keeps its values: the user's object gets memory of its own."""
        view = self.views[position]
        if isinstance(view, Shard):
            place = view._local
            view._local, view._reach = place.clone(), None
            self.views[position] = self._shard(place, view.spec)
            self._locals[position] = place
        else:
            place = view.detach()
            view.set_(view.clone().untyped_storage(), 0, view.shape, view.stride())
            self.views[position] = place

    def show(self, used: Sequence[bool]) -> None:
        """After the last reduction of a backward: p.grad where any rank used the parameter, or it was there before."""
        self._show(list(map(or_, used, self.had)) if any(self.had) else used)

    def hand_to_hooks(self, used: Sequence[bool]) -> None:
        """The user's hooks on what is shown; what was kept from them, or from the reduction, joins it."""
        if not (self._are_hooked() or self.earlier or self.arrived or self.held):
            return
        for position, is_used in enumerate(used):
            if is_used:
                self._call_hooks(position, self.params[position], self.views[position])
            elif position in self.earlier:
                local_of(self.views[position]).add_(self.earlier.pop(position))

    def _are_hooked(self) -> bool:
        if not self.notes.are_hooked:
            return False
        with AS_PLAIN():
            return any(map(_hooks_of, self.params)) or any(map(_late_hooks_of, self.params))

    def show_existing(self) -> None:
        """No reduction came: a plain parameter shows the gradient that was set aside."""
        self._show(self.had)

    def _show(self, which: Sequence[bool]) -> None:
        if self.hidden:
            self.show_hooks()
        if all(which) and not any(self.had):
            bind_gradients(self.params, self.views)
            return
        are_bound = are_same(gradients_of(self.params), self.views)
        if all(which):
            if not all(are_bound):
                bind_gradients(self.params, self.views)
            return
        with AS_PLAIN():
            for param, grad, is_shown, is_bound in zip(self.params, self.views, which, are_bound, strict=True):
                if is_shown and not is_bound:
                    param.grad = grad

    def hold_places(self, sums_of_others: bool) -> None:
        """Sums wait: p.grad shows it where this rank has contributed and there was no gradient; else that one stands.

        sums_of_others: this rank has to forget them too if they are given up, though it may have contributed nothing.
        """
        is_held = self.touched
        if sums_of_others and not any(is_held):
            is_held = [spec.trainable for spec in self.layout.params]
        with AS_PLAIN():
            for i, param in enumerate(self.params):
                if not is_held[i] or i in self.standing:
                    continue
                if param.grad is None:
                    if i not in self.pending:
                        self.pending[i] = pending_gradient(param, self.layout.params[i].name)
                    param.grad = self.pending[i]
                elif i not in self.pending:
                    self.standing[i] = id(param.grad), param.grad._version

    @property
    def waiting(self) -> list[int]:
        """The parameters for which sums wait: those of this rank, if it has contributed to any."""
        held = [*self.pending, *self.standing]
        return [i for i in held if self.touched[i]] or held

    def given_up(self) -> list[int]:
        """Whose places were cleared since they were held."""
        with AS_PLAIN():
            return [i for i in self.waiting if self._is_cleared(i)]

    def _is_cleared(self, position: int) -> bool:
        """Whether a place was cleared; a gradient that stood when sums began: is gone, or written to and zero now."""
        grad = self.params[position].grad
        if position in self.pending:
            return grad is None or self.pending[position].given_up
        key, version = self.standing[position]
        if grad is None or id(grad) != key:
            return True
        return grad._version != version and not local_of(grad).any()

    def forget_pending(self) -> None:
        """There are no sums any more."""
        if not (self.pending or self.standing):
            return
        with AS_PLAIN():
            for i, held in self.pending.items():
                if self.params[i].grad is held:
                    self.params[i].grad = None
        self.pending, self.standing = {}, {}

    def _call_hooks(self, position: int, param: nn.Parameter, grad: Tensor) -> None:
        """The user's hooks on a parameter see the reduced shard: tensor hooks the new part, others p.grad."""
        for more in (self.held.pop(position, None), self.arrived.pop(position, None)):
            if more is not None:
                self.has_squares = False
                local_of(grad).add_(more)
        self._after_tensor_hooks(param, grad)
        earlier = self.earlier.pop(position, None)
        if earlier is not None:
            local_of(grad).add_(earlier)
        for hook in list((param._post_accumulate_grad_hooks or {}).values()):
            hook(param)

    def _after_tensor_hooks(self, param: nn.Parameter, grad: Tensor) -> Tensor:
        """This rank's part of what the user's tensor hooks make of a gradient, in its memory."""
        for hook in list((param._backward_hooks or {}).values()):
            changed = hook(grad)
            if changed is not None and changed is not grad:
                local_of(grad).copy_(local_of(changed))
        return local_of(grad)


def clear_gaps(several: Iterable[UnitGradients], factor: Tensor) -> None:
    """Whole ranges were multiplied by `factor`, 0-dim: of NaN and zero that makes NaN, which no `zero_grad` reaches."""
    if factor.device.type == "cpu" and not factor.isnan():
        return
    if gaps := [gap for gradients in several for gap in gradients.gaps()]:
        torch._foreach_zero_(gaps)


def local_of(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, Shard) else tensor


def gradient_dtype(master: torch.dtype) -> torch.dtype:
    """Gradients are summed in float32, or in the master's dtype where that is wider."""
    if not master.is_floating_point and not master.is_complex:
        return master
    return torch.float32 if master.itemsize == 1 else torch.promote_types(master, torch.float32)  # no float8 promotes
