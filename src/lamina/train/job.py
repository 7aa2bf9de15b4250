"""Everything that a run needs, put together from its configuration: model, data, objective, optimizer.

Two kinds of job: bytes with a GPT of our own, and a pretrained model with its tokenizer. Data are read before the
model, so that what is wrong with them is said first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lamina.core.control import Control
from lamina.errors import UsageError
from lamina.optim.adamw import AdamW
from lamina.runtime.access import runtime_of, sync
from lamina.runtime.agreement import together
from lamina.runtime.api import shard
from lamina.runtime.deferred import deferred
from lamina.runtime.units import plan_units
from lamina.train.chat import check_tokenizer, encode
from lamina.train.chunked_loss import ChunkedHead, vocabulary_of
from lamina.train.config import Config, Optimisation
from lamina.train.data import Order, Packed, Rows, Stream, bigram_loss
from lamina.train.documents import Document, read_documents, split
from lamina.train.export import find_gpt, read_gpt
from lamina.train.gpt import GPT, Shape
from lamina.train.lora import read_rank
from lamina.train.memory import Sizes, choose_strategy, device_memory_bytes
from lamina.train.objective import NextToken, chunks_agree
from lamina.train.packing import pack
from lamina.train.pretrained import Pretrained, check_reading, fill, open_pretrained
from lamina.train.resolve import precision_of, recompute_of, with_steps
from lamina.train.sampling import Bytes, Codec, Words
from lamina.train.separation import check_separation

SPLIT = {
    "ddp": "everything on every rank",
    "zero1": "optimizer state is split over the ranks",
    "zero2": "gradients and optimizer state are split over the ranks",
    "zero3": "parameters, gradients and optimizer state are split over the ranks",
    "hsdp": "parameters, gradients and optimizer state are split inside a node",
}
LARGE_VOCABULARY = 8192  # from here on the loss is computed in chunks


@dataclass
class Job:
    """A run that is ready to begin."""

    config: Config
    model: nn.Module
    objective: NextToken
    optimizer: AdamW
    rows: Rows
    held_out: Rows
    order: Order
    codec: Codec
    control: Control
    device: torch.device
    sizes: Sizes
    why: str  # the strategy
    prompt: str
    bigram: float | None
    opened: Pretrained | None  # None: our own GPT

    @property
    def evaluation_rows(self) -> list[int]:
        """The same at every evaluation and on any number of ranks, spread over what is held out."""
        wanted = self.config.watching.evaluate_batches * (self.config.batches.batch or 1)
        count = min(wanted, len(self.held_out))
        return [i * len(self.held_out) // count for i in range(count)]


def build_job(config: Config) -> Job:
    """Read, build, shard, load. Collective; a mistake raises the same `UsageError` on every rank."""
    control = _control()
    documents = together(control, lambda: read_documents(config.data))
    gpt = None if config.model is None else find_gpt(Path(config.model).expanduser())
    if config.model is None or gpt is not None:
        return _bytes_job(config, control, documents, gpt)
    return _pretrained_job(config, control, documents)


def _control() -> Control:
    """Among the ranks, before there is a model; the default group takes CPU tensors on GPUs too."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Control(None, 0, 1, "train")
    return Control(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), "train")


