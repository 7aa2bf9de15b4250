"""What must be the same on all ranks before a model is sharded: the model, the arguments, the start weights.

Ranks that start from different weights train on a mixture of them without an error, and ranks with different models
hang. Both are found here, before anything is changed, and named on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lamina.core.control import Control, name_ranks
from lamina.core.mesh import DataMesh
from lamina.errors import Disagreement, LaminaError

CHUNK_NUMEL = 1 << 20
T = TypeVar("T")


@contextlib.contextmanager
def agreeing(control: Control, about: str, what: str) -> Iterator[None]:
    """Inside, a rank that waits for others says what it agrees on."""
    before = control.position
    control.position = replace(before, mode=about, kind=about, verb="agrees on", unit=what, is_over=False)
    control.about = about
    try:
        yield
    finally:
        control.position, control.about = before, ""


def together(control: Control, act: Callable[[], T]) -> T:
    """Run something that may fail; if it fails on any rank it fails on every rank, with one message."""
    result, kind, said = None, None, None
    try:
        result = act()
    except LaminaError as error:  # not held: its traceback holds this call
        kind, said = type(error), str(error)
    message = control.agree_on_error(said)
    if message is None:
        return result  # type: ignore[return-value]
    raise Disagreement(message) if kind is None else kind(message)


def check_same_text(control: Control, what: str, lines: Sequence[str]) -> None:
    """Every rank gives the same lines; the error names the first that differs, and who has what."""
    everyone = [text.split("\n") for text in control.exchange_text("\n".join(lines))]
    for number in range(max(map(len, everyone))):
        said = [text[number] if number < len(text) else "nothing" for text in everyone]
        if len(set(said)) > 1:
            groups = {line: [r for r, other in enumerate(said) if other == line] for line in said}
            parts = "; ".join(f"{name_ranks(ranks)}: {line}" for line, ranks in groups.items())
            raise Disagreement(
                f"ranks have different {what}: {parts}. Build the same model with the same arguments everywhere"
            )


def check_start_weights(
    control: Control, names: Sequence[str], values: Sequence[Tensor], caller: str = "lamina.shard"
) -> None:
    """All ranks hold the same values: compared by a checksum of their bits."""
    sums = [checksum(value) for value in values]
    rows = control.exchange(sums) if sums else []
    for number, name in enumerate(names):
        seen = [row[number] for row in rows]
        if len(set(seen)) > 1:
            others = [rank for rank, value in enumerate(seen) if value != seen[0]]
            raise Disagreement(
                f"`{name}` starts with other values on {name_ranks(others)} than on rank 0. Seed every rank alike "
                "before building the model (torch.manual_seed), load the same checkpoint everywhere, or type "
                f"{caller}(..., start='broadcast') to take rank 0's weights"
            )


def checksum(value: Tensor) -> int:
    """A position-dependent sum of a tensor's bits, modulo 2**63."""
    data = value.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for number, start in enumerate(range(0, data.numel(), CHUNK_NUMEL)):
        chunk = data[start : start + CHUNK_NUMEL].to(torch.int64)
        weights = torch.arange(1, chunk.numel() + 1, device=data.device)
        total += (chunk * weights).sum() * (2 * number + 1)
    return int(total) & (2**63 - 1)


def broadcast_from_first(mesh: DataMesh, value: Tensor) -> None:
    """Rank 0's values everywhere: over the first copy's ranks, then from each of them to its replicas."""
    data = value.view(torch.uint8) if value.dim() else value.reshape(1).view(torch.uint8)
    for group in (mesh.shard_group, mesh.replicas):
        if not group.is_trivial:
            assert group.pg is not None
            source = dist.get_global_rank(group.pg, 0)
            dist.broadcast(data, src=source, group=group.pg)
