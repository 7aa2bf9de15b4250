"""Every kernel of lamina's own, at sizes around its blocks, for NVIDIA's sanitizer.

compute-sanitizer --tool memcheck python tests/gpu/kernels.py
compute-sanitizer --tool racecheck python tests/gpu/kernels.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.optim import adamw_kernel
from lamina.runtime import piece_kernel, summing_kernel
from lamina.runtime.piece_sums import MOST_PIECES, Piece, make_batch

BETAS, EPS = (0.9, 0.99), 1e-8


def sum_rows() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for numel in (1, 255, summing_kernel.BLOCK, 2 * summing_kernel.BLOCK + 3):
            target = torch.zeros(numel, device="cuda")
            squares = torch.zeros(numel // summing_kernel.BLOCK + 1, device="cuda")
            for count in (1, 2, summing_kernel.MOST_ROWS):
                rows = [torch.randn(numel, device="cuda").to(dtype) for _ in range(count)]
                summing_kernel.launch(target, rows, 0.5, True, squares)
                summing_kernel.launch(target, rows, 0.5, False, None)


def sum_pieces() -> None:
    """As many as a launch takes and fewer, at sizes around a block, from within their gradients."""
    for dtype in (torch.bfloat16, torch.float32):
        for count, members in ((1, 1), (5, 2), (MOST_PIECES, summing_kernel.MOST_ROWS)):
            numels = [(16, summing_kernel.BLOCK, 2 * summing_kernel.BLOCK + 16)[i % 3] for i in range(count)]
            pieces, at = [], 0
            for i, numel in enumerate(numels):
                pieces.append(Piece(i, (numel + 32,), 16, 16 + numel, at))
                at += numel + 16
            gradients = [torch.randn(numel + 32, device="cuda").to(dtype) for numel in numels]
            inbox, target = torch.randn(members, at, device="cuda").to(dtype), torch.zeros(at, device="cuda")
            batch = make_batch(pieces, inbox, members - 1)
            squares = torch.zeros(batch.blocks, device="cuda")
            places = [gradient.data_ptr() for gradient in gradients]
            for noted in (squares, None, squares, None):
                piece_kernel.launch(batch, target, gradients, places, 0.5, noted is not None, noted)


def step() -> None:
    """Whole parameters, such with copies for peers, and parameters in halves."""
    one, zero, half = (torch.tensor(value, device="cuda") for value in (1.0, 0.0, 0.5))
    for numel in (7, adamw_kernel.BLOCK, adamw_kernel.BLOCK * adamw_kernel.CHUNK_BLOCKS + 5):
        columns: list[list[Tensor]] = [[torch.rand(numel, device="cuda")] for _ in range(4)] + [[one]]
        copy = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
        lower = torch.zeros(numel, dtype=torch.int16, device="cuda")
        table = adamw_kernel.Table
        adamw_kernel.launch(table(columns), 0.1, half, zero, BETAS, EPS, 0.1, True, False)
        for made in (table(columns, [copy]), table(columns, [copy], [lower])):
            adamw_kernel.launch(made, 0.1, None, None, BETAS, EPS, 0.0, False, True)


if __name__ == "__main__":
    sum_rows()
    sum_pieces()
    step()
    torch.cuda.synchronize()
