"""Hangs on NCCL, by hand: `python tests/gpu/hangs.py` on two GPUs prints what each rank raised, and when.

A script rather than a test: what NCCL leaves behind after an abort is to be looked at. On two H200 (torch 2.11) a
killed rank was named after 0.1 s, a stopped one after 7.8 s, an evaluation on one rank after 3.8 s on both, a barrier
on one rank on both; a rank asleep for 15 s was waited for.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import lamina

WIDTH, AT, LIMIT_S = 256, 20, 40
TRANSPORTS = ("c10d", "peer")


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(2, WIDTH, device="cuda"))


SCENARIOS: dict[str, tuple[int, Callable[[nn.Module], object]]] = {
    "killed": (1, lambda model: os.kill(os.getpid(), signal.SIGKILL)),
    "stopped": (1, lambda model: os.kill(os.getpid(), signal.SIGSTOP)),
    "barrier": (1, lambda model: dist.barrier()),
    "evaluation": (0, evaluate),
    "slow (must stay silent)": (1, lambda model: time.sleep(15)),
}


def train(rank: int, folder: str, scenario: str, transport: str) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())  # ranks may share a card: see cards.py
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).cuda()
    model = lamina.shard(layers, units=[nn.Linear], transport=transport)
    odd_rank, odd = SCENARIOS[scenario]
    began = time.monotonic()
    try:
        for step in range(AT + 20):
            if step == AT and rank == odd_rank:
                began = time.monotonic()
                odd(model)
            loss = model(torch.ones(2, WIDTH, device="cuda")).sum()
            loss.backward()
            model.zero_grad()
            loss.item()
            began = time.monotonic() if step < AT else began
        said = "nothing"
    except lamina.LaminaError as error:
        said = f"{error.code}: {error}"
    print(f"[{transport}, {scenario}] rank {rank} after {time.monotonic() - began:.1f} s: {said}", flush=True)
    os._exit(0)


def main() -> None:
    import tempfile

    transports = [word for word in sys.argv[1:] if word in TRANSPORTS] or TRANSPORTS
    scenarios = [word for word in sys.argv[1:] if word not in TRANSPORTS] or SCENARIOS
    for transport, scenario in itertools.product(transports, scenarios):
        with tempfile.TemporaryDirectory() as folder:
            ranks = mp.spawn(train, (folder, scenario, transport), nprocs=2, join=False)
            deadline = time.monotonic() + LIMIT_S
            while any(process.is_alive() for process in ranks.processes) and time.monotonic() < deadline:
                time.sleep(0.2)
            for rank, process in enumerate(ranks.processes):
                if process.is_alive():
                    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
                    print(f"[{transport}, {scenario}] rank {rank} is still there (state {state})")
                    process.kill()


if __name__ == "__main__":
    main()
