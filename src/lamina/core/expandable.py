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

VARIABLE = "PYTORCH_ALLOC_CONF"
NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", VARIABLE)  # the first that is set counts, even if empty
NAME = "expandable_segments"
SETTING = f"{NAME}:True"
MAPS_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


def asked_for() -> bool | None:
    """What the environment says; None: it says nothing of torch's allocator."""
    name = _name_that_counts()
    if name is None:
        return None
    settings = dict(setting.partition(":")[::2] for setting in _settings(name))
    return settings.get(NAME) == "True"


def request() -> str:
    """`NAME=VALUE` that asks for it beside what the environment says already."""
    name = _name_that_counts()
    if name is None:
        return f"{VARIABLE}={SETTING}"
    others = [setting for setting in _settings(name) if setting and not setting.startswith(f"{NAME}:")]
    return f"{name}={','.join([*others, SETTING])}"


def _name_that_counts() -> str | None:
    return next((name for name in NAMES if name in os.environ), None)


def _settings(name: str) -> list[str]:
    """Lists in brackets come in pieces."""
    return os.environ[name].replace(" ", "").split(",")


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
        os.environ.pop(VARIABLE, None)


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
