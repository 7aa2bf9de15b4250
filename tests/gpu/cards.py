"""The GPUs that the ranks of a test take. They share cards where NCCL (2.30 and newer) and torch are told to allow it:

NCCL_MULTI_RANK_GPU_ENABLE=1 TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 NCCL_MAX_CTAS=4 python -m pytest tests/gpu

They take turns on the card, so a barrier takes milliseconds: right or wrong can be told, how fast cannot.
"""

from __future__ import annotations

import os

import torch

SWITCHES = ("NCCL_MULTI_RANK_GPU_ENABLE", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")


def most_ranks() -> int:
    cards = torch.cuda.device_count()
    return max(4, cards) if all(os.environ.get(name) == "1" for name in SWITCHES) else cards


def take_card(rank: int) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
