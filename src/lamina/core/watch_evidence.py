"""What a process can find out about itself and its neighbours without their help: threads' frames, /proc, groups.

`faulthandler` and py-spy print stacks for a human; torch's flight recorder knows NCCL only. The watch needs three facts
that a program can judge: which torch.distributed call a thread is blocked in, and from which line of the user's; how a
process on the same host is; and how many collectives torch has issued on each group. All are read from outside: nothing
is written down in the step.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import sysconfig
import time
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lamina.core.watch_judge import GroupCount

_LAMINA = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARY = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_COLLECTIVES = (
    str(Path(_TORCH, "distributed", "distributed_c10d.py")),
    str(Path(_TORCH, "distributed", "_functional_collectives.py")),
)
_WRAPPERS = (str(Path(_TORCH, "distributed", "c10d_logger.py")),)
_OURS_BLOCKING = str(Path(_LAMINA, "transport", "c10d.py"))  # a wait there that does not look up
# Calls that end when all members have made them; of others (send, recv, new_group) torch's counts tell nothing.
_COUNTED = ("barrier", "all_", "broadcast", "reduce", "gather", "scatter")
_TICKS_FIELD, _EXIT_FIELD = 19, 49  # of /proc/<pid>/stat, counted from the state

OUR_GROUPS: set[str] = set()  # names of the groups that lamina has made


class OnDevice(Protocol):
    """Something beside torch's groups that makes the device wait for other ranks. It counts its barriers."""

    def release(self) -> None:
        """Let them pass."""


# Barriers that this rank has queued, by a name that all their members use. Of those that are gone, too: what a rank has
# last said of them would else depend on when it was asked, and one that said more would seem to wait for the others.
BARRIERS: dict[str, int] = {}
_ON_DEVICE: list[weakref.ref[OnDevice]] = []  # only appended to: other threads walk through it


def note_on_device(waits: OnDevice) -> None:
    _ON_DEVICE.append(weakref.ref(waits))


def on_device() -> list[OnDevice]:
    return [waits for reference in _ON_DEVICE if (waits := reference()) is not None]


@dataclass(frozen=True)
class Frames:
    """Where a thread is."""

    site: str  # "train.py:88", "" if no line is the user's
    call: str  # "barrier": the torch.distributed function that it is in, or ""
    group: str  # name of that function's group, if it has one
    mark: tuple[int, int]  # the same as long as the innermost frame has not moved


def frames_of(thread: int) -> Frames | None:
    """The frames of a thread of this process, by its identifier."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    call, group = _call(frame)
    found = Frames(call_site(frame), call, group, (id(frame), frame.f_lasti))
    del frame  # of this very call, where a thread asks for itself: a circle that holds all callers' variables
    return found


def _call(frame: FrameType | None) -> tuple[str, str]:
    """The outermost function of torch.distributed around the innermost frame, and the name of its group."""
    name, group = "", ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _OURS_BLOCKING and not name:
            return "a reduction", ""
        if file in _COLLECTIVES:
            name = frame.f_code.co_name
            group = group or _group_of(frame)
        elif file not in _WRAPPERS:
            break
        frame = frame.f_back
    return name, (group if name.startswith(_COUNTED) else "")


def _group_of(frame: FrameType) -> str:
    given = frame.f_locals.get("group", frame.f_locals.get("pg"))
    if given is None and "group" in frame.f_code.co_varnames and dist.is_initialized():
        given = dist.group.WORLD
    if not isinstance(given, dist.ProcessGroup):
        return ""
    try:
        return _key(given, str(given.group_name))
    except (RuntimeError, KeyError, ValueError):  # it is being made
        return ""


def group_key(pg: dist.ProcessGroup) -> str:
    """A name of a group that all its members use."""
    return _key(pg, str(pg.group_name))


def _key(pg: dist.ProcessGroup, name: str) -> str:
    """torch's names are numbers that other ranks may have given to other groups."""
    return f"{name} {zlib.crc32(str(dist.get_process_group_ranks(pg)).encode()):x}"


def is_users(file: str) -> bool:
    """Neither lamina's, torch's, Python's nor an installed package's."""
    return not file.startswith((_LAMINA, _TORCH, *_LIBRARY, "<frozen", "<string>"))


