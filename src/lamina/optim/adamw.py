"""AdamW that updates whole ranges of a unit at once.

torch's fused AdamW takes one entry per parameter in six lists, and builds and checks these lists at every step: host
time that grows with the number of parameters, however small they are. Parameters of a sharded model lie in a few
buffers, so here the lists hold a few ranges, made once:

    homes   the state, one buffer a moment for neighbouring parameters of one group (`moments`)
    calls   one fused kernel per group, device and dtype, over ranges of masters, gradients and moments; on GPUs two,
            for the units that lead come first, and are gathered for the next step while the others are written

Calls are made anew when a gradient appears, goes away or is replaced by another tensor, and when groups or states
change; hyperparameters are read from the groups at every step. The algorithm is that of Loshchilov and Hutter,
"Decoupled weight decay regularization", by torch's own kernel, or on GPUs by ours (`adamw_kernel`) where it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from lamina.core.lanes import Lanes, Mark
from lamina.core.shard_optim import written_flags
from lamina.core.shard_spec import DirtyFlag
from lamina.core.uncompiled import uncompiled
from lamina.errors import UsageError
from lamina.optim.clip import Norm
from lamina.optim.moments import FLAT, Home, make_steps, stepping
from lamina.optim.places import find_places, local_of
from lamina.optim.update import (
    Call,
    Scaling,
    by_own_kernel,
    by_torch,
    by_torch_in_halves,
    gradient_for,
    is_same_place,
    published_of,
    real_of,
)
from lamina.runtime.halving import CLIPPING
from lamina.runtime.unit import Unit

_master = attrgetter("master")


@dataclass
class Seen:
    """What the homes were made for; compared at every step by identity, without a loop in Python."""

    groups: list[tuple[list[Tensor], bool, bool]]  # parameters, amsgrad, eps == 0
    state: dict[Any, Any]
    values: list[Any]  # of `state`
    entries: list[tuple[str, list[dict[str, Any]], list[Tensor]]]  # key, states, what they hold


class AdamW(torch.optim.AdamW):
    """AdamW over the flat ranges of a sharded model; equal to `torch.optim.AdamW` up to rounding.

    A `torch.optim.Optimizer` with the groups, options and state dict of torch's, for parameters of sharded models and
    for any others; it may be built before or after `lamina.shard()`. Always fused.

    Args:
        params: parameters, named parameters, or groups of them.
        lr: a number, or a tensor with one element.
        betas, eps, weight_decay, amsgrad, maximize, capturable: as in torch.
        fused: accepted for code that passes it to torch's; False is refused.
        max_norm: clip gradients to this global norm in the step itself, with the result of `lamina.clip_grad_norm_`
            before it and one or two passes over memory less. The step is then collective, and what `p.grad` holds
            between it and `zero_grad()` is not defined. May be set later, as an attribute.

    Attributes:
        grad_norm: with `max_norm`, the norm that the last step found before clipping: 0-dim, on the device, equal on
            all ranks. None before.

    Raises:
        UsageError: `fused=False`; a sparse gradient; a `max_norm` that is not positive.
        ParameterChanged: a parameter was cast or moved after `lamina.shard()`.
    """

    _step_supports_amp_scaling = True  # GradScaler sets grad_scale and found_inf, the kernel reads them
    marks_what_it_writes = True  # parameters need not be marked after a step
    _homes: Sequence[Home] = ()
    _calls: Sequence[Call] = ()
    _counts: Sequence[list[Tensor]] = ()  # pieces of the homes' step counts that a step adds to, by device
    _leading: Sequence[Unit] = ()  # units that a step writes, those first that the next one gathers first
    _others: Sequence[Unit] = ()
    _flags: Sequence[DirtyFlag] = ()  # of parameters that are a unit's by another object, such as `p.detach()`
    _kinds: list[list[int]] | None = None
    _masters: Sequence[Tensor | None] = ()  # by home, in which the calls' ranges lie
    _seen: Seen | None = None
    _rates: Sequence[Tensor] = ()  # learning rates by group, 0-dim on the device: what a captured step reads
    _rehearses = False  # an eager step that launches what a recording will launch, so that it is compiled then
    _recorded: Sequence[Call] = ()  # whose kernels a recording holds
    _norm: Norm | None = None  # of the gradients that a step takes; None: to be made anew
    max_norm: float | None = None
    grad_norm: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        capturable: bool = False,
        fused: bool | None = True,
        max_norm: float | None = None,
    ) -> None:
        if fused is False:
            raise UsageError("lamina.optim.AdamW is always fused: leave `fused` out, or use torch.optim.AdamW")
        is_number = isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool)
        if max_norm is not None and not (is_number and max_norm > 0):
            raise UsageError(f"lamina.optim.AdamW(max_norm={max_norm!r}): a positive number, or None not to clip")
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, capturable=capturable, fused=True
        )
        self.max_norm = max_norm
        CLIPPING.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_norm": self.max_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also what `load_state_dict` calls; the groups of a torch.optim.AdamW may say that it was not fused."""
        super().__setstate__(state)
        for group in self.param_groups:
            group["fused"], group["foreach"] = True, None
        self._seen = None
        CLIPPING.add(self)

    @torch.no_grad()
    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient. Local, unless `max_norm` asks for the norm."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._is_current():
            self._settle()
        kinds = [home.kinds() for home in self._homes]
        if kinds != self._kinds or not all(map(is_, map(_master, self._homes), self._masters)):
            self._draw(kinds)
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        scaling = Scaling(scale, found_inf, None if self.max_norm is None else self._clip_factor(scale))
        for counts in self._counts:
            torch._foreach_add_(counts, 1)
        if scaling.factor is not None:
            _note_earlier_writes((*self._leading, *self._others))
        cast = set()  # units that are not published by the step
        for leads, units in ((True, self._leading), (False, self._others)):
            for call in self._calls:
                if call.leads is leads and not self._update(call, scaling):
                    cast.update(call.units)
            _note_written(units, cast)
        for flag in self._flags:
            flag.mark()
        if found_inf is not None:  # a step that the kernels left out does not count
            for counts in self._counts:
                torch._foreach_sub_(counts, [found_inf.to(counts[0].device, non_blocking=True)] * len(counts))
        return loss

    def _update(self, call: Call, scaling: Scaling) -> bool:
        """Whether it has published what it wrote. Note [Published] 3 in runtime/publishing.py."""
        publishes = scaling.factor is not None and bool(call.published)
        for unit, copies in zip(call.units, call.copies, strict=True) if publishes else ():
            if unit.published is not copies:  # `lamina.adopt` has given it other memory
                publishes, self._norm = False, None
            elif unit.dirty.value and not unit.dirty.published and not call.halved:
                publishes = False  # more has changed than this writes
        if call.halved and publishes:  # all who read have been met
            publishes = all(master.make_halves(master.lanes.compute) for _, master, _, _ in call.halved)
        group = self.param_groups[call.group]
        is_captured = _is_capturing()
        reads_rate = bool(self._rates) and (is_captured or self._rehearses)
        rate = self._rates[call.group] if reads_rate else group["lr"]
        may_be_own = not is_captured or (call.table is not None and call.table.has_place)
        if not (may_be_own and by_own_kernel(call, group, rate, scaling, publishes)):
            if call.halved and publishes:
                by_torch_in_halves(call, group, rate, scaling)
                return True
            by_torch(call, group, rate, scaling)
            return False
        if is_captured:
            self._recorded = [*self._recorded, call]
        return publishes

    def _clip_factor(self, scale: Tensor | None) -> Tensor:
        """What gradients are to be multiplied by so that their norm is at most `max_norm`; collective."""
        assert self.max_norm is not None
        if self._norm is None:
            params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            self._norm = Norm(params)
            self._choose_published()
        for lanes in {unit.lanes for unit in (*self._leading, *self._others) if unit.lanes is not None}:
            if lanes.is_recording or not _is_capturing():
                lanes.compute.wait(lanes.gather.mark())  # who takes part in the norm has read what was published before
        norm = self._norm.total()
        if any(call.loose for call in self._calls):
            self._norm = None  # gradients of no fixed place
        if scale is not None:
            norm = norm / scale.to(norm.device, non_blocking=True)
        self.grad_norm = norm
        return (self.max_norm / (norm + 1e-6)).clamp(max=1.0)

    def _choose_published(self) -> None:
        """Where calls write the copies that peers read: if the norm meets all who read them."""
        assert self._norm is not None
        for call in self._calls:
            before, call.published = call.published, []
            if all(map(self._norm.meets_readers, call.units)):
                call.published = published_of(call)
            call.copies = [unit.published for unit in call.units]
            if len(before) != len(call.published) or not all(map(is_same_place, before, call.published)):
                call.table = None

    def let_go(self) -> None:
        """Masters come to lie in other memory: what is drawn of them is given up until the next step."""
        self._calls, self._kinds, self._masters = (), None, ()

    def rehearse(self, on: bool) -> None:
        """From here on steps launch what a recorded one will, or (`on=False`) no longer. See `lamina.capture`."""
        self._rehearses, self._recorded = on, ()
        if on:
            self.hold_rates()
            return
        for call in self._calls:
            if call.table is not None:
                call.table.make_place()

    def end_recording(self) -> list[Tensor]:
        """Write down where the ranges lie; returns what recorded kernels read, to be held as long as the recording."""
        held = [place for call in self._recorded if call.table is not None for place in call.table.end_recording()]
        self._recorded = ()
        return held

    def hold_rates(self) -> None:
        """Give the learning rates a place on the device, the same for all recordings. See `lamina.capture`."""
        if len(self._rates) != len(self.param_groups):
            device = next(p.device for group in self.param_groups for p in group["params"])
            self._rates = [torch.zeros((), dtype=torch.float32, device=device) for _ in self.param_groups]
        self.refresh_rates()

    def refresh_rates(self) -> None:
        """Bring the groups' learning rates there."""
        for rate, group in zip(self._rates, self.param_groups, strict=True):
            lr = group["lr"]
            if isinstance(lr, Tensor):
                rate.copy_(lr.reshape(()), non_blocking=True)
            else:
                rate.fill_(lr)

    # ---- homes: from groups and states ---------------------------------------------------------------------------

    def _is_current(self) -> bool:
        seen = self._seen
        if seen is None or len(self.param_groups) != len(seen.groups):
            return False
        for group, (params, amsgrad, no_eps) in zip(self.param_groups, seen.groups, strict=True):
            same = len(group["params"]) == len(params) and all(map(is_, group["params"], params))
            if not same or bool(group["amsgrad"]) != amsgrad or (group["eps"] == 0) != no_eps:
                return False
        if self.state is not seen.state or len(self.state) != len(seen.values):
            return False
        if not all(map(is_, self.state.values(), seen.values)):
            return False
        try:
            return all(all(map(is_, map(itemgetter(key), states), held)) for key, states, held in seen.entries)
        except KeyError:
            return False

    def _settle(self) -> None:
        """Give every parameter a home and bring the states there; homes that stayed the same are kept."""
        before = {home.identity: home for home in self._homes}
        homes = []
        for number, group in enumerate(self.param_groups):
            keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if group["amsgrad"] else 2]
            for params, places in _neighbours(group["params"]):
                home = Home(params, places, number, keys)
                homes.append(before.get(home.identity, home))
        make_steps([home for home in homes if home.identity not in before])
        for home in homes:
            states = [self.state.get(param) or {} for param in home.params]
            for i, state in enumerate(states):
                home.adopt(i, state)
            home.read_histories([bool(state) for state in states])
        self._homes, self._kinds = homes, None
        self._remember()

    def _remember(self) -> None:
        by_key: dict[str, tuple[list[dict[str, Any]], list[Tensor]]] = {}
        for home in self._homes:
            for param, view in zip(home.params, home.views, strict=False):
                state = self.state.get(param)
                for key in view if state else ():
                    states, held = by_key.setdefault(key, ([], []))
                    states.append(state)  # type: ignore[arg-type]
                    held.append(view[key])
        groups = [(list(g["params"]), bool(g["amsgrad"]), g["eps"] == 0) for g in self.param_groups]
        entries = [(key, states, held) for key, (states, held) in by_key.items()]
        self._seen = Seen(groups, self.state, list(self.state.values()), entries)

    # ---- calls: from homes and gradients -------------------------------------------------------------------------

    def _draw(self, kinds: list[list[int]]) -> None:
        """Make the calls for the gradients that are there; states begin with the first gradient."""
        calls: dict[tuple[Any, ...], Call] = {}
        units: dict[int, Unit] = {}
        for home, here in zip(self._homes, kinds, strict=True):
            if not any(here):
                continue
            home.allocate()
            for i in home.advance(here):
                self.state[home.params[i]] = dict(home.views[i])
            first = home.params[0]
            group = self.param_groups[home.group]
            leads, copied_to = False, None
            if home.unit is not None:
                published = home.unit.published
                leads, copied_to = home.unit.leads, published[home.places[0].segment].dtype if published else None
            is_halved = home.unit is not None and home.places[0].segment in home.unit.halved
            key = home.group, first.device, first.dtype, leads, copied_to, is_halved
            call = calls.setdefault(key, Call(home.group, leads))
            for start, end in home.runs(here, over_padding=group["eps"] != 0):
                _add_range(call, home, start, end, flat=here[start] == FLAT)
            if home.unit is not None:
                units[id(home.unit)] = home.unit
                call.units.append(home.unit)
        self._calls, self._norm = [call for call in calls.values() if call.params], None
        self._counts = stepping(self._homes, kinds)
        self._leading = [unit for unit in units.values() if unit.leads]
        self._others = [unit for unit in units.values() if not unit.leads]
        self._flags = written_flags(param for home in self._homes if home.unit is None for param in home.params)
        self._kinds, self._masters = kinds, list(map(_master, self._homes))
        self._remember()


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _note_earlier_writes(units: Sequence[Unit]) -> None:
    """Such as to the `p.local` of a frozen parameter: no step publishes these."""
    for unit in units:
        if unit.published and unit.was_written():
            unit.dirty.mark()


