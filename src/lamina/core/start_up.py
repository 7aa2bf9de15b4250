"""Before there is a process group: ranks meet in a store.

torch waits for the first group's members for half an hour, names nobody, and hears no Ctrl-C meanwhile. Where a
launcher holds the store (torchrun, `lamina.launch`) it is there before any rank asks for a group; where rank 0 does
(srun, variables set by hand) it waits for nobody, and the others look for it. So whoever waits can say for whom. That a
rank will not come at all only `lamina.launch` can know; a rank that is late is waited for.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait

import torch.distributed as dist

from lamina.core.control import name_ranks
from lamina.core.roll_call import RollCall
from lamina.core.watch_board import is_held_by_launcher
from lamina.errors import Disagreement, TransportError

PAUSE_S = 0.02
ANSWER_S = 2.0  # of a host that is asked for a connection
NOTICES_S = (10.0, 60.0, 600.0)  # after which those who wait say so
FIRST_LOOK_S = 0.2  # at who is missing, and between two looks; most waits are over by then
RETURNED = "lamina/returned"


class DefaultGroups:
    """torch's default groups, one after the other, in which this process has called `shard()`.

    Groups have names, and meet under them in the store. torch counts names anew once the default group is destroyed,
    and where the store outlives it (a launcher's; rank 0's as long as an old model is alive) ranks find their peers'
    old addresses there, and wait for ever. So from the second default group on, keys have a prefix of their own.
    """

    count = 0
    recent: Callable[[], object | None] = staticmethod(lambda: None)

    @classmethod
    def enter(cls) -> None:
        """Groups that are made in the running default group from here on go by keys of their own."""
        world = dist.distributed_c10d._world
        group = world.default_pg
        if group is None or cls.recent() is group:
            return
        backend, store = world.pg_map[group]
        if cls.count:
            world.pg_map[group] = (backend, dist.PrefixStore(f"lamina/groups {cls.count}", store))
        cls.count, cls.recent = cls.count + 1, weakref.ref(group)


def store_of_ranks() -> tuple[dist.Store, int, int]:
    """The store that rank 0 holds, by torch's variables, with this rank and how many there are.

    Raises:
        TransportError: a variable is missing or makes no sense, rank 0 cannot open its port, or has not within torch's
            time for a group.
    """
    variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in variables if name not in os.environ]:
        raise TransportError(
            f"{', '.join(missing)} not set, beside RANK: start the ranks by torchrun, or set all of them"
        )
    host = os.environ["MASTER_ADDR"]
    try:
        rank, world, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError as error:
        raise TransportError(f"RANK, WORLD_SIZE and MASTER_PORT are whole numbers: {error}") from error
    if not 0 <= rank < world:
        raise TransportError(f"RANK={rank} and WORLD_SIZE={world}: ranks are numbered from 0 to WORLD_SIZE - 1")
    if not 0 < port < 1 << 16:
        raise TransportError(f"MASTER_PORT={port}: a port is a number from 1 to 65535")
    make = functools.partial(
        dist.TCPStore,
        host,
        port,
        world,
        rank == 0,
        dist.distributed_c10d.default_pg_timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    return (_connected(make, host, port, rank) if rank else _opened(make, host, port)), rank, world


def _limit_s() -> float:
    """How long torch waits for the members of a group."""
    return dist.distributed_c10d.default_pg_timeout.total_seconds()


def _opened(make: Callable[[], dist.Store], host: str, port: int) -> dist.Store:
    patience, where = _Patience(0), f"port {port} of {host} (MASTER_PORT, MASTER_ADDR)"
    while (why := _unknown(host)) is not None:
        patience.go_on(f"an address of {host} (MASTER_ADDR): {why}")
        time.sleep(10 * PAUSE_S)
    try:
        return _made(make, patience, f"an answer from itself at {where}: is that an address of this host?")
    except dist.DistNetworkError as error:
        raise TransportError(
            f"the ranks cannot meet: rank 0 cannot open port {port} (MASTER_PORT), which another program may hold. "
            f"Give torchrun another --master-port, or all ranks another MASTER_PORT. {error}"
        ) from error


class _Patience:
    """Of a rank that waits for rank 0: it says so now and then, and gives up after torch's time for a group."""

    def __init__(self, rank: int) -> None:
        self.rank, self.began, self.notices = rank, time.monotonic(), list(NOTICES_S)

    def go_on(self, for_what: str) -> None:
        """Raises `TransportError` when it is at its end."""
        waited_s = time.monotonic() - self.began
        said = f"rank {self.rank} has waited {waited_s:.0f} s for {for_what}"
        if waited_s > _limit_s():
            raise TransportError(said)
        if self.notices and waited_s > self.notices[0]:
            del self.notices[0]
            print(f"lamina: {said}", file=sys.stderr, flush=True)


