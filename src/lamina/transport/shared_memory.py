"""Memory of one process that others on the same host can read.

`multiprocessing.shared_memory` gives regions a name in /dev/shm: a rank that is killed leaves it behind, and containers
limit that folder to 64 MB. torch's shared storages are passed on by a server process. Here a region is an anonymous
file (memfd): it has no name, and its memory is gone with the last process that maps it, however that one ends. Others
open it through the owner's entry in /proc, for reading only: nobody but the owner can write to it.

Note [Owner's lock]
    1. The owner holds a lock on its file from before anybody hears of it. The kernel drops it when the process ends,
       by whatever cause, or when the region is freed; so a lock that a reader can take is an owner that will never
       write again. Process numbers would do less: they are re-used, and a dead process keeps its own for a while.
    2. It is a POSIX lock: children that inherit the file by fork do not inherit the lock. The owner must not open its
       own file a second time: closing that would drop the lock.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
import socket
import stat
import warnings
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HEADER_BYTES = 4096  # counters, on a page of their own
COUNTERS = HEADER_BYTES // 8
NONCE_INDEX = 0


def host_id() -> str:
    """One running kernel: host names repeat, and containers have names of their own."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Ticket:
    """What another process needs to open a region, and to be sure that it is this one."""

    host: str
    host_name: str
    pid: int
    fd: int
    inode: int
    nonce: int
    size_bytes: int

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.fd}"

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Ticket:
        return cls(**json.loads(text))


class OwnRegion:
    """This process's region: counters and `data_bytes` of data, all zero, in memory that is there already.

    Raises:
        OSError: the memory is not to be had.
    """

    def __init__(self, data_bytes: int) -> None:
        size_bytes = HEADER_BYTES + data_bytes
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no anonymous files (memfd_create)")
        self._fd = os.memfd_create("lamina", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        os.posix_fallocate(self._fd, 0, size_bytes)  # fails here and now, not with a signal at the first write
        fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        memory = mmap.mmap(self._fd, size_bytes)
        self.counters = _counters(memory)  # (COUNTERS,)
        self.data = _data(memory, data_bytes)  # uint8, (data_bytes,)
        nonce = secrets.randbits(62)
        self.counters[NONCE_INDEX] = nonce
        inode = os.fstat(self._fd).st_ino
        self.ticket = Ticket(host_id(), socket.gethostname(), os.getpid(), self._fd, inode, nonce, size_bytes)


class PeerRegion:
    """Another process's region, for reading.

    Raises:
        OSError: it cannot be opened, or what was opened is something else.
    """

    def __init__(self, ticket: Ticket) -> None:
        _check_file(ticket, os.stat(ticket.path))  # before it is opened: opening a device may act on it
        self._fd = os.open(ticket.path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        _check_file(ticket, os.fstat(self._fd))
        memory = mmap.mmap(self._fd, ticket.size_bytes, prot=mmap.PROT_READ)
        self.counters = _counters(memory)  # (COUNTERS,), read-only
        self.data = _data(memory, ticket.size_bytes - HEADER_BYTES)  # uint8; a write to it is a memory fault
        if self.counters[NONCE_INDEX] != ticket.nonce:
            raise OSError(f"{ticket.path} is another region")

    def owner_is_gone(self) -> bool:
        """Note [Owner's lock]: whether the owner has ended or freed the region. False may be a moment old."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
        return True


def _check_file(ticket: Ticket, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_ino != ticket.inode or found.st_size != ticket.size_bytes:
        raise OSError(f"{ticket.path} is another file: process numbers mean other processes there")


def _counters(memory: mmap.mmap) -> NDArray[np.int64]:
    return np.frombuffer(memory, dtype=np.int64, count=COUNTERS)


def _data(memory: mmap.mmap, data_bytes: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*buffer is not writable.*")  # what we want of a peer's memory
        return torch.frombuffer(memory, dtype=torch.uint8, count=data_bytes, offset=HEADER_BYTES)
