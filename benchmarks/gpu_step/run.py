"""Step time, device memory and loss of sharded training on GPUs, beside its peers and a hand-written loop.

    python benchmarks/gpu_step/run.py --gpus 2 --save benchmarks/gpu_step/results/NAME.json

Every way has processes of its own, so that device memory is its own; all start at once and then take turns. A first
turn trains from one start on the same batches: its losses are compared with the hand-written loop's (bf16 compute, fp32
masters, gradients averaged in fp32), and device memory that is gone after it is what the way uses. Then come rounds: in
each, every way in turn warms up and is timed over ten steps without a synchronisation in between (maximum over ranks),
then gives its caches back and sleeps. A ratio is of one round.

`--ways a,b/c,d` starts c and d when a and b have ended, where device memory does not hold all at once. All ways change
the learning rate at every step and clip at 1.0 (not with `--unclipped`).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from ways import BUILDERS, DEVICE, Job

WAYS = ("bound", "reference", "fsdp2-fp32", "fsdp2-bf16", "lamina", "lamina-peer")
TIMED_STEPS, WARM_STEPS = 10, 2
HOUR = timedelta(hours=1)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Way:
    """One way on one rank, built by its first turn."""

    def __init__(self, name: str, job: Job, curve_steps: int) -> None:
        self.name, self.job, self.curve_steps = name, job, curve_steps

    def learn(self) -> dict:
        if DEVICE == "cuda":
            rank = int(os.environ["LOCAL_RANK"])
            torch.cuda.set_device(rank % torch.cuda.device_count())  # ranks may share a card: see tests/gpu/cards.py
        self.step = BUILDERS[self.name](self.job)
        self.data = self.job.batch(0)
        losses = []
        for number in range(self.curve_steps):
            loss = self.step(*self.job.batch(number), number)
            dist.all_reduce(loss)
            losses.append(loss / dist.get_world_size())
        found: dict = {"losses": [float(loss) for loss in losses]}
        if DEVICE == "cuda":
            found["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
            found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        return found

    def rest(self) -> dict:
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        return {}

    def time(self) -> dict:
        for number in range(WARM_STEPS):
            self.step(*self.data, number)
        synchronize()
        dist.barrier()
        synchronize()
        started = time.perf_counter()
        for number in range(TIMED_STEPS):
            self.step(*self.data, number)
        issued = time.perf_counter()
        synchronize()
        took = torch.tensor([time.perf_counter() - started, issued - started], device=DEVICE) * 1e3 / TIMED_STEPS
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        self.rest()
        return {"ms": float(took[0]), "host_ms": float(took[1])}


def child(options: argparse.Namespace) -> None:
    """What every rank of a way runs: turns, as the store says."""
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)
    store = dist.TCPStore("127.0.0.1", options.port, is_master=False, timeout=HOUR)
    dist.init_process_group("cuda:nccl,cpu:gloo" if DEVICE == "cuda" else "gloo")
    way = Way(options.way, job_of(options), options.steps)
    turns = {"learn": way.learn, "rest": way.rest, "time": way.time}
    number = 0
    while (turn := store.get(f"{options.way} {number}").decode()) != "end":
        found = turns[turn]()
        dist.barrier()
        if dist.get_rank() == 0:
            store.set(f"{options.way} {number} done", json.dumps(found))
        number += 1
    dist.destroy_process_group()


@dataclass
class Runner:
    """The processes of one way, as the parent sees them."""

    name: str
    process: subprocess.Popen
    output: Path
    store: dist.TCPStore
    turns: int = 0
    is_well: bool = True
    is_asked: bool = False  # a turn was given and has not ended
    rounds: dict[int, dict] = field(default_factory=dict)
    row: dict = field(default_factory=dict)

    def turn(self, what: str) -> dict:
        """Empty, and the way is out, where its processes have failed."""
        key = f"{self.name} {self.turns}"
        self.turns += 1
        self.store.set(key, what)
        self.is_asked = what != "end"
        while self.is_asked and self.is_well:
            if self.store.check([f"{key} done"]):
                self.is_asked = False
                return json.loads(self.store.get(f"{key} done"))
            self.is_well = self.process.poll() is None
            time.sleep(0.01)
        if self.is_asked:
            self.is_asked = False
            print(f"{self.name}: failed in `{what}`\n{self.last_lines()}", flush=True)
        return {}

    def last_lines(self) -> str:
        return self.output.read_text()[-6000:]

    def finish(self) -> None:
        """End it; where it does not end by itself, or was ended within a turn, say what the ranks were doing."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not self.is_asked:
                self.process.wait(timeout=20)
                return
        self.process.terminate()  # torchrun ends its ranks, which would keep their memory of the cards
        try:
            self.process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        print(
            f"{self.name}: had not ended {'its turn' if self.is_asked else 'by itself'}\n{self.last_lines()}",
            flush=True,
        )

    def finished_row(self) -> dict:
        ms = [found["ms"] for found in self.rounds.values()]
        host = [found["host_ms"] for found in self.rounds.values()]
        times = {"ms": statistics.median(ms), "ms_min": min(ms), "ms_max": max(ms), "host_ms": statistics.median(host)}
        return {
            "way": self.name,
            **times,
            "rounds_ms": {n: found["ms"] for n, found in self.rounds.items()},
            **self.row,
        }


