"""What can be read about a machine without running anything on it, and what of it deserves a warning.

`torch.utils.collect_env` prints versions and leaves the reading to whoever wrote the bug report. Here each fact that
has cost people a day (no NCCL, little shared memory, GPUs that do not reach each other) becomes a sentence with a cure.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

OLDEST_TORCH = (2, 11)
NEEDED_SHM_BYTES = 1 << 30  # data loader workers, and NCCL's buffers between ranks that have no NVLink
NEEDED_FREE_SHARE = 0.9  # of a GPU's memory; less is free when somebody else is on it


@dataclass(frozen=True)
class DeviceFacts:
    name: str
    memory_bytes: int
    free_bytes: int
    reaches: tuple[int, ...]  # devices whose memory it can read


@dataclass(frozen=True)
class Facts:
    """One machine, as the libraries show it."""

    python: str
    torch: str
    cuda: str  # "" without
    nccl: str
    gloo: bool
    cpus: int  # that this process may use
    memory_bytes: int
    shm_bytes: int  # size of /dev/shm; 0 where there is none
    devices: tuple[DeviceFacts, ...]

    @property
    def kind(self) -> str:
        return "cuda" if self.devices else "cpu"


@dataclass(frozen=True)
class Finding:
    """Something that will cost speed or a run, and what to do about it."""

    what: str
    cure: str


def collect_facts() -> Facts:
    """Facts of this machine; starts no process and no CUDA context beyond what counting devices needs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    nccl = ""
    if count and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return Facts(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        nccl=nccl,
        gloo=dist.is_gloo_available(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        devices=tuple(_device(index, count) for index in range(count)),
    )


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def _device(index: int, count: int) -> DeviceFacts:
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    reaches = tuple(i for i in range(count) if i != index and torch.cuda.can_device_access_peer(index, i))
    return DeviceFacts(torch.cuda.get_device_name(index), total_bytes, free_bytes, reaches)


def warnings_of(facts: Facts) -> tuple[Finding, ...]:
    """What will cost speed or a run. Pure, so that every sentence has a test."""
    found = []
    version = tuple(int(part) for part in re.findall(r"\d+", facts.torch)[:2])
    if version < OLDEST_TORCH:
        found.append(Finding(f"torch {facts.torch} is older than lamina needs", "pip install 'torch>=2.11'"))
    if facts.kind == "cuda" and not facts.nccl:
        what = "this torch has no NCCL: collectives between GPUs would go through the host"
        found.append(Finding(what, "install torch's own CUDA build for Linux (pip install torch)"))
    if facts.kind == "cpu" and not facts.gloo:
        found.append(Finding("this torch has no Gloo: ranks on the CPU cannot talk", "pip install torch"))
    if facts.shm_bytes < NEEDED_SHM_BYTES:
        size = f"{facts.shm_bytes / 2**20:.0f} MiB" if facts.shm_bytes else "missing"
        found.append(Finding(f"/dev/shm is {size}", "in a container: docker run --shm-size=8g, or --ipc=host"))
    if facts.kind == "cuda" and facts.cpus < 2 * len(facts.devices):
        what = f"{facts.cpus} CPU cores for {len(facts.devices)} GPUs: the host may be too slow to keep them busy"
        found.append(Finding(what, "give the job at least 2 cores a GPU"))
    found += _device_warnings(facts.devices)
    return tuple(found)


def _device_warnings(devices: tuple[DeviceFacts, ...]) -> list[Finding]:
    found = []
    names = sorted({device.name for device in devices})
    if len(names) > 1:
        what = f"GPUs of different kinds: {', '.join(names)}; every step waits for the slowest"
        found.append(Finding(what, "choose the equal ones with CUDA_VISIBLE_DEVICES"))
    for index, device in enumerate(devices):
        apart = [i for i in range(len(devices)) if i != index and i not in device.reaches]
        if apart:
            what = f"GPU {index} cannot read the memory of GPU {', '.join(map(str, apart))}: no transport='peer'"
            cure = "see `nvidia-smi topo -p2p r`; virtual machines and IOMMU settings switch it off. c10d works"
            found.append(Finding(what, cure))
        if device.free_bytes < NEEDED_FREE_SHARE * device.memory_bytes:
            used_gib = (device.memory_bytes - device.free_bytes) / 2**30
            what = f"{used_gib:.1f} GiB of GPU {index} are in use by others"
            found.append(Finding(what, "see `nvidia-smi`; figures measured beside another job are too low"))
    return found
