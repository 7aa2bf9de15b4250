"""What a job on lanes did, as plain data: who touched which bytes, what was marked, who waited for it.

A `Trace` is written by watching.py while the runtime runs and read by judge.py as often as one likes, also with one
wait left out: on a CPU nothing depends on a wait, so one run answers for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Place(NamedTuple):
    """A line of a function."""

    file: str  # from the checkout on; of others its name
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


Stack = tuple[Place, ...]  # innermost first


@dataclass(slots=True)
class Access:
    """Bytes [start, stop) of a block, read or written by work queued on a lane."""

    lane: str
    block: int
    start: int
    stop: int
    writes: bool
    what: str  # the operation
    stack: Stack

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        return f"{self.lane} {verb} [{self.start}:{self.stop}) in {self.what}"


@dataclass(slots=True)
class Taken:
    """The allocator gives a block out on a lane: what was there before may still be used by work of that lane."""

    lane: str
    block: int
    size_bytes: int
    what: str
    stack: Stack


@dataclass(slots=True)
class GivenBack:
    """The allocator may give a block's bytes out again on the lane that took it."""

    block: int


@dataclass(slots=True)
class Kept:
    """`record_stream`: a block's bytes stay away until what this lane has been given so far is done."""

    lane: str
    block: int
    place: Place


@dataclass(slots=True)
class Marked:
    lane: str
    number: int  # in this rank's trace


@dataclass(slots=True)
class Waited:
    """What a lane does next comes after a mark."""

    lane: str
    number: int
    place: Place  # who asked for it
    is_queued: bool = True  # False: the lane had waited for as much before


@dataclass(slots=True)
class HostWaited:
    """What any lane is given from now on comes after a mark."""

    number: int


@dataclass(slots=True)
class Met:
    """What a lane does next comes after what the lanes of all these ranks had been given when they came here."""

    lane: str
    what: str  # the group and its channel: the nth meeting there is the others' nth
    ranks: tuple[int, ...]
    place: Place | None = None  # None: a collective, which nobody leaves out


Event = Access | Taken | GivenBack | Kept | Marked | Waited | HostWaited | Met
Droppable = Waited | Kept | Met


@dataclass
class Trace:
    """One rank's. Blocks are numbered alike in no two ranks, but for memory that they share."""

    rank: int
    events: list[Event] = field(default_factory=list)
    names: dict[int, list[tuple[int, int, str]]] = field(default_factory=dict)  # by block: [start, stop) and what it is

    def name_of(self, block: int, start: int, stop: int) -> str:
        """What lies in these bytes, as far as it is known; "" if it is not."""
        found = [name for first, last, name in self.names.get(block, ()) if first < stop and start < last]
        return ", ".join(dict.fromkeys(found))

    def shortened(self) -> Trace:
        """Without what was done to memory that one lane alone has used: it says nothing of races."""
        lanes: dict[int, set[str]] = {}
        for event in self.events:
            if isinstance(event, (Access, Taken)):
                lanes.setdefault(event.block, set()).add(event.lane)
        alone = {block for block, users in lanes.items() if len(users) == 1 and block >= 0}
        events: list[Event] = []
        for event in self.events:
            if isinstance(event, (Access, GivenBack, Kept)) and event.block in alone:
                continue
            if not (
                isinstance(event, Taken) and event.block in alone and events and _is_same(event, events[-1], alone)
            ):
                events.append(event)
        return Trace(self.rank, events, self.names)


def _is_same(event: Taken, before: Event, alone: set[int]) -> bool:
    """Taken one after the other on one lane: the first asks what the second would."""
    return isinstance(before, Taken) and before.lane == event.lane and before.block in alone


def places_of(traces: list[Trace]) -> list[Place]:
    """Who waited, kept or met anywhere, by line."""
    found = {event.place for trace in traces for event in trace.events if isinstance(event, Droppable)}
    return sorted(place for place in found if place is not None)