def start(name: str, store: dist.TCPStore, folder: str, options: argparse.Namespace) -> Runner:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus)]
    command += [__file__, *sys.argv[1:], "--way", name, "--port", str(store.port)]
    output = Path(folder) / f"{name}.txt"
    with output.open("w") as file:
        return Runner(name, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT), output, store)


def free_gib() -> list[float]:
    if DEVICE == "cpu":
        return [0.0]
    return [torch.cuda.mem_get_info(card)[0] / 2**30 for card in range(torch.cuda.device_count())]


def measure(names: list[str], options: argparse.Namespace, done: list[dict]) -> list[dict]:
    """Rows of ways that take turns. What is there is saved after every round."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=HOUR)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        runners = [start(name, store, folder, options) for name in names]
        try:
            for runner in runners:
                before = free_gib()
                runner.row = runner.turn("learn")
                runner.row["used_gib"] = max(a - b for a, b in zip(before, free_gib(), strict=True))
                if runner.is_well:
                    runner.turn("rest")
            for number in range(options.rounds):
                for runner in runners:
                    if runner.is_well and (found := runner.turn("time")):
                        runner.rounds[number] = found
                rows = [runner.finished_row() for runner in runners if runner.rounds]
                save(done + rows, options)
        finally:
            for runner in runners:
                if runner.is_well and not runner.is_asked:
                    runner.turn("end")
            for runner in runners:
                runner.finish()
    return rows


def compare(rows: list[dict]) -> None:
    """Shares of the bound, and deviations from the hand-written loop."""
    base = next((row["losses"] for row in rows if row["way"] == "reference"), None)
    bounds = {row["way"].removeprefix("bound"): row for row in rows if row["way"].startswith("bound")}
    for row in rows:
        learns = base is not None and not row["way"].startswith("bound")  # the bound's ranks go their own ways
        row["deviation"] = max(abs(a - b) for a, b in zip(row["losses"], base, strict=True)) if learns else None
        kind = next((f"-{word}" for word in ("captured", "compiled") if row["way"].endswith(word)), "")
        if kind in bounds:
            best = bounds[kind]["rounds_ms"]
            shares = [best[number] / ms for number, ms in row["rounds_ms"].items() if number in best]
            row |= {"of_bound": statistics.median(shares), "of_bound_range": [min(shares), max(shares)]}


def save(rows: list[dict], options: argparse.Namespace) -> None:
    compare(rows)
    if options.save is not None:
        facts = {"card": card_name(), "torch": torch.__version__, "command": " ".join(sys.argv), "rows": rows}
        options.save.write_text(json.dumps(facts, indent=1))


def card_name() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"


def show(rows: list[dict], options: argparse.Namespace) -> None:
    job = job_of(options)
    print(f"{job}, {options.gpus} x {card_name()}, torch {torch.__version__}")
    sizes = f"{'used':>6} {'alloc':>6} {'resv':>6}"
    print(
        f"{'way':>20} {'ms':>7} {'(min':>6} - {'max)':>6} {'host':>6} {sizes}  of bound (range)"
        f"{'deviation':>15}  last loss"
    )
    for row in rows:
        lowest, highest = row.get("of_bound_range", (float("nan"), float("nan")))
        deviation = "" if row["deviation"] is None else f"{row['deviation']:.1e}"
        print(
            f"{row['way']:>20} {row['ms']:7.1f} {row['ms_min']:6.1f} - {row['ms_max']:6.1f} {row['host_ms']:6.1f} "
            f"{row['used_gib']:6.2f} {row.get('allocated_gib', 0):6.2f} {row.get('reserved_gib', 0):6.2f}  "
            f"{row.get('of_bound', float('nan')):.3f} ({lowest:.3f}-{highest:.3f})  {deviation:>9}  "
            f"{row['losses'][-1]:.4f}"
        )


def job_of(options: argparse.Namespace) -> Job:
    return Job(options.size, options.tokens, not options.unclipped, options.micro_batches, options.recompute)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--size", default="1b")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch, on one GPU")
    parser.add_argument("--steps", type=int, default=50, help="of the loss curve")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--unclipped", action="store_true")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--recompute", action="store_true", help="all blocks, fully")
    parser.add_argument("--save", type=Path, default=None)
    parser.add_argument("--way", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        child(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    rows: list[dict] = []
    for group in options.ways.split("/"):
        rows += measure(group.split(","), options, rows)
    save(rows, options)
    show(rows, options)


if __name__ == "__main__":
    main()
