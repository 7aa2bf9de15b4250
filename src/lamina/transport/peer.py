"""One-sided reads between ranks of one host: regions of all members of a gather group, and the epochs that order them.

A collective ends when all ranks have called it. Here a rank that needs weights copies them from its peers' regions, and
they do not have to do anything, nor be at the same place of the step. What is left to agree on is when a region may be
read and when it may be written again: two counters for each rank, in its own region.

Note [Epochs]
    1. Every rank calls `publish()` equally often; the number of the call is the epoch. Each rank writes only its own
       counters, and they only grow: ARRIVED = e, "I read nothing older than e any more"; PUBLISHED = e, "my region
       holds version e, and will until all peers have arrived at a later one".
    2. A rank changes its region in epoch e only after all peers have ARRIVED at e. One with nothing to change waits for
       nobody.
    3. A rank reads a peer in epoch e only after that peer has PUBLISHED e.
    4. One epoch for a rank, not one for each unit: everything that has changed is cast in one call, before the first
       gather, so a counter for each unit would be W x units loads to learn the same thing a little earlier.

Note [Memory order]
    A counter is an aligned int64 that numpy reads or writes with one instruction: nobody sees half of a number. Its
    place among the other accesses is made by `fence()`, before each write and after each successful wait. x86 keeps
    stores in order, and loads, by itself. ARM does not: there, releasing a lock and then taking one is a full barrier
    (what comes before stays before the release, what follows stays after the acquisition, and a load-acquire never
    passes an earlier store-release). torch's own threads have met at the end of each copy.
"""

from __future__ import annotations

import datetime
import enum
import json
import threading
import time
from collections.abc import Sequence

from torch import Tensor

from lamina.core.control import Control, name_ranks
from lamina.core.mesh import DataMesh
from lamina.core.peer_memory import Outbox, place_outboxes
from lamina.errors import TransportError
from lamina.transport.host_memory import available_bytes
from lamina.transport.shared_memory import OwnRegion, PeerRegion, Ticket

SHORTEST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 1e-3
LIVENESS_CHECK_S = 0.05  # how often a waiting rank looks whether its peers still live


class Counter(enum.IntEnum):
    """Index of a counter in a region's header; each on a cache line of its own. 0 is the region's nonce."""

    ARRIVED = 8
    PUBLISHED = 16
    OFFERED = 24  # see pulled.py


class Peers:
    """The regions of one gather group as this rank sees them. Made by `connect`."""

    def __init__(
        self,
        control: Control,
        own: OwnRegion,
        others: dict[int, PeerRegion],
        place: int,
        global_ranks: Sequence[int],
        data_bytes: int,
        outboxes: Sequence[Outbox] = (),
    ) -> None:
        self.control, self.place, self.global_ranks = control, place, global_ranks
        self.size = len(others) + 1
        self.own = own
        self.others = others  # by data rank, in the order of their ranges
        self.other_places = [p for p in range(self.size) if p != place]
        self._regions = {place: own.data} | {p: r.data for p, r in zip(self.other_places, others.values(), strict=True)}
        self.data_bytes, self.outboxes = data_bytes, outboxes

    @property
    def outboxes_bytes(self) -> int:
        return len(self.own.data) - self.data_bytes

    def region(self, place: int) -> Tensor:
        """uint8, all that the member with that place in the group shares; only one's own may be written."""
        return self._regions[place]

    def data(self, place: int) -> Tensor:
        """uint8, its published range."""
        return self._regions[place][: self.data_bytes]

    def announce(self, counter: Counter, epoch: int) -> None:
        """Everything that this rank read or wrote before happened before its counter says `epoch`."""
        assert epoch >= self.own.counters[counter], "counters only grow"
        fence()
        self.own.counters[counter] = epoch

    def wait_for(self, counter: Counter, epoch: int) -> None:
        """Return when all peers' counters have come to `epoch`; never wait for one that is gone.

        Raises:
            Disagreement: a peer has ended, or all ranks wait and not for the same thing.
        """
        waiting = EpochWait(self.others, counter, epoch, self.global_ranks)
        if not waiting.is_over():
            self.control.wait(waiting)  # type: ignore[arg-type]
        fence()


