"""A plan goes over the transport that `lamina.shard(transport="auto")` will take."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from lamina.core.peer_memory import AUTO_SHARE
from lamina.core.strategy import resolve
from lamina.planner.machine import load_machine
from lamina.planner.measure import measure
from lamina.planner.state import state_of
from lamina.planner.transports import settled
from lamina.planner.workload import Choice


def test_what_halves_publish_costs_nothing() -> None:
    """Peers come with an optimizer under which masters lie in halves (runtime/late_peers.py), if the rest is little."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(32000, 1024), *(nn.Linear(1024, 1024) for _ in range(6)))
    measured = measure(model, 1, 8, precision="bf16", kind="cuda", units=["1", "2", "3", "4", "5", "6"])
    state = state_of(measured.units, resolve("zero3", 4), peers=True)
    inboxes_bytes = state.shared - state.published

    def plan(limit_bytes: float, halved: bool | None, captured: bool = False) -> tuple[str, bool | None]:
        machine = replace(load_machine("h200"), memory_bytes=round(limit_bytes / AUTO_SHARE))
        choice = Choice("zero3", 4, transport="auto", halved=halved, captured=captured)
        found = settled(choice, measured, machine)
        return found.transport, found.halved

    room, tight, none = 1.01 * state.shared, 1.01 * inboxes_bytes, 0.99 * inboxes_bytes
    assert [plan(limit, None) for limit in (room, tight, none)] == [("peer", True), ("peer", True), ("c10d", False)]
    assert [plan(limit, False)[0] for limit in (room, tight)] == ["peer", "c10d"]
    assert [plan(limit, None, captured=True) for limit in (room, tight)] == [("peer", False), ("c10d", False)]
