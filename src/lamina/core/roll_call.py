"""Ranks that start together find each other in a store that may hold words of those before them.

torchrun starts ranks anew (`--max-restarts`, nodes that come and go) beside the store that the ranks before them had,
and the new ones get no number in common that those had not: only the node whose rank failed counts the restart. torch
2.13 finds the old addresses there, which lead nowhere. So, whoever has been there before:

    1. Every rank draws a token, and writes it under its rank.
    2. Rank 0 writes the list of the tokens that it sees, and writes it anew when one of them has changed.
    3. A rank that finds its token in the list answers with the list's name: no earlier list has that token.
    4. Rank 0 says that all are here, and in which list, when every rank has answered with the newest.

Below the list's name there is nothing in the store but what these ranks write.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import torch.distributed as dist

ALL_HERE, ROLL = "all here", "roll"


class RollCall:
    """One rank's part of it. The store answers all of its questions at once: nothing here waits."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self._store: Any = dist.PrefixStore("lamina/start", store)  # torch's stubs lag behind: `multi_get`
        self._rank, self._token = rank, secrets.token_hex(8)
        self._tokens = [f"token {other}" for other in range(world)]
        self._answers = [f"answer {other}" for other in range(1, world)]
        self.name = ""  # of the newest list that has this rank's token
        self._store.set(self._tokens[rank], self._token)

    def is_complete(self) -> bool:
        """Do what this rank can do now, and see whether all are here."""
        return self._all_have_answered() if self._rank == 0 else self._has_answered_and_all_others()

    def missing(self) -> list[int]:
        """Who is not here yet, as far as this rank can tell."""
        absent = [rank for rank, key in enumerate(self._tokens) if not self._store.check([key])]
        if absent or not self.name:
            return absent or [0]
        return [rank for rank, key in enumerate(self._answers, start=1) if self._said(key) != self.name]

    def _all_have_answered(self) -> bool:
        if not self._store.check(self._tokens):
            return False
        roll = " ".join(self._said_all(self._tokens))
        if self.name != _name_of(roll):
            self.name = _name_of(roll)
            self._store.set(ROLL, roll)
        if self._answers and not self._store.check(self._answers):
            return False
        if any(answer != self.name for answer in self._said_all(self._answers)):
            return False
        self._store.set(ALL_HERE, self.name)
        return True

    def _has_answered_and_all_others(self) -> bool:
        roll = self._said(ROLL)
        if roll.split()[self._rank : self._rank + 1] != [self._token]:
            return False
        if self.name != _name_of(roll):
            self.name = _name_of(roll)
            self._store.set(self._answers[self._rank - 1], self.name)
        return self._said(ALL_HERE) == self.name

    def _said(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _said_all(self, keys: list[str]) -> list[str]:
        at_once = bool(keys) and self._store.has_extended_api()
        texts = self._store.multi_get(keys) if at_once else [self._store.get(key) for key in keys]
        return [text.decode() for text in texts]


def _name_of(roll: str) -> str:
    return hashlib.sha256(roll.encode()).hexdigest()[:16]
