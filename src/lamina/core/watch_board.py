"""Where reports and verdicts hang: keys in the store that the ranks met in.

A store has no idea who is alive, and one that has stopped answering blocks its caller in C++. So all traffic with it is
in one thread of its own, over a connection of its own. Every rank posts a line a second; reading everybody's lines is
left to one of those who wait, the judge, because W ranks that read W lines would be more traffic than the training. A
judge that falls silent is replaced.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import time
import weakref
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from lamina.core.watch_evidence import Identity
from lamina.core.watch_judge import Limits, Report, Verdict, judge

FREE = "free"
LOOKS_KEPT = 200  # a rank that lost a peer looks often
SILENT_BEATS = 2.5
KNOCK_S = 0.5
GONE = "the process that held the ranks' store (rank 0, or the launcher) has ended"


def is_held_by_launcher() -> bool:
    """Whether the store of torch's variables is there before the ranks are, and after them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class Line:
    """A connection of one's own to the ranks' store, looked at before it is used.

    torch tries for half an hour to reach a store that has gone, and fills the terminal with its stack where a word is
    sent into a connection whose other end is closed.
    """

    def __init__(self, store: dist.Store, prefix: str) -> None:
        if not answers(store):
            raise dist.DistNetworkError(GONE)
        handle: Any = store  # torch's stubs lag behind: `clone`, `append`, `has_extended_api`
        before = _connections_to(store)
        # a second handle of a file would count as a rank
        self._store: Any = dist.PrefixStore(prefix, store if _is_a_file(store) else handle.clone())
        self._ends = list(map(os.dup, _connections_to(store) - before))
        weakref.finalize(self, _close, self._ends).atexit = False  # a thread may look until the very end

    def look_for_end(self) -> None:
        """Raise DistNetworkError if whoever held the store has ended. Sends nothing."""
        if any(map(_is_closed, self._ends)):
            raise dist.DistNetworkError(GONE)

    @property
    def store(self) -> Any:
        """Raises DistNetworkError if whoever held it has ended."""
        self.look_for_end()
        return self._store


