"""The GPUs that the ranks of a test take. They share cards where NCCL (2.30 and newer) and torch are told to allow it:

NCCL_MULTI_RANK_GPU_ENABLE=1 TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 NCCL_MAX_CTAS=4 python -m pytest tests/gpu

They take turns on the card, so a barrier takes milliseconds: right or wrong can be told, how fast cannot.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

from harness import fork_server

SWITCHES = ("NCCL_MULTI_RANK_GPU_ENABLE", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")


def most_ranks() -> int:
    cards = torch.cuda.device_count()
    return max(4, cards) if all(os.environ.get(name) == "1" for name in SWITCHES) else cards


def take_card(rank: int) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())


def run_on_cards(world: int, fn: Callable[..., None], *args: Any, timeout_s: float = 120) -> None:
    """Call `fn(rank, *args)` in `world` new processes, which have torch imported already, and nothing of CUDA."""
    fork_server()
    ranks = mp.start_processes(fn, args, world, join=False, start_method="forkserver")
    deadline = time.monotonic() + timeout_s
    while not ranks.join(timeout=max(0.0, deadline - time.monotonic())):
        alive = [rank for rank, process in enumerate(ranks.processes) if process.is_alive()]
        if alive and time.monotonic() >= deadline:
            for process in ranks.processes:
                process.kill()
            raise TimeoutError(f"ranks {alive} have not ended within {timeout_s:g} s")
