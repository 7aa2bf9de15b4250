"""Notes what one rank does, at the points where the runtime issues it.

`torch.profiler` sees kernels, thousands in a step, and not which unit they serve or what was waited for. The runtime
knows, at six points. While a trace runs, these methods of one engine's parts are replaced by ones that take a stamp
before and after; without a trace nothing is there to be asked, so a step pays nothing.

Note [What is stamped]
    1. Compute: a use from the end of `enter` to the beginning of `_shut`; uses inside it interrupt it.
    2. Gather: from where the lane has room to where the bytes are there. On the CPU a collective tells when it has
       ended; a gather that this rank copies itself is compute's time as well, so it counts as waited for.
    3. Reduce: from where gradients begin to be laid together to where they are reduced (on the CPU: have arrived).
    4. Waits: what compute stood still for, on its own lane, as `wait AG3`; they are cut out of the uses that they fall
       into. On a GPU the stream waits, elsewhere the host.
    5. The optimizer: from any torch optimizer's step hooks. What is left blank is the loss, clipping, the data, and
       the host's own time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lamina.core.program import Op, Step
from lamina.core.slots import Slot, SlotState
from lamina.planner.timeline import COMPUTE, GATHER, REDUCE, Span
from lamina.runtime.assemble import Runtime
from lamina.runtime.gathering import Gatherer
from lamina.runtime.phase import Phase
from lamina.runtime.unit import Unit
from lamina.trace.alone import NativeUses
from lamina.trace.clocks import Clock, Stamp, clock_of
from lamina.trace.recording import EVALUATION, OPTIMIZER, WAIT, Recording, without_waits
from lamina.transport.c10d import GuardedWork


@dataclass
class _Note:
    """A span whose stamps are not read yet."""

    lane: str
    label: str
    start: Stamp
    end: Stamp | None = None
    unit: int | None = None  # of a use


class Recorder:
    """Taps on one sharded model."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.engine = runtime, runtime.engine
        self.lanes, self.gatherer, self.reducer = self.engine.lanes, self.engine.gatherer, self.engine.reducer
        self.clock: Clock = clock_of(runtime.device)
        self.on_host = self.clock.device_type == "cpu"
        self._notes: list[_Note] = []
        self._memory: list[tuple[Stamp, int]] = []
        self._step_ends: list[Stamp] = []
        self._open: list[_Note] = []  # uses, innermost last
        self._reducing: _Note | None = None
        self._taps: list[tuple[Any, str]] = []
        self._handles: list[Any] = []

    # ---- begin and end -----------------------------------------------------------------------------------------

    def start(self) -> None:
        self._tap(self.engine, "enter", self._entering)
        self._tap(self.engine, "_shut", self._leaving)
        self._tap(self.gatherer, "_fill", self._filling)
        self._tap(self.gatherer, "finish", self._finishing_gather)
        if type(self.gatherer).publish is not Gatherer.publish:
            self._tap(self.gatherer, "publish", self._publishing)
        self._tap(self.reducer, "begin", self._beginning_reduction)
        self._tap(self.reducer, "start", self._starting_reduction)
        self._tap(self.reducer, "start_direct", self._starting_reduction)
        self._tap(self.reducer, "finish", self._finishing_reduction)
        self._tap(self.engine.gradients, "settle", self._settling)
        model = self.runtime.model()
        if model is not None and self.runtime.units and not self.engine.units:
            self._handles.append(NativeUses(model, self.runtime.units, self._beginning_use, self._ending_use))
        self._handles += [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]

    def stop(self) -> None:
        """The runtime is as it was."""
        for target, name in self._taps:
            delattr(target, name)
        for handle in self._handles:
            handle.remove()
        self._taps, self._handles = [], []

    def _tap(self, target: Any, name: str, around: Callable[..., Any]) -> None:
        """Call `around(original, ...)` in the method's place; not while a graph is captured, which takes no stamps."""
        original = getattr(target, name)

        def tapped(*args: Any, **kwargs: Any) -> Any:
            if self.lanes.is_recording:
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        setattr(target, name, tapped)
        self._taps.append((target, name))

    def recording(self) -> Recording:
        """Everything that has ended, in ms since `start`."""
        self.clock.settle()
        read = self.clock.read_ms
        ended = [note for note in self._notes if note.end is not None]
        spans = [Span(n.lane, n.label, read(n.start), read(n.end)) for n in ended if n.end is not None]
        return Recording(
            device=self.clock.device_type,
            rank=self.runtime.control.rank,
            world=self.runtime.control.world,
            units=tuple(unit.name for unit in self.runtime.units),
            spans=tuple(sorted(without_waits(spans), key=lambda span: (span.start_ms, span.end_ms))),
            memory=tuple((read(stamp), size_bytes) for stamp, size_bytes in self._memory),
            step_ends_ms=tuple(read(stamp) for stamp in self._step_ends),
            numels=tuple(unit.layout.numel for unit in self.runtime.units),
        )

    # ---- stamps ------------------------------------------------------------------------------------------------

    def _now(self) -> Stamp:
        """Where compute is, and the memory there."""
        stamp = self.clock.stamp(self.lanes.compute)
        self._memory.append((stamp, self.clock.used_bytes()))
        return stamp

    def _note(self, lane: str, label: str, start: Stamp, end: Stamp | None = None) -> _Note:
        note = _Note(lane, label, start, end)
        self._notes.append(note)
        return note

    def _follow(self, note: _Note, works: Sequence[dist.Work | GuardedWork | None]) -> None:
        """On the CPU: the note ends when the last of its collectives does, on whatever thread that is seen.

        One that cannot tell leaves the end to whoever waits for it.
        """
        if not any(isinstance(work, GuardedWork) for work in works):
            for work in works:
                if isinstance(work, dist.Work):
                    work.get_future().add_done_callback(lambda _: self._arrived(note))

    def _arrived(self, note: _Note) -> None:
        note.end = time.perf_counter()

    # ---- uses --------------------------------------------------------------------------------------------------

    def _pause(self) -> None:
        if self._open:
            self._open[-1].end = self._now()

    def _go_on(self) -> None:
        """The innermost use goes on."""
        if self._open:
            note = self._open[-1]
            self._open[-1] = self._note(COMPUTE, note.label, self._now())
            self._open[-1].unit = note.unit

    def _open_use(self, op: Op, unit: Unit) -> None:
        """One without gradients, and inside no other that has them, is no part of a step."""
        outer = self._open[-1].label if self._open else None
        evaluates = outer == EVALUATION if outer else op is Op.FORWARD and not torch.is_grad_enabled()
        note = self._note(COMPUTE, EVALUATION if evaluates else str(Step(op, unit.index)), self._now())
        note.unit = unit.index
        self._open.append(note)

    def _close_use(self, unit: Unit) -> None:
        place = next((i for i in reversed(range(len(self._open))) if self._open[i].unit == unit.index), None)
        if place is not None:  # None: it was entered before the trace began
            del self._open[place]

    def _beginning_use(self, op: Op, unit: Unit) -> None:
        self._pause()
        self._open_use(op, unit)

    def _ending_use(self, op: Op, unit: Unit) -> None:
        self._pause()
        self._close_use(unit)
        self._go_on()

    def _entering(self, original: Callable[..., Any], unit: Unit, op: Op, *more: Any) -> Slot | None:
        self._pause()
        found = original(unit, op, *more)
        self._open_use(op, unit)
        return found

    def _leaving(self, original: Callable[..., Any], phase: Phase | None, unit: Unit, *more: Any) -> None:
        self._pause()
        self._close_use(unit)
        original(phase, unit, *more)
        self._go_on()

    # ---- gathers -----------------------------------------------------------------------------------------------

    def _filling(self, original: Callable[..., Any], unit: Unit, slot: Slot) -> list[dist.Work]:
        label, start = str(Step(Op.GATHER, unit.index)), self.clock.stamp(self.lanes.gather)
        works = original(unit, slot)
        note = self._note(GATHER, label, start)
        if self.on_host and works:
            self._follow(note, works)
            return works
        note.end = self.clock.stamp(self.lanes.gather)
        if self.on_host and unit.communicates:
            self._waited(label, start, note.end)
        return works

    def _finishing_gather(self, original: Callable[..., Any], slot: Slot) -> None:
        if slot.state is not SlotState.GATHERING:
            return original(slot)
        start = self.clock.stamp(self.lanes.compute)
        original(slot)
        unit = next((u for u in self.engine.units if slot in u.slots), None)
        label = "AG" if unit is None else str(Step(Op.GATHER, unit.index))
        return self._waited(label, start, self.clock.stamp(self.lanes.compute))

    def _publishing(self, original: Callable[..., Any], units: Any) -> None:
        lane = self.lanes.gather
        start = self.clock.stamp(lane)
        original(units)
        note = self._note(GATHER, "publish", start, self.clock.stamp(lane))
        if self.on_host and note.end is not None:
            self._waited("publish", start, note.end)

    def _waited(self, label: str, start: Stamp, end: Stamp) -> None:
        self._note(COMPUTE, WAIT + label, start, end)

    # ---- reductions --------------------------------------------------------------------------------------------

    def _beginning_reduction(self, original: Callable[..., Any], unit: Unit) -> None:
        before = self.clock.stamp(self.lanes.compute)
        original(unit)
        label = str(Step(Op.REDUCE, unit.index))
        if not self.on_host:  # the stream may have waited for gradients that were being copied
            self._waited(label, before, self.clock.stamp(self.lanes.compute))
        self._reducing = self._note(REDUCE, label, self.clock.stamp(self.lanes.reduce))

    def _starting_reduction(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        note, pending = self._reducing, self.reducer.pending
        if note is None:
            return
        if self.on_host and pending is not None and any(work is not None for work in pending.works):
            self._follow(note, pending.works)
        elif note.end is None:
            note.end = self.clock.stamp(self.lanes.reduce)

    def _finishing_reduction(self, original: Callable[..., Any]) -> None:
        pending = self.reducer.pending
        if pending is None:
            return original()
        start = self.clock.stamp(self.lanes.compute)
        original()
        end = self.clock.stamp(self.lanes.reduce)
        note = self._reducing
        if note is not None and (note.end is None or not self.on_host):
            note.end = end
        if self.on_host:
            self._waited(str(Step(Op.REDUCE, pending.unit.index)), start, end)
        return None

    def _settling(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        start = self.clock.stamp(self.lanes.compute)
        original(*args, **kwargs)
        if not self.on_host:  # there `finish`, inside, is what waits
            self._waited("RS", start, self.clock.stamp(self.lanes.compute))

    # ---- the optimizer -----------------------------------------------------------------------------------------

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.lanes.is_recording:
            self._open.append(self._note(COMPUTE, OPTIMIZER, self._now()))

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._open and self._open[-1].label == OPTIMIZER:
            end = self._open.pop().end = self._now()
            self._step_ends.append(end)
