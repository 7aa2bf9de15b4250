"""Other published figures against the forecast with the constants of the 144 runs (results/fsdp_measured.json).

    python benchmarks/plan_time/published.py

Nothing is fitted here. Figures with tensor parallelism are left out: a `Choice` cannot say that yet.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from lamina.planner.machine import Machine, load_machine
from lamina.planner.rates import Reached
from lamina.planner.time import StepTime, forecast_time
from lamina.planner.workload import Choice, MatrixProduct, UnitWork, Workload

CONSTANTS = Path(__file__).parent / "results" / "fsdp_measured.json"


def attention(tokens: int, width: int, inner: int, key_width: int, heads: int, seq: int) -> tuple[MatrixProduct, ...]:
    """Projections and attention of one layer; `inner` is the width of all heads together."""
    return (
        MatrixProduct(tokens, inner, width),
        MatrixProduct(tokens, key_width, width, count=2),
        MatrixProduct(seq, seq, inner // heads, batch=tokens // seq * heads, is_attention=True),
        MatrixProduct(tokens, width, inner),
    )


def stack(
    name: str, blocks: list[tuple[int, tuple[MatrixProduct, ...], float]], words: int, batch: int, seq: int
) -> Workload:
    """Blocks of (parameters, products, bytes), with an embedding and a head of its size in the root."""
    width = blocks[0][1][0].k
    tokens = batch * seq
    units = tuple(
        UnitWork(f"blocks.{i}", numel, 0, products, memory_bytes, 25, block_index=i)
        for i, (numel, products, memory_bytes) in enumerate(blocks)
    )
    head = (MatrixProduct(tokens, words, width),)
    root = UnitWork("", 2 * words * width, 0, head, 10.0 * tokens * words, 20, encloses=True, recomputable=False)
    return Workload(name, (root, *units), batch, seq)


def llama_8b(batch: int, seq: int) -> Workload:
    tokens, width, hidden = batch * seq, 4096, 14336
    products = (
        *attention(tokens, width, width, 1024, 32, seq),
        MatrixProduct(tokens, hidden, width, count=2),
        MatrixProduct(tokens, width, hidden),
    )
    memory_bytes = 2.0 * tokens * (14 * width + 5 * hidden)
    numel = 2 * width * width + 2 * width * 1024 + 3 * width * hidden
    return stack("Llama-3.1-8B", [(numel, products, memory_bytes)] * 32, 128256, batch, seq)


def gpt_175b(batch: int, seq: int = 2048) -> Workload:
    tokens, width = batch * seq, 12288
    products = (
        *attention(tokens, width, width, width, 96, seq),
        MatrixProduct(tokens, 4 * width, width),
        MatrixProduct(tokens, width, 4 * width),
    )
    return stack("GPT-175B", [(12 * width * width, products, 40.0 * tokens * width)] * 96, 50000, batch, seq)


def t5_11b(batch: int, seq: int = 512) -> Workload:
    tokens, width, inner, hidden = batch * seq, 1024, 16384, 65536
    own = attention(tokens, width, inner, inner, 128, seq)
    dense = (MatrixProduct(tokens, hidden, width), MatrixProduct(tokens, width, hidden))
    numel = 4 * width * inner + 2 * width * hidden
    memory_bytes = 2.0 * tokens * (14 * width + 4 * hidden + 2 * inner)
    encoder = (numel, own + dense, memory_bytes)
    decoder = (numel + 4 * width * inner, own + own + dense, memory_bytes + 4.0 * tokens * inner)
    return stack("T5-11B", [encoder] * 24 + [decoder] * 24, 32128, batch, seq)


def hardware_flops(workload: Workload) -> float:
    """Operations of a step with everything recomputed, as the FSDP paper counts them."""
    total = sum(2.0 * p.m * p.n * p.k * p.batch * p.count for u in workload.units for p in u.forward_products)
    return 4 * total


def main() -> None:
    reached = Reached(**json.loads(CONSTANTS.read_text()))
    # The H100 of the torchtitan table: 96 GB of HBM2e; its bandwidth is an assumption, its power limit is not modelled.
    slow_h100 = dataclasses.replace(load_machine("h100"), memory_bytes_per_s=2.4e12)
    a100 = load_machine("a100-80")

    def ask(workload: Workload, choice: Choice, machine: Machine) -> StepTime:
        return forecast_time(workload, choice, machine, reached)

    print("| figure | published | forecast | error |\n|---|---|---|---|")
    for gpus, published in ((8, 5762), (128, 5605)):
        choice = Choice("zero3", gpus, recompute="selective", wire=torch.float32, sums="ring")
        found = ask(llama_8b(2, 8192), choice, slow_h100).tokens_per_s / gpus
        row(f"Llama-3.1-8B, {gpus} H100, eager, tokens/s a GPU", published, found)
    for batch, published in ((1, 173), (2, 186)):
        workload = gpt_175b(batch)
        found = ask(workload, Choice("zero3", 128, recompute="full", sums="ring"), a100)
        row(
            f"GPT-175B, 128 A100, batch {batch}, TFLOP/s a GPU",
            published,
            hardware_flops(workload) / found.total_ms / 1e9,
        )
    alone, many = (ask(t5_11b(8), Choice("zero3", gpus, recompute="full", sums="ring"), a100) for gpus in (8, 512))
    loss = 100 * (1 - many.tokens_per_s / 512 / (alone.tokens_per_s / 8))
    print(f"| T5-11B, A100: loss a GPU from 8 to 512, % | 7 | {loss:.1f} | |")


def row(title: str, published: float, found: float) -> None:
    print(f"| {title} | {published} | {found:.0f} | {found / published - 1:+.1%} |")


if __name__ == "__main__":
    main()
