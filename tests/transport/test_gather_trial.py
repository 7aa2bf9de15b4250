"""`transport="auto"` on GPUs: copies from peers are timed beside NCCL's gathers. Here: what ranks make of the times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, nn

import lamina
from harness import run_ranks
from lamina.errors import TransportError
from lamina.runtime.assemble import RUNTIMES
from lamina.transport import symmetric
from lamina.transport.c10d import C10d
from lamina.transport.symmetric import TRIAL_BYTES, compare_gathers, connect_gpus, trial_bytes
from transport.test_symmetric import SharedFiles, map_file

MIB = 1 << 20


def test_the_slowest_rank_counts() -> None:
    said = compare_gathers(["0.1 0.3", "0.25 0.2"], 8 * MIB)
    assert said == "a gather of 8 MiB takes 0.250 ms by copies from peers and 0.300 ms by NCCL"
    assert "1.250 ms" in compare_gathers(["1.25 0.9", "1.0 1.0"], MIB), "copies leave the multiprocessors to compute"
    with pytest.raises(TransportError, match="1.260 ms by copies .* 1.000 ms by NCCL; type transport='peer'"):
        compare_gathers(["1.0 0.9", "1.26 1.0"], MIB)


@pytest.mark.parametrize("members", [2, 3, 8, 72])
def test_little_memory_is_taken(members: int) -> None:
    assert trial_bytes(1000, members) == 1000
    assert trial_bytes(1 << 40, members) * members <= TRIAL_BYTES


def connect(folder: str, copies_ms: list[float]) -> str:
    """What both ranks make of what each has measured."""
    rank = dist.get_rank()

    def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        made.append(map_file(f"{folder}/memory-{rank}-{copies_ms[1]}", numel))
        made[-1].path = f"{folder}/memory-{rank}-{copies_ms[1]}"  # type: ignore[attr-defined]
        return made[-1]

    made: list[Any] = []
    runtime = RUNTIMES[lamina.shard(nn.Linear(4, 4), transport="c10d")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "empty", empty)
        patch.setattr(symmetric_memory, "rendezvous", SharedFiles)
        patch.setattr(symmetric, "_cannot_reach", lambda *_: "")
        patch.setattr(symmetric, "_time_gathers", lambda *_: (copies_ms[rank], 1.0))
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
        try:
            return connect_gpus(runtime.control, runtime.mesh, 4096, [512], is_to_be_faster=True).trial
        except TransportError as error:
            return f"error: {error}"


class Clock:
    """Stands for a CUDA event: what has been gathered when it was recorded."""

    def __init__(self, enable_timing: bool) -> None:
        self.seen: list[int] = []

    def record(self) -> None:
        self.seen = WHOLE[0].tolist() if WHOLE else []

    def elapsed_time(self, end: Clock) -> float:
        assert end.seen == [1, 1, 1, 1, 2, 2, 2, 2], end.seen
        WHOLE[0].zero_()
        return 1.0 + sum(self.seen)


WHOLE: list[Tensor] = []


def time_gathers() -> tuple[float, float]:
    """Both ways are run, each as often as it counts, and bring everybody's part."""
    mesh, rank = RUNTIMES[lamina.shard(nn.Linear(4, 4), transport="c10d")].mesh, dist.get_rank()

    class Waiting(C10d):
        def __init__(self, device: torch.device) -> None:
            super().__init__(torch.device("cpu"))
            self.asynchronous = False

    class Regions:
        place, size, _data_bytes, _device = rank, 2, 4, torch.device("cpu")
        met = 0

        def data(self, place: int) -> Tensor:
            return torch.full((4,), place + 1, dtype=torch.uint8)

        def meet(self, channel: int) -> None:
            self.met += 1
            if WHOLE:
                WHOLE[0].zero_()[4 * rank : 4 * rank + 4] = rank + 1

    def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        WHOLE[:] = [torch.zeros(numel, dtype=dtype)]
        return WHOLE[0]

    peers: Any = Regions()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "C10d", Waiting)
        patch.setattr(symmetric.torch, "empty", empty)  # type: ignore[attr-defined]
        patch.setattr(torch.cuda, "Event", Clock)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        found = symmetric._time_gathers(peers, mesh.gather[0], torch.device("cpu"))
    WHOLE.clear()
    assert peers.met == 2 * symmetric.TRIAL_ROUNDS
    return found


def test_both_ways_gather() -> None:
    for rank, found in enumerate(run_ranks(2, time_gathers)):
        assert found == (1.0 + 4 * (rank + 1),) * 2


@pytest.mark.parametrize(("copies_ms", "begin"), [([1.0, 1.2], "a gather of"), ([1.0, 1.3], "error: a gather of")])
def test_ranks_decide_alike(tmp_path: Any, copies_ms: list[float], begin: str) -> None:
    said = run_ranks(2, connect, str(tmp_path), copies_ms)
    assert said[0] == said[1] and said[0].startswith(begin), said
    assert f"takes {copies_ms[1]:.3f} ms" in said[0]
