"""Ranks that torchrun starts anew go on from the last checkpoint, as if nothing had been."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forked_programs import run_warm

SOURCE = str(Path(__file__).parents[2] / "src")
PROGRAM = """
import os, signal, sys
import torch, lamina

deaths, rank, world = sys.argv[1].split(","), int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)).double()
model = lamina.shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
start, found = 0, lamina.latest("runs")
if found is not None:
    start = lamina.load(found, model, optimizer)["step"]
for step in range(start, 6):
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
    model(x).square().mean().backward()
    if f"{step}:{rank}" in deaths and not os.path.exists(f"died {step}"):
        open(f"died {step}", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step(), optimizer.zero_grad()
    lamina.save(f"runs/{step}", model, optimizer, extra={"step": step + 1}, wait=step % 2 == 0)
    lamina.checkpoint.keep_last("runs", 1)
total = sum((param.full() if world > 1 else param).square().sum().item() for param in model.parameters())
if rank == 0:
    open("total", "w").write(repr(total))
"""


def total_of(folder: Path, deaths: str, agents: int, ranks: int) -> float:
    """What a run ends with. `deaths`: "step:rank,..."; `ranks`: of each agent, as torchrun calls itself."""
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nnodes", str(agents), "--nproc-per-node", str(ranks)]
    launcher += [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--rdzv-id",
        "a",
        "--max-restarts",
        "3",
    ]
    command = [sys.executable, *(launcher if ranks else []), "train.py", deaths]
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    environment.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    started = []
    for agent in range(agents):
        with open(folder / f"said {agent}", "w") as said:
            started.append(
                subprocess.Popen(command, env=environment, cwd=folder, stdout=said, stderr=subprocess.STDOUT)
            )
    deadline = time.monotonic() + 100
    try:
        codes = [process.wait(timeout=max(0.1, deadline - time.monotonic())) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0] * agents, [(folder / f"said {agent}").read_text() for agent in range(agents)]
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["5"]
    return float((folder / "total").read_text())


@pytest.mark.parametrize(
    ("agents", "ranks", "deaths"),
    [(1, 2, "2:1,4:0"), (2, 1, "3:1")],  # one agent that counts restarts; one that restarts for the other's sake
    ids=["one agent", "two agents"],
)
def test_restarted_ranks_go_on(agents: int, ranks: int, deaths: str, tmp_path: Path) -> None:
    alone = run_warm(total_of, tmp_path / "alone", "", 1, 0)
    assert run_warm(total_of, tmp_path / "restarted", deaths, agents, ranks) == pytest.approx(alone, abs=1e-10)
    died = {path.name.removeprefix("died ") for path in (tmp_path / "restarted").glob("died *")}
    assert died == {death[0] for death in deaths.split(",")}
