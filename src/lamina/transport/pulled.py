"""Exchanges of gradients between ranks of one host: each lays out what is the others', and they read it there.

Gloo moves every byte through a socket: copied into the kernel by one thread and out of it by another, on the cores that
compute. Here a rank copies the others' parts into its own region once, and each adds them up from there.

Note [Offers]
    1. An offer is one exchange of one segment; all ranks make the same ones in the same order, and number them. A rank
       copies the parts, then its counter OFFERED says the number; who has seen it may read.
    2. Each segment number has `TURNS` outboxes, used in turn. A rank fills one anew when all peers have made the offer
       between: before that they had finished, or given up, the reduction that read it. Reductions are finished
       one after the other, so that this rank has waited for those offers already.
    3. With its number each offer has a tag, what it is of: a rank that finds another in a peer's region than it has
       offered itself has parted with it, and that is an error and no sum.
    4. A rank's own part is never copied: it is read where it is, which stays as it is until the reduction is finished.
"""

from __future__ import annotations

import datetime
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.core.control import name_ranks
from lamina.core.groups import Group
from lamina.core.peer_memory import TURNS
from lamina.errors import Disagreement
from lamina.transport.c10d import C10d
from lamina.transport.peer import Counter, EpochWait, Peers, fence

TAGS = 64  # index of the first tag in a region's header
RECENT = 64  # tags that are kept


class Offered(EpochWait):
    """Waiting for the peers' parts, in the form of a collective's handle."""

    def __init__(self, peers: Peers, number: int, tag: int) -> None:
        super().__init__(peers.others, Counter.OFFERED, number, peers.global_ranks)
        self.peers, self.tag = peers, tag

    def wait(self, timeout: datetime.timedelta) -> bool:
        super().wait(timeout)
        fence()
        at = TAGS + self.epoch % RECENT
        apart = [rank for rank, region in self.peers.others.items() if region.counters[at] != self.tag]
        if apart:
            names = name_ranks([self.global_ranks[rank] for rank in apart])
            raise Disagreement(
                f"{names} reduced the gradients of another unit at the same time: their steps went apart, as after an "
                "error that one rank has caught. Catch it on all ranks or on none"
            )
        return True


class Views(NamedTuple):
    """Of one source and one outbox."""

    source: int  # address
    parts: list[Tensor]  # the peers'
    outbox: list[Tensor]  # where they go
    rows: list[Tensor]  # what is to be summed, by member


class Pulls(C10d):
    """`Transport` whose exchanges over the gather group are read from the peers' memory; the rest is Gloo's."""

    name = "peer"

    def __init__(self, device: torch.device, peers: Peers, group: Group) -> None:
        """`group`: over which gradients are exchanged, of the ranks of `peers`."""
        super().__init__(device)
        self.peers, self.group = peers, group
        self.made = 0  # offers
        self._earlier = [[0] * TURNS for _ in peers.outboxes]  # the last offer in each outbox
        self._turns = [0] * len(peers.outboxes)
        self._rows: dict[tuple[object, int], Views] = {}  # by key and turn

    def takes(self, group: Group, number: int, size_bytes: int) -> bool:
        """Whether an exchange has a place here; the same on all ranks."""
        outboxes = self.peers.outboxes
        return group.pg is self.group.pg and number < len(outboxes) and size_bytes <= outboxes[number].exchange_bytes

    def offer(self, number: int, source: Tensor, tag: int, key: object = None) -> tuple[Offered, list[Tensor]]:
        """Let the peers read their parts of `source`, (members * n,) elements; what comes is in the rows, (n,) each.

        Args:
            number: of the segment.
            tag: what it is of, a number below 2**62.
            key: `source` lies at the same place nearly whenever this key is given.
        """
        turn = self._turns[number]
        self._turns[number] = (turn + 1) % TURNS
        between = max(self._earlier[number])
        if between > self._earlier[number][turn]:
            self.peers.wait_for(Counter.OFFERED, between)
        views = self._views(number, turn, source, key)
        torch._foreach_copy_(views.outbox, views.parts)
        self.made += 1
        self._earlier[number][turn] = self.made
        self.peers.own.counters[TAGS + self.made % RECENT] = tag
        self.peers.announce(Counter.OFFERED, self.made)
        return Offered(self.peers, self.made, tag), views.rows

    def _views(self, number: int, turn: int, source: Tensor, key: object) -> Views:
        place = source.data_ptr()
        found = self._rows.get((key, turn)) if key is not None else None
        if found is None or found.source != place:
            peers, parts = self.peers, list(source.view(self.peers.size, -1).unbind())
            outbox = [self._part(peers.place, p, number, turn, source) for p in peers.other_places]
            rows = [
                parts[p] if p == peers.place else self._part(p, peers.place, number, turn, source)
                for p in range(peers.size)
            ]
            found = Views(place, [parts[p] for p in peers.other_places], outbox, rows)
            if key is not None:
                self._rows[key, turn] = found
        return found

    def _part(self, owner: int, reader: int, number: int, turn: int, source: Tensor) -> Tensor:
        """What `owner` offers to `reader` of an exchange like that of `source`."""
        part_bytes = source.nbytes // self.peers.size
        outbox, others = self.peers.outboxes[number], self.peers.size - 1
        index = reader if reader < owner else reader - 1
        start = outbox.start_bytes + turn * others * (outbox.exchange_bytes // self.peers.size) + index * part_bytes
        return self.peers.region(owner)[start : start + part_bytes].view(source.dtype)
