"""Streams and events that run nothing and write a trace: `lamina.core.lanes` as on a GPU, on a machine without one.

The module's own StreamLane, Mark and Lanes run; what they ask torch.cuda for comes from here.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import torch

from races.trace import HostWaited, Kept, Marked, Place, Stack, Trace, Waited

ROOT = Path(__file__).parents[2]
Key = tuple[int, int, int]
NAMES = ("compute", "gather", "reduce")  # in the order in which Lanes makes its streams, the default one first
SKIPPED = ("/torch/", "/races/streams.py", "/races/watching.py", "/contextlib.py")
DEPTH = 7  # lines of a stack that are kept


class FakeDevice:
    """What `Lanes` asks of a device."""

    type, index = "cuda", 0


class FakeStream:
    def __init__(self, lanes: FakeCuda, stream_id: int, name: str) -> None:
        self.lanes, self.stream_id, self.name = lanes, stream_id, name
        self.device_index, self.device_type = 0, 1

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        event = FakeEvent(self.lanes)
        event.record(self)
        event.synchronize()

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)


class FakeEvent:
    def __init__(self, lanes: FakeCuda) -> None:
        self.lanes, self.number = lanes, 0  # 0: never recorded

    def record(self, stream: FakeStream) -> None:
        self.number = next(self.lanes.numbers)
        self.lanes.trace.events.append(Marked(stream.name, self.number))

    def wait(self, stream: FakeStream) -> None:
        if self.number:
            self.lanes.trace.events.append(Waited(stream.name, self.number, place_of_caller()))

    def synchronize(self) -> None:
        if self.number:
            self.lanes.trace.events.append(HostWaited(self.number))


class FakeCuda:
    """As much of torch as `lamina.core.lanes` uses, over lanes that write to `trace`."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.numbers = trace, itertools.count(1)
        self.streams = [FakeStream(self, 0, f"{NAMES[0]} lane of rank {trace.rank}")]
        self.current = self.streams[0]
        self.device = torch.device
        self.cuda = SimpleNamespace(
            Stream=self.make_stream,
            Event=lambda: FakeEvent(self),
            current_device=lambda: 0,
            current_stream=lambda device=None: self.current,
        )
        self._C = SimpleNamespace(_cuda_getCurrentStream=self.get_current, _cuda_setStream=self.set_current)

    def make_stream(self, device: Any = None, priority: int = 0) -> FakeStream:
        number = len(self.streams)
        kind, turn = NAMES[1 + (number - 1) % 2], (number - 1) // 2  # each model has a pair of its own
        self.streams.append(
            FakeStream(self, number, f"{kind} lane{f' {turn}' if turn else ''} of rank {self.trace.rank}")
        )
        return self.streams[-1]

    def get_current(self, index: int) -> Key:
        return self.current.stream_id, 0, 1

    def set_current(self, stream_id: int, device_index: int, device_type: int) -> None:
        self.current = self.streams[stream_id]

    def keep(self, block: int, stream: FakeStream) -> None:
        """`record_stream`."""
        self.trace.events.append(Kept(stream.name, block, place_of_caller()))


_places: dict[tuple[CodeType, int], Place] = {}


def place_of(code: CodeType, line: int) -> Place:
    key = code, line
    place = _places.get(key)
    if place is None:
        path = Path(code.co_filename)
        file = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
        place = _places[key] = Place(file, line, code.co_qualname)
    return place


def stack_of_caller(depth: int = DEPTH) -> Stack:
    """Lines outside torch and what watches, innermost first."""
    found: list[Place] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < depth:
        file = frame.f_code.co_filename
        if not any(part in file for part in SKIPPED):
            found.append(place_of(frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def place_of_caller(*passed: str) -> Place:
    """The innermost line outside torch, what watches, the module of lanes and the functions of these names."""
    places = (place for place in stack_of_caller() if not place.file.endswith("core/lanes.py"))
    return next(place for place in places if place.function not in passed)
