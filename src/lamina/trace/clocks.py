"""When a lane reached a point: events on a GPU, the host's clock on the CPU.

A time on the host says nothing about a GPU that runs behind it, and an event says nothing about the host. A `Stamp` is
either; it becomes milliseconds when the device has come to rest.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch

from lamina.core.lanes import Lane

Stamp = float | torch.cuda.Event


class HostClock:
    """The CPU: a lane's work is done where it is called."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.used_bytes = _malloc_bytes() or (lambda: 0)  # given away by malloc; 0 where the C library does not say

    def stamp(self, lane: Lane) -> Stamp:
        return time.perf_counter()

    def settle(self) -> None:
        """Everything stamped has been reached."""

    def read_ms(self, stamp: Stamp) -> float:
        """Milliseconds since the trace began."""
        assert isinstance(stamp, float)
        return (stamp - self.begin) * 1e3


def _malloc_bytes() -> Callable[[], int] | None:
    """glibc's own count, since 2.33. Resident memory would not fall where malloc keeps what was freed."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = _MallInfo

    def used_bytes() -> int:
        info = mallinfo()
        return info.uordblks + info.hblkhd

    return used_bytes


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2`: in use are `uordblks` bytes of the heaps and `hblkhd` bytes mapped one by one."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


class DeviceClock:
    """A GPU: an event in the lane's stream."""

    device_type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.synchronize(device)
        self.begin = torch.cuda.Event(enable_timing=True)
        self.begin.record(torch.cuda.current_stream(device))

    def stamp(self, lane: Lane) -> Stamp:
        event = torch.cuda.Event(enable_timing=True)
        with lane.running():
            event.record(torch.cuda.current_stream(self.device))
        return event

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def read_ms(self, stamp: Stamp) -> float:
        assert isinstance(stamp, torch.cuda.Event)
        return self.begin.elapsed_time(stamp)

    def used_bytes(self) -> int:
        """What the allocator has given away. It runs ahead of the device, in the order in which the device follows."""
        return torch.cuda.memory_allocated(self.device)


Clock = HostClock | DeviceClock


def clock_of(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()
