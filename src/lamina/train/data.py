"""Sequences of equal length, and which of them a step reads.

A data loader with a sampler deals samples to ranks, so that the number of ranks decides what a step sees, and its
position has to be saved. Here the sequences of step n are a function of the seed and n: all ranks know the whole batch
and take their part of it, a run on 1, 2 or 4 ranks reads the same, and to resume is to go on counting.

`Stream` cuts one long text of bytes; `Packed` holds documents that share sequences (packing.py makes it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lamina.errors import UsageError

IGNORED = -100  # a label without a loss, as torch's cross_entropy has it
SHORTEST = 8  # length of a sequence that is worth to be proposed


@dataclass(frozen=True)
class Batch:
    """Some sequences on the device."""

    tokens: Tensor  # [sequences, length]
    labels: Tensor  # [sequences, length]: the token that follows, or IGNORED
    positions: Tensor | None  # [sequences, length], from 0 in each document; None: the whole sequence is one
    count: int  # labels with a loss


class Rows(Protocol):
    """Numbered sequences."""

    length: int

    def __len__(self) -> int: ...

    def count(self, rows: Sequence[int]) -> int:
        """Labels with a loss."""

    def take(self, rows: Sequence[int], device: torch.device) -> Batch: ...


class Stream:
    """Neighbouring windows of one text, each with the byte that follows it."""

    def __init__(self, text: bytes, length: int, where: str) -> None:
        self.length = length
        if len(text) <= length:
            said = f"{where}: {len(text)} bytes are not one sequence of {length} and the byte after it"
            raise UsageError(f"{said}{what_to_type(len(text))}")
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def count(self, rows: Sequence[int]) -> int:
        return len(rows) * self.length

    def take(self, rows: Sequence[int], device: torch.device) -> Batch:
        starts = torch.tensor(rows)[:, None] * self.length
        windows = _on(device, self.text[starts + torch.arange(self.length + 1)]).long()
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), None, self.count(rows))


def _on(device: torch.device, rows: Tensor) -> Tensor:
    """A copy that the host does not wait for: else it would wait for all that the GPU has been given before."""
    return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows


def what_to_type(size: int) -> str:
    """Where a text of `size` bytes or tokens is less than one sequence."""
    shorter = size // 4
    if shorter < SHORTEST:
        return ", and too few for shorter ones: give more text"
    return f": give more text, or type --length {shorter}"


class Packed:
    """Sequences that hold documents, one after the other."""

    def __init__(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> None:
        self.tokens, self.labels, self.positions = tokens, labels, positions  # each [rows, length], int32
        self.length = tokens.shape[1]
        self.counts = (labels != IGNORED).sum(1)  # [rows]

    def __len__(self) -> int:
        return len(self.tokens)

    def count(self, rows: Sequence[int]) -> int:
        return int(self.counts[list(rows)].sum())

    def take(self, rows: Sequence[int], device: torch.device) -> Batch:
        chosen = list(rows)
        parts = [_on(device, part[chosen]).long() for part in (self.tokens, self.labels, self.positions)]
        return Batch(parts[0], parts[1], parts[2], self.count(chosen))


class Order:
    """Which sequences each step reads: every epoch its own permutation, epochs end to end."""

    def __init__(self, rows: int, batch: int, seed: int) -> None:
        self.rows, self.batch, self.seed = rows, batch, seed
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def of_step(self, step: int) -> list[int]:
        first = step * self.batch
        return [self._at(place) for place in range(first, first + self.batch)]

    def _at(self, place: int) -> int:
        epoch, index = divmod(place, self.rows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**62)
            self._epoch, self._permutation = epoch, torch.randperm(self.rows, generator=generator)
        return int(self._permutation[index])


def deal(rows: Sequence[int], passes: int, world: int, rank: int) -> list[list[int]]:
    """This rank's part of a step, pass by pass; the batch is a multiple of both."""
    share = len(rows) // (passes * world)
    assert share * passes * world == len(rows)
    mine = rows[rank * passes * share : (rank + 1) * passes * share]
    return [list(mine[i * share : (i + 1) * share]) for i in range(passes)]


def bigram_loss(train: Stream, held_out: Stream, rows: Sequence[int]) -> float:
    """What a table of the pairs counted in the training text, one added to each, loses: nats per byte."""
    text = train.text.long()
    counts = torch.bincount(text[:-1] * 256 + text[1:], minlength=256**2).view(256, 256) + 1.0
    table = (counts / counts.sum(1, keepdim=True)).log()
    batch = held_out.take(rows, torch.device("cpu"))
    return -table[batch.tokens, batch.labels].mean().item()
