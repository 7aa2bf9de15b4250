"""Optimizer state of neighbouring parameters: one buffer a moment, shown to the user by parameter.

torch keeps a tensor per parameter and moment. A `Home` holds the same state in one buffer for parameters that follow
one another in a unit and belong to one group; `state[p]` shows `Shard`s (or plain tensors) that are views of it, so
state dicts, checkpoints and edits in place work as with torch. A parameter outside any unit is a home of its own.

Note [equal steps]
    A kernel takes one step count for a range, so only parameters of equal count may be one range. Counts lie on the
    device, where an overflow may hold them back; reading them every step would make the host wait. Instead a home
    keeps a history number per parameter: those with one number have taken part in the same steps ever since.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from lamina.core.shard_optim import cut
from lamina.core.shard_tensor import Shard
from lamina.errors import ShardOpError, UsageError
from lamina.optim.places import Place, local_of
from lamina.runtime.unit import Unit
from lamina.runtime.unit_gradients import gradient_dtype

ABSENT, FLAT, LOOSE = range(3)  # no gradient | in the unit's buffers | to be looked up at every step
NEVER = -1  # history of a parameter that has not been stepped

_grad = attrgetter("grad")
_local = attrgetter("_local")


class Home:
    """State of parameters of one group that are neighbours in one segment of a unit, or of one parameter outside."""

    moments: dict[str, Tensor]  # each (stop - start,); of a plain parameter outside any unit: its own shape
    steps: Tensor  # (len(params),) float32, a piece of `all_steps`
    all_steps: Tensor  # 1D, of all homes that were made together

    def __init__(
        self, params: Sequence[Tensor], places: Sequence[Place | None], group: int, keys: Sequence[str]
    ) -> None:
        self.params, self.places = list(params), [place for place in places if place is not None]
        self.group, self.keys = group, tuple(keys)
        self.unit: Unit | None = self.places[0].unit if self.places else None
        self.history = [NEVER] * len(self.params)
        self.moments = {}
        self.steps_at = 0  # where `steps` begins in `all_steps`
        self.views: list[dict[str, Tensor]] = []  # what `state[p]` holds, by parameter
        self._histories = 0
        self._all_flat = [FLAT] * len(self.params)
        self._is_sharded = type(self.params[0]) is Shard
        self._has_kernel_dtype = False  # gradients are wider than 16-bit masters; the kernel takes one dtype
        if self.places:
            self.start, self.stop = self.places[0].start, self.places[-1].stop
            self._first, self._end = self.places[0].position, self.places[-1].position + 1
            master = self.places[0].unit.masters[self.places[0].segment]
            self._has_kernel_dtype = gradient_dtype(master.dtype) is master.dtype
            self._addresses = [
                master.data_ptr() + place.start * master.element_size() if place.stop > place.start else 0
                for place in self.places
            ]

    @property
    def identity(self) -> tuple[Any, ...]:
        """Two homes of one identity hold the same state."""
        where = None if self.unit is None else id(self.unit)
        return (self.group, self.keys, where, self._is_sharded, *map(id, self.params))

    @property
    def master(self) -> Tensor | None:
        """In which its parameters lie; another one where masters have changed their form (runtime/halving.py)."""
        return self.places[0].unit.masters[self.places[0].segment] if self.places else None

    # ---- memory ------------------------------------------------------------------------------------------------

    def allocate(self) -> None:
        if self.views:
            return
        first = self.params[0]
        if self.places:
            master = self.places[0].unit.masters[self.places[0].segment]
            self.moments = {key: master.new_zeros(self.stop - self.start) for key in self.keys}
        else:
            self.moments = {key: torch.zeros_like(local_of(first).detach()) for key in self.keys}
        self.views = [
            {"step": self.steps[i], **{key: self._view(i, moment) for key, moment in self.moments.items()}}
            for i in range(len(self.params))
        ]

    def _view(self, i: int, moment: Tensor) -> Tensor:
        param = self.params[i]
        if self.places:
            place = self.places[i]
            moment = moment[place.start - self.start : place.stop - self.start]
        if isinstance(param, Shard):
            return Shard(moment, param.spec.derived)
        return moment.view(param.shape) if self.places else moment

    def adopt(self, i: int, state: dict[str, Any]) -> None:
        """Take the values of a parameter's state, whatever tensors hold them, or forget it if there is none."""
        if not state and not self.views:
            return
        self.allocate()
        for key, view in self.views[i].items():
            value = state.get(key)
            if value is view:
                continue
            if value is None:
                view.zero_()
            elif isinstance(value, Tensor):
                view.copy_(value)
            else:
                view.fill_(value)
        if state:
            state.update(self.views[i])

    def read_histories(self, stepped: Sequence[bool]) -> None:
        """After a load: parameters of one step count share a history. Waits for the device."""
        if not any(stepped):
            self.history = [NEVER] * len(self.params)
            return
        numbers: dict[float, int] = {}
        counts = self.steps.tolist()
        self.history = [
            numbers.setdefault(count, len(numbers)) if has else NEVER
            for count, has in zip(counts, stepped, strict=True)
        ]
        self._histories = len(numbers)

    def advance(self, kinds: Sequence[int]) -> list[int]:
        """Note which parameters take part from now on; returns those that begin. See Note [equal steps]."""
        left_out = {number for number, kind in zip(self.history, kinds, strict=True) if kind == ABSENT}
        renamed: dict[int, int] = {}
        begin = []
        for i, kind in enumerate(kinds):
            number = self.history[i]
            if kind == ABSENT:
                continue
            if number == NEVER:
                begin.append(i)
            if number == NEVER or number in left_out:
                if number not in renamed:
                    renamed[number] = self._histories
                    self._histories += 1
                self.history[i] = renamed[number]
        return begin

    # ---- gradients ---------------------------------------------------------------------------------------------

    def kinds(self) -> list[int]:
        """For each parameter: ABSENT, FLAT or LOOSE. Local, and quick where all are flat."""
        grads = list(map(_grad, self.params))
        if self.unit is None or not self.unit.gradients.views or not self._has_kernel_dtype:
            return [ABSENT if grad is None else self._loose(i, grad) for i, grad in enumerate(grads)]
        in_place = self._in_place()
        views = self.unit.gradients.views[self._first : self._end]
        if all(in_place) and all(map(is_, grads, views)):
            return self._all_flat
        return [
            ABSENT if grad is None else FLAT if grad is view and here else self._loose(i, grad)
            for i, (grad, view, here) in enumerate(zip(grads, views, in_place, strict=True))
        ]

    def _in_place(self) -> list[bool]:
        """Whether each parameter and its gradient's view still are parts of their unit's ranges."""
        assert self.unit is not None
        if self._is_sharded:
            if not all(map(is_, map(_local, self.params), self.unit.locals[self._first : self._end])):
                self.unit.check_masters()  # names what was cast or moved, or brings it back
            return [True] * len(self.params)
        addresses = [param.data_ptr() for param in self.params]
        found = self.unit.gradients.in_place(range(self._first, self._end))
        if addresses == self._addresses:
            return found
        same = zip(addresses, self._addresses, found, strict=True)
        return [here == wanted and is_in_place for here, wanted, is_in_place in same]

    def _loose(self, i: int, grad: Tensor) -> int:
        param = self.params[i]
        if isinstance(param, Shard) and not isinstance(grad, Shard):
            param.grad = cut(grad, param)  # such as a regulariser's, outside the forward
        elif grad.is_sparse:
            raise UsageError(
                f"lamina.optim.AdamW got a sparse gradient for a parameter of shape {tuple(param.shape)}: build its "
                "embedding with sparse=False, or step it with torch.optim.SparseAdam"
            )
        grad = param.grad if param.grad is not None else grad
        if local_of(grad).numel() != local_of(param).numel():  # a kernel would write past the shorter one
            name = self.places[i].name if self.places else "a parameter"
            raise ShardOpError(
                f"`{name}` has {local_of(param).numel()} elements here and its gradient {local_of(grad).numel()}: it "
                "was cut in another way. Set `p.grad` to a full tensor, or to a Shard such as `torch.zeros_like(p)`"
            )
        return LOOSE

    def runs(self, kinds: Sequence[int], over_padding: bool) -> list[tuple[int, int]]:
        """[first, end) numbers of parameters that one kernel entry updates: flat neighbours with one history."""
        runs: list[tuple[int, int]] = []
        for i, kind in enumerate(kinds):
            if kind == ABSENT:
                continue
            first, end = runs[-1] if runs else (0, -1)
            joins = end == i and kind == kinds[first] == FLAT and self.history[i] == self.history[first]
            if joins and (over_padding or self.places[i - 1].stop == self.places[i].start):
                runs[-1] = (first, i + 1)
            else:
                runs.append((i, i + 1))
        return runs


