"""What a model asks of a machine in one micro-batch, and under which choices it is to run: plain data.

Whoever measures a model (on fake tensors, or by formula) fills in a `Workload`; memory and time are forecast from it
and a `Choice`, and neither needs the model. All counts are of one rank; ranks that do the same are one.

Pure: no communication, no device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lamina.core.layout import ParamSpec
from lamina.core.strategy import Strategy


@dataclass(frozen=True)
class MatrixProduct:
    """(m, k) by (k, n), `batch` of them at once, `count` times in one forward.

    Both products of attention are one entry with `is_attention`: m queries, n keys, k the head's width, and what a
    causal mask leaves out is half of it: 2 m n k operations are counted for the two.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    count: int = 1
    dtype_bytes: int = 2
    is_attention: bool = False


@dataclass(frozen=True)
class UnitWork:
    """The forward of one unit in one micro-batch; backward follows from it."""

    name: str
    trainable_numel: int
    frozen_numel: int
    forward_products: tuple[MatrixProduct, ...]
    forward_memory_bytes: float  # read and written by everything that is no product
    kernel_count: int  # operations that are launched
    encloses: bool = False  # its window holds the windows of all others (the root)
    recomputable: bool = True  # a block, which `recompute` applies to
    block_index: int = 0  # the number of its first block, for every-n-th recomputation
    blocks: int = 1  # that share the unit
    saved_bytes: int = 0  # activations that autograd keeps for backward, each storage once, weights left out
    output_bytes: int = 0
    fused_memory_bytes: float | None = None  # the same two where the unit is compiled; None: nobody counted
    fused_kernel_count: int | None = None
    backward_memory_bytes: float | None = None  # bytes and launches of backward, products' left out; None: not counted
    backward_kernel_count: int | None = None
    holds_head: bool = False  # the output layer, which a loss in chunks computes again in backward
    is_lookup: bool = False  # an embedding, which is not gathered for its backward (runtime/lookups.py)
    params: tuple[ParamSpec, ...] = ()  # none listed: their gradients are counted as laid out


@dataclass(frozen=True)
class Workload:
    """A model and its input: units in order of use, the root among them."""

    name: str
    units: tuple[UnitWork, ...]
    batch: int  # sequences of a micro-batch on one rank
    seq: int
    logits_bytes: int = 0

    @property
    def tokens(self) -> int:
        """Of a micro-batch on one rank."""
        return self.batch * self.seq


@dataclass(frozen=True)
class Choice:
    """How a model is to run."""

    strategy: str | Strategy = "zero3"
    world: int = 1  # data ranks
    shard_size: int | None = None  # ranks that share one copy in "hsdp"; the ranks of a node
    recompute: str | int = "none"  # "none", "full", "selective", or n for every n-th block
    accumulation: int = 1  # micro-batches of a step
    compute_bytes: int = 2  # of an element of the compute dtype
    wire: torch.dtype | None = None  # in which gradients travel (`Precision(wire=)`); None: as they are computed
    slots: int = 3
    # how gradients are summed: "exchange" (all-to-all, then locally), "ring" (reduce-scatter), or "auto": what the
    # runtime does on GPUs, exchanges of 16 bit and rings of 32; on a CPU it exchanges both
    sums: str = "auto"
    transport: str = "c10d"  # or "peer": one-sided copies inside a node, where parameters are split
    # masters in halves (`Precision(halves=True)`), over peers; None: as lamina chooses, which `settled` says
    halved: bool | None = False
    expandable: bool = False  # torch's setting `expandable_segments:True`, on GPUs
    gradients: str = "auto"  # or "laid out", side by side: runtimes of before did so over peers too
    compiled: bool = False  # each unit but the root by itself
    captured: bool = False  # the step is one CUDA graph (lamina.capture): the device never waits for the host
    chunked_loss: bool = False  # output layer and loss a few tokens at a time, and again in backward

    @property
    def wire_bytes(self) -> int:
        """Of an element of a gradient on its way."""
        return self.compute_bytes if self.wire is None else self.wire.itemsize
