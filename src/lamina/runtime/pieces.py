"""Draws one tensor in pieces that do not wait for each other.

A large parameter is drawn on one core by torch. The values of a piece depend on the numbers that belong to it alone,
if pieces begin at multiples of 16, and the generator can be put to where they begin (`mersenne.advance`).

As in `skipping`, that is proved before it is used: the first draw of a kind is made whole, and two of its pieces are
drawn once more and compared, in every byte. A kind whose pieces differ is always drawn whole.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lamina.runtime import mersenne, skipping
from lamina.runtime.init_program import Blank, Call, Node, Ref, Written, aten, check_end

# A multiple of 16. One size for all: its jump needs one polynomial. Drawn in 50 ms, where a jump takes 3.
PIECE_NUMEL = 1 << 23

_proofs: dict[tuple[Any, ...], bool] = {}
_PROVING = threading.Lock()  # one piece of spare memory at a time


def splittable(node: Node) -> Call | None:
    """The call behind `node`, if it is one large draw that fills the storage and nothing else is."""
    if not isinstance(node, Written) or not isinstance(node.before, Blank) or node.device.type != "cpu":
        return None
    call, target = node.call, node.call.args[0]
    if call.func not in (aten.normal_.default, aten.uniform_.default) or call.draw is None:
        return None
    numel = math.prod(target.size)
    whole = target.offset == 0 and numel * target.dtype.itemsize == node.nbytes and _is_contiguous(target)
    alone = sum(1 for _ in call.refs()) == 1 and numel % 16 == 0 and numel >= 2 * PIECE_NUMEL
    return call if whole and alone and target.dtype in skipping.TYPES and mersenne.is_plain(call.draw.state) else None


def _is_contiguous(ref: Ref) -> bool:
    return torch.empty_strided(ref.size, ref.stride, device="meta").is_contiguous()


def is_proved(call: Call) -> bool:
    """Whether the pieces of this kind of draw are known to make up the whole."""
    return _proofs.get(_kind(call), False)


def needs_proof(call: Call) -> bool:
    """Whether nobody has tried this kind yet; true once, for the caller who is to try it."""
    kind = _kind(call)
    return kind not in _proofs and not _proofs.setdefault(kind, False)


def _kind(call: Call) -> tuple[Any, ...]:
    target = call.args[0]
    return (call.func, target.dtype, target.size, *skipping.bounds_of(call.args, call.kwargs))


def starts(call: Call) -> Iterator[tuple[int, torch.Tensor]]:
    """Where each piece begins, and the generator's state there."""
    assert call.draw is not None
    state, target = call.draw.state, call.args[0]
    width = 2 if target.dtype is torch.float64 else 1
    for start in range(0, math.prod(target.size), PIECE_NUMEL):
        yield start, state
        state = mersenne.advance(state, PIECE_NUMEL * width)


def on_storage(call: Call, storage: torch.UntypedStorage) -> torch.Tensor:
    """The target as one row, on `storage`."""
    flat = torch.empty(0, dtype=call.args[0].dtype)
    return flat.set_(storage, 0, (math.prod(call.args[0].size),), (1,))  # type: ignore[call-overload]


def draw_piece(call: Call, flat: torch.Tensor, start: int, state: torch.Tensor) -> None:
    """Fill the piece of `flat` that begins at `start`."""
    assert call.draw is not None
    generator = torch.Generator()
    generator.set_state(state)
    call.func(flat[start : start + PIECE_NUMEL], *call.args[1:], **{**call.kwargs, "generator": generator})
    if start + PIECE_NUMEL >= flat.numel():
        check_end(call.func, call.draw, generator)


def prove(call: Call, storage: torch.UntypedStorage) -> None:
    """Hold the second piece and the last one against the whole, which is on `storage`."""
    flat = on_storage(call, storage)
    with _PROVING:
        spare = torch.empty(PIECE_NUMEL, dtype=flat.dtype)
        ends = list(starts(call))
        for start, state in (ends[1], ends[-1]):
            want = flat[start : start + PIECE_NUMEL]
            got = spare[: want.numel()]
            generator = torch.Generator()
            generator.set_state(state)
            call.func(got, *call.args[1:], **{**call.kwargs, "generator": generator})
            # By NumPy, in whole words: torch would start threads of its own here.
            if not np.array_equal(got.view(torch.int64).numpy(), want.view(torch.int64).numpy()):
                return
        _proofs[_kind(call)] = True