def make_steps(homes: Sequence[Home]) -> None:
    """Give new homes their step counts: one buffer a device, so that a step adds to it once."""
    by_device: dict[torch.device, list[Home]] = {}
    for home in homes:
        by_device.setdefault(home.params[0].device, []).append(home)
    for device, members in by_device.items():
        buffer = torch.zeros(sum(len(home.params) for home in members), dtype=torch.float32, device=device)
        at = 0
        for home in members:
            home.steps, home.steps_at, home.all_steps = buffer[at : at + len(home.params)], at, buffer
            at += len(home.params)


def stepping(homes: Sequence[Home], kinds: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """The step counts of all parameters that take part, as few pieces of the buffers, by device."""
    pieces: list[tuple[Tensor, int, int]] = []
    for home, here in zip(homes, kinds, strict=True):
        for i, kind in enumerate(here, start=home.steps_at):
            if kind == ABSENT:
                continue
            if pieces and pieces[-1][0] is home.all_steps and pieces[-1][2] == i:
                pieces[-1] = (home.all_steps, pieces[-1][1], i + 1)
            else:
                pieces.append((home.all_steps, i, i + 1))
    by_device: dict[torch.device, list[Tensor]] = {}
    for buffer, first, end in pieces:
        by_device.setdefault(buffer.device, []).append(buffer[first:end])
    return list(by_device.values())
