"""A unit's place in the arena and what is in it.

torch's own runtimes keep the state of a unit in several booleans written at many places. Here it is one enum with one
transition table and one writer.

Note [Slot states]
    EMPTY      nothing that anybody may read; in debug mode filled with NaN
    GATHERING  a gather into it is under way; nobody reads it
    WEIGHTS    the full parameters
    GRADS      this rank's gradients over the dead weights, until their reduction has read them
    Two slots that share bytes are never both other than EMPTY.

Note [Given back]
    A graph whose weights are not there must not be run backward. Autograd compares the version of what it has saved:
    while a slot holds other bytes, its full parameters have a version that no graph has seen, and weights that were
    changed come under a new version. A use that has begun brings its weights back, and with them their version. All of
    a slot have one counter between them: to set and read one for each took a twentieth of the runtime's host time.
    A graph that has outlived the model has no use that could begin: what it has saved of a slot that was `retire`d is
    given back for good, and gradients that come to its full parameters raise.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from lamina.core.full_parameter import bind
from lamina.core.keepers import Keepers
from lamina.core.lanes import Mark, running_stream
from lamina.core.layout import UnitLayout
from lamina.errors import StateError


class SlotState(enum.Enum):
    EMPTY = "empty"
    GATHERING = "gathering"
    WEIGHTS = "weights"
    GRADS = "grads"


EMPTY, GATHERING, WEIGHTS, GRADS = SlotState  # `SlotState.EMPTY` is a search on Python 3.11, of 0.1 us
_set_versions: Any = torch._C._autograd._unsafe_set_version_counter
LEAST_GIVEN_BACK = 2**30  # a version above what writes come to; autograd counts to 2**32
_versions_given_back = itertools.count(LEAST_GIVEN_BACK)
WEIGHTY = (WEIGHTS, GATHERING)  # the weights are there, or on their way

TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    EMPTY: frozenset({GATHERING, GRADS}),  # GRADS: zeros of a skipped unit
    GATHERING: frozenset({WEIGHTS, GATHERING, EMPTY}),
    WEIGHTS: frozenset({EMPTY, GRADS, GATHERING}),
    GRADS: frozenset({EMPTY}),
}


class DebugMode:
    """Whether units share no memory, freed slots are filled with NaN, and every transition is checked."""

    enabled: bool = False


class _Nobody(dict["Slot", None]):
    """Where slots are noted that share bytes with no other: they would only hold themselves."""

    def __setitem__(self, slot: Slot, value: None) -> None:
        pass


_ALONE = _Nobody()


class Slot:
    """Bytes into which one unit is gathered, and the full parameters that are views of them."""

    __slots__ = (  # read at every use: a slot's own dict would be several lines of the cache more
        "layout", "buffer", "home", "state", "is_checked", "pins", "shares", "busy", "freed", "ready", "segments",
        "views", "counter", "fulls", "storage", "keepers", "version", "given_back", "is_saved", "has_version",
        "__weakref__",
    )  # fmt: skip

    def __init__(self, layout: UnitLayout, buffer: Tensor, home: bool = True) -> None:
        self.layout = layout
        self.buffer = buffer  # uint8, (layout.buffer_bytes,)
        self.home = home  # False: an overflow slot, whose memory comes and goes
        self.state = EMPTY
        self.is_checked = DebugMode.enabled
        self.pins = 0  # uses that read it now
        self.shares: frozenset[Slot] = frozenset()  # home slots with bytes in common
        self.busy: dict[Slot, None] = _ALONE  # of the arena: whoever writes bytes in common looks at these; see `to`
        self.freed: Mark | None = None  # work that must end before the bytes are written again
        self.ready: Mark | None = None  # the gather that filled it
        self.segments = segment_views(layout, buffer)
        self.views = parameter_views(layout, self.segments)
        self.counter = torch.empty(0, device=buffer.device)  # of versions; nothing but `fulls` shares it
        seen = segment_views(layout, in_own_storage(buffer)) if home else self.segments
        self.fulls = [
            bind(view, spec.trainable, self.counter)
            for view, spec in zip(parameter_views(layout, seen), layout.params, strict=True)
        ]
        self.storage = seen[0].untyped_storage()._cdata if seen else 0  # of `fulls`: at home nothing else lies in it
        del seen
        self.keepers = Keepers(self.fulls, self.storage, buffer)
        self.version = self.count_writes()  # of `fulls` as long as nobody has written to them
        self.given_back = next(_versions_given_back)  # their version while the weights are not here
        self.is_saved = False  # whether graphs may have saved `fulls`
        self.has_version = True  # whether `fulls` have `version`; else they have `given_back`
        if self.is_checked:
            self._poison()

    def count_writes(self) -> int:
        """How often full parameters were written in place; gathers write past the counter, so these are the user's."""
        return self.counter._version

    @property
    def has_weights(self) -> bool:
        return self.state in WEIGHTY

    def to(self, state: SlotState) -> None:
        """The only writer of `state`.

        A slot that holds something is in `busy` from then on until another one has taken its bytes, and has waited for
        the work that read them: so few of all that share bytes are looked at.
        """
        if self.is_checked:
            self._check(state)
        if state is WEIGHTS:
            if not self.has_version:
                _set_versions((self.counter,), (self.version,))
                self.has_version = True
        else:
            if state is not EMPTY:
                self.busy[self] = None
            if self.has_version and self.is_saved and state is not GATHERING:
                self._hide_version()
        self.state = state

    def _hide_version(self) -> None:
        _set_versions((self.counter,), (self.given_back,))
        self.has_version = False

    def expect_other_weights(self) -> None:
        """They were changed: graphs that have saved the old ones do not take the next ones for theirs."""
        if self.is_saved:
            if self.has_version:
                self._hide_version()
            self.version += 1

    def _check(self, state: SlotState) -> None:
        """Debug mode: the transition is legal, and what becomes empty is not read any more."""
        assert state in TRANSITIONS[self.state], f"{self.layout.name}: {self.state.name} -> {state.name}"
        if state is EMPTY:
            self._poison()
        else:
            alive = [s.layout.name for s in self.shares if s.state is not EMPTY]
            assert not alive, f"{self.layout.name} -> {state.name} while {alive} hold the same bytes"

    def _poison(self) -> None:
        """Debug mode: NaN where nobody may read, in order with the work before and after it."""
        stream = running_stream(self.buffer.device)
        if stream is not None and self.freed is not None:
            stream.wait_event(self.freed.event)
        with torch.no_grad():
            for segment in self.segments:
                if segment.is_floating_point() or segment.is_complex():
                    segment.fill_(float("nan"))
        if stream is not None:
            self.freed = Mark(stream)

    def belong_to(self, owners: Sequence[Callable[[], nn.Parameter | None]]) -> None:
        """See `FullParameter`."""
        for full, owner in zip(self.fulls, owners, strict=True):
            full.belong_to(owner)

    def retire(self) -> None:
        """Nothing will be gathered into it any more. Graphs that have saved `fulls` may still be there."""
        self.busy.pop(self, None)
        self.shares, self.busy = frozenset(), _ALONE
        if not self.is_saved:
            return
        if self.has_version:
            self._hide_version()
        for full, spec in zip(self.fulls, self.layout.params, strict=True):
            if full.requires_grad:
                full.register_hook(functools.partial(_refuse_gradient, spec.name))

    def take_memory(self) -> None:
        """Give an overflow slot its memory back before it is written.

        One that has it is left alone: CUDA's storages are moved and copied even to the same size, on the lane of
        compute, beside the gather.
        """
        storage = self.buffer.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.layout.buffer_bytes)

    def drop_memory(self) -> None:
        if not self.home and self.pins == 0:
            self.buffer.untyped_storage().resize_(0)


