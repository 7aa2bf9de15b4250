"""The door of `shard()`: ranks go in together, or none does.

`torch.distributed.new_group` waits for every member, for minutes and without a word, and a rank that could not even
tell its members has raised by then. So before the first group is made, ranks meet in the store: whoever cannot go in
says why, and those who wait at the door raise the same. A rank that is merely late is waited for.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from lamina import errors
from lamina.core import watch
from lamina.core.watch_sever import disagreement
from lamina.errors import Disagreement, TransportError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.1

_attempts = itertools.count(1)
_times_met: dict[tuple[int, ...], int] = {}
_last_met: dict[tuple[int, ...], list[str]] = {}  # keys in the store
_failed_tries = 0  # a rank that failed and those that waited for it count alike: their next door is another one
Found = TypeVar("Found")


class Door:
    """One call of `shard()`, before its ranks have a group to agree over."""

    def __init__(self) -> None:
        self._store: Any = dist.PrefixStore("lamina/door", dist.distributed_c10d._get_default_store())
        self._me, self._attempt = dist.get_rank(), next(_attempts)
        if dist.get_backend() != "fake":
            watch.start()  # those at the door must hear of a rank that ends before it has come

    def try_to(self, find: Callable[[], Found]) -> Found:
        """What may fail on some ranks only; those at the door hear of it."""
        try:
            return find()
        except Exception as error:
            global _failed_tries
            _failed_tries += 1
            number = self._store.add(f"failures {self._attempt}", 1)
            said = json.dumps([self._me, type(error).__name__, str(error)])
            self._store.set(f"failure {self._attempt} {number}", said)
            raise

    def meet(self, ranks: tuple[int, ...], offers: Sequence[str] = ()) -> list[str]:
        """Return when all ranks have come: those of this rank's offers that all others make as well, sorted.

        Raises:
            LaminaError: that of a rank that cannot come.
            TransportError: the ranks' histories of groups differ, so that torch could not make another one.
        """
        times = _times_met.get(ranks, 0)
        key = f"{hashlib.sha1(str(ranks).encode()).hexdigest()} {times} {_failed_tries}"
        groups = len(dist.distributed_c10d._world.pg_names)
        self._store.set(f"groups {key} {self._me}", str(groups))
        alike = f"alike {key} {groups}"
        self._store.add(alike, 1)
        offered = {offer: f"offer {key} {offer}" for offer in sorted(offers)}
        for name in offered.values():
            self._store.add(name, 1)
        self._wait_here(key, ranks)
        watch.start().meet_neighbours()
        _times_met[ranks] = times + 1
        whole_world = len(ranks) == dist.get_world_size()
        if not whole_world and self._store.add(alike, 0) < len(ranks):
            self._raise_histories(key, ranks)
        agreed = [offer for offer, name in offered.items() if self._store.add(name, 0) == len(ranks)]
        self._sweep(ranks, [f"groups {key} {self._me}", alike, f"here {key}", *offered.values()])
        return agreed

    def _sweep(self, ranks: tuple[int, ...], keys: list[str]) -> None:
        """All ranks are here, so nobody reads what they wrote when they met the time before."""
        for key in _last_met.get(ranks, ()):
            self._store.delete_key(key)
        _last_met[ranks] = keys

    def _wait_here(self, key: str, ranks: tuple[int, ...]) -> None:
        here = self._store.add(f"here {key}", 1)
        waiting = _Waiting(lambda: self._missing(key, ranks))
        try:
            while here < len(ranks):
                self._raise_failures(ranks)
                waiting.pause()
                here = self._store.add(f"here {key}", 0)
        finally:
            waiting.end()

    def _missing(self, key: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if not self._store.check([f"groups {key} {rank}"]))

    def _raise_failures(self, ranks: tuple[int, ...]) -> None:
        """What one of these ranks has raised in this same call."""
        global _failed_tries
        count = f"failures {self._attempt}"
        if not self._store.check([count]):  # asking for the number would make the key
            return
        for number in range(1, self._store.add(count, 0) + 1):
            rank, kind, text = json.loads(self._store.get(f"failure {self._attempt} {number}"))
            if rank not in ranks:
                continue
            _failed_tries += 1
            if hasattr(errors, kind):
                raise getattr(errors, kind)(f"{text} (on rank {rank})")
            raise Disagreement(f"rank {rank} raised {kind} in lamina.shard(): {text}")

    def _raise_histories(self, key: str, ranks: tuple[int, ...]) -> None:
        """torch names a group of some ranks by how many groups a process has had: members that differ wait for ever."""
        counts = {rank: int(self._store.get(f"groups {key} {rank}")) for rank in ranks}
        said = ", ".join(f"rank {rank}: {count}" for rank, count in counts.items())
        raise TransportError(
            f"the ranks of this mesh have created different numbers of process groups before ({said}), and torch "
            "cannot make a group of some ranks then. Create the same groups on all of them, or let all ranks "
            "call lamina.shard() on meshes of one init_device_mesh()"
        )


class _Waiting:
    """Pauses that grow, watched over once they have lasted."""

    def __init__(self, missing: Callable[[], tuple[int, ...]]) -> None:
        self._missing = missing
        self._late: tuple[int, ...] = ()
        self._began, self._pause_s = time.monotonic(), FIRST_PAUSE_S
        self._watched: watch.Waiting | None = None

    def pause(self) -> None:
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if time.monotonic() - self._began < watch.FIRST_POLL.total_seconds():
            return
        self._late = self._missing()  # here: the store's connection is this thread's
        running = watch.start()
        if self._watched is None:
            self._watched = running.begin_wait("", "waits in lamina.shard() for others to call it", lambda: self._late)
        verdict = running.verdict_on(self._watched)
        if verdict is not None:
            raise disagreement(verdict)

    def end(self) -> None:
        running = watch.current()
        if self._watched is not None and running is not None:
            running.end_wait()
