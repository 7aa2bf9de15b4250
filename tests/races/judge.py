"""Races in the traces of all ranks: two accesses of the same bytes, one a write, of which neither is known to be first.

Note [Happens before]
    Every lane has a clock, one number for each lane: how far it knows that lane to be. A mark copies the clock and lets
    the lane's own number go up; a wait takes the larger of both clocks, number by number. An access is known to be over
    where the clock of the lane that asks has reached the number that the access's lane had at the time. The host
    orders nothing: work is queued on a lane at any time, and only a mark that the host has waited for is behind
    everything that is queued later.

Note [Between ranks]
    Where lanes of several ranks meet, in a barrier or in a collective that needs everybody's part, each takes the
    clocks of all. Hosts that agree on something order nothing on the lanes.

Note [Given out again]
    torch's allocator gives freed memory to the next who asks on the same lane at once, without waiting for others that
    use it. So memory that is taken is written by the lane that took it, at the time when it is taken; and what other
    lanes do with freed memory must be known to be over when that lane takes memory the next time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from races.trace import Access, GivenBack, HostWaited, Kept, Marked, Met, Place, Stack, Taken, Trace, Waited

Clock = dict[str, int]


@dataclass
class Race:
    first: Access
    second: Access | Taken
    name: str  # of the memory

    @property
    def key(self) -> tuple[str, Stack, str, Stack]:
        """The same for races of the same two lines."""
        return self.first.lane, self.first.stack[:2], self.second.lane, self.second.stack[:2]

    def __str__(self) -> str:
        other = f"{self.second.lane} is given that memory by the allocator for {self.second.what}"
        lines = [f"{self.name}:", f"    {self.first}", *(f"        {place}" for place in self.first.stack)]
        lines += ["  beside", f"    {self.second if isinstance(self.second, Access) else other}"]
        return "\n".join(lines + [f"        {place}" for place in self.second.stack])


@dataclass(slots=True)
class _Past:
    access: Access
    number: int  # of its lane, when it was queued


class Judge:
    """Reads traces once, one of each rank, in an order in which it could have been."""

    def __init__(self, traces: Sequence[Trace], is_dropped: Callable[[Place], bool] | None = None) -> None:
        """`is_dropped`: which waits, meetings and `record_stream`s are left out."""
        self.traces, self.is_dropped = traces, is_dropped
        self.clocks: dict[str, Clock] = {}
        self.hosts: dict[int, Clock] = {trace.rank: {} for trace in traces}  # what they have waited for
        self.marks: dict[tuple[int, int], Clock] = {}  # by rank and number
        self.past: dict[int, list[_Past]] = {}  # by block
        self.owners: dict[int, str] = {}  # who took a block
        self.kept: dict[int, set[str]] = {}  # by block
        self.limbo: dict[str, list[_Past]] = {}  # of blocks that were given back, by the lane that took them
        self.meetings: Counter[tuple[int, str]] = Counter()  # by rank and what
        self.arrived: dict[tuple[str, int], dict[int, str]] = {}  # lanes, by meeting and rank
        self.races: dict[tuple[object, ...], Race] = {}

    def run(self) -> list[Race]:
        """Each pair of lines once."""
        cursors, goes_on = {trace.rank: 0 for trace in self.traces}, True
        blocked: dict[int, tuple[str, int]] = {}
        while goes_on:
            goes_on = False
            for trace in self.traces:
                at, events = cursors[trace.rank], trace.events
                if at < len(events) and trace.rank in blocked:
                    if blocked[trace.rank] in self.arrived:
                        continue  # others are still to come
                    del blocked[trace.rank]
                    at += 1
                    goes_on = True
                while at < len(events):
                    event = events[at]
                    if isinstance(event, Met):
                        meeting = self.meet(trace.rank, event)
                        goes_on = True
                        if meeting in self.arrived:
                            blocked[trace.rank] = meeting
                            break
                    else:
                        self.see(trace.rank, event)
                    at += 1
                cursors[trace.rank] = at
        stuck = {trace.rank: str(trace.events[cursors[trace.rank]]) for trace in self.traces if trace.rank in blocked}
        assert not stuck, f"meetings that not all came to: {stuck}"
        return list(self.races.values())

    def see(self, rank: int, event: object) -> None:
        if isinstance(event, Access):
            self.access(rank, event)
        elif isinstance(event, Taken):
            self.take(rank, event)
        elif isinstance(event, GivenBack):
            self.give_back(event.block)
        elif isinstance(event, Marked):
            self.marks[rank, event.number] = self.leave_mark(rank, event.lane)
        elif isinstance(event, Waited):
            if event.is_queued if self.is_dropped is None else not self.is_dropped(event.place):
                # where something is left out, a wait that was superfluous may be needed
                merge(self.clock(rank, event.lane), self.marks[rank, event.number])
        elif isinstance(event, HostWaited):
            self.wait_for(rank, self.marks[rank, event.number])
        elif isinstance(event, Kept) and not (self.is_dropped is not None and self.is_dropped(event.place)):
            self.kept.setdefault(event.block, set()).add(event.lane)

    # ---- clocks ------------------------------------------------------------------------------------------------

    def clock(self, rank: int, lane: str) -> Clock:
        clock = self.clocks.get(lane)
        if clock is None:
            clock = self.clocks[lane] = {**self.hosts[rank], lane: 1}
        return clock

    def leave_mark(self, rank: int, lane: str) -> Clock:
        clock = self.clock(rank, lane)
        marked = dict(clock)
        clock[lane] += 1
        return marked

    def wait_for(self, rank: int, marked: Clock) -> None:
        """The host of a rank has waited."""
        merge(self.hosts[rank], marked)
        for lane, clock in self.clocks.items():
            if lane.endswith(f" {rank}"):
                merge(clock, marked)

    def meet(self, rank: int, event: Met) -> tuple[str, int]:
        """The nth meeting of its kind. The last to come lets all others go on."""
        self.meetings[rank, event.what] += 1
        meeting = event.what, self.meetings[rank, event.what]
        lanes = self.arrived.setdefault(meeting, {})
        lanes[rank] = event.lane
        if len(lanes) == len(event.ranks):
            del self.arrived[meeting]
            if event.place is None or self.is_dropped is None or not self.is_dropped(event.place):
                marks = [self.leave_mark(member, lane) for member, lane in lanes.items()]
                for lane in lanes.values():
                    for marked in marks:
                        merge(self.clocks[lane], marked)
        return meeting

    def is_over(self, past: _Past, clock: Clock, lane: str) -> bool:
        return past.access.lane == lane or clock.get(past.access.lane, 0) >= past.number

    # ---- memory ------------------------------------------------------------------------------------------------

    def access(self, rank: int, access: Access) -> None:
        clock, lane = self.clock(rank, access.lane), access.lane
        past, left = self.past.setdefault(access.block, []), []
        for earlier in past:
            before = earlier.access
            if before.stop <= access.start or access.stop <= before.start:
                left.append(earlier)
                continue
            is_over = self.is_over(earlier, clock, lane)
            if not is_over and (access.writes or before.writes):
                self.report(before, access)
            # whoever comes after this access comes after what is behind it, too
            is_covered = access.start <= before.start and before.stop <= access.stop
            if not (is_over and is_covered and (access.writes or (before.lane == lane and not before.writes))):
                left.append(earlier)
        left.append(_Past(access, clock[lane]))
        self.past[access.block] = left

    def take(self, rank: int, event: Taken) -> None:
        clock = self.clock(rank, event.lane)
        for past in self.limbo.pop(event.lane, ()):
            if not self.is_over(past, clock, event.lane):
                self.report(past.access, event)
        self.owners[event.block] = event.lane
        taking = f"{event.what}, which takes it"
        self.access(rank, Access(event.lane, event.block, 0, event.size_bytes, True, taking, event.stack))

    def give_back(self, block: int) -> None:
        owner, kept = self.owners.pop(block, None), self.kept.pop(block, set())
        past = self.past.pop(block, [])
        if owner is not None:
            used = [p for p in past if p.access.lane != owner and p.access.lane not in kept]
            self.limbo.setdefault(owner, []).extend(used)

    def report(self, first: Access, second: Access | Taken) -> None:
        start, stop = first.start, first.stop
        if isinstance(second, Access):
            start, stop = max(start, second.start), min(stop, second.stop)
        found = (trace.name_of(first.block, start, stop) for trace in self.traces)
        race = Race(first, second, next(filter(None, found), f"memory {first.block}"))
        self.races.setdefault(race.key, race)


def merge(clock: Clock, marked: Clock) -> None:
    for lane, number in marked.items():
        if clock.get(lane, 0) < number:
            clock[lane] = number


def races_in(traces: Sequence[Trace], is_dropped: Callable[[Place], bool] | None = None) -> list[Race]:
    """Each pair of lines once."""
    return Judge(traces, is_dropped).run()
