"""Whether a unit's gradients are laid out side by side before they are reduced, or are read where autograd left them.

Collectives need one buffer; pushes into the peers' memory do not (runtime/direct.py). What decides that before a step
has run is the layout and how the ranks share it, and both the runtime and a plan ask for it here.

Pure: no communication, no device.
"""

from __future__ import annotations

from lamina.core.layout import Segment, UnitLayout
from lamina.core.strategy import Factors

LEAST_PIECE_BYTES = 1 << 20  # on average: a copy between GPUs takes as long as it takes to queue it


def must_lay_out(layout: UnitLayout, factors: Factors, least_piece_bytes: int = LEAST_PIECE_BYTES) -> bool:
    """Even where reductions are pushes: sums of more than one stage, and pieces that are small on average."""
    stages = [level.size for level in factors.levels if level.size > 1]
    segments = [segment for segment in layout.segments if segment.trainable]
    if len(stages) != 1 or factors.replicas.size > 1 or not segments:
        return True
    count = sum(count_pieces(segment, stages[0]) for segment in segments)
    return sum(segment.compute_bytes for segment in segments) < count * least_piece_bytes


def count_pieces(segment: Segment, members: int) -> int:
    """Stretches of single parameters that `members` equal parts of a segment consist of, all parts together."""
    numel = segment.numel // members
    owned = [(at, spec.numel) for at, spec in zip(segment.starts, segment.params, strict=True) if spec.numel]
    return sum((at + size - 1) // numel - at // numel + 1 for at, size in owned)
