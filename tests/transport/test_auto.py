"""What `transport="auto"` chooses on CPUs: shared memory where it works and there is enough; else Gloo, saying why."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lamina
from harness import expect_error, run_ranks
from lamina.runtime.assemble import RUNTIMES
from lamina.runtime.phase import Kind
from lamina.transport import host_memory, peer, shared_memory

MIB = 1 << 20


@contextlib.contextmanager
def patched(module: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, value)
        yield


def cannot_open(ticket: Any) -> None:
    raise PermissionError(13, "Permission denied")


def chosen(**choices: Any) -> tuple[str, str, float]:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
    model = lamina.shard(layers, units=[nn.Linear], **choices)
    model(torch.ones(2, 128)).sum().backward()
    report = lamina.report(model)
    assert all(note in str(report) for note in report.notes)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return report.transport, " ".join(report.notes), float(norm)


def choose() -> dict[str, tuple[str, str, float]]:
    found = {"enough": chosen(), "one slot": chosen(slots=1), "asked for": chosen(transport="c10d")}
    with patched(peer, "available_bytes", lambda: MIB // 10 if dist.get_rank() == 1 else 1 << 40):
        found["little memory"] = chosen()
    with patched(shared_memory, "host_id", lambda: f"host {dist.get_rank()}"):
        found["two hosts"] = chosen()
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 1:
            stack.enter_context(patched(peer, "PeerRegion", cannot_open))
        found["two containers"] = chosen()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.delattr(os, "memfd_create")
        found["no Linux"] = chosen()
    return found


def test_auto_takes_shared_memory_where_it_can_and_says_why_not() -> None:
    words = {
        "one slot": "slots=1 asks for the least memory",
        "little memory": "more than 25% of the 0.1 MiB that are left on the host",
        "two hosts": "needs all ranks of a gather group on one host: rank 0 on",
        "two containers": "rank 1 cannot read the memory of rank 0",
        "no Linux": "this system has no anonymous files",
    }
    for found in run_ranks(2, choose):
        assert len({norm for _, _, norm in found.values()}) == 1, found
        assert found["enough"][:2] == ("peer", "") and found["asked for"][:2] == ("c10d", ""), found
        for case, wanted in words.items():
            transport, note, _ = found[case]
            assert transport == "c10d" and note.startswith("transport c10d, for ") and wanted in note, found


def ask_for_peers_with_little_memory() -> None:
    with patched(peer, "available_bytes", lambda: MIB // 10 if dist.get_rank() == 1 else 1 << 40):
        chosen(transport="peer")


def test_memory_is_looked_at_before_it_is_taken() -> None:
    words = ["MiB of shared memory for all ranks", "more than the 0.1 MiB that are left", "transport='c10d'"]
    expect_error(2, ask_for_peers_with_little_memory, error="TransportError", contains=words)


def write_group(folder: Any, limit: str, used: str, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("memory.max", limit), ("memory.current", used), ("memory.stat", f"inactive_file {cached}")):
        (folder / name).write_text(text)


def test_control_groups_limit_what_is_left(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/box/inner\n")
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(host_memory, "OWN_GROUPS", own)
    machine = host_memory.available_bytes()
    assert machine > 64 * MIB
    write_group(tmp_path / "groups" / "box" / "inner", "max", "0", 0)
    assert abs(host_memory.available_bytes() - machine) < machine // 2
    write_group(tmp_path / "groups" / "box", str(64 * MIB), str(60 * MIB), 3 * MIB)
    assert host_memory.available_bytes() == 7 * MIB
    monkeypatch.setattr(host_memory, "MACHINE", tmp_path / "no meminfo")
    assert host_memory.available_bytes() == 7 * MIB
    own.unlink()
    assert host_memory.available_bytes() > 1 << 60


def kinds_of_programs() -> list[bool]:
    model = lamina.shard(nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))), units=[nn.Linear], transport="peer")
    found = []
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()
        found.append({key.kind for key in RUNTIMES[model].engine.programs.known} == {Kind.FORWARD, Kind.BACKWARD})
    return found


def test_a_program_that_is_followed_is_kept() -> None:
    assert run_ranks(2, kinds_of_programs) == [[True] * 4] * 2


def one_rank_a_node() -> tuple[tuple[str, ...], ...]:
    meshes = [dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) for shape in ((2, 1), (1, 2))]
    return tuple(lamina.report(lamina.shard(nn.Linear(8, 8), "hsdp", mesh=mesh)).notes for mesh in meshes)


def test_hsdp_that_shards_nothing_says_so() -> None:
    for nothing, something in run_ranks(2, one_rank_a_node):
        assert len(nothing) == 1 and "every rank holds a whole copy" in nothing[0] and something == ()
