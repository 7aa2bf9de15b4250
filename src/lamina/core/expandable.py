"""torch's setting `expandable_segments:True`: memory of a CUDA device in one stretch a stream, that grows and shrinks.

torch's allocator otherwise keeps memory in segments of the sizes that were once asked for, and what is free in one does
not join what is free in the next. It reads the setting from the environment when CUDA is first used, for the whole
process; docs/decisions/expandable-segments.md says who sets it here, and who does not.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE, OLDER_NAME = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"  # the first counts where both are set
NAME = "expandable_segments"
SETTING = f"{NAME}:True"
MAPS_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


def asked_for() -> bool | None:
    """What the environment says; None: it says nothing of torch's allocator."""
    text = os.environ.get(VARIABLE, os.environ.get(OLDER_NAME))
    if text is None:
        return None
    settings = dict(setting.partition(":")[::2] for setting in text.replace(" ", "").split(","))
    return settings.get(NAME) == "True"


@contextmanager
def by_default() -> Iterator[None]:
    """Ask for it in this process and those that it starts, unless their user has set something of the allocator's."""
    if asked_for() is not None:
        yield
        return
    os.environ[VARIABLE] = SETTING
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def is_supported() -> bool:
    """Whether every GPU here maps memory page by page, which some virtual ones do not. Starts the CUDA driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True  # no driver, or another system, where torch says itself what it leaves out
    count, device, maps = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return True
    for index in range(count.value):
        failed = driver.cuDeviceGet(ctypes.byref(device), index)
        if not failed and not driver.cuDeviceGetAttribute(ctypes.byref(maps), MAPS_MEMORY, device) and not maps.value:
            return False
    return True