def _bytes_job(config: Config, control: Control, documents: list[Document], folder: Path | None) -> Job:
    arch, batches, opt = config.architecture, config.batches, config.optimisation
    dtype = torch.float64 if config.sharding.precision == "fp64" else torch.float32

    def build() -> GPT:
        if folder is not None:
            return read_gpt(folder).to(dtype)
        assert arch.width and arch.layers and arch.heads and batches.length
        with deferred(seed=opt.seed):
            return GPT(Shape(arch.width, arch.layers, arch.heads, batches.length)).to(dtype)

    def texts() -> tuple[Stream, Stream]:
        assert batches.length
        return streams_of(documents, batches.length, config.data or "the standard library")

    rows, held_out = together(control, texts)
    model = together(control, build)
    if folder is not None and opt.steps is None:
        config = with_steps(config, max(1, len(rows) // (batches.batch or 1)))
    prompt = "def " if config.data is None else documents[0].text[:24]
    job = _assemble(config, control, model, rows, held_out, Bytes(), prompt, None)
    return replace(job, bigram=bigram_loss(rows, held_out, job.evaluation_rows))


def streams_of(documents: Sequence[Document], length: int, where: str) -> tuple[Stream, Stream]:
    """To train on, and held out."""
    if documents[0].is_chat:
        raise UsageError(f"{documents[0].where} holds conversations: they need a --model with a chat template")
    train, held = (b"".join(d.text.encode() for d in part) for part in split(documents))
    # the shorter one first: what it says to type does for both
    held_out = Stream(held, length, f"{where}: its held-out tenth")
    return Stream(train, length, where), held_out


def _pretrained_job(config: Config, control: Control, documents: list[Document]) -> Job:
    name = config.model or ""
    rank = None if config.lora is None else read_rank(config.lora)
    precision = config.sharding.precision or "fp32"
    opened = together(control, lambda: open_pretrained(name, rank, config.optimisation.seed, precision))

    def tokens() -> tuple[Packed, Packed]:
        check_tokenizer(opened.tokenizer, documents, name)
        parts = _pack_parts(config, documents, opened.tokenizer)
        check_reading(opened, config.batches.length or 0, 1 + max(int(part.tokens.max()) for part in parts))
        return parts

    rows, held_out = together(control, tokens)
    if config.optimisation.steps is None:
        config = with_steps(config, max(1, len(rows) // (config.batches.batch or 1)))
    prompt = "" if documents[0].is_chat else documents[0].text[:60]
    return _assemble(config, control, opened.model, rows, held_out, Words(opened.tokenizer), prompt, opened)


def _pack_parts(config: Config, documents: list[Document], tokenizer: Any) -> tuple[Packed, Packed]:
    length, join = config.batches.length or 0, config.batches.packing == "documents"
    filler = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    where = config.data or "the standard library"
    train, held = split(documents)
    rows = pack([encode(d, tokenizer) for d in train], length, filler, join, where)
    few = [encode(d, tokenizer) for d in held]
    return rows, pack(few, length, filler, join and sum(len(d.tokens) for d in few) >= length, f"{where}, held out")


def _assemble(
    config: Config,
    control: Control,
    model: nn.Module,
    rows: Rows,
    held_out: Rows,
    codec: Codec,
    prompt: str,
    opened: Pretrained | None,
) -> Job:
    head = None
    if opened is not None and (large := opened.large_head(LARGE_VOCABULARY)) is not None:
        head = ChunkedHead(large, vocabulary_of(large))
    device = _device()
    sizes = _sizes(model, config.sharding.precision or "fp32")
    config, why = _with_strategy(config, sizes, control, device)
    _shard(model, config)
    if opened is not None:
        together(control, lambda: fill(opened))
        sync(model)
    objective = NextToken(model, head)
    if head is not None and not chunks_agree(objective, device):
        head.remove()
        objective = NextToken(model)
    if isinstance(rows, Packed):
        shared, wide = config.batches.packing == "documents", config.sharding.precision != "bf16"
        check_separation(objective, shared, wide, control, device)
    return Job(
        config=config,
        model=model,
        objective=objective,
        optimizer=make_optimizer(model, config.optimisation),
        rows=rows,
        held_out=held_out,
        order=Order(len(rows), config.batches.batch or 1, config.optimisation.seed),
        codec=codec,
        control=runtime_of(model).control,
        device=device,
        sizes=sizes,
        why=why,
        prompt=prompt,
        bigram=None,
        opened=opened,
    )


def _with_strategy(config: Config, sizes: Sizes, control: Control, device: torch.device) -> tuple[Config, str]:
    """`auto` by its name, and why. Collective: ranks may have unequal memory."""
    shards = config.sharding
    if shards.strategy != "auto":
        return config, SPLIT[shards.strategy or "zero3"]
    if shards.halves:
        return replace(config, sharding=replace(shards, strategy="zero3")), "halves need split parameters"
    here = device_memory_bytes(device, control.world)
    least_bytes = min(row[0] for row in control.exchange([here]))
    strategy, why = choose_strategy(sizes, control.world, least_bytes)
    return replace(config, sharding=replace(shards, strategy=strategy)), why


def _shard(model: nn.Module, config: Config) -> None:
    shards = config.sharding
    shard(
        model,
        shards.strategy or "zero3",
        precision=precision_of(config),
        recompute=recompute_of(config),
        slots=shards.slots,
        transport=shards.transport,
        compile=shards.compile,
        start="trust",  # every rank has just built or read the same
    )


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _sizes(model: nn.Module, precision: str) -> Sizes:
    params = dict(model.named_parameters())
    units = [sum(params[n].numel() for n in plan.parameters) for plan in plan_units(model, "auto")]
    master_bytes = 8 if precision == "fp64" else 4
    return Sizes(
        sum(p.numel() for p in params.values()),
        sum(p.numel() for p in params.values() if p.requires_grad),
        max(units),
        master_bytes,
        2 if precision == "bf16" else master_bytes,
    )


def make_optimizer(model: nn.Module, opt: Optimisation) -> AdamW:
    """AdamW over flat ranges, which clips; no decay for norms, biases and other vectors."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": opt.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return AdamW(groups, lr=opt.lr or 0.0, betas=(opt.beta1, opt.beta2), max_norm=opt.clip or math.inf)
