"""What models leave in a process: regions of shared memory that are open, and runtimes that are alive."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

from lamina.runtime.assemble import RUNTIMES
from lamina.runtime.failed_backward import ENGINES


def mapped_regions() -> int:
    """Of lamina's."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += "memfd:lamina" in os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            pass  # the listing's own
    return found


def with_leftovers(function: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, int]]:
    """What a call returns, and how much more there is after it; other tests' models may live in this process."""
    gc.collect()
    before = leftovers()
    result = function(*args)
    gc.collect()
    return result, {name: count - before[name] for name, count in leftovers().items()}


def leftovers() -> dict[str, int]:
    """Models, runtimes and regions that are there now."""
    return {"models": len(RUNTIMES), "runtimes": len(ENGINES), "regions": mapped_regions()}
