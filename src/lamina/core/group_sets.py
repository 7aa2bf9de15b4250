"""Process groups outlive the model that they were made for: the next model takes them over.

A model has five groups or so, each with its connections and threads, and torch keeps them until the process ends. To
destroy one is collective, and ranks find out at different times that a model is gone. So nothing is destroyed: what a
model leaves, a later `shard()` of the same ranks uses again, if all of them have it back.

Note [Sets of groups]
    1. A set serves one model at a time (and its deep copies). Whoever may still use its groups holds its `Lease`: the
       mesh, and by `Share` every Shard, its gradients, optimizer states and losses over it.
    2. When the last holder on this rank is gone, the set is free here, not elsewhere. That happens wherever the garbage
       collector runs, so it appends to a list and does nothing else.
    3. At the door of `shard()` ranks say which sets they have back, and how many collectives they have issued on each
       control group. The first set of which all say the same is taken; else a new one is made. No rank waits for the
       garbage of another one.
    4. A rank may have left its model in the middle of something: what had more collectives issued here than there is
       left alone, and made anew (`forget_uneven`).
"""

from __future__ import annotations

import gc
import json
import os
import resource
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from lamina.core import watch
from lamina.core.watch_evidence import issued_on
from lamina.errors import StateError, TransportError

GROUPS_A_MODEL = 5  # of zero3 over collectives
FILES_A_GROUP = 3  # of Gloo, and a connection for each rank
Key = tuple[str, tuple[int, ...], str]  # lane, global ranks, backend


@dataclass(eq=False)
class GroupSet:
    """Groups of one set of data ranks: what models over them have needed so far."""

    ranks: tuple[int, ...]  # global, by data rank
    made: dict[Key, dist.ProcessGroup] = field(default_factory=dict)
    control: dist.ProcessGroup | None = None
    used_by: list[str] = field(default_factory=list)  # keys of controls

    def offer(self) -> str:
        """What ranks compare at the door; Note [Sets of groups] 3."""
        assert self.control is not None
        return f"{self.control.group_name} {issued_on(self.control)}"

    def is_whole(self) -> bool:
        """Neither has torch forgotten the groups, nor are they those of ranks that have parted."""
        running = watch.current()
        known = dist.distributed_c10d._world.pg_names
        broken = running.broken if running is not None else {}
        return self.control in known and not any(key in broken for key in self.used_by)

    def counts(self) -> str:
        """How many collectives this rank has issued on each of its groups, as text."""
        ours = {key: pg for key, pg in self.made.items() if isinstance(pg, dist.ProcessGroup)}
        return json.dumps({_text(key): issued_on(pg) for key, pg in ours.items()})

    def forget_uneven(self, texts: Sequence[str]) -> None:
        """Note [Sets of groups] 4.

        Args:
            texts: every rank's `counts`, by number of the global rank.
        """
        said = dict(zip(sorted(self.ranks), map(json.loads, texts), strict=True))
        for key in list(self.made):
            seen = {said[rank].get(_text(key)) for rank in key[1]}
            if len(seen) > 1 or None in seen:
                del self.made[key]


def refuse_destroyed(group: dist.ProcessGroup | None) -> None:
    """Raise where torch has taken down the groups of a model; called before collectives are issued.

    Gloo would carry them out all the same, as long as the others come too; who does not is not named any more.
    """
    if group is not None and group not in dist.distributed_c10d._world.pg_names:
        raise StateError(
            "torch.distributed.destroy_process_group() has ended the process groups of this model since lamina.shard() "
            "took it. Run, gather and save models before; to train again in this process, give a new model to "
            "lamina.shard(), and lamina.load() what was saved"
        )


class Lease:
    """While it lives the groups of its set are one model's."""

    def __init__(self, groups: GroupSet) -> None:
        self.groups = groups
        weakref.finalize(self, _free.append, groups).atexit = False
        _leases.add(self)


_free: list[GroupSet] = []
_leases: weakref.WeakSet[Lease] = weakref.WeakSet()


def free_sets(ranks: tuple[int, ...]) -> dict[str, GroupSet]:
    """Sets over these ranks that no model of this rank uses, by offer."""
    if not _mine(ranks) and any(lease.groups.ranks == ranks for lease in list(_leases)):
        gc.collect()  # a model that is in a circle with itself, as users' are
    return {groups.offer(): groups for groups in _mine(ranks)}


def check_files(ranks: tuple[int, ...]) -> None:
    """Whether another model's groups can be opened: one that finds no file number leaves the others waiting.

    Raises:
        TransportError: too many are open.
    """
    needed, limit = GROUPS_A_MODEL * (FILES_A_GROUP + len(ranks)), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        taken = len(os.listdir("/proc/self/fd"))
    except OSError:
        return  # no /proc, or no file left to look with: what comes says so
    if limit != resource.RLIM_INFINITY and taken + needed > limit:
        alive = len(_leases)
        raise TransportError(
            f"a sharded model over {len(ranks)} ranks needs about {needed} open files for its connections, and this "
            f"process has {taken} of the {limit} open that it may have ({alive} sharded models are alive in it). Type "
            f"`ulimit -n {max(4096, 2 * (taken + needed))}` before you start the ranks, or drop models that are done"
        )


def take(groups: GroupSet) -> Lease:
    """Let a model have a set: a new one, or a free one that all of its ranks take."""
    if groups in _free:
        _free.remove(groups)
        running = watch.current()
        if running is not None:
            running.forget(groups.used_by)
        groups.used_by.clear()
    return Lease(groups)


def _mine(ranks: tuple[int, ...]) -> list[GroupSet]:
    for groups in list(_free):  # which the garbage collector may append to meanwhile
        if not groups.is_whole():
            _free.remove(groups)
    return [groups for groups in list(_free) if groups.ranks == ranks]


def _text(key: Key) -> str:
    lane, ranks, backend = key
    return f"{lane} {backend} {','.join(map(str, ranks))}"
