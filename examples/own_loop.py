"""A training loop of one's own: data, schedule, clipping, a checkpoint, on any number of ranks.

    python examples/own_loop.py                                  # one process
    torchrun --nproc-per-node 2 examples/own_loop.py             # sharded over two

It learns bytes of Python's own `argparse`. docs/from-fsdp2.md shows in which lines it differs from an FSDP2 script.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import lamina

CONTEXT, BATCH = 64, 16  # bytes; rows per rank


class Model(nn.Module):
    def __init__(self, width=64, layers=3):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, text):
        x = self.bytes(text) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=text.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def train(steps, folder):
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = Model().to(device)
    lamina.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    own = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=own)
        rows = text[starts + torch.arange(CONTEXT + 1)].to(device)
        loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if rank == 0 and step % 10 == 0:
            print(f"step {step:3d}   loss {losses[-1]:.3f}")
    lamina.save(folder, model, optimizer)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--folder", default="runs/own_loop")
    options = parser.parse_args()
    train(options.steps, options.folder)