class EpochWait:
    """Waiting for peers in the form of a collective's handle, so that `Control` watches over it as over any other."""

    def __init__(
        self, others: dict[int, PeerRegion], counter: Counter, epoch: int, global_ranks: Sequence[int]
    ) -> None:
        self.late = dict(others)
        self.global_ranks = global_ranks
        self.counter, self.epoch = counter, epoch

    def is_over(self) -> bool:
        for rank in [rank for rank, region in self.late.items() if region.counters[self.counter] >= self.epoch]:
            del self.late[rank]
        return not self.late

    def wait(self, timeout: datetime.timedelta) -> bool:
        """Poll: on the host there is no signal between processes that costs less than a short sleep."""
        now = time.monotonic()
        deadline, next_check, pause = now + timeout.total_seconds(), now + LIVENESS_CHECK_S, SHORTEST_PAUSE_S
        while not self.is_over():
            now = time.monotonic()
            if now >= deadline:
                raise RuntimeError("timed out")
            if now >= next_check:
                self._check_alive()
                next_check = now + LIVENESS_CHECK_S
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return True

    def missing(self) -> tuple[int, ...]:
        """Global ranks that are waited for."""
        return tuple(self.global_ranks[rank] for rank in list(self.late))

    def _check_alive(self) -> None:
        gone = [rank for rank, region in self.late.items() if region.owner_is_gone()]
        if gone and not self.is_over():  # one that went after it had published has done its part
            still = sorted(set(gone) & set(self.late))
            if still:
                raise RuntimeError(f"{name_ranks(still)} ended or dropped the model")


def connect(
    control: Control, mesh: DataMesh, data_bytes: int, exchange_bytes: Sequence[int] = (), host_share: float = 1.0
) -> Peers:
    """Make this rank's region and open those of its gather group. Collective over all data ranks.

    Args:
        data_bytes: of the published range.
        exchange_bytes: of the largest exchange of gradients, by number of the segment.
        host_share: the most that the ranks of a gather group may take of what their host has left.

    Raises:
        TransportError: ranks of a gather group on several hosts, no memory, or no access; on every rank, the same.
    """
    members = mesh.factors.levels[0].size
    outboxes, size_bytes = place_outboxes(exchange_bytes, members, data_bytes)
    agree(control, _too_much(members * size_bytes, host_share))
    own, problem = None, ""
    try:
        own = OwnRegion(size_bytes)
    except OSError as error:
        problem = f"transport='peer' got no {size_bytes} bytes of shared memory: {error}; type transport='c10d'"
    agree(control, problem)
    assert own is not None
    tickets = [Ticket.parse(text) for text in mesh.by_data_rank(control.exchange_text(own.ticket.text()))]
    level = mesh.factors.levels[0]
    groups = sorted({level.members(rank) for rank in range(mesh.world)})
    _check_hosts(tickets, groups)
    others: dict[int, PeerRegion] = {}
    try:
        for rank in level.members(mesh.rank):
            if rank != mesh.rank:
                others[rank] = PeerRegion(tickets[rank])
    except OSError as error:
        problem = (
            f"transport='peer': rank {mesh.rank} cannot read the memory of rank {rank} on the same host ({error}). Run "
            "the ranks under one user and in one container, or type transport='c10d'"
        )
    agree(control, problem)
    return Peers(control, own, others, level.place(mesh.rank), mesh.global_ranks, data_bytes, outboxes)


def agree(control: Control, problem: str) -> None:
    """Raise on every rank what is a problem on any; "": on this one there is none. Collective."""
    message = control.agree_on_error(problem or None)
    if message is not None:
        raise TransportError(message)


def _too_much(wanted_bytes: int, host_share: float) -> str:
    """Looked at before: memory that a control group does not grant is not refused, the process is killed for it."""
    left_bytes = available_bytes()
    if wanted_bytes <= host_share * left_bytes:
        return ""
    part = "" if host_share == 1.0 else f"{host_share:.0%} of "
    wanted, left = f"{wanted_bytes / 2**20:.1f} MiB", f"{left_bytes / 2**20:.1f} MiB"
    return (
        f"transport='peer' needs {wanted} of shared memory for all ranks together, more than {part}the {left} that are "
        "left on the host; type transport='c10d', or shard over more hosts"
    )


def _check_hosts(tickets: Sequence[Ticket], groups: Sequence[tuple[int, ...]]) -> None:
    """Every group on one host. All ranks hold all tickets, so all come to the same answer."""
    for members in groups:
        hosts: dict[str, list[int]] = {}
        for rank in members:
            hosts.setdefault(tickets[rank].host, []).append(rank)
        if len(hosts) > 1:
            where = [f"{name_ranks(ranks)} on {json.dumps(tickets[ranks[0]].host_name)}" for ranks in hosts.values()]
            raise TransportError(
                f"transport='peer' needs all ranks of a gather group on one host: {', '.join(where)}; type "
                "transport='c10d', or strategy='hsdp' to keep each gather group on one host"
            )


def check_epochs(peers: Peers) -> None:
    """Note [Epochs] 1 and 2, as far as they show in the counters: nobody publishes what it has not arrived at."""
    for counters in (peers.own.counters, *(region.counters for region in peers.others.values())):
        published = int(counters[Counter.PUBLISHED])  # read first: both only grow
        assert published <= int(counters[Counter.ARRIVED])


_lock = threading.Lock()


def fence() -> None:
    """Note [Memory order]."""
    with _lock:
        pass
    with _lock:
        pass
