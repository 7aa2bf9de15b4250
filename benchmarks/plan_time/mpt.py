"""MPT models as workloads, by formula: what `lamina plan` would measure on fake tensors, for models of public shape.

Shapes are those of the published configurations (mosaicml/llm-foundry); the parameter count they give is compared with
the one in each row. Bytes are counted kernel by kernel in eager mode: a kernel reads its inputs and writes its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lamina.planner.workload import Choice, MatrixProduct, UnitWork, Workload

SHAPES = {  # width, heads, layers
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
VOCABULARY = 50368
MACHINES = {"a100_40gb": "a100-40", "a100_80gb": "a100-80", "h100_80gb": "h100"}

# What a block's forward moves beside its products, in widths of 2 bytes a token: two norms (2 + 2), two residual sums
# (3 + 3), GELU over four widths (4 + 4), and joining heads (2).
BLOCK_MEMORY = 20
# One fused kernel makes the loss from 16-bit logits: it reads them; backward reads and writes them. Bytes in forward.
LOGIT_BYTES = 2
BLOCK_KERNELS = 20


@dataclass(frozen=True)
class Run:
    """One row: what was run, and how long a step took."""

    model: str
    machine: str
    gpus: int
    workload: Workload
    choice: Choice
    step_s: float

    @property
    def tokens(self) -> int:
        """Of a step, on all GPUs."""
        return self.workload.tokens * self.choice.accumulation * self.gpus

    @property
    def keeps_weights(self) -> bool:
        """SHARD_GRAD_OP: a slot a unit."""
        return self.choice.slots >= len(self.workload.units)

    @property
    def title(self) -> str:
        c, w = self.choice, self.workload
        again = " recompute" if c.recompute != "none" else ""
        return f"{self.model} {w.seq} x {w.batch} x {c.accumulation} on {self.gpus} {self.machine}{again}"


def read_run(row: Mapping[str, str]) -> Run:
    """A row of the table."""
    model, seq, gpus = row["Model"], int(row["SeqLen (T)"]), int(row["# GPUs"])
    batch, accumulation = int(row["MicroBatchSize"]), int(row["GradAccum"])
    workload = mpt(model, batch, seq, fp8=row["Precision"] == "amp_fp8")
    numel = sum(unit.trainable_numel for unit in workload.units)
    assert numel == int(row["NumParams"]), f"{model} has {numel} parameters by formula, {row['NumParams']} in the table"
    choice = Choice(
        strategy="zero3",
        world=gpus,
        recompute="full" if row["Activation Checkpointing"] == "True" else "none",
        accumulation=accumulation,
        compute_bytes=2,
        wire=None if row["MP Mode"] == "PURE" else torch.float32,
        sums="ring",
        # FSDP1 keeps two blocks; SHARD_GRAD_OP keeps all from forward to backward
        slots=2 if row["Sharding Strategy"] == "FULL_SHARD" else len(workload.units),
    )
    step_s = int(row["GlobalBatchSize (T)"]) / float(row["Throughput (T/s)"])
    return Run(model, MACHINES[row["GPU"]], gpus, workload, choice, step_s)


def mpt(model: str, batch: int, seq: int, fp8: bool = False) -> Workload:
    """One unit a block, and the root with embeddings, last norm and the tied head."""
    width, heads, layers = SHAPES[model]
    tokens = batch * seq
    size = 1 if fp8 else 2
    products = (
        MatrixProduct(tokens, 3 * width, width, 1, 1, size),
        # both products of attention, of which a causal mask leaves half
        MatrixProduct(seq, seq, width // heads, batch * heads, 1, 2, True),
        MatrixProduct(tokens, width, width, 1, 1, size),
        MatrixProduct(tokens, 4 * width, width, 1, 1, size),
        MatrixProduct(tokens, width, 4 * width, 1, 1, size),
    )
    numel = 12 * width**2 + 13 * width
    memory_bytes = BLOCK_MEMORY * 2 * tokens * width
    blocks = tuple(
        UnitWork(f"blocks.{i}", numel, 0, products, memory_bytes, BLOCK_KERNELS, False, True, i) for i in range(layers)
    )
    root_numel = VOCABULARY * width + seq * width + 2 * width
    head = (MatrixProduct(tokens, VOCABULARY, width, 1, 1, 2),)
    root_bytes = LOGIT_BYTES * tokens * VOCABULARY + 10 * 2 * tokens * width
    root = UnitWork("", root_numel, 0, head, root_bytes, 20, True, False, 0)
    return Workload(model, (root, *blocks), batch, seq)
