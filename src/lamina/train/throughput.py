"""Tokens per second, and what part of the device's arithmetic they are (MFU).

Counted are 6 operations for each parameter that takes part in matrix products and each token (4 where it is frozen):
what the forward and the backward need, without attention's own products and without recomputation. The peak is the
maker's dense figure for the device, or, where none is known (CPUs), what a matrix product reached here just now.
"""

from __future__ import annotations

import time

import torch
from torch import nn

PEAK_FLOPS = {  # dense, 16 bit; fp32 is a fraction that depends on settings, and is measured
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}
MEASURED_WIDTH = 512
MEASURED_TIMES = 8


def flops_per_token(model: nn.Module) -> int:
    """Forward and backward."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    used_as_matrix = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}  # tied heads among them
    flops = 0
    for parameter in model.parameters():
        if parameter.ndim >= 2 and (id(parameter) not in tables or id(parameter) in used_as_matrix):
            flops += parameter.numel() * (6 if parameter.requires_grad else 4)
    return flops


def peak_flops(device: torch.device, compute: torch.dtype) -> float:
    """Of one rank."""
    if device.type == "cuda" and compute.itemsize == 2:
        name = torch.cuda.get_device_name(device)
        known = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
        if known is not None:
            return known
    matrix = torch.ones(MEASURED_WIDTH, MEASURED_WIDTH, dtype=compute, device=device)
    best_s = float("inf")
    for _ in range(MEASURED_TIMES):
        begin = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        best_s = min(best_s, time.perf_counter() - begin)
    return 2 * MEASURED_WIDTH**3 / best_s
