"""Who is named, when: ranks that die, stop or part, at the first step and at the thousandth; slow ones are waited for.

    python benchmarks/hangs/run.py [--only killed,compile] [--save benchmarks/hangs/results.md]

Each row starts two ranks (Gloo, CPU) as a user would, with lamina's own limits. One rank does something odd before a
step; the other, and the odd one where it can, must raise within ten seconds, or nobody may.
"""

from __future__ import annotations

import argparse
import os
import pdb
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

WIDTH, WORLD, AFTER, LIMIT_S = 8, 2, 5, 10.0
COMPILE_S, STALL_S, DISK_S, DEBUGGER_S = 60.0, 40.0, 30.0, 20.0


class Job:
    """One rank's training loop."""

    def __init__(self) -> None:
        import lamina

        torch.manual_seed(0)
        self.lamina, self.rank = lamina, int(os.environ["RANK"])
        self.model = lamina.shard(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), units=[nn.Linear])
        self.odd_at = 0.0

    def step(self) -> None:
        self.model(torch.ones(2, WIDTH)).sum().backward()
        self.model.zero_grad()


def barrier(job: Job) -> None:
    dist.barrier()


def evaluate(job: Job) -> None:
    with torch.no_grad():
        job.model(torch.ones(2, WIDTH))


def loader_fails(job: Job) -> None:
    raise ValueError("sample 17 is damaged")


def save(job: Job) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job.lamina.save(f"{folder}/step", job.model)


def compile_slowly(job: Job) -> None:
    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable:
        time.sleep(COMPILE_S)
        return graph.forward

    torch.compile(lambda x: x * 2 + 1, backend=backend)(torch.ones(3))


class SlowData(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(STALL_S)
        return torch.ones(WIDTH)


def stall(job: Job) -> None:
    list(torch.utils.data.DataLoader(SlowData(), num_workers=1))


def slow_disk(job: Job) -> None:
    """Every rank saves; on one the disk takes its time."""
    if job.rank == 1:
        real = os.fsync

        def slow(descriptor: int) -> None:
            time.sleep(DISK_S)
            os.fsync = real
            real(descriptor)

        os.fsync = slow
    folder = Path(tempfile.gettempdir(), f"lamina-slow-disk-{os.environ['MASTER_PORT']}")
    job.lamina.save(folder / "step", job.model)


def debugger(job: Job) -> None:
    reader, writer = os.pipe()  # what the person types, after a while
    if os.fork() == 0:
        time.sleep(DEBUGGER_S)
        os.write(writer, b"continue\n")
        os._exit(0)
    pdb.Pdb(stdin=os.fdopen(reader), stdout=open(os.devnull, "w")).set_trace()  # noqa: SIM115


NAMED: dict[str, tuple[str, tuple[int, ...], Callable[[Job], object]]] = {  # what happens, on which ranks, how
    "killed": ("SIGKILL", (1,), lambda job: os.kill(os.getpid(), signal.SIGKILL)),
    "stopped": ("SIGSTOP", (1,), lambda job: os.kill(os.getpid(), signal.SIGSTOP)),
    "loader": ("its loader raises", (1,), loader_fails),
    "barrier": ("a barrier of its own", (1,), barrier),
    "evaluation": ("an evaluation of its own", (0,), evaluate),
    "save": ("lamina.save on it alone", (0,), save),
}
SILENT: dict[str, tuple[str, tuple[int, ...], Callable[[Job], object]]] = {
    "compile": (f"a compilation of {COMPILE_S:.0f} s", (1,), compile_slowly),
    "stall": (f"its loader takes {STALL_S:.0f} s", (1,), stall),
    "disk": (f"all save, its disk takes {DISK_S:.0f} s", (0, 1), slow_disk),
    "debugger": (f"breakpoint() for {DEBUGGER_S:.0f} s", (1,), debugger),
}
ALL = {**NAMED, **SILENT}


def child(name: str, at: int) -> None:
    torch.set_num_threads(1)
    job = Job()
    _, ranks, act = ALL[name]
    began = time.monotonic()
    try:
        for number in range(1, at + AFTER):
            if number == at:
                began = time.monotonic()
                if job.rank in ranks:
                    act(job)
            job.step()
    except BaseException as error:
        print(
            f"RESULT {job.rank} {time.monotonic() - began:.1f} {getattr(error, 'code', type(error).__name__)} {error}"
        )
        raise
    print(f"RESULT {job.rank} {time.monotonic() - began:.1f} - went on")


def run(name: str, at: int) -> list[str]:
    """Start both ranks; what each of them said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--child", name, "--at", str(at)],
            env=os.environ | {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(WORLD), "MASTER_PORT": str(port),
                              "MASTER_ADDR": "127.0.0.1"},
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for r in range(WORLD)
    ]  # fmt: skip
    said = []
    for rank, process in enumerate(processes):
        try:
            output, _ = process.communicate(timeout=2 * COMPILE_S + 120)
            lines = [line for line in output.splitlines() if line.startswith("RESULT")]
            said.append(lines[0].removeprefix("RESULT ") if lines else f"{rank} - ended ({process.returncode})")
        except subprocess.TimeoutExpired:
            said.append(f"{rank} - is still there")
        if name == "stopped":
            for other in processes:
                other.kill()
    return said


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(ALL))
    parser.add_argument("--steps", default="1,1000")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--at", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.at)
        return
    lines = ["| one rank | step | rank 0 | rank 1 |", "|---|---|---|---|"]
    for name in options.only.split(","):
        for at in map(int, options.steps.split(",")):
            title, _, _ = ALL[name]
            cells = [text.split(maxsplit=1)[1] for text in run(name, at)]
            lines.append(f"| {title} | {at:,} | " + " | ".join(cell.replace("|", "/")[:330] for cell in cells) + " |")
            print(lines[-1], flush=True)
    if options.save is not None:
        facts = f"`{' '.join(sys.argv)}`, torch {torch.__version__}, Gloo on one machine of {os.cpu_count()} cores"
        options.save.write_text(
            f"{facts}. Cells: seconds after the odd thing began, code, message.\n\n" + "\n".join(lines) + "\n"
        )


if __name__ == "__main__":
    main()
