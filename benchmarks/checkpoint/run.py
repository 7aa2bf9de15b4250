"""Saving and loading on two ranks: lamina beside torch.distributed.checkpoint with FSDP2, one after the other.

    python benchmarks/checkpoint/run.py                          # a state of 201 MB
    python benchmarks/checkpoint/run.py --parameters 1e9 --folder /a/real/disk
    python benchmarks/checkpoint/run.py --parameters 1e9 --apart --acts save load restart --no-memory --rounds 2
    python benchmarks/checkpoint/run.py --device cuda --ranks 1 --parameters 1e9

Each way has processes of its own. The state is float32 parameters with AdamW's two moments (12 bytes a parameter),
stepped once. Times are the slower rank's, medians over rounds; in every round the ways follow one another, so that a
disturbance of the machine hits all; with `--apart` each round of a way has new processes, for half the memory and
without a round to warm up. Blocked: how long the training thread waits for a save that goes on beside it;
`copy`: one plain copy of the rank's own state into host memory that is there already, the floor for that; it is made
just before each save beside training, and the ratio is of these pairs. On a GPU that memory is pinned, and times last
until the device has nothing left to do.
Host memory: the largest growth of a rank's resident set above what it was before the call, pages of files not counted;
another process looks, since a thread of the rank would wait for the interpreter's lock.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here, before ranks are forked: the first optimizer of a process imports it
import torch.distributed as dist
from torch import Tensor, nn

import lamina

WIDTH = 2048
WAYS = ("lamina", "dcp")
MOMENTS = ("exp_avg", "exp_avg_sq")
ACTS = ("save", "load", "restart", "copy", "save_beside")


def build(parameters: float) -> nn.Module:
    """Square layers; as many as come nearest to the wanted number of parameters."""
    layers = max(1, round(parameters / WIDTH**2))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


class Way:
    """One library's model, optimizer, and how it saves and loads."""

    def __init__(self, parameters: float, device: str) -> None:
        self.model = build(parameters).to(device)
        self.optimizer: torch.optim.Optimizer

    def step_once(self) -> None:
        """Gradients of ones, one at a time, for little memory: the optimizer only has to have a state."""
        for param in self.model.parameters():
            param.grad = torch.ones_like(param)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """A new one, without states: as a job has it that starts again."""
        raise NotImplementedError

    def own(self) -> list[Tensor]:
        """What this rank holds, parameters and moments."""
        raise NotImplementedError

    def save(self, path: str) -> None:
        raise NotImplementedError

    def save_beside(self, path: str) -> Callable[[], None]:
        """Start a save and return what waits for it."""
        raise NotImplementedError

    def load(self, path: str) -> None:
        raise NotImplementedError


class Lamina(Way):
    def __init__(self, parameters: float, device: str) -> None:
        super().__init__(parameters, device)
        lamina.shard(self.model, "zero3", start="trust")
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return lamina.optim.AdamW(self.model.parameters())

    def own(self) -> list[Tensor]:
        moments = [getattr(s[key], "local", s[key]) for s in self.optimizer.state.values() for key in MOMENTS]
        return [getattr(p, "local", p).detach() for p in self.model.parameters()] + moments

    def save(self, path: str) -> None:
        lamina.save(path, self.model, self.optimizer)

    def save_beside(self, path: str) -> Callable[[], None]:
        lamina.save(path, self.model, self.optimizer, wait=False)
        return lamina.checkpoint.finish

    def load(self, path: str) -> None:
        lamina.load(path, self.model, self.optimizer)


class Dcp(Way):
    def __init__(self, parameters: float, device: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(parameters, device)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), fused=True)

    def own(self) -> list[Tensor]:
        moments = [s[key]._local_tensor for s in self.optimizer.state.values() for key in MOMENTS]
        return [p._local_tensor.detach() for p in self.model.parameters()] + moments

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def save(self, path: str) -> None:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(path, sync_files=True)
        dcp.save(self._state(), storage_writer=writer)

    def save_beside(self, path: str) -> Callable[[], None]:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(path, sync_files=True)
        return dcp.async_save(self._state(), storage_writer=writer).result

    def load(self, path: str) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


