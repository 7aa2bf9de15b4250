"""Peers on GPUs: memory that every GPU of an NVLink domain can read and write, and copies by its copy engines.

NCCL moves bytes with kernels, which take multiprocessors and memory bandwidth from the compute beside them; torch's
symmetric memory maps each rank's buffer into all others, so a plain copy is done by an engine that does nothing else.
What is left to build is who may read and write when.

Note [Symmetric]
    1. One allocation a rank: its published range, then one inbox for each segment of a unit. All offsets agree.
    2. `barrier()` is one block that waits on the lane it is queued on until all ranks have come to it; it is a
       collective, called by all ranks in the same order. One channel for each lane.
    3. A published range changes between two barriers: before the first, all reads of the old version have been queued
       on the same lane; after the second, the new one is there. Gathers are reads: nobody else takes part in them.
    4. A reduction pushes its parts into the peers' inboxes between two barriers of the reduce lane: after the first,
       all ranks have summed what they got the last time; after the second, everything has arrived. One pair of them for
       all segments of a unit, each of which has an inbox of its own.
    5. A barrier waits for ever; torch's own time limit ends in a trap that takes the process along. Whoever has proof
       that a peer will not come calls `release()`, which lets this rank's barriers pass: what they bring is rubbish,
       and never used, for the proof is raised as an error.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lamina.core.control import Control, name_ranks
from lamina.core.groups import Group, group_for_a_while
from lamina.core.layout import round_up
from lamina.core.mesh import DataMesh
from lamina.core.watch_evidence import BARRIERS, group_key, note_on_device
from lamina.errors import TransportError
from lamina.transport.c10d import C10d, Exchange
from lamina.transport.peer import agree
from lamina.transport.shared_memory import host_id

GATHER_CHANNEL, REDUCE_CHANNEL = CHANNELS = 0, 1  # of barriers; each needs a cell for each rank
PART_ALIGNMENT_BYTES = 512
RELEASE_S = 5.0  # how long `release` goes on letting barriers pass
TRIAL_BYTES = 64 << 20  # of a gather that is timed, at most
TRIAL_ROUNDS = 7  # of which the first two do not count
# Of NCCL's time: copies leave the multiprocessors to compute. Beside matrix products on two H200, NCCL's gathers made
# them 14 % slower, copies of the same bytes 5 %.
SLOWEST = 1.25
_past_autograd = getattr(torch._C, "_AutoDispatchBelowAutograd", contextlib.nullcontext)  # a private name of torch's
_copy = Tensor.copy_


def copy_each(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy by copy engines, which one call of torch's for all of them would not use; none of them needs a gradient.

    Autograd has nothing to do here, and takes 2 us of 8 that a copy costs the host.
    """
    with _past_autograd():
        deque(map(_copy, targets, sources), maxlen=0)


class SymmetricPeers:
    """This rank's published range and inboxes, and those of its gather group. Made by `connect_gpus`."""

    def __init__(self, group: Group, device: torch.device, data_bytes: int, inbox_bytes: Sequence[int]) -> None:
        """Collective over the group.

        Raises:
            RuntimeError: no memory, or peers that cannot be reached.
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        assert group.pg is not None
        self.place, self.size, self.pg = group.place, group.size, group.pg
        self._data_bytes = data_bytes
        self._inboxes: list[tuple[int, int]] = []  # offset, size in bytes
        end = round_up(data_bytes, PART_ALIGNMENT_BYTES)
        for size_bytes in inbox_bytes:
            self._inboxes.append((end, size_bytes))
            end = round_up(end + size_bytes, PART_ALIGNMENT_BYTES)
        self.total_bytes = end
        self._own = symmetric_memory.empty(end, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(self._own, group.pg)
        self._buffers = [
            self._own if place == self.place else self._handle.get_buffer(place, (end,), torch.uint8)
            for place in range(self.size)
        ]
        self._device = device
        self.trial = ""  # what gathers took beside NCCL's, where that was asked
        self._names = [f"{group_key(group.pg)} barriers of lane {channel}" for channel in CHANNELS]
        for name in self._names:
            BARRIERS.setdefault(name, 0)  # they go on where the group had another model's
        note_on_device(self)

    def data(self, place: int) -> Tensor:
        """uint8, the published range of the member with that place in the group; only one's own may be written."""
        return self._buffers[place][: self._data_bytes]

    def inbox(self, place: int, number: int, size_bytes: int) -> Tensor | None:
        """uint8, the inbox `number` of a member; None where that many bytes have no place."""
        if number >= len(self._inboxes) or size_bytes > self._inboxes[number][1]:
            return None
        start = self._inboxes[number][0]
        return self._buffers[place][start : start + size_bytes]

    def meet(self, channel: int) -> None:
        """Queue a barrier on the lane that is running, whose channel it is. Collective."""
        BARRIERS[self._names[channel]] += 1
        self._handle.barrier(channel=channel)

    # ---- the end of a wait -------------------------------------------------------------------------------------

    def release(self) -> None:
        """Let barriers of this rank pass, for as long as work is queued. Note [Symmetric] 5."""
        pads = [self._handle.get_signal_pad(place, dtype=torch.int32) for place in range(self.size)]
        cells = [channel * self.size + self.place for channel in CHANNELS]
        aside, deadline = torch.cuda.Stream(self._device), time.monotonic() + RELEASE_S
        with torch.cuda.stream(aside):
            while time.monotonic() < deadline:
                for place, pad in enumerate(pads):
                    if place == self.place:
                        pad[: 2 * self.size].fill_(1)  # what it waits for has come
                    else:
                        for cell in cells:
                            pad[cell].fill_(0)  # what it said has been heard
                time.sleep(1e-3)


