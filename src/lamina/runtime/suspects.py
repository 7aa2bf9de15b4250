"""Which parameters to name when all that is known is that one of a unit's was written to, or is missing.

The full parameters of a slot have one version counter between them: see Note [Given back] in slots.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lamina.core.slots import Slot
    from lamina.runtime.unit import Unit


def written_to(unit: Unit, slot: Slot) -> str:
    """Those whose full values differ from this rank's masters; all, if another rank's part was written to."""
    index, position, found = unit.mesh.range_index, 0, []
    for segment, master in zip(unit.layout.segments, unit.read_masters(), strict=True):
        for i, spec in enumerate(segment.params):
            start, stop = segment.owned(i, index)
            offset = segment.offset_in_range(i, index)
            own = master[offset : offset + stop - start].to(segment.compute)
            if not torch.equal(slot.views[position].reshape(-1)[start:stop], own):
                found.append(spec.name)
            position += 1
    return _one_of(found or [spec.name for spec in unit.layout.params])


def described(unit: Unit, said: str) -> str:
    """Those of the shape that autograd's error has named, or of its transpose; all, if there are none.

    said: "[torch.FloatTensor [24, 96]], which is output 0 of AsStridedBackward0," for example.
    """
    shape = re.search(r"\[([\d, ]*)\]", said)
    sizes = [int(size) for size in shape[1].split(",") if size.strip()] if shape else []
    alike = [spec.name for spec in unit.layout.params if list(spec.shape) in (sizes, sizes[::-1])]
    return _one_of(alike or [spec.name for spec in unit.layout.params])


def _one_of(names: Sequence[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"one of {', '.join(quoted)}"
