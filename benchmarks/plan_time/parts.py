"""What the parts of a step take on one GPU: alone in a burst, alone and sustained, and inside whole steps.

    python benchmarks/plan_time/parts.py [--save benchmarks/plan_time/results/parts_NAME.json]    # one GPU, 3 minutes
    python benchmarks/plan_time/parts.py --only lamina:1b:8192,lamina-compiled:1b:8192            # these steps alone

A planner adds up parts that were timed alone. Where the sum is not the step, this says which part was wrong: products
and attention at the clock of a burst, of a card that has been busy with the same for a second, and of one that is busy
with all that a block runs; elementwise kernels by size; what a kernel costs inside a CUDA graph when it does nothing;
and the kernels of real steps by kind, with the time in which none ran. SM clock and power are read beside everything
(nvidia-smi).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

GPU_STEP = Path(__file__).parents[1] / "gpu_step"
WHICH = ("forward", "input", "weight")
WARM_S = 0.6  # busy before a sustained time is taken
DIM, HEADS, KV_HEADS, HIDDEN, VOCABULARY, LENGTH = 2048, 16, 8, 5632, 32768, 2048  # of gpu_step's 1b
STEPS = (  # way, size, tokens
    ("bound", "1b", 8192),
    ("bound-captured", "1b", 8192),
    ("bound-captured", "1b", 2048),
    ("lamina", "1b", 8192),
    ("lamina-captured", "1b", 2048),
    ("bound", "3b", 8192),
    ("lamina", "3b", 4096),
    ("bound-captured", "3b", 2048),
    ("four eager blocks", "1b", 8192),
    ("chunked loss", "1b", 8192),
)
KINDS = {
    "product": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
    "attention": ("flash", "fmha"),
    "optimizer": ("multi_tensor", "adam", "foreach", "lamina", "lpnorm"),
}


class Clock:
    """SM clock and power, sampled beside what runs."""

    def __init__(self) -> None:
        query = "clocks.sm,power.draw,clocks_event_reasons.active"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", "0", "-lms", "50"]
        self.samples: list[tuple[float, float, float, str]] = []
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            mhz, watt, why = (part.strip() for part in (line.split(",") + ["", ""])[:3])
            if mhz.replace(".", "").isdigit() and watt.replace(".", "").isdigit():
                self.samples.append((time.perf_counter(), float(mhz), float(watt), why))

    def since(self, begin: float) -> tuple[float, float, str]:
        """Mean clock in MHz, mean power in W, and the last reason for a lower clock."""
        found = [s for s in self.samples if s[0] >= begin]
        if not found:
            return 0.0, 0.0, ""
        return sum(s[1] for s in found) / len(found), sum(s[2] for s in found) / len(found), found[-1][3]

    def close(self) -> None:
        self._process.terminate()


def timed_ms(call: Callable[[], object], repeats: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def alone(call: Callable[[], object], clock: Clock) -> dict[str, float]:
    """Burst and sustained ms, and the clock of the second."""
    call()
    torch.cuda.synchronize()
    time.sleep(0.15)
    burst_ms = min(timed_ms(call, 5) for _ in range(3))
    begin = time.perf_counter()
    repeats = max(3, int(50 / max(burst_ms, 1e-3)))
    while time.perf_counter() - begin < WARM_S:
        timed_ms(call, repeats)
    late = time.perf_counter()
    sustained = [timed_ms(call, repeats) for _ in range(4)]
    mhz, watt, _ = clock.since(late)
    return {"burst_ms": burst_ms, "ms": sorted(sustained)[1], "mhz": mhz, "watt": watt}


def beside_a_block(calls: dict[str, Callable[[], object]], clock: Clock) -> dict[str, dict[str, float]]:
    """ms of each call, a few at a time, on a card that is busy with what a block runs, in a block's proportions."""
    shapes, rest = products(8192), others(8192)
    block = [shapes[f"{name} 8192 {kind}"] for name in ("q", "q", "k", "k", "gate", "gate", "down") for kind in WHICH]
    block += [call for name, (call, _) in rest.items() if name.split()[0] in ("attention", "silu", "mul", "norm")]

    def busy(seconds: float) -> None:
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            for call in block:
                call()
            torch.cuda.synchronize()

    busy(1.5)
    found = {}
    for name, call in calls.items():
        begin, times = time.perf_counter(), []
        for _ in range(3):
            busy(0.06)
            times.append(timed_ms(call, 4))
        mhz, watt, _ = clock.since(begin)
        found[name] = {"ms": sorted(times)[1], "mhz": mhz, "watt": watt}
    return found


