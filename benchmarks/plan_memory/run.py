"""Memory of real steps beside what was predicted, on one GPU or two.

    python benchmarks/plan_memory/run.py [--gpus 1] --save benchmarks/plan_memory/results/NAME.json

Each row runs in processes of its own, so that device memory is its own: three steps on random tokens. A row that runs
out of memory says so. *Used* is device memory in use at the end (`mem_get_info`), the others are torch's peaks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from rows import LENGTH, SIZES, Model, Row, precision, rows_of, wire_of

import lamina

STEPS = 3
ROW_S = 100.0  # after which a row is given up
PEAKS = {"allocated": torch.cuda.max_memory_allocated, "reserved": torch.cuda.max_memory_reserved}


def measure(row: Row) -> dict:
    """Three steps on this rank, whatever becomes of them."""
    for layer in (nn.Linear, nn.Embedding):
        layer.reset_parameters = lambda module: None  # values are nothing to memory, and 8 B of them take minutes
    nn.init.normal_ = lambda parameter, std: nn.init.zeros_(parameter)
    try:
        with lamina.deferred(seed=0):
            model = Model(row.size)
        model = lamina.shard(
            model, strategy=row.strategy, precision=precision(wire_of(row)), recompute=row.recompute, transport="c10d"
        )
        optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-4)
        shape = (row.tokens // LENGTH, LENGTH)
        for _ in range(STEPS):
            tokens = torch.randint(0, SIZES[row.size][-1], shape, device="cuda")
            model(tokens, tokens).backward()
            lamina.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return {"row": row._asdict(), "fits": False}
    free, everything = torch.cuda.mem_get_info()
    peaks = {name: peak() / 2**30 for name, peak in PEAKS.items()}
    return {"row": row._asdict(), "fits": True, "used": (everything - free) / 2**30, **peaks}


def child(number: int, result: Path) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cuda:nccl,cpu:gloo")
    values = measure(rows_of(dist.get_world_size())[number])
    if dist.get_rank() == 0:
        result.write_text(json.dumps(values))
    os._exit(0)  # a rank that is out of memory answers nobody: no goodbyes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=Path, default=None)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="number of the first row to run")
    parser.add_argument("--child", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child, options.result)
        return
    found = []
    for number, row in list(enumerate(rows_of(options.gpus)))[options.first :]:
        with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(options.gpus),
            ]
            command += [__file__, "--child", str(number), "--result", result.name]
            try:
                subprocess.run(command, capture_output=True, timeout=ROW_S)
            except subprocess.TimeoutExpired:
                print(f"{row}: given up after {ROW_S} s")
            text = result.read()
        found.append(json.loads(text) if text else {"row": row._asdict(), "fits": None})
        figures = {key: round(value, 2) for key, value in found[-1].items() if isinstance(value, float)}
        print(*row, figures or ("does not fit" if found[-1]["fits"] is False else "no result"), flush=True)
        if options.save is not None:
            facts = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": found}
            options.save.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
