"""One launch for all pieces of a segment writes what a launch for each writes, from the same table of blocks.

The kernel needs a GPU, where tests/gpu compares it with the other way. Here a loop over the table stands for it, that
finds gradients by their addresses alone, as the kernel does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from lamina.core.layout import ParamSpec, lay_out
from lamina.optim import AdamW
from lamina.runtime import direct, piece_sums, summing, unit_gradients
from lamina.runtime.assemble import RUNTIMES
from lamina.runtime.direct import pieces_of
from lamina.runtime.piece_sums import MOST_PIECES, Batch, Piece, find_sums
from transport.test_symmetric import shard_symmetrically

BLOCK = 64  # so that a piece takes several
launches: list[Batch] = []


def launch(
    batch: Batch,
    target: Tensor,
    gradients: list[Tensor],
    addresses: list[int],
    factor: float,
    accumulate: bool,
    squares: Tensor | None,
) -> None:
    """Stands for the kernel: block by block, of pieces that it knows by their addresses."""
    launches.append(batch)
    assert len(addresses) <= MOST_PIECES
    for number, (piece, begin, at, left) in enumerate(batch.table.tolist()):
        numel = min(left, BLOCK)
        rows = [row[at : at + numel] for row in batch.inbox]
        rows[batch.place] = read(addresses[piece], begin, numel, batch.inbox.dtype)
        place = target[at : at + numel]
        summing.add_rows(place, rows, factor, accumulate)
        if squares is not None:
            squares.as_strided((batch.blocks,), (1,))[number] = place.double().pow(2).sum()


def read(address: int, start: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What lies in memory at `start` elements from an address."""
    size_bytes = numel * dtype.itemsize
    memory = (ctypes.c_char * size_bytes).from_address(address + start * dtype.itemsize)
    return torch.frombuffer(bytearray(memory.raw), dtype=dtype)


def use_it(patch: pytest.MonkeyPatch) -> None:
    """The launch above on a CPU, with places for squares as on a GPU."""

    def make(target: Tensor, stretches: int = 1) -> Tensor:
        return torch.zeros(target.numel() // BLOCK + stretches)

    def split(squares: Tensor, numels: Sequence[int]) -> Sequence[Tensor]:
        sizes = [max(1, -(-numel // BLOCK)) for numel in numels]
        return squares[: sum(sizes)].split(sizes)

    def add(target: Tensor, rows: Sequence[Tensor], factor: float, accumulate: bool, noted: Tensor | None) -> None:
        summing.add_rows(target, rows, factor, accumulate)
        if noted is not None:
            noted.zero_()[0] = target.double().pow(2).sum()

    patch.setattr(direct, "add_rows", add)
    patch.setattr(piece_sums, "BLOCK", BLOCK)
    patch.setattr(piece_sums, "can_launch", lambda inbox: True)
    patch.setattr(piece_sums, "launcher", lambda: launch)
    patch.setattr(unit_gradients, "make_squares", make)
    patch.setattr(unit_gradients, "split_squares", split)


FEW = [(16, 48), (33, 80), (112,), (16,), (0, 3)]
MANY = [(16, 16)] * 21 + [(48,)] * 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("shapes", "members"), [(FEW, 2), (FEW, 3), (MANY, 1), (MANY, 2)])
def test_blocks_make_up_the_pieces(
    shapes: list[tuple[int, ...]], members: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_it(monkeypatch)
    specs = [ParamSpec(f"p{i}", shape, dtype, torch.float32, True) for i, shape in enumerate(shapes)]
    (segment,) = lay_out("unit", specs, members).segments
    gradients: list[Tensor | None] = [torch.randn(spec.shape).to(dtype) for spec in segment.params]
    inbox = torch.randn(members, segment.range_numel).to(dtype)
    for place in range(members):
        pieces, gaps = pieces_of(segment, 0, place, members)
        sums = find_sums(pieces, inbox, place, torch.float32)
        assert sums is not None and len(sums._batches) == -(-len(pieces) // MOST_PIECES)
        for accumulate in (False, True):
            before = torch.randn(segment.range_numel)
            found, wanted = before.clone(), before.clone()
            squares = unit_gradients.make_squares(found, len(pieces))
            assert squares is not None
            places = unit_gradients.split_squares(squares, [piece.numel for piece in pieces])
            assert sums.run(found, gradients, 1 / 3, accumulate, places)
            for piece, noted in zip(pieces, places, strict=True):
                stop = piece.at + piece.numel
                rows = [row[piece.at : stop] for row in inbox]
                rows[place] = piece.of(gradients)
                summing.add_rows(wanted[piece.at : stop], rows, 1 / 3, accumulate)
                torch.testing.assert_close(noted.sum(), wanted[piece.at : stop].pow(2).sum())
            assert torch.equal(found, wanted)
            assert all(torch.equal(found[start:stop], before[start:stop]) for start, stop in gaps)


def test_what_does_not_fit_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    use_it(monkeypatch)
    inbox, target = torch.zeros(2, 256), torch.ones(256)
    piece = Piece(0, (16, 16), 0, 256, 0)
    sums = find_sums([piece], inbox, 0, torch.float32)
    assert sums is not None
    askew = torch.zeros(257)[1:].view(16, 16)  # of a user's own backward: autograd takes gradients as they are
    assert not sums.run(target, [askew], 1.0, False, None) and target.eq(1).all()
    for refused in (
        find_sums([], inbox, 0, torch.float32),
        find_sums([replace(piece, stop=255)], inbox, 0, torch.float32),
        find_sums([piece], inbox, 0, torch.float64),
        find_sums([piece], inbox.double(), 0, torch.float32),
        find_sums([piece], torch.zeros(9, 256), 0, torch.float32),
        find_sums([piece], torch.zeros(513)[1:].view(2, 256), 0, torch.float32),
    ):
        assert refused is None


def train(is_together: bool) -> tuple[list[Tensor], list[Tensor], int]:
    """Masters and norms of four steps of three micro-batches, and launches of the last step."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 80), nn.ReLU(), nn.Linear(80, 32)) for _ in range(3)]
    norms = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "LEAST_PIECE_BYTES", 0)
        if is_together:
            use_it(patch)
        model = shard_symmetrically(nn.Sequential(*blocks), "zero3", units=["[0-9]"], precision="bf16")
        optimizer = AdamW(model.parameters(), lr=0.01, max_norm=1e9)  # the norm's last bits change nothing
        for step in range(4):
            launches.clear()
            for number in range(3):
                data = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + number))
                model(data * (1 + dist.get_rank())).float().square().mean().backward()
                if number == 1:  # the next backward adds to some gradients of this unit and begins one
                    next(model.parameters()).grad = None
            norms.append(lamina.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        assert all(route is not None for _, route in RUNTIMES[model].engine.reducer._routes.values())
    return [p.local.clone() for p in model.parameters()], norms, len(launches)


def both_ways() -> tuple[bool, list[tuple[float, float]], int]:
    (masters, norms, none), (others, more, count) = train(False), train(True)
    assert none == 0
    return (
        all(map(torch.equal, masters, others)),
        [(a.item(), b.item()) for a, b in zip(norms, more, strict=True)],
        count,
    )


def test_training_is_bitwise_the_same() -> None:
    for are_equal, norms, count in run_ranks(2, both_ways):
        assert are_equal and count == 3 * 3 - 1  # units, micro-batches
        assert all(a == pytest.approx(b, rel=1e-6) for a, b in norms)
