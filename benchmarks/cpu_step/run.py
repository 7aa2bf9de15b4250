"""A 10 M-parameter GPT on 2 Gloo ranks: lamina beside FSDP2 and DDP, interleaved in one run.

    python benchmarks/cpu_step/run.py

All ways train the same model on the same batches in the same two processes; a round times a few steps of each in turn,
so that a disturbance of the machine hits all alike. Ratios are per round. Peak memory is the growth of the process's
resident set above what it was before that way's model was built, in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import lamina

WORLD = 2
DIM, LAYERS, HEADS, VOCABULARY, LENGTH, BATCH = 320, 8, 8, 256, 128, 4
WAYS = ("lamina", "lamina peer", "lamina ddp", "fsdp2", "ddp")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, DIM))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.positions = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(way: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable]:
    torch.manual_seed(0)
    model: nn.Module = GPT()
    if way.startswith("lamina"):
        transport = "peer" if way == "lamina peer" else "c10d"
        model = lamina.shard(model, "ddp" if way == "lamina ddp" else "zero3", transport=transport)
        return model, lamina.optim.AdamW(model.parameters(), lr=1e-3), lamina.clip_grad_norm_
    if way == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), nn.utils.clip_grad_norm_


def step_of(way: str) -> Callable[[int], float]:
    model, optimizer, clip = build(way)

    def step(number: int) -> float:
        generator = torch.Generator().manual_seed(number * WORLD + dist.get_rank())
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def start(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)


def time_ways(rank: int, folder: str, rounds: int, steps: int) -> None:
    start(rank, folder)
    ways = {way: step_of(way) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    losses = {way: [step(number) for number in range(3)] for way, step in ways.items()}
    for _ in range(rounds):
        for way, step in ways.items():
            dist.barrier()
            started = time.perf_counter()
            for number in range(steps):
                step(number)
            took = torch.tensor([(time.perf_counter() - started) / steps * 1e3])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            times[way].append(float(took))
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps({"times": times, "losses": losses}))
    dist.destroy_process_group()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def memory_of(rank: int, folder: str, way: str, steps: int) -> None:
    start(rank, folder)
    torch.ones(1).add_(1)
    before, peak, done = resident_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], resident_bytes())

    step = step_of(way)
    step(0)
    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(steps):
        step(number)
    done.set()
    watcher.join()
    (Path(folder) / f"{way}-{rank}").write_text(str(peak[0] - before))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save", type=Path, default=None)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(time_ways, (folder, options.rounds, options.steps), nprocs=WORLD)
        found = json.loads((Path(folder) / "times.json").read_text())
    memory = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(memory_of, (folder, way, 6), nprocs=WORLD)
            memory[way] = max(int((Path(folder) / f"{way}-{rank}").read_text()) for rank in range(WORLD))
    parameters = sum(p.numel() for p in GPT().parameters())
    size = f"{parameters / 1e6:.1f} M parameters"
    print(f"{size}, {WORLD} Gloo ranks, {BATCH} x {LENGTH} tokens a rank, torch {torch.__version__}")
    print(f"{'way':>11} {'ms':>8} {'of lamina':>10}  (min - max)  {'peak MiB':>9}")
    rows = []
    for way in WAYS:
        ratios = [t / base for t, base in zip(found["times"][way], found["times"]["lamina"], strict=True)]
        row = {
            "way": way,
            "ms": statistics.median(found["times"][way]),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "peak_mib": memory[way] / 2**20,
            "losses": found["losses"][way],
        }
        rows.append(row)
        print(
            f"{way:>11} {row['ms']:8.1f} {row['ratio']:10.3f}  ({row['ratio_min']:.3f} - {row['ratio_max']:.3f}) "
            f"{row['peak_mib']:9.1f}"
        )
    if options.save is not None:
        facts = {"torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count(), "rows": rows}
        options.save.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