class Watcher:
    """The largest growth of the anonymous memory of processes, seen from outside."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.peak_bytes = 0
        self._before = {pid: anonymous_bytes(pid) for pid in pids}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            for pid, before in self._before.items():
                self.peak_bytes = max(self.peak_bytes, anonymous_bytes(pid) - before)


def anonymous_bytes(pid: int) -> int:
    """Resident memory that no file stands behind."""
    found = 0
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            found += int(line.split()[1]) * 1024
    return found


def drop_from_cache(folder: str) -> None:
    """What has been written to the disk is forgotten: the next reader has to ask the disk."""
    for path in Path(folder).iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@dataclass(frozen=True)
class Setting:
    """What all ranks of all ways are given."""

    room: str
    parameters: float
    device: str
    ranks: int
    cold: bool = False  # files are not in the page cache when they are loaded


def serve(kind: str, rank: int, setting: Setting, pipe: Any) -> None:
    """A rank: measure what it is asked for."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    is_cuda = setting.device == "cuda"
    if is_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        init_method=f"file://{setting.room}/store-{kind}",
        rank=rank,
        world_size=setting.ranks,
    )
    torch.manual_seed(0)
    way: Way = {"lamina": Lamina, "dcp": Dcp}[kind](setting.parameters, setting.device)
    way.step_once()
    settle = torch.cuda.synchronize if is_cuda else lambda: None
    host: list[Tensor] = []

    def copy(path: str) -> None:
        if not host:
            host.extend(torch.zeros(t.shape, dtype=t.dtype, pin_memory=is_cuda) for t in way.own())
        torch._foreach_copy_(host, way.own(), non_blocking=True)

    acts = {"copy": copy, "save": way.save, "save_beside": way.save_beside, "load": way.load, "restart": way.load}
    pipe.send(sum(t.numel() * t.element_size() for t in way.own()))
    while (asked := pipe.recv()) is not None:
        what, path = asked
        if what == "restart":
            way.optimizer = way.make_optimizer()
        settle()
        dist.barrier()
        begin, cpu_begin, thread_begin = time.perf_counter(), time.process_time(), time.thread_time()
        waiting = acts[what](path)
        settle()
        took_s, thread_cpu_s = time.perf_counter() - begin, time.thread_time() - thread_begin
        if callable(waiting):
            waiting()
        whole_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
        pipe.send({"s": took_s, "whole_s": whole_s, "cpu_s": cpu_s, "thread_cpu_s": thread_cpu_s})
    os._exit(0)