def segment_views(layout: UnitLayout, buffer: Tensor) -> list[Tensor]:
    """Typed 1-D views of a unit's byte buffer, one a segment."""
    return [
        buffer[offset : offset + segment.compute_bytes].view(segment.compute)
        for segment, offset in zip(layout.segments, layout.offsets_bytes, strict=True)
    ]


def in_own_storage(buffer: Tensor) -> Tensor:
    """The same bytes, in a storage that holds the memory but no tensor of ours: kept graphs hold it."""
    bare = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
    bare.set_(buffer.untyped_storage(), buffer.storage_offset(), buffer.shape)  # type: ignore[call-overload]
    return from_dlpack(to_dlpack(bare))


def parameter_views(layout: UnitLayout, segments: Sequence[Tensor]) -> list[Tensor]:
    """Views of a unit's parameters, in their shapes."""
    return [
        segment[start : start + spec.numel].view(spec.shape)
        for segment, plan in zip(segments, layout.segments, strict=True)
        for start, spec in zip(plan.starts, plan.params, strict=True)
    ]


def outlived(what: str) -> StateError:
    """The error of a backward whose model is gone."""
    return StateError(
        f"a backward comes to {what} of a sharded model that is gone: dropped (`del model`, or the end of the function "
        "that made it), or with other units since lamina.adopt(). Keep the model until its last backward. Of an output "
        "that is kept for its values, keep `output.detach()`, of a loss `loss.item()`"
    )


def _refuse_gradient(name: str, gradient: Tensor) -> NoReturn:
    raise outlived(f"`{name}`")


def check_slots(slots: Sequence[Slot]) -> None:
    """Note [Slot states]: of slots that share bytes at most one is in use."""
    for slot in slots:
        if slot.state is not EMPTY:
            assert all(other.state is EMPTY for other in slot.shares)
