"""Peers that come in the middle of a job, and go again, at moments that every rank draws for itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from lamina.core.strategy import Factors
from lamina.runtime import api, late_peers

FORWARDS = 12  # after which the question is closed


@contextmanager
def peers_come_late(seed: int, rank: int) -> Iterator[None]:
    """All that `transport="auto"` may find out is drawn; masters stay whole, so that no number depends on it."""
    draw = random.Random(f"late peers {seed} {rank}")

    def has_peers(layouts: Any, meshes: Any, *rest: Any) -> bool:
        factors: list[Factors] = [mesh.factors for mesh in meshes]
        return any(split.shards_parameters for split in factors)

    def why_not(*asked: Any) -> str:
        return "peers would take too much" if has_peers(*asked) else ""

    with (
        patch.object(late_peers, "FORWARDS", FORWARDS),
        patch.object(late_peers, "all_are_held", lambda units: draw.random() < 0.8),
        patch.object(late_peers, "_were_touched", lambda runtime: draw.random() < 0.5),
        patch.object(late_peers, "would_come_late", has_peers),
        patch.object(api, "would_come_late", has_peers),
        patch.object(api, "why_not_peers", why_not),
    ):
        yield
