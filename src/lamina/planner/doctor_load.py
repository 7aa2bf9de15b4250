"""A GPU kept as busy as in a training step, while the doctor takes times on it.

Timed alone and for milliseconds, products run at a clock that no step holds: eight thousand tokens of 1.27 B parameters
run into an H200's power limit, at 1.6 GHz of 1.98. Products alone for a second hold less than that, since nothing
cools them. So between measurements the card runs what a block runs, in about the shares that a step has them: products
for three fifths of the time, attention for one, passes over memory for the rest. Each measured call is queued behind
that, so the card neither cools down nor waits for the host.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

HEAT_S = 1.5  # until the clock has come down to what the power limit allows
BETWEEN_MS = 60.0  # of load in front of each measured group
READ_S = 5.0  # at most, until clock and power have been read; nvidia-smi takes a second to begin
TOKENS, LENGTH, DIM, HIDDEN, HEADS = 8192, 2048, 2048, 5632, 16
PRODUCTS, PASSES = 12, 30  # in a round, beside one attention with its backward


class Load:
    """Work without an end; a round of it takes some milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._x, self._weight, self._hidden = (
            torch.randn(shape, device=device, dtype=torch.bfloat16)
            for shape in ((TOKENS, DIM), (HIDDEN, DIM), (TOKENS, HIDDEN))
        )
        shape = (TOKENS // LENGTH, HEADS, LENGTH, DIM // HEADS)
        self._query, self._key, self._value = (
            torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
        )
        self._round_ms = 1.0
        begin = time.perf_counter()
        while time.perf_counter() - begin < HEAT_S:
            started = time.perf_counter()
            for _ in range(4):
                self._run()
            torch.cuda.synchronize(device)
            self._round_ms = (time.perf_counter() - started) * 250  # the last ones count: the card is hot

    def queue(self, ms: float) -> None:
        """Put about so much of it on the current stream."""
        for _ in range(max(1, round(ms / self._round_ms))):
            self._run()

    def _run(self) -> None:
        for _ in range(PRODUCTS):
            linear(self._x, self._weight)
        with torch.enable_grad():  # whatever the measured call is under
            mixed = scaled_dot_product_attention(self._query, self._key, self._value, is_causal=True)
            torch.autograd.grad(mixed, (self._query, self._key, self._value), mixed.detach())
        for _ in range(PASSES):
            self._hidden * 1.0


def busy_ms(load: Load, call: Callable[[], object], repeats: int, groups: int) -> float:
    """Mean time of `call` behind `load`; the median of `groups`, each with a load of its own in front."""
    call()
    found = []
    for _ in range(groups):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        load.queue(BETWEEN_MS)
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize(load.device)
        found.append(begin.elapsed_time(end) / repeats)
    return sorted(found)[groups // 2]


def clock_of(load: Load) -> str:
    """What the card does under that load, in words for a machine file: "1590 MHz and 691 W"; empty if nobody says."""
    uuid = getattr(torch.cuda.get_device_properties(load.device), "uuid", "")
    wanted = ["nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    begin = time.perf_counter()
    try:
        with subprocess.Popen(wanted, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            while process.poll() is None:  # it reads what is so at its end, and the card cools in a moment
                if time.perf_counter() - begin > READ_S:
                    process.kill()
                load.queue(BETWEEN_MS)
                torch.cuda.synchronize(load.device)
            said, _ = process.communicate()
        mhz, watt = (float(word) for word in said.strip().split(","))
    except (OSError, ValueError):
        return ""
    return f"{mhz:.0f} MHz and {watt:.0f} W"


def kernel_us(device: torch.device, count: int = 1000, groups: int = 3) -> float:
    """Device time of a kernel that does next to nothing and waits for the one before it, inside a CUDA graph."""
    number = torch.ones(1, device=device)
    number.add_(1)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            number.add_(1)
    graph.replay()
    best = float("inf")
    for _ in range(groups):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        best = min(best, begin.elapsed_time(end) / count * 1e3)
    return best
