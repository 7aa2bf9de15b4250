"""Train a small byte-level language model on the sources of Python's own standard library, sharded.

    python examples/first_steps.py                                      # every GPU, or 2 CPU processes: about a minute
    torchrun --nproc-per-node 2 examples/first_steps.py                 # the same on ranks that torchrun started

It prints the loss on held-out text at the start and at the end, in nats per byte, beside that of a bigram table: the
model has learned more than which byte follows which once its loss is the lower one.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import lamina

VOCABULARY = 256  # bytes
CONTEXT = 64  # bytes the model sees
BATCH = 32  # windows per rank and step


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width / heads]
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Bytes [batch, length] to logits [batch, length, 256]."""
        x = self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def corpus(limit_bytes: int = 4_000_000) -> tuple[Tensor, Tensor]:
    """Bytes to train on, and bytes held out (every tenth file)."""
    train, held_out = bytearray(), bytearray()
    for index, path in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        (held_out if index % 10 == 9 else train).extend(path.read_bytes())
    as_tensor = [torch.frombuffer(part[:limit_bytes], dtype=torch.uint8).long() for part in (train, held_out)]
    return as_tensor[0], as_tensor[1]


def windows(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` random windows of the text, [count, CONTEXT + 1]."""
    starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)]


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def bigram_loss(train: Tensor, batch: Tensor) -> float:
    """What a table of the pairs counted in `train`, one added to each, loses on the same windows."""
    pairs = train[:-1] * VOCABULARY + train[1:]
    counts = torch.bincount(pairs, minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY) + 1.0
    table = (counts / counts.sum(1, keepdim=True)).log()
    return -table[batch[:, :-1], batch[:, 1:]].mean().item()


def train(steps: int) -> None:
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)  # the same weights on every rank; the batches below differ
    model = lamina.shard(GPT().to(device), strategy="zero3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps + 1, pct_start=0.1)
    text, held_out = corpus()
    own = torch.Generator().manual_seed(rank)
    test = windows(held_out, 128, torch.Generator().manual_seed(0)).to(device)

    def report(step: int) -> None:
        with torch.no_grad():
            loss = mean_loss(model, test).item()
        if rank == 0:
            print(f"step {step:4d}   held-out loss {loss:.3f}   {time.monotonic() - begin:5.1f} s", flush=True)

    begin = time.monotonic()
    for step in range(steps):
        if step % 40 == 0:
            report(step)
        mean_loss(model, windows(text, BATCH, own).to(device)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    report(steps)
    if rank == 0:
        print(f"bigram table: held-out loss {bigram_loss(text, test.cpu()):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--nprocs", type=int, default=None, help="default: the GPUs, or 2 CPU processes")
    options = parser.parse_args()
    lamina.launch(train, options.nprocs, (options.steps,))