def _note_written(units: Sequence[Unit], cast: Set[Unit]) -> None:
    """Masters are what they will be once all that compute has been given so far is done, gradients are used up."""
    marks: dict[Lanes | None, Mark | None] = {None: None}
    for unit in units:
        lanes = unit.lanes
        if lanes is not None and lanes not in marks:
            marks[lanes] = lanes.compute.mark()
        is_published = unit not in cast and (unit.dirty.published or not unit.dirty.value)
        unit.dirty.mark(marks[lanes], is_published)
        unit.note_writes()
        unit.gradients.has_squares = False  # a kernel may have scaled them


def _neighbours(params: Sequence[Tensor]) -> list[tuple[list[Tensor], list[Any]]]:
    """The parameters of a group, neighbours in a unit together, in the order of the units."""
    alone, placed = [], []
    for param, place in zip(params, find_places(params), strict=True):
        if place is None:
            alone.append(([param], [None]))
        else:
            placed.append((place, param))
    placed.sort(key=lambda item: (item[0].unit.index, id(item[0].unit), item[0].position))
    runs: list[tuple[list[Tensor], list[Any]]] = []
    for place, param in placed:
        if runs and runs[-1][1][-1].is_followed_by(place):
            runs[-1][0].append(param)
            runs[-1][1].append(place)
        else:
            runs.append(([param], [place]))
    return runs + alone


def _add_range(call: Call, home: Home, first: int, end: int, flat: bool) -> None:
    """Enter the parameters [first, end) of a home, as one range where they are flat."""
    if flat:
        start, stop = home.places[first].start, home.places[end - 1].stop
        if start == stop:
            return
        place = home.places[first]
        moments = {key: moment[start - home.start : stop - home.start] for key, moment in home.moments.items()}
        if place.segment in place.unit.halved:
            call.halved.append((len(call.params), place.unit.halved[place.segment], start, stop))
            call.params.append(moments["exp_avg"])  # replaced before a kernel runs
        else:
            call.params.append(real_of(place.unit.masters[place.segment][start:stop]))
        call.grads.append(gradient_for(place.unit.gradients.ranges[place.segment][start:stop], call.params[-1]))
        call.places.append((place.unit, place.segment, start, stop))
    else:
        param = home.params[first]
        if local_of(param).numel() == 0:
            return
        call.loose.append((len(call.params), param))
        call.params.append(param)
        call.grads.append(param)  # both are replaced before the kernel runs
        moments = {key: local_of(home.views[first][key]) for key in home.keys}
    for key, moment in moments.items():
        call.moments.setdefault(key, []).append(real_of(moment))
    call.steps.append(home.steps[first])
