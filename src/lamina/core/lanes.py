"""Streams of work: compute, gather, reduce.

On a GPU a lane is a stream with its own communicator, and order between lanes is made by events. On the CPU a lane is
null: the same calls do nothing, and order is made by waiting for a collective's handle. The runtime is written once,
against this interface.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
P = ParamSpec("P")
R = TypeVar("R")


class Lane:
    """A null lane: work runs where it is called."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `act`: what it queues is queued on this lane."""
        return act(*args, **kwargs)

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Work inside is queued on this lane."""
        return NOTHING

    def mark(self) -> Mark | None:
        """The point that this lane has reached."""
        return None

    def wait(self, mark: Mark | None) -> None:
        """Work queued on this lane from now on starts after `mark`."""

    def is_busy(self) -> bool:
        """Whether it has work that is not done. Never to be asked of a stream that a graph is captured from."""
        return False


class Mark:
    """A point in a stream's work.

    Its event may be recorded again at a later point of any stream, after a thousand marks more: who still waits for
    it then waits longer than he must. That cannot end in a circle, as all that a stream waits for is queued already.
    """

    __slots__ = ("event", "number", "stream_id")

    def __init__(self, stream: torch.cuda.Stream, event: torch.cuda.Event | None = None) -> None:
        self.event = torch.cuda.Event() if event is None else event
        _record(self.event, stream)
        self.stream_id = stream.stream_id
        self.number = next(_numbers)  # marks of one stream are reached in the order of their numbers


_numbers = itertools.count(1)
# Without torch's Python around them; a build without CUDA has neither.
_record = getattr(torch._C._CudaEventBase, "record", torch.cuda.Event.record)
_wait = getattr(torch._C._CudaEventBase, "wait", torch.cuda.Event.wait)
EVENTS = 1024  # of a lane, before the first is recorded again: some steps. Making one takes longer than recording it


class StreamLane(Lane):
    """A lane on a CUDA stream; `stream=None` is whatever stream the user computes on.

    A step passes through here some hundred times, and `torch.cuda.current_stream` and `torch.cuda.stream` look up the
    device each time: 10 us where the calls below them take less than one.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        super().__init__(device)
        self.stream = stream
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._seen: dict[tuple[int, int], int] = {}  # newest mark waited for, by waiting stream and marked stream
        self._events: list[torch.cuda.Event] = []
        self._marks = itertools.count()
        self._known: dict[tuple[int, int, int], torch.cuda.Stream] = {}
        self._running = NOTHING if stream is None else Running(stream, self._index)

    def _current(self) -> torch.cuda.Stream:
        if self.stream is not None:
            return self.stream
        key = torch._C._cuda_getCurrentStream(self._index)
        stream = self._known.get(key)
        if stream is None:
            stream = self._known[key] = torch.cuda.current_stream(self.device)
        return stream

    def running(self) -> contextlib.AbstractContextManager[None]:
        return self._running

    def run(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        with self._running:
            return act(*args, **kwargs)

    def mark(self) -> Mark:
        number = next(self._marks) % EVENTS
        if number == len(self._events):
            self._events.append(torch.cuda.Event())
        return Mark(self.stream or self._current(), self._events[number])

    def wait(self, mark: Mark | None) -> None:
        if mark is None:
            return
        stream = self.stream or self._current()
        waiting, marked = stream.stream_id, mark.stream_id
        if waiting != marked and self._seen.get((waiting, marked), 0) < mark.number:
            self._seen[waiting, marked] = mark.number
            _wait(mark.event, stream)

    def is_busy(self) -> bool:
        return self.stream is not None and not self.stream.query()


class Running(contextlib.AbstractContextManager[None]):
    """Makes a stream the current one of its device, which is the current device."""

    def __init__(self, stream: torch.cuda.Stream, index: int) -> None:
        self.stream, self.index = stream, index
        self._before: list[tuple[int, int, int]] = []  # streams to come back to, innermost last

    def __enter__(self) -> None:
        self._before.append(torch._C._cuda_getCurrentStream(self.index))
        stream = self.stream
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *exception: object) -> None:
        torch._C._cuda_setStream(*self._before.pop())


def running_stream(device: torch.device) -> torch.cuda.Stream | None:
    """What work is queued on now; None on a CPU, where it runs at once."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class Lanes:
    """The lanes of one device."""

    is_recording = False  # a graph is captured from them: nobody may ask how far they are

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.compute: Lane = StreamLane(device, None)
            self.gather: Lane = StreamLane(device, torch.cuda.Stream(device, priority=-1))
            self.reduce: Lane = StreamLane(device, torch.cuda.Stream(device, priority=-1))
        else:
            lane = self.compute = self.gather = self.reduce = Lane(device)
            # A step comes to them a dozen times for each unit. These do the same, and do it in C.
            lane.mark, lane.wait, lane.run = {}.clear, set().discard, operator.call  # type: ignore[method-assign, assignment]

    def are_busy(self) -> bool:
        """Whether communication is queued that has not ended."""
        return not self.is_recording and (self.gather.is_busy() or self.reduce.is_busy())

    def join(self) -> None:
        """What compute does next comes after everything that is queued."""
        for lane in (self.gather, self.reduce):
            self.compute.wait(lane.mark())
