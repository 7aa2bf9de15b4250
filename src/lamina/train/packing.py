"""Documents into sequences: cut where they are too long, laid side by side where they are short.

Padding wastes what it fills, and joining documents lets one be read while another is learned. Here a sequence holds
several documents and nothing else; each begins at position 0, which is how the model's mask knows them apart, and the
last token of each has no label. A document longer than a sequence becomes several.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lamina.errors import UsageError
from lamina.train.data import IGNORED, Packed, what_to_type


class Piece(NamedTuple):
    """At most one sequence's length of a document."""

    tokens: list[int]
    labels: list[int]  # the token that follows each, or IGNORED


class Encoded(NamedTuple):
    """A document as tokens; `learned` says of each whether it is to be predicted."""

    tokens: list[int]
    learned: list[bool]


def pack(documents: Sequence[Encoded], length: int, filler: int, join: bool, where: str) -> Packed:
    """Sequences of `length` tokens; `join`: several documents in each, else one and padding behind it.

    Raises `UsageError` if there is nothing to predict in them, or less than one sequence of text.
    """
    pieces = [piece for document in documents for piece in cut(document, length)]
    pieces = [piece for piece in pieces if any(label != IGNORED for label in piece.labels)]
    tokens = sum(len(piece.tokens) for piece in pieces)
    if not pieces:
        raise UsageError(f"{where}: no token in it is to be learned")
    if join and tokens < length:
        said = f"{where}: {tokens} tokens are less than one sequence of {length}"
        raise UsageError(f"{said}{what_to_type(tokens)}")
    rows = place([len(piece.tokens) for piece in pieces], length) if join else [[i] for i in range(len(pieces))]
    shape = (len(rows), length)
    tokens_of = torch.full(shape, filler, dtype=torch.int32)
    labels_of = torch.full(shape, IGNORED, dtype=torch.int32)
    positions_of = torch.arange(length, dtype=torch.int32).repeat(len(rows), 1)
    for row, members in enumerate(rows):
        at = 0
        for piece in (pieces[member] for member in members):
            end = at + len(piece.tokens)
            tokens_of[row, at:end] = torch.tensor(piece.tokens, dtype=torch.int32)
            labels_of[row, at:end] = torch.tensor(piece.labels, dtype=torch.int32)
            positions_of[row, at:] -= positions_of[row, at].clone()  # what is left over counts as one more document
            at = end
        if at < length:
            positions_of[row, at:] -= positions_of[row, at].clone()
    return Packed(tokens_of, labels_of, positions_of)


def cut(document: Encoded, length: int) -> list[Piece]:
    """Neighbouring pieces; the last token of one is told the first of the next."""
    tokens, learned = document
    follows = [token if told else IGNORED for token, told in zip(tokens[1:], learned[1:], strict=True)] + [IGNORED]
    return [Piece(tokens[i : i + length], follows[i : i + length]) for i in range(0, len(tokens), length)]


def place(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Which pieces share a sequence: largest first, each where the least room is left over. Order is kept inside."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        at = bisect.bisect_left(room, (sizes[index], -1))
        left, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        if left > sizes[index]:
            bisect.insort(room, (left - sizes[index], row))
    return sorted(sorted(row) for row in rows)