def _connected(make: Callable[[], dist.Store], host: str, port: int, rank: int) -> dist.Store:
    patience, where = _Patience(rank), f"port {port} of {host} (MASTER_PORT, MASTER_ADDR)"
    while (why := _closed(host, port)) is not None:
        patience.go_on(f"rank 0 to open {where}: {why}")
        time.sleep(10 * PAUSE_S)  # many may ask one host
    try:
        return _made(make, patience, f"an answer from {where}: is it rank 0 that listens there, or another program?")
    except dist.DistNetworkError as error:
        raise TransportError(
            f"what listens at {where} is not rank 0's store: give all ranks another MASTER_PORT"
        ) from error


def _made(make: Callable[[], dist.Store], patience: _Patience, for_what: str) -> dist.Store:
    """A store, made on a thread of its own: torch waits without end for an answer, and hears no Ctrl-C meanwhile."""
    found: Future[dist.Store] = Future()

    def connect() -> None:
        try:
            found.set_result(make())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=connect, daemon=True, name="lamina connects to rank 0's store").start()
    while not wait([found], timeout=PAUSE_S).done:
        patience.go_on(for_what)
    return found.result()


def _unknown(host: str) -> str | None:
    """Why a name has no address; None: it has."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return str(error)
    return None


def _closed(host: str, port: int) -> str | None:
    """Why nobody listens there; None: somebody does."""
    try:
        socket.create_connection((host, port), timeout=ANSWER_S).close()
    except OSError as error:
        return str(error)
    return None


def meet(store: dist.Store, rank: int, world: int) -> dist.Store:
    """Wait until all ranks have come.

    Args:
        store: the launcher's, as torch's rendezvous hands it out, or rank 0's.

    Returns:
        a part of it where nobody else has written anything.

    Raises:
        Disagreement: a rank has returned and will not come, or, where no launcher could end those who wait, has not
            come within torch's time for a group.
    """
    call, returned = RollCall(store, rank, world), dist.PrefixStore(RETURNED, store)
    began, next_look_s, notices = time.monotonic(), FIRST_LOOK_S, list(NOTICES_S)
    while not call.is_complete():
        time.sleep(PAUSE_S)
        waited_s = time.monotonic() - began
        if waited_s > next_look_s:
            next_look_s, missing = waited_s + FIRST_LOOK_S, call.missing()
            gone = [other for other in missing if returned.check([str(other)])]
            if gone:
                raise Disagreement(
                    f"{name_ranks(gone)} ended without a call that the others wait in: lamina.shard() starts the "
                    "process group, and every rank has to call it. Is it inside `if rank == 0:`?"
                )
            if missing and waited_s > _limit_s() and not is_held_by_launcher():
                raise Disagreement(
                    f"rank {rank} has waited {waited_s:.0f} s for {name_ranks(missing)} to call lamina.shard(), which "
                    "starts the process group: do they run, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE?"
                )
            if notices and waited_s > notices[0] and missing and min(set(range(world)).difference(missing)) == rank:
                del notices[0]
                print(
                    f"lamina: rank {rank} has waited {waited_s:.0f} s for {name_ranks(missing)} to call "
                    "lamina.shard(), which starts the process group",
                    file=sys.stderr,
                    flush=True,
                )
    return dist.PrefixStore(f"lamina/{call.name}", store)


def say_returned(store: dist.Store, rank: int) -> None:
    """Of a rank that the launcher knows to have ended well. `store`: the launcher's own."""
    for seen in (store, dist.PrefixStore("/worker/attempt_0", store)):  # what a rendezvous hands out; torch 2.11's
        dist.PrefixStore(RETURNED, seen).set(str(rank), "")
