"""Copies in host memory of what a save will write while training goes on.

`torch.empty(..., pin_memory=True)` rounds what it takes up to a power of two, half as much again on average. Here
ordinary memory is pinned in place: as much as is needed, allocated once and used again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from lamina.checkpoint.datafile import Item

ALIGNMENT_BYTES = 64  # of each copy: wide enough for any dtype, and a line of a core's cache
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class HostCopy:
    """One buffer, and the copies that lie in it until the next `take`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)  # 1D
        self._sources: list[Tensor] = []  # alive until the device has read them
        self._done: torch.cuda.Event | None = None

    @property
    def buffer(self) -> Tensor:
        return self._buffer

    def take(self, items: Sequence[Item]) -> list[Item]:
        """The items again, their values copied. Local; on a GPU the copies are queued behind what computes now.

        They are not given a stream of their own: weights and buffers may be changed by anything that is queued next, so
        that the device's next work has to come after them. The host does not wait; `wait` does.
        """
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, item in enumerate(items):
            by_dtype.setdefault(item.values.dtype, []).append(i)
        lengths = {dtype: _padded([items[i] for i in places]) for dtype, places in by_dtype.items()}
        self._make_room(sum(sum(numels) * dtype.itemsize for dtype, numels in lengths.items()))
        copies, at = list(items), 0
        for dtype, places in by_dtype.items():
            end = at + sum(lengths[dtype]) * dtype.itemsize
            # one call that makes all views: after a long copy nothing of the interpreter is in a core's cache
            targets = self._buffer[at:end].view(dtype).split_with_sizes(lengths[dtype])[::2]
            torch._foreach_copy_(targets, [_flat(items[i].values) for i in places], non_blocking=True)
            for i, target in zip(places, targets, strict=True):
                copies[i] = items[i]._replace(values=target if items[i].flat else target.view(items[i].values.shape))
            at = end
        if self._device.type == "cuda":
            self._sources = [item.values for item in items]
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(self._device))
        return copies

    def wait(self) -> None:
        """Until the copies are there; any thread may ask."""
        if self._done is not None:
            self._done.synchronize()
            self._done, self._sources = None, []

    def _make_room(self, length_bytes: int) -> None:
        self.wait()
        if self._buffer.numel() >= length_bytes:
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first
        self._buffer = torch.empty(length_bytes, dtype=torch.uint8)
        if self._device.type == "cuda":
            _pin(self._buffer)


def _padded(items: Sequence[Item]) -> list[int]:
    """Elements of each, then of what fills it up to the alignment."""
    numels = []
    for item in items:
        numel, line_numel = item.values.numel(), max(1, ALIGNMENT_BYTES // item.values.element_size())
        numels += [numel, -numel % line_numel]
    return numels


def _flat(values: Tensor) -> Tensor:
    return values if values.dim() == 1 else values.detach().reshape(-1)


def _pin(buffer: Tensor) -> None:
    """Where the system refuses to pin so much, copies are slower and right."""
    cudart = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.numel(), _PORTABLE)) == 0:
        weakref.finalize(buffer, cudart.cudaHostUnregister, buffer.data_ptr()).atexit = False
