"""One unit at work: its persistent parameters and masters, and the exchange with the full parameters.

`UnitPlan` and `UnitLayout` say which parameters belong together and where they lie; this object holds the tensors. The
user's own Parameter objects stay outside compute (`Shard`s, or plain where the optimizer state is not split); inside a
use the modules see the full parameters of a slot.

Note [Whose memory]
    masters[s]  (S,)  this rank's range of segment s, in master dtype; the optimizer writes it at any time
    gradients.ranges[s] (S,) the same range of the gradient; see unit_gradients.py
    published[s] (P,) compute-dtype copy of the wider range that the gathers read, only where optimizer state is split
                      further than parameters
    A *plain* unit (optimizer state not split, computed in master dtype) has no copies: its full parameters are the
    user's parameters.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from lamina.core.full_parameter import FullParameter
from lamina.core.lanes import Lanes
from lamina.core.layout import ParamSpec, UnitLayout
from lamina.core.mesh import DataMesh
from lamina.core.parameter_loops import requirements_of
from lamina.core.shard_optim import note_whole
from lamina.core.shard_spec import DirtyFlag, ShardSpec
from lamina.core.shard_tensor import OWN_ATTRIBUTES, Shard, convert_
from lamina.core.slots import WEIGHTY, Slot
from lamina.errors import ParameterChanged, StateError
from lamina.runtime.changed_forms import refuse_changed_forms
from lamina.runtime.halved import HalvedMaster, HalvedPlace
from lamina.runtime.halving import Halving
from lamina.runtime.outside import listen, receive
from lamina.runtime.parts import further_axes
from lamina.runtime.suspects import written_to
from lamina.runtime.unit_gradients import UnitGradients, gradient_dtype, local_of
from lamina.runtime.units import UnitPlan
from lamina.runtime.windows import Entry, Shown, Window, give_memory, refresh_flat_weights

_OF_FROZEN = "; lamina.shard(..., ignore=) for layers that rewrite frozen weights, as quantised ones do"
_local_of = attrgetter("_local")
_address_of = Tensor.data_ptr


class Visits:
    """Forwards of one unit whose graph may still be run backward. See Note [Kept graphs] in uses.py."""

    __slots__ = ("unit", "alive")

    def __init__(self, unit: str) -> None:
        self.unit = unit  # its name
        self.alive = 0


class Unit:
    """Tensors of one unit on this rank."""

    __slots__ = (  # more attributes than Python keeps beside an object: each would be looked up in a dict
        "index", "plan", "layout", "mesh", "name", "params", "entries", "window", "plain", "sharded", "trainable",
        "communicates", "dirty", "version", "expected", "_versions", "wanted", "slot", "requires", "_followed",
        "_shown", "overflow", "windows", "was_entered", "leads", "lanes", "kept", "ears", "visits", "gathers",
        "reduces", "overflows", "_hung", "_attribute_count", "recurrent", "gradients", "masters", "published",
        "halved", "halving", "gone", "locals", "addresses", "__weakref__",
    )  # fmt: skip

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
        self.window = Window(entries, params)
        self.plain = plain
        self.sharded = mesh.factors.shards_parameters
        self.trainable = any(spec.trainable for spec in layout.params)
        self.communicates = mesh.factors.uses_shards
        self.dirty = DirtyFlag(True)
        self.version = 0  # counts changes of the weights, as root forwards see them
        self.expected = [spec.trainable for spec in layout.params]  # which gradients there is a place for
        self._versions = -1  # writes that are known of, as autograd counts them
        self.wanted = list(self.expected)  # which gradients a use should leave
        self.slot: Slot | None = None  # home; None for a plain unit
        self.requires = self.expected  # requires_grad of the user's parameters when the root forward began
        self._followed: dict[Slot, tuple[int, list[bool]]] = {}  # the same of a slot's, and `freezes` when they got it
        self._shown: dict[Slot, Shown] = {}  # what a use of the slot shows
        self.overflow: list[Slot] = []
        self.windows = 0  # open uses whose modules see full parameters
        self.was_entered = False  # by a forward, since its last reduction
        self.leads = False  # among the first uses of a step: on GPUs its weights are brought first
        self.lanes: Lanes | None = None  # its masters are written on `compute`; None: they are read there, too
        self.kept = 0  # `keep` scopes that hold it
        self.ears: dict[int, Any] = {}  # by position: autograd's node that gives the user's parameter its gradient
        self.visits = Visits(self.name)
        self.gathers = self.reduces = self.overflows = 0
        self._hung = False  # whether users have hung attributes on its parameters
        self._attribute_count = 0  # of all of them, ours included, when it was last looked at
        self.recurrent: list[weakref.ref[nn.RNNBase]] = []  # modules that hold a list of their weights beside the dict
        self.gradients = UnitGradients(self.params, layout, mesh.device, mesh.range_index, plain)
        self.gradients.notes.are_hooked = not self.communicates  # nobody tells
        self.masters: list[Tensor] = []
        self.published: list[Tensor] = []
        self.halved: dict[int, HalvedMaster] = {}  # by segment, in whose place `masters` holds a husk; see halved.py
        self.halving = Halving()  # whether there are any
        self.gone: frozenset[int] = frozenset()  # positions of parameters that have left the model
        self.locals: list[Tensor] = []  # what each parameter's memory was made, to see whether it still is
        self.addresses: list[int] = []  # the same of parameters that are plain

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

    @property
    def has_whole_masters(self) -> bool:
        """Whether some that can be halved are not."""
        return any(master.whole is not None for master in self.halved.values())

    def read_masters(self) -> list[Tensor]:
        """As `masters`, values that may not be written to."""
        halved = self.halved
        return [halved[i].read(0, halved[i].numel) if i in halved else own for i, own in enumerate(self.masters)]

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
        self._note_addresses()
        self._make_published()
        listen(self)

    def adopt_shards(self) -> None:
        """Make masters of parameters that are sharded already: a copied model's."""
        for segment in self.layout.segments:
            self.masters.append(torch.zeros(segment.range_numel, dtype=segment.master, device=self.mesh.device))
        self.locals = [local_of(param) for param in self.params]
        for position, param in enumerate(self.params):
            if isinstance(param, Shard):
                param.spec = self._owned(position, param.spec)
            else:
                note_whole(param, self.mesh.share, None if self.plain else self.dirty)
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
            note_whole(param, self.mesh.share, None if self.plain else self.dirty)
            if param.data_ptr() != local.data_ptr() or param.dtype is not local.dtype:  # empty ones have no address
                give_memory(param, local.view(spec.shape))
            return
        group, gathers = self.mesh.shard_sums, self.mesh.shard_group.pg
        ranges = tuple(pieces[factors.range_index(rank)] for rank in range(factors.optimizer))
        outer, larger = further_axes(param)
        shape = torch.Size(spec.shape)
        made = ShardSpec(spec.name, shape, ranges, group.place, group.pg, outer, larger, gathers=gathers)
        convert_(param, local, self._owned(position, made))

    def _owned(self, position: int, spec: ShardSpec) -> ShardSpec:
        """The spec of a parameter, not of just any tensor that is cut so."""
        takes = functools.partial(receive, weakref.ref(self), position)
        notes, share = self.gradients.notes_of(position), self.mesh.share
        return replace(spec, dirty=self.dirty, share=share, receive=takes, notes=notes, geometry=spec.geometry)

    # ---- a model that was changed around it ---------------------------------------------------------------------

    def stand_at(self, plan: UnitPlan, layout: UnitLayout, entries: Sequence[Entry], gone: frozenset[int]) -> None:
        """The same parameters under other names, in other modules or (`gone`) in none. No use is open."""
        self.gone = gone
        self.plan, self.layout, self.gradients.layout = plan, layout, layout
        self.name = self.visits.unit = plan.name or "root"
        self.entries = list(entries)
        self.window = Window(entries, self.params)
        for slot in self.slots:
            slot.layout = layout
        for slot in self._shown:
            self._shown[slot] = self.window.values(slot.fulls)
            slot.keepers.have_none()
        for param, spec in zip(self.params, layout.params, strict=True):
            if isinstance(param, Shard) and param.spec.name != spec.name:
                param.spec = replace(param.spec, name=spec.name, geometry=param.spec.geometry)

    def leave_slots(self) -> None:
        """It is given another place. Nothing reads the old one any more."""
        for slot in self.slots:
            slot.retire()
        self.slot, self.overflow = None, []
        self._shown.clear()
        self._followed.clear()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            for slot in self.slots:
                slot.retire()

    def count_change(self) -> None:
        """A root forward begins: it reads other weights and attributes than the last one if they were changed since."""
        if not self._hung:
            count = 0
            for param in self.params:
                count += len(param.__dict__)
            if count != self._attribute_count:  # else they are the same: nobody takes our own away
                self._attribute_count = count
                self._hung = not all(map(OWN_ATTRIBUTES.issuperset, map(vars, self.params)))
        if self.dirty.value:
            self.version += 1
            for slot in self.slots:
                slot.expect_other_weights()

    # ---- exchange ----------------------------------------------------------------------------------------------

    def swap_in(self, slot: Slot, forward: bool) -> None:
        """Let the modules see the full parameters of `slot`."""
        shown = self._shown.get(slot)
        if shown is None:
            shown = self._shown[slot] = self.window.values(slot.fulls)
            self._followed[slot] = -1, []  # nothing yet: what was frozen when it was sharded may train by now
            me = weakref.ref(self)
            slot.belong_to([functools.partial(_parameter_of, me, position) for position in range(len(slot.fulls))])
            slot.keepers.have_none()
        slot.keepers.unlock()
        if self._hung:
            any(map(FullParameter.take_attributes, slot.fulls, self.params))
        if self.windows == 0:
            self.window.open(shown)
        else:
            self.window.show(shown)
        if not self.communicates or self._followed[slot][0] != self.gradients.notes.freezes:
            self.follow(slot, forward)
        for module in self.recurrent:
            refresh_flat_weights(module())

    def refuse_writes(self, slot: Slot, when: str) -> None:
        """What was written into a full parameter is lost when its slot is given back."""
        slot.version = slot.count_writes()
        of_frozen = "" if all(p.requires_grad for p in self.params) else _OF_FROZEN
        raise StateError(
            f"{written_to(self, slot)} was changed in place {when}, on its gathered copy, so that the change would be "
            "lost: use a buffer, or change the parameter between steps (`with torch.no_grad(): p.clamp_(...)`; "
            f"Embedding without max_norm=){of_frozen}"
        )

    def shut_window(self) -> None:
        """One use less; with the last, the modules see the persistent parameters again."""
        if self.windows > 0:
            self.windows -= 1
            if self.windows == 0 and not self.plain:
                self.swap_out()

    def swap_out(self) -> None:
        self.window.shut()
        for module in self.recurrent:
            refresh_flat_weights(module())

    def follow(self, slot: Slot, forward: bool) -> None:
        """Let full parameters require gradients as the user's do now.

        At every use: a forward may freeze a part of the model around one call of it. In backwards, too: there autograd
        asks a leaf whether it takes its gradient, and a later forward may have found it frozen.
        """
        freezes = self.gradients.notes.freezes
        seen, before = self._followed[slot]
        if seen == freezes and self.communicates:
            return
        now = requirements_of(self.params)
        if forward and now != before:
            self.refuse_late_thaw()
        self._followed[slot] = freezes, now
        if now == before:
            return
        for full, is_trainable, has_place in zip(slot.fulls, now, self.expected, strict=True):
            # torch.vmap refuses to be asked for what is so already; to what has no place no graph leads
            if full.requires_grad != is_trainable and has_place:
                full.requires_grad_(is_trainable)
        self.wanted = now

    def open_plain(self, forward: bool) -> None:
        """A use begins for which nothing is gathered."""
        if forward:
            self.refuse_late_thaw()
        self.windows += 1

    def refuse_late_thaw(self) -> None:
        """Raise if there is no place for the gradient of what this forward is to train."""
        if all(self.expected):
            return
        for param, has_place, spec in zip(self.params, self.expected, self.layout.params, strict=True):
            if param.requires_grad and not has_place:
                raise ParameterChanged(
                    f"`{spec.name}` requires a gradient since the middle of this forward, for the first time: call "
                    "`requires_grad_()` before the forward of the whole model"
                )

    def look(self) -> bool:
        """Before a root forward: see what the user has done to the parameters; whether a frozen one trains from now on.

        Every one is still a view of its master: `.to()`, `.double()` and the like would have moved it.
        """
        if not self._untouched():
            self.check_masters()  # it may write to them
        requires = requirements_of(self.params)
        if not self.plain and self._versions != self._count_writes():
            self.note_writes()
            self.dirty.mark()
        if requires == self.requires:
            return False
        self.requires = requires
        self.gradients.notes.freezes += 1  # also where nobody has told of it
        listen(self)
        if self.plain:
            self.wanted = list(requires)
        thawed = [i for i, (now, place) in enumerate(zip(requires, self.expected, strict=True)) if now and not place]
        if thawed:
            self._thaw(thawed)
        return bool(thawed)

    def was_written(self) -> bool:
        """Whether masters were changed since, through `p.local` or as plain parameters, and nobody has said so."""
        return self._count_writes() != self._versions

    def note_writes(self) -> None:
        """All writes so far are known of."""
        self._versions = self._count_writes()

    def _count_writes(self) -> int:
        count = 0
        for written in self.masters if self.communicates else self.params:
            count += written._version
        return count if self.communicates else count + hash(tuple(map(_address_of, self.params)))

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
        self.layout = self.layout.thawed(positions)
        for slot in self.slots:
            slot.layout = self.layout
        self.trainable, self.expected = True, [spec.trainable for spec in self.layout.params]
        self.gradients.thaw(self.layout)

    def check_masters(self) -> None:
        """Raise if a parameter was cast or moved; take back values of Shards that were given other memory."""
        if self._untouched():
            return
        refuse_changed_forms(self.params, self.layout.params, self.mesh.device, self.communicates)
        if self.communicates:  # else somebody may keep what lies in their places: they are read where they are
            self.re_home()

    def _untouched(self) -> bool:
        """The quick look: the same tensor objects as when the masters were made."""
        if not self.communicates:
            return self._in_place()
        try:
            return all(map(is_, map(_local_of, self.params), self.locals))
        except AttributeError:  # one is no Shard any more
            return False

    def _in_place(self) -> bool:
        """Of parameters that are plain: each still lies in its master."""
        return list(map(_address_of, self.params)) == self.addresses

    def re_home(self) -> None:
        """Copy values that were given other memory (`.data =`, no-op casts) back into the masters."""
        index, position = self.mesh.range_index, 0
        with torch.no_grad():
            for number, (segment, master) in enumerate(zip(self.layout.segments, self.masters, strict=True)):
                halved = self.halved.get(number)
                for i, spec in enumerate(segment.params):
                    start, stop = segment.owned(i, index)
                    offset = segment.offset_in_range(i, index)
                    place, param = master[offset : offset + stop - start], self.params[position]
                    target = place if halved is None else halved.make_whole()[offset : offset + stop - start]
                    target.copy_(local_of(param).reshape(-1))
                    self.locals[position] = place
                    if isinstance(param, Shard):
                        param.local = place
                        param._reach = None if halved is None else HalvedPlace(halved, offset, offset + stop - start)
                        if param.spec.dirty is not self.dirty:  # `.to_empty()` and the like made another shard of it
                            param.spec = self._owned(position, param.spec)
                    else:
                        param.data = place.view(spec.shape)
                    position += 1
        self._note_addresses()
        self.dirty.mark()
        listen(self)

    def _note_addresses(self) -> None:
        if not self.communicates:
            self.addresses = list(map(_address_of, self.params))


def _parameter_of(unit: weakref.ref[Unit], position: int) -> nn.Parameter | None:
    """Not by a reference to the parameter itself: torch does not move one that has any."""
    return None if (there := unit()) is None else there.params[position]