class Ranks:
    """The processes of one way."""

    def __init__(self, kind: str, setting: Setting) -> None:
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for rank in range(setting.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(kind, rank, setting, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        self.state_bytes = sum(pipe.recv() for pipe in self.pipes)

    def ask(self, what: str, path: str) -> dict[str, float]:
        for pipe in self.pipes:
            pipe.send((what, path))
        answers = [pipe.recv() for pipe in self.pipes]
        return {key: max(answer[key] for answer in answers) for key in answers[0]}

    def peak_bytes(self, what: str, path: str) -> int:
        """Of one call, the rank that grows most."""
        with Watcher([process.pid for process in self.processes if process.pid is not None]) as watcher:
            self.ask(what, path)
        return watcher.peak_bytes

    def end(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join()


def measure(setting: Setting, rounds: int, acts: Sequence[str], apart: bool) -> dict[str, Any]:
    seen: dict[str, dict[str, list[float]]] = {kind: {} for kind in WAYS}
    ways: dict[str, Ranks] = {}
    for number in range(rounds + 1 - apart):  # the first round warms up: buffers, groups, the page cache
        for kind in WAYS:
            ranks = ways[kind] = ways.get(kind) or Ranks(kind, setting)
            one_round(setting, kind, ranks, acts, seen[kind] if number or apart else {})
            if apart:
                end(setting, kind, ways.pop(kind))
    for kind in list(ways):
        end(setting, kind, ways.pop(kind))
    state_bytes = ranks.state_bytes
    if "save_beside" in acts:
        ours = seen["lamina"]
        for clock in ("s", "thread_cpu_s"):
            pairs = zip(ours[f"save_beside_{clock}"], ours[f"copy_{clock}"], strict=True)
            ours[f"blocked_per_copy_{clock}"] = [a / b for a, b in pairs]
    for key in [act for act in ("save", "load", "restart") if act in acts]:
        pairs = zip(seen["lamina"][f"{key}_s"], seen["dcp"][f"{key}_s"], strict=True)
        seen["lamina"][f"{key}_per_dcp"] = [a / b for a, b in pairs]
    table = {kind: {key: statistics.median(values) for key, values in by.items()} for kind, by in seen.items()}
    worst = {kind: {key: max(values) for key, values in by.items()} for kind, by in seen.items()}
    setup = {"state_bytes": state_bytes, "rounds": rounds, "acts": list(acts), "apart": apart}
    return {**setup, "median": table, "largest": worst}


def end(setting: Setting, kind: str, ranks: Ranks) -> None:
    ranks.end()
    Path(f"{setting.room}/store-{kind}").unlink(missing_ok=True)
    for left in Path(setting.room).glob(f"{kind}-*"):
        shutil.rmtree(left)


def one_round(setting: Setting, kind: str, ranks: Ranks, acts: Sequence[str], into: dict[str, list[float]]) -> None:
    for what in acts:
        if what == "copy" and kind != "lamina":  # as much, and the memory that it is copied into
            continue
        path = f"{setting.room}/{kind}-{'save' if what in ('load', 'restart') else what}"
        if what.startswith("save"):
            shutil.rmtree(path, ignore_errors=True)
        if what != "save_beside":
            os.sync()
        if setting.cold and what in ("load", "restart"):
            drop_from_cache(path)
        found = ranks.ask(what, path)
        print(f"{kind} {what}: {found['s']:.3f} s", file=sys.stderr, flush=True)
        for key, value in found.items():
            into.setdefault(f"{what}_{key}", []).append(value)


def show(found: dict[str, Any]) -> str:
    ours, dcp = found["median"]["lamina"], found["median"]["dcp"]
    names = {"save": "save", "load": "load", "restart": "load into a new optimizer"}
    rows = [(f"{name}, s", f"{act}_s") for act, name in names.items()]
    rows += [(f"{name}, s of CPU time", f"{act}_cpu_s") for act, name in names.items()]
    rows.append(("blocked by a save beside training, s", "save_beside_s"))
    rows.append(("that save until it is complete, s", "save_beside_whole_s"))
    figures = [(name, ours[key], dcp[key]) for name, key in rows if key in ours]
    for act, name in {"save": "save", "load": "load", "save_beside": "save beside training"}.items():
        if found["first_peak_bytes"]:
            first = [found["first_peak_bytes"][kind][act] / 2**20 for kind in WAYS]
            figures.append((f"host memory of the first {name}, MiB", first[0], first[1]))
    own = found["state_bytes"] / found["ranks"]
    lines = [
        f"state {found['state_bytes'] / 2**20:.0f} MiB, {own / 2**20:.0f} a rank; medians of {found['rounds']} rounds"
    ]
    lines += [f"| {name} | {a:.3f} | {b:.3f} | {a / b if b else float('nan'):.2f} |" for name, a, b in figures]
    for act, name in names.items():
        if act in found["acts"]:
            lines.append(f"{name} / dcp's, median of rounds {ours[f'{act}_per_dcp']:.2f}")
    if "save_beside" in found["acts"]:
        copy_s, blocked_s = ours["copy_s"], ours["save_beside_s"]
        lines.append(
            f"a plain copy of the rank's state {copy_s:.3f} s; blocked / copy {ours['blocked_per_copy_s']:.2f}"
        )
        lines.append(f"the same, CPU time of the blocked thread {ours['blocked_per_copy_thread_cpu_s']:.2f}")
        lines.append(f"blocked / blocked of dcp.async_save {blocked_s / dcp['save_beside_s']:.3f}")
        if "save" in found["acts"]:
            lines.append(f"blocked / dcp.save {blocked_s / dcp['save_s']:.3f}")
    return "\n".join(lines)


def first_memory(setting: Setting) -> dict[str, dict[str, float]]:
    """Host memory of the first call of each kind, each in processes of its own."""
    found: dict[str, dict[str, float]] = {}
    for kind in WAYS:
        for what in ("save", "load", "save_beside"):
            Path(f"{setting.room}/store-{kind}").unlink(missing_ok=True)
            ranks = Ranks(kind, setting)
            path = f"{setting.room}/{kind}-{'first' if what != 'save_beside' else 'beside'}"
            found.setdefault(kind, {})[what] = ranks.peak_bytes(what, path)
            ranks.end()
        for left in Path(setting.room).glob(f"{kind}-*"):
            shutil.rmtree(left)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=16.8e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--acts", nargs="+", choices=ACTS, default=ACTS, help="what is measured")
    parser.add_argument("--apart", action="store_true", help="a way's processes end with its round: half the memory")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="do not look at host memory")
    parser.add_argument("--cold", action="store_true", help="drop files from the page cache before each load")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU a rank")
    parser.add_argument("--folder", help="where checkpoints go; default: a temporary folder")
    parser.add_argument("--save", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    room = tempfile.mkdtemp(dir=options.folder)
    setting = Setting(room, options.parameters, options.device, options.ranks, options.cold)
    try:
        memory = first_memory(setting) if options.memory else {}
        for store in Path(room).glob("store-*"):
            store.unlink()
        found = measure(setting, options.rounds, options.acts, options.apart)
    finally:
        shutil.rmtree(room)
    found |= {"first_peak_bytes": memory, "ranks": options.ranks, "device": options.device, "cold": options.cold}
    found |= {"torch": torch.__version__, "machine": platform.platform(), "load_average": os.getloadavg()}
    print(show(found))
    if options.save is not None:
        options.save.parent.mkdir(exist_ok=True)
        options.save.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
