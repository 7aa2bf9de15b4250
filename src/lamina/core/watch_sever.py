"""Ending a wait by a verdict: as an error, and from outside where the one who waits cannot look up.

NCCL has `abort`; for Gloo, in torch 2.13, it does nothing, and a thread in `dist.barrier()` sits in C++ until a peer's
end closes a connection. Peers that raise an error do not always end (a notebook, a process pool). So each rank writes
down the ends of its TCP connections, and one whose wait is proven endless shuts those that lead to another rank. Its
groups are lost by that; its process, and every connection to anything else, is not.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from lamina.core.watch_evidence import on_device
from lamina.core.watch_judge import Verdict
from lamina.errors import Disagreement

_ESTABLISHED = "01"


def disagreement(verdict: Verdict) -> Disagreement:
    """The error of a verdict."""
    error = Disagreement(verdict.text)
    error.code, error.cause = verdict.code, verdict.cause
    return error


def raise_in(thread: int, verdict: Verdict) -> None:
    """Let another thread raise the verdict as soon as it runs Python again."""

    def __init__(self: Disagreement, *arguments: object) -> None:
        Disagreement.__init__(self, *(arguments or (verdict.text,)))
        self.code, self.cause = verdict.code, verdict.cause

    kind = type("Disagreement", (Disagreement,), {"__init__": __init__, "__module__": Disagreement.__module__})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def abort_groups() -> None:
    """End what the device waits for. Gloo has no such thing: see `sever`."""
    for waits in on_device():
        threading.Thread(target=waits.release, name="lamina-release", daemon=True).start()
    for pg in list(dist.distributed_c10d._world.pg_names):
        with suppress(RuntimeError):
            pg.abort()


# ---- Gloo ----------------------------------------------------------------------------------------------------------


class Connection(NamedTuple):
    """One TCP connection of this process; addresses as /proc writes them."""

    descriptor: int
    local: str
    remote: str


def connections(store: dist.Store) -> list[Connection]:
    """Those of this process, without the store's."""
    by_inode: dict[str, tuple[str, str]] = {}
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    by_inode[fields[9]] = (_plain(fields[1]), _plain(fields[2]))
    found, not_ours = [], _port_of(store)
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            inode = os.readlink(f"/proc/self/fd/{entry}").removeprefix("socket:[").removesuffix("]")
            if inode in by_inode and not_ours not in {end.rpartition(":")[2] for end in by_inode[inode]}:
                found.append(Connection(int(entry), *by_inode[inode]))
    return found


def sever(own: list[Connection], ends: set[str]) -> int:
    """Shut the connections that lead to one of `ends`, which are other ranks'; how many."""
    count = 0
    for connection in own:
        if connection.remote in ends:
            with suppress(OSError), socket.socket(fileno=os.dup(connection.descriptor)) as handle:
                handle.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _plain(address: str) -> str:
    """IPv4 inside IPv6 is IPv4: the two ends of a connection may be written either way."""
    host, _, port = address.rpartition(":")
    return f"{host[-8:] if host.startswith('0000000000000000FFFF0000') else host}:{port}"


def _port_of(store: Any) -> str:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f"{store.port:04X}" if isinstance(store, dist.TCPStore) else ""
