"""From this rank's gradients to `p.grad`: collecting, reducing, and settling at the end of a backward.

Note [None or zero]
    `p.grad` is None where no rank used the parameter, and there on every rank where any did. A rank that has a gradient
    for everything knows the answer; only one that lacks some waits for the other ranks' flags.

Note [Given up]
    Sums of micro-batches that are not reduced yet belong to `p.grad`, as in torch: who clears it has given them up, and
    the next backward begins with zeros in their place. The sums stay allocated, so that what ranks send does not depend
    on it.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import or_
from typing import ClassVar

import torch
from torch import Tensor

from lamina.core.control import Control, Flags
from lamina.core.lanes import Lanes
from lamina.core.parameter_loops import (
    all_there,
    any_there,
    are_there,
    bind_gradients,
    clear_gradients,
    gradients_of,
    has_gradient,
)
from lamina.core.room import make_room
from lamina.core.shard_losses import hand_over_means
from lamina.core.shard_tensor import AS_PLAIN
from lamina.core.slots import GRADS, WEIGHTS, Slot
from lamina.errors import Disagreement, ParameterChanged, StateError
from lamina.runtime.alike import Alike
from lamina.runtime.direct import DirectRoute
from lamina.runtime.lockstep import FREEZE_ALIKE
from lamina.runtime.phase import Phase
from lamina.runtime.reducing import Reducer, Staging
from lamina.runtime.residency import Residency
from lamina.runtime.tokens import Tokens
from lamina.runtime.unit import Unit
from lamina.runtime.unit_gradients import gradient_dtype


@dataclass(frozen=True)
class Share:
    """This rank's in a batch of `lamina.even`."""

    has_data: bool
    active_ranks: int  # how many have
    ranks: Sequence[int]  # those that the loop goes over

    now: ClassVar[Share | None] = None  # of the batch that is under way


