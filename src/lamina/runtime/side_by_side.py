"""Replays the parameters of a unit in a few threads.

torch draws a tensor's random numbers on one core, and so does eager construction, since each draw begins where the one
before it ended. Where that is known beforehand (`init_program`), draws need not wait for each other, and torch lets go
of the interpreter's lock while it draws.

A very large draw goes to them in pieces (`pieces`). Only replays that are little else than a large draw go to a thread
at all; the others run in the caller's thread, in order. As many values as there are threads exist at a time beyond
those already handed out.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from lamina.runtime import pieces
from lamina.runtime.environment import local_ranks
from lamina.runtime.init_program import Node, aten, reachable, replay

MOST_THREADS = 8
LEAST_NUMEL = 1 << 18  # drawn in a millisecond or two

_DRAWS = frozenset({aten.normal_.default, aten.uniform_.default})
# What `torch.nn.init` does around them.
_ELEMENTWISE = frozenset(
    {
        aten.zero_.default,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.mul_.Tensor,
        aten.mul_.Scalar,
        aten.add_.Tensor,
        aten.add_.Scalar,
        aten.erfinv_.default,
        aten.clamp_.default,
        aten.copy_.default,
        aten._to_copy.default,
    }
)
_SHARED_NUMEL = 32768  # from here on torch gives an operation to several threads


def thread_count() -> int:
    """Threads for one of this host's ranks."""
    return max(1, min(MOST_THREADS, (os.cpu_count() or 1) // local_ranks()))


@dataclass
class _Job:
    """A value in the making."""

    parts: list[Future[Any]]
    storage: torch.UntypedStorage | None  # None: the only part returns it

    def result(self) -> torch.UntypedStorage:
        results = [part.result() for part in self.parts]
        return results[0] if self.storage is None else self.storage


def replay_each(nodes: Sequence[Node], threads: int | None = None) -> Iterator[torch.UntypedStorage]:
    """`replay` of each node, in order."""
    threads = threads or thread_count()
    alone = [threads > 1 and is_mostly_a_draw(node) for node in nodes]
    ahead: deque[_Job] = deque()
    waiting = deque(node for node, is_alone in zip(nodes, alone, strict=True) if is_alone)
    if len(waiting) < 2 and not any(pieces.splittable(node) for node in waiting):
        yield from (replay(node) for node in nodes)
        return
    with ThreadPoolExecutor(threads) as pool:
        for node, is_alone in zip(nodes, alone, strict=True):
            while waiting and len(ahead) < threads and _unfinished(ahead) < 2 * threads:
                ahead.append(_begin(pool, waiting.popleft()))
            yield ahead.popleft().result() if is_alone else replay(node)


def _unfinished(jobs: Iterable[_Job]) -> int:
    return sum(not part.done() for job in jobs for part in job.parts)


def _begin(pool: ThreadPoolExecutor, node: Node) -> _Job:
    call = pieces.splittable(node)
    if call is None or not pieces.is_proved(call):
        return _Job([pool.submit(_whole, node, call is not None and pieces.needs_proof(call))], None)
    storage = torch.UntypedStorage(node.nbytes, device=node.device)
    flat = pieces.on_storage(call, storage)
    return _Job([pool.submit(pieces.draw_piece, call, flat, *at) for at in pieces.starts(call)], storage)


def _whole(node: Node, and_prove: bool) -> torch.UntypedStorage:
    storage = replay(node)
    if and_prove:
        call = pieces.splittable(node)
        assert call is not None
        pieces.prove(call, storage)
    return storage


def is_mostly_a_draw(target: Node) -> bool:
    """Whether replaying `target` keeps one thread busy with drawing, and starts no others.

    A thread of ours that calls an operation with threads of its own would start a whole team of them.
    """
    drawn_numel = 0
    for call in reachable(target, None)[0]:
        numel = max((math.prod(ref.size) for ref in call.refs()), default=0)
        if call.func in _DRAWS and call.draw is not None and call.draw.device.type == "cpu":
            drawn_numel += numel
        elif call.func not in _ELEMENTWISE or (numel >= _SHARED_NUMEL and torch.get_num_threads() > 1):
            return False
    return drawn_numel >= LEAST_NUMEL and target.device.type == "cpu"
