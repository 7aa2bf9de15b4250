"""The rows of this benchmark: the model of benchmarks/gpu_step, and one of 8 B parameters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu_step"))

from model import SIZES, Model

import lamina

LENGTH = 2048


class Row(NamedTuple):
    size: str
    tokens: int  # a GPU
    strategy: str
    recompute: str
    wire: str = ""  # dtype in which gradients travel, if not that of compute


FITTED = [Row("1b", 8192, "zero3", "none"), Row("1b", 2048, "zero3", "none")]  # the rows of the constants
ROWS = [
    *FITTED,
    *(Row("3b", 4096, strategy, recompute) for strategy in ("ddp", "zero2", "zero3") for recompute in ("none", "full")),
    *(Row("8b", 2048, strategy, recompute) for strategy in ("ddp", "zero2", "zero3") for recompute in ("none", "full")),
]


# on one GPU, which holds everything: predicted and measured apart from the others
ONE_GPU = [
    *(
        Row(size, tokens, "zero3", recompute)
        for size, tokens in (("1b", 8192), ("3b", 4096))
        for recompute in ("none", "full")
    ),
    Row("1b", 2048, "zero3", "selective"),
    Row("1b", 8192, "zero3", "none", "float32"),
    Row("3b", 8192, "zero3", "selective"),
    Row("8b", 2048, "zero3", "none"),
]


def rows_of(gpus: int) -> list[Row]:
    return ONE_GPU if gpus == 1 else ROWS


def wire_of(row: Row) -> torch.dtype | None:
    return getattr(torch, row.wire) if row.wire else None


def precision(wire: torch.dtype | None = None) -> lamina.Precision:
    return lamina.Precision(compute=torch.bfloat16, wire=wire, keep=())


__all__ = ["LENGTH", "SIZES", "Model", "Row", "precision", "rows_of", "wire_of"]
