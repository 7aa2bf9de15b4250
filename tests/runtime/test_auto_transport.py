"""Why `transport="auto"` takes no peers on GPUs, in words that say what would change it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import run_ranks
from lamina.core.control import Control
from lamina.core.strategy import resolve
from lamina.planner.measure import measure
from lamina.planner.state import state_of
from lamina.runtime.precision import Precision
from lamina.runtime.publishing import grant, why_not_peers, would_come_late

GIB = 1 << 30


@pytest.mark.parametrize("precision, halvable", [(Precision(torch.bfloat16), True), (Precision(), False)])
def test_who_publishes_too_much_is_told_what_halves_would_leave(precision: Precision, halvable: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(32000, 1024), *(nn.Linear(1024, 1024) for _ in range(6)))
    measured = measure(model, 1, 8, precision=precision, kind="cuda", units=["1", "2", "3", "4", "5", "6"])
    factors = resolve("zero3", 4)
    state = state_of(measured.units, factors, 3, 1, True, peers=True)
    meshes: Any = [SimpleNamespace(factors=factors)] * len(state.layouts)
    left_bytes = state.shared - sum(spec.numel for layout in state.layouts for spec in layout.params) * 2 // 4

    def asked(granted_bytes: float, given: Precision = precision, meshes: Any = meshes) -> tuple[str, bool]:
        why = why_not_peers(state.layouts, meshes, given, 3, granted_bytes)
        return why, would_come_late(state.layouts, meshes, given, granted_bytes)

    left = f"; {left_bytes / GIB:.2f} where lamina.optim.AdamW(max_norm=...) steps: "
    assert asked(state.shared) == ("", False), "they are there"
    why, comes = asked(state.shared - 1)
    assert f"peers would take {state.shared / GIB:.2f} GiB, more than 2% of the GPU" in why
    assert (left + "they come with its first forward" in why) is comes is halvable
    why, comes = asked(state.shared - 1, replace(precision, halves=False))
    assert "AdamW" not in why and not comes
    why, comes = asked(left_bytes - 1)
    assert (left + "type transport='peer' then" in why) is halvable and not comes, "too much all the same"
    less: Any = [SimpleNamespace(factors=replace(factors, params=2))] * len(state.layouts)
    assert "AdamW" not in asked(state.shared - 1, meshes=less)[0]


def granted_on_unlike_cards() -> float:
    mesh: Any = SimpleNamespace(device=torch.device("cuda"))
    own = SimpleNamespace(total_memory=(80 - 9 * dist.get_rank()) * GIB)
    with patch.object(torch.cuda, "get_device_properties", lambda device: own):
        return grant(Control(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), "unlike cards"), mesh)


def test_the_smallest_gpu_decides_for_all() -> None:
    """Or ranks would take different ways, and wait for each other."""
    assert run_ranks(2, granted_on_unlike_cards) == [0.02 * 71 * GIB] * 2
