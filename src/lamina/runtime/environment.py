"""The launcher's variables: the one place that reads them."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def initialise_distributed() -> None:
    """Start the default process group from torchrun's variables, if there are any and nobody did it before."""
    if dist.is_initialized() or not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ):
        return
    if torch.cuda.is_available():
        device = local_cuda_device()
        torch.cuda.set_device(device)
        dist.init_process_group("cuda:nccl,cpu:gloo")
    else:
        dist.init_process_group("gloo")


def local_cuda_device() -> torch.device:
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def local_ranks() -> int:
    """How many ranks share this host's cores; without a launcher's word for it, all of them."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
