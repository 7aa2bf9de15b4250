"""Why `transport="auto"` takes no peers on GPUs, in words that say what would change it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lamina.core.strategy import resolve
from lamina.planner.measure import measure
from lamina.planner.state import state_of
from lamina.runtime.precision import Precision
from lamina.runtime.publishing import why_not_peers, would_come_late

GIB = 1 << 30


@pytest.mark.parametrize("precision, halvable", [(Precision(torch.bfloat16), True), (Precision(), False)])
def test_who_publishes_too_much_is_told_what_halves_would_leave(
    precision: Precision, halvable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gpu_of(size_bytes: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=size_bytes))

    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(32000, 1024), *(nn.Linear(1024, 1024) for _ in range(6)))
    measured = measure(model, 1, 8, precision=precision, kind="cuda", units=["1", "2", "3", "4", "5", "6"])
    factors = resolve("zero3", 4)
    state = state_of(measured.units, factors, 3, 1, True, peers=True)
    mesh: Any = SimpleNamespace(device=torch.device("cuda"), factors=factors)
    asked = mesh, state.layouts, [mesh] * len(state.layouts)
    left_bytes = state.shared - sum(spec.numel for layout in state.layouts for spec in layout.params) * 2 // 4
    left = f"; {left_bytes / GIB:.2f} where lamina.optim.AdamW(max_norm=...) steps: "
    whole = replace(precision, halves=False)

    gpu_of(51 * state.shared)
    assert why_not_peers(*asked, precision, 3) == ""
    assert not would_come_late(*asked, precision), "they are there"
    gpu_of(49 * state.shared)
    why = why_not_peers(*asked, precision, 3)
    assert f"peers would take {state.shared / GIB:.2f} GiB, more than 2% of the GPU" in why
    assert (left + "they come with its first forward" in why) is halvable
    assert would_come_late(*asked, precision) is halvable
    assert "AdamW" not in why_not_peers(*asked, whole, 3) and not would_come_late(*asked, whole)
    gpu_of(49 * left_bytes)
    assert (left + "type transport='peer' then" in why_not_peers(*asked, precision, 3)) is halvable
    assert not would_come_late(*asked, precision), "too much all the same"
    other = SimpleNamespace(device=mesh.device, factors=replace(factors, params=2))
    meshes: Any = [other] * len(state.layouts)
    assert "AdamW" not in why_not_peers(other, state.layouts, meshes, precision, 3)  # type: ignore[arg-type]
