"""How much memory the host still has for this process: the machine's, and what its control groups leave of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
MACHINE = Path("/proc/meminfo")


def available_bytes() -> int:
    """Bytes that can be had without pushing anything out that is in use; what cannot be read does not limit."""
    return max(0, min([sys.maxsize, *_left_on_machine(), *_left_in_groups()]))


def _left_on_machine() -> Iterator[int]:
    try:
        lines = MACHINE.read_text().splitlines()
    except OSError:  # not Linux, or a sandbox
        return
    for line in lines:
        if line.startswith("MemAvailable"):
            yield int(line.split()[1]) * 1024


def _left_in_groups() -> Iterator[int]:
    """Of this process's control groups and all above them (containers, SLURM, systemd)."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root, limit, usage, cache = GROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit = GROUPS / "memory", "memory.limit_in_bytes"
            usage, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        while group != root.parent:
            left = _left_in(group, limit, usage, cache)
            if left is not None:
                yield left
            group = group.parent


def _left_in(group: Path, limit: str, usage: str, cache: str) -> int | None:
    """None: the group is not seen from here, or has no limit. Cached files that nobody uses count as free."""
    try:
        words = (group / limit).read_text().strip()
        if words == "max":
            return None
        used = int((group / usage).read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(words) - used + int(counts.get(cache, 0))