def products(tokens: int) -> dict[str, Callable[[], object]]:
    """Forward, gradient of the input, gradient of the weight, of each shape of a block and of the output layer."""
    calls: dict[str, Callable[[], object]] = {}
    for name, n, k in (
        ("q", DIM, DIM),
        ("k", DIM // 2, DIM),
        ("gate", HIDDEN, DIM),
        ("down", DIM, HIDDEN),
        ("head", VOCABULARY, DIM),
    ):
        x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
        g = torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16)
        calls[f"{name} {tokens} forward"] = lambda x=x, w=w: F.linear(x, w)
        calls[f"{name} {tokens} input"] = lambda g=g, w=w: g @ w
        calls[f"{name} {tokens} weight"] = lambda g=g, x=x: g.t() @ x
    return calls


def others(tokens: int) -> dict[str, tuple[Callable[[], object], float]]:
    """Attention and passes over memory, with the GB that each moves (or TFLOP of attention)."""
    batch = tokens // LENGTH
    q, k, v = (
        torch.randn(batch, heads, LENGTH, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    done = attend()
    gradient = torch.randn_like(done)
    x = torch.randn(tokens, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    normed = F.rms_norm(x, (DIM,), weight, 1e-5)
    ones = torch.ones_like(normed)
    logits = torch.randn(tokens, VOCABULARY, device="cuda", requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.long, device="cuda")
    loss = F.cross_entropy(logits, targets)
    flops = 2.0 * batch * HEADS * LENGTH * LENGTH * 128 / 1e12
    return {
        f"attention {tokens} forward": (lambda: attend().detach(), flops),
        f"attention {tokens} backward": (
            lambda: torch.autograd.grad(done, (q, k, v), gradient, retain_graph=True),
            2.5 * flops,
        ),
        f"silu {tokens}": (lambda: F.silu(y), 2e-9 * y.nbytes),
        f"mul {tokens}": (lambda: y * y, 2e-9 * y.nbytes),
        f"add {tokens}": (lambda: x.detach() + ones, 3e-9 * x.nbytes),
        f"norm {tokens} forward": (lambda: F.rms_norm(x.detach(), (DIM,), weight.detach(), 1e-5), 2e-9 * x.nbytes),
        f"norm {tokens} backward": (
            lambda: torch.autograd.grad(normed, (x, weight), ones, retain_graph=True),
            3e-9 * x.nbytes,
        ),
        f"loss {tokens} forward": (lambda: F.cross_entropy(logits.detach(), targets), 3e-9 * logits.nbytes),
        f"loss {tokens} backward": (
            lambda: torch.autograd.grad(loss, logits, retain_graph=True),
            3e-9 * logits.nbytes,
        ),
        f"cast {tokens}": (lambda: logits.detach().to(torch.bfloat16), 1.5e-9 * logits.nbytes),
    }


class Eager(nn.Module):
    """A block as Hugging Face's Llama of 1.24 B has it: norms in fp32 by hand, rotations, heads of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(DIM)) for _ in range(2))
        shapes = {"q": (DIM, DIM), "k": (512, DIM), "v": (512, DIM), "o": (DIM, DIM)}
        shapes |= {"gate": (8192, DIM), "up": (8192, DIM), "down": (DIM, 8192)}
        self.maps = nn.ModuleDict({name: nn.Linear(k, n, bias=False) for name, (n, k) in shapes.items()})

    def norm(self, x: Tensor, which: int) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.norms[which] * wide.to(x.dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm(x, 0)
        q, k, v = (self.maps[name](y).view(batch, length, -1, 64).transpose(1, 2) for name in "qkv")

        def turned(t: Tensor) -> Tensor:
            return t * cos + torch.cat((-t[..., 32:], t[..., :32]), -1) * sin

        attended = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        x = x + self.maps["o"](attended.transpose(1, 2).reshape(batch, length, DIM))
        y = self.norm(x, 1)
        return x + self.maps["down"](F.silu(self.maps["gate"](y)) * self.maps["up"](y))


def four_eager_blocks(*_: object) -> Callable[..., object]:
    with torch.device("cuda"):
        blocks = nn.ModuleList(Eager() for _ in range(4)).to(torch.bfloat16)
        data = torch.randn(4, LENGTH, DIM, dtype=torch.bfloat16).requires_grad_()
        angles = torch.randn(1, 1, LENGTH, 64, dtype=torch.bfloat16)

    def step(*_: object) -> None:
        x = data
        for block in blocks:
            x = block(x, angles, angles)
        x.backward(data.detach())
        blocks.zero_grad()

    return step


def chunked_loss(*_: object) -> Callable[..., object]:
    from lamina.train.chunked_loss import ChunkedHead

    with torch.device("cuda"):
        head = nn.Linear(DIM, 128256, bias=False).to(torch.bfloat16)
        hidden = torch.randn(4, LENGTH, DIM, dtype=torch.bfloat16).requires_grad_()
        labels = torch.randint(0, 128256, (4 * LENGTH,))
    chunked = ChunkedHead(head, 128256)
    chunked.labels, chunked.factor = labels, 1 / labels.numel()

    def step(*_: object) -> None:
        (chunked(hidden).sum() * chunked.factor).backward()
        head.zero_grad()
        hidden.grad = None

    return step


def in_a_graph(numel: int, count: int = 1000) -> float:
    """us of one elementwise kernel that waits for the one before it, inside a CUDA graph."""
    x = torch.ones(numel, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    x.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(count):
            x.add_(1)
    graph.replay()
    return min(timed_ms(graph.replay, 3) for _ in range(3)) / count * 1e3


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gpu_step_{name}", GPU_STEP / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def whole(way: str, size: str, tokens: int, clock: Clock) -> dict:
    """A step's time early and late, and its kernels by kind."""
    ways = load("ways")
    job = ways.Job(size, tokens)
    step = (ways.BUILDERS | {"four eager blocks": four_eager_blocks, "chunked loss": chunked_loss})[way](job)
    data = job.batch(0)
    for number in range(3):
        step(*data, number)
    torch.cuda.synchronize()
    time.sleep(0.5)
    early_ms = timed_ms(lambda: step(*data, 5), 3)
    begin = time.perf_counter()
    while time.perf_counter() - begin < 2.0:
        timed_ms(lambda: step(*data, 5), 5)
    late = time.perf_counter()
    times = sorted(timed_ms(lambda: step(*data, 5), 5) for _ in range(5))
    mhz, watt, why = clock.since(late)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(2):
            step(*data, 5)
        torch.cuda.synchronize()
    row = {"way": way, "size": size, "tokens": tokens, "early_ms": early_ms, "ms": times[2], "ms_all": times}
    row |= {"mhz": mhz, "watt": watt, "why": why} | kernels_of(profile)
    return row


def kernels_of(profile: torch.profiler.profile) -> dict:
    """Kernels of two steps: ms and number a step by kind, ms in which none ran, the names that take most."""
    spans, ms, counts, names = [], defaultdict(float), defaultdict(int), defaultdict(lambda: [0, 0.0])
    for event in profile.profiler.kineto_results.events():
        if event.device_type() != torch.autograd.DeviceType.CUDA or event.duration_ns() <= 0:
            continue
        name = event.name()
        kind = next((k for k, words in KINDS.items() if any(word in name.lower() for word in words)), "memory")
        spans.append((event.start_ns(), event.end_ns()))
        ms[kind] += event.duration_ns() / 2e6
        counts[kind] += 1
        names[name][0] += 1
        names[name][1] += event.duration_ns() / 2e6
    busy_ns, end_ns = 0, 0
    for start, stop in sorted(spans):
        busy_ns += max(0, stop - max(start, end_ns))
        end_ns = max(end_ns, stop)
    span_ms = (max(s[1] for s in spans) - min(s[0] for s in spans)) / 2e6
    most = sorted(names.items(), key=lambda item: -item[1][1])[:28]
    return {
        "profiled_ms": span_ms,
        "idle_ms": span_ms - busy_ns / 2e6,
        "kernels": {kind: [round(ms[kind], 2), counts[kind] / 2] for kind in ms},
        "names": [[name[:150], n / 2, round(total, 3)] for name, (n, total) in most],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--only", default="", metavar="WAY:SIZE:TOKENS,...", help="whole steps and nothing else")
    options = parser.parse_args()
    only = [word.split(":") for word in options.only.split(",") if word]
    defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    os.environ.update({k: os.environ.get(k, v) for k, v in defaults.items()})
    torch.cuda.set_device(0)
    dist.init_process_group("cuda:nccl,cpu:gloo")
    clock, begin = Clock(), time.perf_counter()
    facts: dict = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "alone": {}, "steps": []}
    print(facts["card"], facts["torch"])
    if not only:
        measure_alone(facts, clock)
    print(f"-- {time.perf_counter() - begin:.0f} s")
    for way, size, tokens in [(way, size, int(tokens)) for way, size, tokens in only] or STEPS:
        torch.cuda.empty_cache()
        try:
            row = whole(way, size, tokens, clock)
        except Exception as problem:  # the others are worth having
            print(f"{way} {size} {tokens}: {type(problem).__name__}: {str(problem)[:300]}")
            continue
        facts["steps"].append(row)
        print(
            f"{way} {size} {tokens}: {row['ms']:.2f} ms ({row['early_ms']:.2f} early; {row['mhz']:.0f} MHz "
            f"{row['watt']:.0f} W {row['why']}), profiled {row['profiled_ms']:.2f}, idle {row['idle_ms']:.2f}, "
            f"{row['kernels']}"
        )
        if options.save is not None:
            options.save.write_text(json.dumps(facts, indent=1))
    shown = ("bound", "four eager blocks", "chunked loss")
    for row in [row for row in facts["steps"] if only or row["way"] in shown]:
        print(f"most of {row['way']} {row['size']} {row['tokens']} (launches a step, ms):")
        for name, count, ms in row["names"][:22]:
            print(f"  {count:6.0f} {ms:8.3f}  {name[:110]}")
    clock.close()
    dist.destroy_process_group()
    print(f"{time.perf_counter() - begin:.0f} s")


def measure_alone(facts: dict, clock: Clock) -> None:
    """Whatever is timed outside of whole steps."""
    print(f"{'alone':<26} {'burst ms':>9} {'ms':>9} {'MHz':>5} {'W':>4}   rate (TFLOP/s or GB/s) burst, sustained")
    for tokens in (8192, 2048):
        for name, call in products(tokens).items():
            n, k = {"q": (DIM, DIM), "k": (DIM // 2, DIM), "gate": (HIDDEN, DIM), "down": (DIM, HIDDEN)}.get(
                name.split()[0], (VOCABULARY, DIM)
            )
            show(facts, name, alone(call, clock), 2e-12 * tokens * n * k)
        for name, (call, amount) in others(tokens).items():
            show(facts, name, alone(call, clock), amount)
        torch.cuda.empty_cache()
    calls = products(8192) | products(2048) | {k: v[0] for k, v in (others(8192) | others(2048)).items()}
    facts["beside_a_block"] = found = beside_a_block(calls, clock)
    print("beside a block (ms, MHz, W):")
    print("; ".join(f"{name} {f['ms']:.4f} {f['mhz']:.0f} {f['watt']:.0f}" for name, f in found.items()))
    del calls
    torch.cuda.empty_cache()
    facts["graph_us"] = {str(numel): in_a_graph(numel) for numel in (1, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26)}
    print("one add_ inside a graph, us by elements:", {k: round(v, 2) for k, v in facts["graph_us"].items()})
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    show(facts, "copy 1 GiB", alone(functools.partial(target.copy_, source), clock), 2 * (1 << 30) / 1e9)
    del source, target


def show(facts: dict, name: str, found: dict[str, float], amount: float) -> None:
    """`amount`: TFLOP of a product or of attention, GB of what only moves."""
    facts["alone"][name] = {k: round(v, 5) for k, v in found.items()} | {"amount": amount}
    print(
        f"{name:<26} {found['burst_ms']:9.4f} {found['ms']:9.4f} {found['mhz']:5.0f} {found['watt']:4.0f}   "
        f"{amount / found['burst_ms'] * 1e3:8.1f} {amount / found['ms'] * 1e3:8.1f}"
    )


if __name__ == "__main__":
    main()