class Board:
    """What this rank writes and reads. Every method may block or raise when the store is gone."""

    def __init__(self, store: dist.Store, rank: int, world: int, limits: Limits) -> None:
        self.writes_seldom = _is_a_file(store)  # every write is appended to it
        self._line = Line(store, "lamina/watch")
        self.rank, self.world, self.limits = rank, world, limits
        self.verdicts = 0  # seen so far
        self._known: set[int] = set()  # ranks that have posted
        self._looks: list[tuple[float, dict[int, Report]]] = []
        self._lease, self._lease_seen, self._term = "", 0.0, 0

    @property
    def _store(self) -> Any:
        return self._line.store

    def look_for_end(self) -> None:
        """Raise DistNetworkError if whoever held the store has ended. Sends nothing."""
        self._line.look_for_end()

    def register(self, identity: Identity) -> None:
        self._store.set(f"who/{self.rank}", json.dumps(vars(identity)))
        if self._store.has_extended_api():
            self._store.append(f"host/{identity.host}", f"{self.rank} ")

    def neighbours(self, own: Identity) -> dict[int, Identity]:
        """The other ranks that have registered from this host."""
        if self._store.has_extended_api():
            there = set(map(int, self._store.get(f"host/{own.host}").split()))
        else:
            there = {rank for rank in range(self.world) if self._store.check([f"who/{rank}"])}
        found = {rank: Identity(**json.loads(self._store.get(f"who/{rank}"))) for rank in there - {self.rank}}
        return {rank: who for rank, who in found.items() if who.host == own.host}

    def post(self, report: Report) -> None:
        self._store.set(f"at/{self.rank}", report.text())

    def next_verdict(self) -> Verdict | None:
        """The next one that this rank has not seen."""
        if not self._store.check([f"verdict/{self.verdicts}"]):
            return None
        self.verdicts += 1
        return Verdict.parse(self._store.get(f"verdict/{self.verdicts - 1}"))

    def announce(self, verdict: Verdict) -> None:
        """The first one of that number holds."""
        self._store.compare_set(f"verdict/{self.verdicts}", "", verdict.to_json())

    def write_ends(self, ends: list[str]) -> None:
        """Where this rank's connections end, for those that may have to cut them."""
        self._store.set(f"ends/{self.rank}", json.dumps(ends))

    def ends_of_others(self) -> set[str]:
        others = set(range(self.world)) - {self.rank}
        written = [rank for rank in sorted(others) if self._store.check([f"ends/{rank}"])]
        return {end for rank in written for end in json.loads(self._store.get(f"ends/{rank}"))}

    # ---- judging -----------------------------------------------------------------------------------------------

    def look(self) -> Verdict | None:
        """Read everybody's reports, if it is this rank's turn, and compare them with an earlier look."""
        if not self._takes_the_turn():
            self._looks.clear()
            return None
        now = time.monotonic()
        reports = self.read()
        self._looks = [*self._looks[-LOOKS_KEPT:], (now, reports)]
        earlier = [(now - at, look) for at, look in self._looks if now - at >= self.limits.proof_s]
        if any(report.lost for report in reports.values()):
            far = [look for age_s, look in earlier if age_s >= SILENT_BEATS * self.limits.beat_s]
            return judge(earlier[-1][1] if earlier else {}, reports, self.limits) or (
                judge(far[-1], reports, self.limits, silence_counts=True) if far else None
            )
        return judge(earlier[-1][1], reports, self.limits) if earlier else None

    def read(self) -> dict[int, Report]:
        """The last report of every rank that has posted any."""
        for rank in set(range(self.world)) - self._known:
            if self._store.check([f"at/{rank}"]):
                self._known.add(rank)
        ranks = sorted(self._known)
        keys = [f"at/{rank}" for rank in ranks]
        texts = self._store.multi_get(keys) if self._store.has_extended_api() else [self._store.get(k) for k in keys]
        return {rank: Report.parse(text) for rank, text in zip(ranks, texts, strict=True)}

    def _takes_the_turn(self) -> bool:
        mine = f"{self.rank} "
        held = self._store.get("judge").decode() if self._store.check(["judge"]) else ""
        now = time.monotonic()
        if held != self._lease:
            self._lease, self._lease_seen = held, now
        silent = now - self._lease_seen > 2 * self.limits.beat_s
        if held not in ("", FREE) and not held.startswith(mine) and not silent:
            return False
        self._term += 1
        wanted = f"{mine}{self._term} {time.time()}"
        self._lease, self._lease_seen = self._store.compare_set("judge", held, wanted).decode(), now
        return self._lease == wanted

    def step_down(self) -> None:
        """This rank waits no longer: let another one judge."""
        self._looks.clear()
        if self._lease.startswith(f"{self.rank} "):
            self._store.compare_set("judge", self._lease, FREE)
            self._lease = ""


def answers(store: Any) -> bool:
    """Whether somebody listens where the store was; torch would fill the terminal with its stack if nobody does."""
    store = _base(store)
    if not isinstance(store, dist.TCPStore):
        return True
    try:
        socket.create_connection((store.host, store.port), KNOCK_S).close()
    except OSError:
        return False
    return True


def _connections_to(store: Any) -> set[int]:
    """Descriptors of this process's connections to a store's port."""
    store, found = _base(store), set[int]()
    if not isinstance(store, dist.TCPStore):
        return found
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as end:
                    if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername()[1] == store.port:
                        found.add(number)
    return found


def _close(descriptors: list[int]) -> None:
    for number in descriptors:
        os.close(number)


def _is_closed(number: int) -> bool:
    """Whether the other side has closed a connection; what has arrived stays where it is."""
    try:
        with socket.socket(fileno=os.dup(number)) as end:
            return end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _is_a_file(store: Any) -> bool:
    return isinstance(_base(store), dist.FileStore)


def _base(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