class Pushes(C10d):
    """`Transport` whose exchanges over the gather group are pushes into inboxes; the rest is NCCL's."""

    name = "peer"
    pushes = True

    def __init__(self, device: torch.device, peers: SymmetricPeers) -> None:
        super().__init__(device)
        self.peers = peers
        self._numbers: dict[int, int] = {}  # inbox by its address
        self._is_open = False  # between the two barriers

    def inbox(self, group: Group, number: int, size_bytes: int) -> Tensor | None:
        """Where an exchange of `size_bytes` over `group` arrives; None: anywhere, by NCCL."""
        if group.size != self.peers.size or group.place != self.peers.place:
            return None
        found = self.peers.inbox(self.peers.place, number, size_bytes)
        if found is not None:
            self._numbers[found.data_ptr()] = number
        return found

    def exchange(self, group: Group, inbox: Tensor, source: Tensor) -> Exchange:
        """As of `Transport`, but this rank's own part stays in `source`."""
        number = self._numbers.get(inbox.data_ptr())
        if number is None:
            return super().exchange(group, inbox, source)
        parts = source.view(self.peers.size, -1)
        targets = self.targets(number, source.numel())
        sent = [parts[place] for place, _ in targets]
        return functools.partial(self._push, [target for _, target in targets], sent)

    def _push(self, targets: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        self.open()
        copy_each(targets, parts)

    def open(self) -> None:
        """Before the first push of a reduction: all ranks have summed what they got the last time. Collective."""
        if not self._is_open:
            self._is_open = True
            self.peers.meet(REDUCE_CHANNEL)

    def close(self) -> None:
        """After its last push: everything has arrived. Collective."""
        if self._is_open:
            self._is_open = False
            self.peers.meet(REDUCE_CHANNEL)

    def targets(self, number: int, size_bytes: int) -> list[tuple[int, Tensor]]:
        """Each peer, and where in its inbox `number` this rank's part of `size_bytes` goes."""
        peers, part_bytes, found = self.peers, size_bytes // self.peers.size, []
        for step in range(1, peers.size):
            place = (peers.place + step) % peers.size  # not all ranks push to the same one at once
            inbox = peers.inbox(place, number, size_bytes)
            assert inbox is not None
            found.append((place, inbox[peers.place * part_bytes : (peers.place + 1) * part_bytes]))
        return found


def connect_gpus(
    control: Control, mesh: DataMesh, data_bytes: int, inbox_bytes: Sequence[int], is_to_be_faster: bool = False
) -> SymmetricPeers:
    """Memory that all GPUs of a gather group share. Collective over all data ranks.

    `is_to_be_faster`: gathers by copies are timed beside NCCL's.

    Raises:
        TransportError: GPUs that do not reach each other, no memory, or gathers that take too long; on every rank, the
            same.
    """
    group, level = mesh.gather[0], mesh.factors.levels[0]
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device.index is None else mesh.device
    where = mesh.by_data_rank(control.exchange_text(f"{host_id()} {device.index}"))
    agree(control, _cannot_reach(where, level.members(mesh.rank), mesh.rank, device))
    problem, peers = "", None
    free_bytes = torch.cuda.mem_get_info(device)[0]
    if free_bytes < data_bytes + sum(inbox_bytes):
        needed_gib, free_gib = (data_bytes + sum(inbox_bytes)) / 2**30, free_bytes / 2**30
        problem = (
            f"transport='peer' needs {needed_gib:.2f} GiB for published weights and inboxes on rank {mesh.rank}, where "
            f"{free_gib:.2f} GiB are free; type transport='c10d', or split over more ranks"
        )
    agree(control, problem)
    try:
        peers = SymmetricPeers(group, device, data_bytes, inbox_bytes)
        problem = _try_out(peers, mesh.rank)
    except RuntimeError as error:
        problem = f"transport='peer' does not work here: {error}; type transport='c10d'"
    agree(control, problem)
    assert peers is not None
    if is_to_be_faster:
        with group_for_a_while(mesh.global_ranks, mesh.rank, level, "gather", group) as trial:
            copies_ms, nccl_ms = _time_gathers(peers, trial, device)
        rows = control.exchange_text(f"{copies_ms!r} {nccl_ms!r}")
        peers.trial = compare_gathers(rows, trial_bytes(data_bytes, group.size) * group.size)
    return peers


def compare_gathers(rows: Sequence[str], gathered_bytes: int) -> str:
    """What the slowest rank took, copies and NCCL; `rows`: both in ms, by rank.

    Raises:
        TransportError: copies take too long.
    """
    copies_ms, nccl_ms = (max(map(float, column)) for column in zip(*map(str.split, rows), strict=True))
    size = f"{gathered_bytes / 2**20:.3g} MiB"
    said = f"a gather of {size} takes {copies_ms:.3f} ms by copies from peers and {nccl_ms:.3f} ms by NCCL"
    if copies_ms > SLOWEST * nccl_ms:
        raise TransportError(f"{said}; type transport='peer' to have copies all the same")
    return said


def trial_bytes(data_bytes: int, members: int) -> int:
    """How much of each published range a timed gather takes."""
    return min(data_bytes, TRIAL_BYTES // members)


def _time_gathers(peers: SymmetricPeers, group: Group, device: torch.device) -> tuple[float, float]:
    """Medians of this rank in ms, of a gather by copies and of one by NCCL. Collective over the group."""
    part_bytes = trial_bytes(peers._data_bytes, peers.size)
    whole = torch.empty(part_bytes * peers.size, dtype=torch.uint8, device=device)
    parts = list(whole.view(peers.size, -1).unbind())

    def copy() -> None:
        for step in range(1, peers.size + 1):
            place = (peers.place + step) % peers.size
            parts[place].copy_(peers.data(place)[:part_bytes])

    return _median_ms(copy, peers), _median_ms(C10d(device).all_gather(group, whole, parts[peers.place]), peers)


def _median_ms(work: Callable[[], object], peers: SymmetricPeers) -> float:
    spans = []
    for _ in range(TRIAL_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        peers.meet(GATHER_CHANNEL)
        begin.record()
        work()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize(peers._device)
    return statistics.median(begin.elapsed_time(end) for begin, end in spans[2:])


def _cannot_reach(where: Sequence[str], members: Sequence[int], me: int, device: torch.device) -> str:
    """Why this rank's GPU cannot map the memory of another member's; "" if nothing speaks against it."""
    host, _ = where[me].split()
    for other in members:
        there, index = where[other].split()
        if other == me:
            continue
        if there != host:
            return (
                f"transport='peer' needs all ranks of a gather group on one host: {name_ranks([me, other])} are not; "
                "type transport='c10d', or strategy='hsdp' to keep each gather group on one host"
            )
        if int(index) == device.index:
            if os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1":  # torch's, for tests on one GPU
                continue
            return f"transport='peer': {name_ranks([me, other])} share one GPU; type transport='c10d'"
        seen = int(index) < torch.cuda.device_count()  # a launcher may show each rank its own GPU only
        if seen and not torch.cuda.can_device_access_peer(device, int(index)):
            return (
                f"transport='peer': GPU {device.index} (rank {me}) cannot reach GPU {index} (rank {other}) directly; "
                "type transport='c10d'"
            )
    return ""


def _try_out(peers: SymmetricPeers, rank: int) -> str:
    """Write a word, meet, and read everybody's."""
    numel = min(peers.total_bytes, 64)
    peers._own[:numel].fill_(peers.place + 1)
    peers.meet(GATHER_CHANNEL)
    read = [int(buffer[numel - 1]) for buffer in peers._buffers] if numel else []
    peers.meet(GATHER_CHANNEL)
    peers._own[:numel].zero_()
    wanted = list(range(1, len(read) + 1))
    return "" if read == wanted else f"transport='peer': rank {rank} read {read} from its peers, not {wanted}"
