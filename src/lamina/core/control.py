"""How ranks agree and how they learn that they cannot.

Collectives in the wrong order do not fail: they pair different units and return mixed weights, or wait for ever. Here
everything that is not fixed by the program is agreed over a host-side Gloo group, and a rank that waits too long says
where it waits; two ranks that wait at places that cannot both be right raise the same named error within seconds. A
rank that is merely slow says nothing, and nobody raises.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lamina.errors import Disagreement

POLL_SECONDS = 1.0
SILENT_SECONDS = 3.0  # how long a rank waits before it says where


@dataclass
class Position:
    """Where a rank is: comparable over ranks by `place`, readable by `words`. Written at every step."""

    phase: int = 0
    mode: str = "start"
    kind: str = "start"
    verb: str = ""
    unit: str = ""

    @property
    def place(self) -> str:
        """Ranks that wait at different places wait for ever."""
        return f"{self.phase} {self.kind} {self.mode}"

    @property
    def words(self) -> str:
        return f"{self.kind} {self.phase}: {self.verb} {self.unit and f'`{self.unit}`'}".rstrip()


class Control:
    """Agreement over the control group; a world of one agrees with itself."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, world: int, name: str) -> None:
        self.group, self.rank, self.world, self.name = group, rank, world, name
        self.position = Position()
        self.exchanges = 0
        self._store: dist.PrefixStore | None = None
        if group is not None:
            store = dist.distributed_c10d._get_default_store()
            members = "-".join(map(str, dist.get_process_group_ranks(group)))
            self._store = dist.PrefixStore(f"lamina/{name}/{members}", store)

    def exchange(self, values: list[int]) -> list[list[int]]:
        """Every rank's values, by rank; all ranks give the same number of them."""
        self.exchanges += 1
        if self.group is None:
            return [values]
        mine = torch.tensor(values, dtype=torch.int64)
        everyone = torch.empty(self.world * len(values), dtype=torch.int64)
        self.wait(dist.all_gather_into_tensor(everyone, mine, group=self.group, async_op=True))
        return everyone.view(self.world, -1).tolist()

    def exchange_text(self, text: str) -> list[str]:
        """Every rank's text, by rank. For messages and checks, not for the step."""
        data = text.encode()
        sizes = [row[0] for row in self.exchange([len(data)])]
        width = max(max(sizes), 1)
        mine = list(data.ljust(width, b" "))
        if self.group is None:
            return [text]
        sent = torch.tensor(mine, dtype=torch.uint8)
        everyone = torch.empty(self.world * width, dtype=torch.uint8)
        self.wait(dist.all_gather_into_tensor(everyone, sent, group=self.group, async_op=True))
        rows = everyone.view(self.world, width)
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]

    def agree_on_error(self, message: str | None) -> str | None:
        """The first message that any rank has, on every rank, with the ranks that have it; None if none has."""
        found = [row[0] for row in self.exchange([0 if message is None else 1])]
        if not any(found):
            return None
        texts = self.exchange_text(message or "")
        ranks = [r for r, has in enumerate(found) if has]
        first = texts[ranks[0]]
        return first if len(ranks) == self.world else f"{first} (on {name_ranks(ranks)} of {self.world})"

    def wait(self, work: dist.Work | None) -> None:
        """Wait on the host for a collective; raise on every rank when another one is provably elsewhere."""
        if work is None:
            return
        if self._store is None:
            work.wait()
            return
        started = time.monotonic()
        while True:
            try:
                work.wait(datetime.timedelta(seconds=POLL_SECONDS))
                break
            except RuntimeError as error:
                if "timed out" not in str(error).lower():
                    raise Disagreement(self._left(error)) from error
                waited = time.monotonic() - started
                if waited > SILENT_SECONDS:
                    self._compare_positions(final=waited > SILENT_SECONDS + 2 * POLL_SECONDS)
        if time.monotonic() - started > SILENT_SECONDS:
            self._store.set(f"at/{self.rank}", json.dumps(None))

    def _left(self, error: RuntimeError) -> str:
        return f"rank {self.rank} lost a peer while waiting in {self.position.words}: {str(error).splitlines()[0]}"

    def _compare_positions(self, final: bool) -> None:
        assert self._store is not None
        if self._store.check(["error"]):
            raise Disagreement(self._store.get("error").decode())
        here = self.position
        self._store.set(f"at/{self.rank}", json.dumps([here.place, here.words, time.time()]))
        if not final:
            return
        others = {rank: self._posted(rank) for rank in range(self.world) if rank != self.rank}
        if any(post is None for post in others.values()):
            return  # somebody is not waiting: merely slow
        for rank, post in others.items():
            assert post is not None
            place, words = post
            if place != here.place:
                message = (
                    f"ranks disagree: rank {self.rank} waits in {here.words}, rank {rank} waits in {words}. Forward, "
                    "backward and step must follow in the same order on every rank; evaluating, saving or skipping a "
                    "step on some ranks only is the usual cause"
                )
                self._store.set("error", message)
                raise Disagreement(message)

    def _posted(self, rank: int) -> tuple[str, str] | None:
        """What another rank said about its waiting, if it said so just now."""
        assert self._store is not None
        if not self._store.check([f"at/{rank}"]):
            return None
        post = json.loads(self._store.get(f"at/{rank}"))
        if post is None or time.time() - post[2] > 3 * POLL_SECONDS:
            return None
        return post[0], post[1]


class Flags:
    """Yes or no of every rank about many things, without a round trip for those who know: started, then read or not."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self._work: dist.Work | None = None
        self._counts = torch.empty(0, dtype=torch.int32)

    def start(self, flags: list[bool]) -> Callable[[], list[bool]]:
        """Send this rank's flags; the result, when called, waits and tells for each whether any rank said yes."""
        self.control.wait(self._work)  # of the time before: ended long ago
        self._counts = torch.tensor(flags, dtype=torch.int32)
        self._work = dist.all_reduce(self._counts, op=dist.ReduceOp.MAX, group=self.control.group, async_op=True)

        def read() -> list[bool]:
            self.control.wait(self._work)
            self._work = None
            return [bool(count) for count in self._counts.tolist()]

        return read


def name_ranks(ranks: list[int]) -> str:
    """ "rank 3", "ranks 0-7", "ranks 0, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))
