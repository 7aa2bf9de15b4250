"""Regions of shared memory: freed with the model, refused by name where they cannot be had."""

from __future__ import annotations

import errno
import gc
import os
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import lamina
from harness import expect_error, run_ranks
from lamina.runtime.assemble import RUNTIMES
from lamina.runtime.publishing import PeerGatherer
from lamina.transport import shared_memory
from leftovers import mapped_regions
from parity.models import UNITS, build
from parity.reference import Recipe, of_language, sharded


def shard_by_peer(model: nn.Module, strategy: Any = "zero3") -> nn.Module:
    return lamina.shard(model, strategy, units=UNITS, transport="peer")


def make_and_drop() -> tuple[int, int, int]:
    gc.collect()
    before = mapped_regions()
    model = shard_by_peer(build())
    sharded(model, of_language(2, Recipe(steps=1)), Recipe(steps=1))
    during = mapped_regions()
    dist.barrier()
    del model
    gc.collect()
    return before, during, mapped_regions()


def test_a_dropped_model_frees_its_memory() -> None:
    for before, during, after in run_ranks(2, make_and_drop):
        assert before == after < during  # another test's model may live in these processes


# ---- where it cannot be --------------------------------------------------------------------------------------------


def on_hosts(hosts: list[str], triple: tuple[int, int, int]) -> str:
    real = shared_memory.host_id
    shared_memory.host_id = lambda: hosts[dist.get_rank()]
    try:
        model = shard_by_peer(build(), lamina.Strategy(*triple))
    finally:
        shared_memory.host_id = real
    return lamina.report(model).transport


def test_ranks_of_two_hosts_are_refused() -> None:
    words = ["one host", "rank 0 on", "rank 1 on", "transport='c10d'"]
    expect_error(2, on_hosts, ["a", "b"], (2, 2, 2), error="TransportError", contains=words)


def test_gather_groups_may_be_on_different_hosts() -> None:
    assert run_ranks(4, on_hosts, ["a", "a", "b", "b"], (2, 2, 2)) == ["peer"] * 4
    words = ["rank 2 on", "rank 3 on"]
    expect_error(4, on_hosts, ["a", "a", "b", "c"], (2, 2, 2), error="TransportError", contains=words)


def without_memory() -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = os.posix_fallocate
    if dist.get_rank() == 1:
        os.posix_fallocate = refuse
    try:
        shard_by_peer(build())
    finally:
        os.posix_fallocate = real


def test_too_little_memory_on_one_rank_is_an_error_on_all() -> None:
    words = ["bytes of shared memory", "No space left", "rank 1 of 2", "transport='c10d'"]
    expect_error(2, without_memory, error="TransportError", contains=words)


def open_other_things() -> tuple[str, str, bool]:
    """A ticket leads to its region or nowhere; a peer's region is not to be written."""
    model = shard_by_peer(build())
    gatherer = RUNTIMES[model].engine.gatherer
    assert isinstance(gatherer, PeerGatherer)
    peers = gatherer.peers
    other = peers.others[1 - dist.get_rank()]
    messages = []
    ticket = peers.own.ticket
    for changes in ({"inode": ticket.inode + 1}, {"fd": 9999}):
        wrong = shared_memory.Ticket(**{**vars(ticket), **changes})
        with pytest.raises(OSError) as caught:
            shared_memory.PeerRegion(wrong)
        messages.append(str(caught.value))
    return messages[0], messages[1], other.counters.flags.writeable


def test_a_ticket_opens_its_region_only() -> None:
    for another, missing, writeable in run_ranks(2, open_other_things):
        assert "another file" in another and "No such file" in missing and not writeable
