"""Sums of all pieces by one launch, against a launch for each, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lamina.core.layout import ParamSpec, lay_out
from lamina.runtime import piece_sums, summing
from lamina.runtime.direct import pieces_of

pytestmark = pytest.mark.gpu

FEW = [(256, 512), (513, 272), (4112,), (16,)]
MANY = [(512, 512)] * 19 + [(4096,)] * 5  # several launches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("shapes", "members"), [(FEW, 2), (FEW, 3), (MANY, 1), (FEW, 8)])
def test_bitwise_what_a_launch_for_each_writes(shapes: list[tuple[int, ...]], members: int, dtype: torch.dtype) -> None:
    assert piece_sums.launcher() is not None
    specs = [ParamSpec(f"p{i}", shape, dtype, torch.float32, True) for i, shape in enumerate(shapes)]
    (segment,) = lay_out("unit", specs, members).segments
    gradients: list[Tensor | None] = [torch.randn(spec.shape, device="cuda").to(dtype) for spec in segment.params]
    inbox = torch.randn(members, segment.range_numel, device="cuda").to(dtype)
    for place in {0, members - 1}:
        pieces, _ = pieces_of(segment, 0, place, members)
        sums = piece_sums.find_sums(pieces, inbox, place, torch.float32)
        assert sums is not None
        numels = [piece.numel for piece in pieces]
        for turn in range(6):  # compiled, found again, called at once
            found = torch.randn(segment.range_numel, device="cuda")
            wanted, accumulate = found.clone(), turn % 2 == 1
            both = [summing.make_squares(found, len(pieces)) for _ in range(2)]
            ours, theirs = (summing.split_squares(squares, numels) for squares in both if squares is not None)
            assert sums.run(found, gradients, 1 / 3, accumulate, ours)
            for piece, noted in zip(pieces, theirs, strict=True):
                stop = piece.at + piece.numel
                rows = [row[piece.at : stop] for row in inbox]
                rows[place] = piece.of(gradients)
                summing.add_rows(wanted[piece.at : stop], rows, 1 / 3, accumulate, noted)
            assert torch.equal(found, wanted) and torch.equal(*both)  # type: ignore[arg-type]
