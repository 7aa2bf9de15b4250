"""What a run keeps in memory, and the simplest strategy that fits.

Counted are the things whose size is known before the first step: parameters, gradients, AdamW's moments, and the slots
in which units are gathered. Activations are not; `auto` leaves them a part of the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lamina.core.strategy import Factors, resolve
from lamina.runtime.report import Report, readable_bytes
from lamina.train.config import StrategyName

FOR_STATE = 0.6  # of a device's memory; the rest is for activations, logits and what the libraries take
MASTER_BYTES = 4
MOMENT_BYTES = 8  # of AdamW, for each trainable element


@dataclass(frozen=True)
class Sizes:
    """Of a model."""

    numel: int
    trainable_numel: int
    largest_unit_numel: int
    master_bytes: int  # of an element
    compute_bytes: int

    def state_bytes(self, factors: Factors) -> dict[str, int]:
        """On one rank, by kind; slots as `shard` gives them by default, three of the largest unit."""
        f = factors
        whole_copy = 0 if self.compute_bytes == self.master_bytes else self.numel * self.compute_bytes
        slots = min(3 * self.largest_unit_numel, self.numel) * self.compute_bytes
        gathered = slots if f.params > 1 else (self.numel * self.compute_bytes if f.optimizer > 1 else whole_copy)
        return {
            "parameters": self.numel * self.master_bytes // f.optimizer,
            "gradients": self.trainable_numel * self.master_bytes // f.grads,
            "optimizer": self.trainable_numel * MOMENT_BYTES * self.master_bytes // MASTER_BYTES // f.optimizer,
            "slots": gathered,
        }


def choose_strategy(sizes: Sizes, ranks: int, device_bytes: int) -> tuple[StrategyName, str]:
    """The simplest of ddp, zero1, zero2, zero3 whose state fits, and why."""
    room = int(device_bytes * FOR_STATE)
    if ranks == 1:
        return "zero3", "one rank: there is nothing to split"
    names: tuple[StrategyName, ...] = ("ddp", "zero1", "zero2", "zero3")
    for name in names:
        needed = sum(sizes.state_bytes(resolve(name, ranks)).values())
        if needed <= room:
            why = f"the simplest that fits: {readable_bytes(needed)} of state in {readable_bytes(room)} of memory"
            return name, why
    return "zero3", f"what needs least, though {readable_bytes(needed)} of state may not fit {readable_bytes(room)}"


def memory_table(sizes: Sizes, factors: Factors, report: Report) -> list[list[str]]:
    """Per rank: the whole model beside this layout."""
    whole = sizes.state_bytes(resolve("ddp", factors.world))
    here = sizes.state_bytes(factors)
    here["slots"] = sum(report.memory.get(kind, 0) for kind in ("slots", "reduction", "published", "overflow"))
    rows = [["", "whole model", "this layout"]]
    rows += [[kind, readable_bytes(whole[kind]), readable_bytes(here[kind])] for kind in whole]
    return [*rows, ["together", readable_bytes(sum(whole.values())), readable_bytes(sum(here.values()))]]


def device_memory_bytes(device: torch.device, local_ranks: int) -> int:
    """Of one rank: its GPU's, or its share of the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    with open("/proc/meminfo") as file:
        kib = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    return kib * 1024 // local_ranks


def used_memory_bytes(device: torch.device) -> int:
    """By this rank, at most so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