class Gradients:
    """Gradients of all units on this rank."""

    def __init__(
        self, units: Sequence[Unit], control: Control, lanes: Lanes, reducer: Reducer, residency: Residency
    ) -> None:
        self.units, self.control, self.lanes = list(units), control, lanes
        self.reducer, self.residency = reducer, residency
        self.flags = Flags(control, self.units[0].mesh.flags if units else None)
        self.alike = Alike(self.units, control)
        self.tokens = Tokens(self.units, control, reducer)
        self.last_micro_batch = True
        self.defer = False
        self.accumulating = False
        self.contributes = True  # False: this rank has run out of data and reduces zeros
        self.active_ranks = control.world  # over which gradients are averaged
        self.is_left_out = False  # the batch is one of other ranks
        self.are_aside = False  # what was there before the backward that is under way
        for share in {id(unit.mesh.share): unit.mesh.share for unit in self.units}.values():
            share.served_by.append(weakref.ref(self))
        # Activations are at their peak while there are no gradients. On the CPU the same memory would come back as new
        # pages, whose first touch costs more than the reduction.
        self.gives_back = any(unit.mesh.device.type == "cuda" for unit in units)
        self.room_part = 0.0  # of the gradients, for which room is yet to be made: `shard()` says it
        self.take_share()

    def take_share(self) -> None:
        """Whether this rank has data, and how many ranks have."""
        share = Share.now
        self.is_left_out = share is not None and share.ranks != self.control.ranks
        if share is None or self.is_left_out:
            share = Share(True, self.control.world, ())
        contributes, active_ranks = self.contributes, self.active_ranks = share.has_data, share.active_ranks
        for unit in self.units:
            unit.mesh.share.contributes, unit.mesh.share.active = contributes, active_ranks

    @property
    def divisor(self) -> int:
        """Means are over the ranks that have data, and sums that are to be divided by their tokens over all."""
        return self.control.world if self.tokens.are_counted else self.active_ranks

    def follow(self, before: Gradients) -> None:
        """Go on where another object stopped, of the same model with other units."""
        self.tokens.follow(before.tokens)
        self.room_part = before.room_part
        self.last_micro_batch, self.defer = before.last_micro_batch, before.defer
        self.accumulating = before.accumulating

    def give_back(self) -> None:
        """A forward begins: the memory of gradients that nobody has any more is for activations."""
        if not self.gives_back:
            return
        if self.room_part and torch.is_grad_enabled() and not self.lanes.is_recording:
            part, self.room_part = self.room_part, 0.0
            self.make_room(part)
        for unit in self.units:
            unit.gradients.give_back()

    def make_room(self, part: float) -> None:
        """Let the allocator hold a free piece for a part of all gradients, if it has memory: core/room.py."""
        whole = [unit for unit in self.units if not unit.halved]  # else there is room where whole masters lay
        units = [unit for unit in whole if any(param.requires_grad for param in unit.params)]
        segments = [segment for unit in units for segment in unit.layout.segments if segment.trainable]
        sizes_bytes = [segment.range_numel * gradient_dtype(segment.master).itemsize for segment in segments]
        if units:
            make_room(part, sizes_bytes, units[0].mesh.device)

    def begin(self) -> None:
        """A backward begins: what plain units' parameters hold already is kept apart from what autograd adds."""
        if self.are_aside:
            return
        self.are_aside = True
        if self.reducer.partials:
            self.give_up()
        for unit in self.units:
            if unit.plain and not unit.kept:
                self.set_aside(unit)
            elif not unit.plain and unit.gradients.notes.are_hooked:
                unit.gradients.hide_hooks()

    def begin_phase(self) -> None:
        """The backward has reached a unit."""
        if self.is_left_out:
            raise StateError(
                "this is a batch of `lamina.even`, whose loop goes over the data ranks of the model that was made or "
                "called last when it began; this model's data ranks are others. Call it before the loop, or train it "
                "outside"
            )
        self.tokens.refuse_other_terms()
        self.begin()

    def set_aside(self, unit: Unit) -> None:
        """A plain unit's parameters hold nothing from here to the reduction but what is to be reduced."""
        unit.gradients.fresh = True
        unit.gradients.note_existing()
        for param in unit.params:
            param.grad = None

    def of(self, unit: Unit) -> list[Tensor | None]:
        """This rank's gradients, by parameter, summed over the slots that the unit was used in."""
        if unit.slot is None:
            return gradients_of(unit.params)
        gradients = gradients_of(unit.slot.fulls)
        for slot in unit.overflow:
            for i, full in enumerate(slot.fulls):
                if full.grad is not None:
                    before = gradients[i]
                    gradients[i] = full.grad if before is None else before + full.grad
        if not unit.communicates and unit.gradients.arrived:
            for i, value in unit.gradients.arrived.items():
                before = gradients[i]
                gradients[i] = value if before is None else value + before
        return gradients

    def any_of(self, unit: Unit) -> bool:
        return any_there(self.of(unit))

    def having(self, units: Sequence[Unit]) -> Iterator[Unit]:
        """Those of which this rank has any gradient when their turn comes."""
        held: list[Sequence[Tensor]] = [slot.fulls for unit in units for slot in unit.slots]
        held += [unit.params for unit in units if unit.slot is None]
        arrived = any(unit.gradients.arrived and not unit.communicates for unit in units)
        with AS_PLAIN():
            is_held = any(map(has_gradient, held))
        if arrived or is_held:
            yield from filter(self.any_of, units)

    def all_of(self, unit: Unit) -> bool:
        """Autograd gives a leaf its gradient once a graph task: when all are there, no use is still to come."""
        wanted = unit.wanted
        return any(wanted) and all(g is not None for g, w in zip(self.of(unit), wanted, strict=True) if w)

    def drop(self, unit: Unit) -> None:
        """Forget this rank's gradients."""
        clear_gradients(unit.params if unit.slot is None else unit.slot.fulls)
        for slot in unit.overflow:
            clear_gradients(slot.fulls)
        if not unit.communicates:
            unit.gradients.arrived.clear()

    def reduce(self, phase: Phase, unit: Unit, contribute: bool) -> None:
        """Take part in the reduction of a unit: with its gradients, or with zeros."""
        if torch.is_grad_enabled():  # in create_graph, and outside backwards
            with torch.no_grad():
                self.reduce(phase, unit, contribute)
            return
        with AS_PLAIN():
            self._reduce(phase, unit, contribute)

    def _reduce(self, phase: Phase, unit: Unit, contribute: bool) -> None:
        phase.ready.discard(unit.index)
        self.reducer.finish()
        if unit.index not in phase.reduced:
            phase.reduced.add(unit.index)
            if not unit.plain:
                unit.gradients.note_existing()
        gradients = self.of(unit) if contribute and self.contributes else [None] * len(unit.params)
        slot = self.residency.free_home(unit)
        if self.reducer.pushes is not None:
            route = self.reducer.route_of(unit, gradients, self.last_micro_batch, self.defer)
            if route is not None:
                self._reduce_directly(unit, route, gradients, slot)
                return
        self.reducer.begin(unit)
        place = self.reducer.stage(unit) if slot is None else slot
        self.lanes.reduce.run(self._collect, unit, gradients, place, slot is not None and slot.state is WEIGHTS)
        self.reducer.hold(gradients)
        if contribute:
            self.drop(unit)
            unit.was_entered = unit.visits.alive > 0
        if slot is not None:
            slot.to(GRADS)
        self.reducer.start(unit, place.segments, slot, self.last_micro_batch, self.defer, self.divisor)

    def _reduce_directly(
        self, unit: Unit, route: DirectRoute, gradients: Sequence[Tensor | None], slot: Slot | None
    ) -> None:
        self.reducer.begin(unit)
        self.drop(unit)
        unit.was_entered = unit.visits.alive > 0
        unit.gradients.touched = list(map(or_, unit.gradients.touched, are_there(gradients)))
        self.reducer.start_direct(unit, route, gradients, slot, self.divisor)
        self.reducer.hold(gradients)

    def _collect(self, unit: Unit, gradients: Sequence[Tensor | None], place: Slot | Staging, clean: bool) -> None:
        """Lay gradients into their places; zeros where this rank has none, and between them.

        `clean`: weights lie there, so what is between parameters is zero already.
        """
        if not clean:
            for segment, target in zip(unit.layout.segments, place.segments, strict=True):
                if segment.trainable:
                    target.zero_()
        if all_there(gradients):
            try:
                torch._foreach_copy_(place.views, gradients)  # type: ignore[arg-type]
            except RuntimeError:
                pass  # one is sparse, and copied below; or it is an error that comes again there
            else:
                unit.gradients.touched = [True] * len(gradients)
                return
        views, values = [], []
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                views.append(place.views[i])
                values.append(gradient if gradient.layout is torch.strided else gradient.to_dense())
                unit.gradients.touched[i] = True
            elif clean and unit.layout.params[i].trainable:
                place.views[i].zero_()
        if views:
            torch._foreach_copy_(views, values)

    # ---- the end of a backward ---------------------------------------------------------------------------------

    def settle(self, reduced: Sequence[int]) -> None:
        """Finish reductions and give the user gradients."""
        self.are_aside = False
        self.reducer.finish()
        self.lanes.compute.wait(self.lanes.reduce.mark())
        self.reducer.let_go()
        self.average_losses()
        complete = [index for index in reduced if index not in self.reducer.partials]
        self.tokens.take_fresh()
        if self.last_micro_batch:
            self.tokens.divide(complete, self.control.world)
        used = self._used_anywhere(complete)
        with AS_PLAIN():
            for index in complete:
                gradients = self.units[index].gradients
                if gradients.pending or gradients.standing:
                    gradients.forget_pending()
                if gradients.hidden or not all(used[index]) or any(gradients.had):
                    gradients.show(used[index])
                else:
                    bind_gradients(gradients.params, gradients.views)
                gradients.touched = [False] * len(gradients.touched)
        for index in complete:
            gradients = self.units[index].gradients
            if gradients.notes.are_hooked or gradients.earlier or gradients.arrived or gradients.held:
                gradients.hand_to_hooks(used[index])
        for unit in self.units:
            if unit.plain and unit.gradients.fresh and not unit.kept:
                unit.gradients.fresh = False
                if unit.index not in complete:
                    unit.gradients.show_existing()
            elif unit.gradients.hidden:
                unit.gradients.show_hooks()
        for index, partial in self.reducer.partials.items():
            self.units[index].gradients.hold_places(sums_of_others=partial.climbed > 0)
        self.tokens.note_end()

    def give_up(self) -> None:
        """Forget the sums of which `p.grad` was cleared. See Note [Given up]."""
        units = [self.units[index] for index in self.reducer.partials if self.units[index].gradients.waiting]
        cleared_units = 0
        for unit in units:
            cleared, held = unit.gradients.given_up(), unit.gradients.waiting
            if not cleared:
                continue
            if len(cleared) < len(held) and any(unit.gradients.touched):
                name_of = [spec.name for spec in unit.layout.params]
                left = next(name_of[i] for i in held if i not in cleared)
                raise StateError(
                    f"sums of micro-batches wait for the gradients of `{unit.name or 'root'}`, and some were cleared: "
                    f"that of `{name_of[cleared[0]]}`, not that of `{left}`. Clear all "
                    "(`model.zero_grad()`) or none"
                )
            self.reducer.forget_sums(unit)
            unit.gradients.forget_pending()
            unit.gradients.held.clear()
            unit.gradients.touched = [False] * len(unit.params)
            cleared_units += 1
        if units and cleared_units == len(units):
            self.tokens.forget()

    def restore(self) -> None:
        """A backward has failed: parameters show what they had before it."""
        for unit in self.units:
            unit.gradients.arrived.clear()
            unit.mesh.share.arrived.clear()
            if not unit.plain and not unit.kept:
                self.drop(unit)
        self._show_existing()

    def _show_existing(self) -> None:
        self.are_aside = False
        for unit in self.units:
            if not unit.plain:
                if unit.gradients.hidden:
                    unit.gradients.show_hooks()
            elif unit.gradients.fresh and not unit.kept:
                unit.gradients.fresh = False
                for param in unit.params:
                    param.grad = None
                unit.gradients.show_existing()
                if unit.index in self.reducer.partials:
                    unit.gradients.hold_places(sums_of_others=self.reducer.partials[unit.index].climbed > 0)

    def end(self) -> None:
        """A backward has ended; if it was none of this model, parameters show what they had before it."""
        if self.are_aside:
            self._show_existing()

    def average_losses(self) -> None:
        """Gradients of losses over Shards arrive, those of the mean over the ranks. Collective if there are any."""
        share = self.units[0].mesh.share if self.units else None
        if share is None or share.group is None or not (share.arrived or share.seen != share.reductions):
            return
        share.seen = share.reductions
        keys = zlib.crc32(repr(sorted(share.arrived)).encode())
        rows = self.control.exchange([keys], "losses over parameters")
        if any(row != rows[0] for row in rows):
            raise Disagreement(
                "a loss over sharded parameters, outside the model's forward, is part of the backward on some ranks "
                "only, and each rank has its own elements' gradient alone: add it on all ranks, or multiply it by 0 "
                "where it should not count"
            )
        hand_over_means(share)

    def take_in(self) -> None:
        """The backward has ended: what came from outside forwards joins gradients that no reduction has bound."""
        self.average_losses()
        for unit in self.units:
            if unit.gradients.hidden:
                unit.gradients.show_hooks()
            if unit.communicates and (unit.gradients.arrived or unit.gradients.held):
                self.tokens.refuse_other_terms()
                unit.gradients.take_in(sums_wait=unit.index in self.reducer.partials)

    def _used_anywhere(self, complete: Sequence[int]) -> dict[int, list[bool]]:
        """By unit and parameter: has any rank a gradient? See Note [None or zero]."""
        here = {index: self.units[index].gradients.touched for index in complete}
        if self.control.world == 1 or not complete:
            return here
        everyone = self.flags.start(list(chain.from_iterable(here.values())), self.alike.fingerprint(complete))
        if self.flags.differed:
            self.alike.refuse()
        for index in complete:
            if here[index] != self.units[index].expected:
                break
        else:
            return here
        anywhere = iter(everyone())
        found = {index: [next(anywhere) for _ in flags] for index, flags in here.items()}
        for index, flags in found.items():
            self._refuse_frozen_here(self.units[index], flags, here[index])
        return found

    def _refuse_frozen_here(self, unit: Unit, anywhere: Sequence[bool], here: Sequence[bool]) -> None:
        """Others learn of it when they wait for this rank; the first backwards compare it beforehand."""
        for i, (is_used, is_used_here) in enumerate(zip(anywhere, here, strict=True)):
            if is_used and not is_used_here and not unit.params[i].requires_grad:
                name = unit.layout.params[i].name
                raise ParameterChanged(
                    f"`{name}` is frozen on rank {self.control.rank} of {self.control.world}, and others train it: "
                    f"{FREEZE_ALIKE}"
                )