def is_folded(file: str) -> bool:
    """lamina's or torch's: left out where a traceback is shown."""
    return file.startswith((_LAMINA, _TORCH, "<frozen"))


def call_site(frame: FrameType | None) -> str:
    """ "train.py:88": the outermost line of the user's from which something else runs, such as the root forward."""
    found, inner_is_users = "", False
    while frame is not None:
        here = is_users(frame.f_code.co_filename)
        if here and not inner_is_users:
            found = _line(frame)
        inner_is_users = here
        frame = frame.f_back
    return found


def innermost_site(frame: FrameType | None) -> str:
    """The innermost line that is the user's, else the innermost that is not torch's or ours."""
    fallback = ""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return _line(frame)
        if not is_folded(frame.f_code.co_filename):
            fallback = fallback or _line(frame)
        frame = frame.f_back
    return fallback


def _line(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


# ---- processes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identity:
    """Enough to look at a process from another one of the same host."""

    host: str
    host_name: str
    pid: int
    born: str  # start time in ticks: a number that is used again is not mistaken for it

    @staticmethod
    def own() -> Identity:
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            space = os.readlink("/proc/self/ns/pid")
        except OSError:
            boot, space = "", str(os.getpid())  # no /proc: nobody is a neighbour
        stat = _stat(os.getpid())
        return Identity(f"{boot} {space}", socket.gethostname(), os.getpid(), stat[_TICKS_FIELD] if stat else "")


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def state_of(who: Identity) -> str:
    """ "runs", "is stopped", or how it has ended. One that a debugger holds (state t) runs."""
    stat = _stat(who.pid)
    if stat is None or stat[_TICKS_FIELD] != who.born:
        return f"has died (process {who.pid} on {who.host_name} is gone: killed, out of memory, or crashed)"
    if stat[0] in "ZX":
        return f"has died (process {who.pid} on {who.host_name} {_how(int(stat[_EXIT_FIELD]))})"
    return "is stopped" if stat[0] == "T" else "runs"


def _how(status: int) -> str:
    number = status & 0x7F
    if number == 0:
        return f"ended with exit code {status >> 8}" if status else "has ended"
    hint = ", out of memory if nobody sent it" if number == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(number).name}{hint}"


class Neighbours:
    """The other ranks of this host, and which of them are dead or have been stopped for long."""

    def __init__(self) -> None:
        self.known: dict[int, Identity] = {}
        self.ailing: dict[int, str] = {}
        self._stopped_since: dict[int, float] = {}

    def look(self, stopped_s: float) -> None:
        """One look at each; a stop counts from the first look that saw it."""
        now = time.monotonic()
        for rank, who in self.known.items():
            state = state_of(who)
            if state == "is stopped":
                if now - self._stopped_since.setdefault(rank, now) < stopped_s:
                    continue
                state += f" (SIGSTOP or Ctrl-Z; process {who.pid} on {who.host_name}; `kill -CONT {who.pid}` wakes it)"
            else:
                self._stopped_since.pop(rank, None)
            if state == "runs":
                self.ailing.pop(rank, None)
            else:
                self.ailing[rank] = state


# ---- groups --------------------------------------------------------------------------------------------------------


def group_counts() -> dict[str, GroupCount]:
    """How many collectives this rank has issued on each of its groups."""
    found: dict[str, GroupCount] = {}
    for pg, group_name in list(dist.distributed_c10d._world.pg_names.items()):
        name = str(group_name)
        try:
            found[_key(pg, name)] = GroupCount(_by_torch(pg), name in OUR_GROUPS)
        except (RuntimeError, KeyError, ValueError):
            continue  # a backend that does not count, or a group that is being destroyed
    return found | {name: GroupCount(count, True) for name, count in list(BARRIERS.items())}


def issued_on(pg: dist.ProcessGroup) -> int:
    """How many collectives this rank has issued on one of its groups, barriers on the device among them."""
    key = group_key(pg)
    return _by_torch(pg) + sum(count for name, count in list(BARRIERS.items()) if name.startswith(f"{key} "))


def _by_torch(pg: Any) -> int:
    try:
        return pg._get_sequence_number_for_group()
    except RuntimeError:  # several backends: each counts its own
        return sum(pg._get_backend(device)._get_sequence_number_for_group() for device in pg._device_types)
