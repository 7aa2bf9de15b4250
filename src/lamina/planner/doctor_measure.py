"""How fast a machine is: what `lamina doctor` runs on every rank.

One interface, `Bench`, hides how time is taken and which sizes make sense; a GPU and a CPU differ in nothing else, so
that the tests run the same code as a GPU does. Each measurement is short (a few repeats, the fastest of three groups):
a planner needs rates to a few per cent, not records. Products and attention are timed on a busy device
(doctor_load.py).
"""

from __future__ import annotations

import abc
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from lamina.core.strategy import resolve
from lamina.planner.doctor_load import Load, busy_ms, clock_of, kernel_us
from lamina.planner.machine import CollectivePoint, MatrixPoint
from lamina.planner.memory import communicators

GROUPS = 3  # repeats of a measurement; the fastest counts
LEAST_REPEATS = 4  # times as many where the device is busy: what begins behind other work must not be short


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    products: tuple[tuple[int, int, int], ...]  # (m, n, k), 16 bit
    product_fp32: tuple[int, int, int]
    attention: tuple[int, int, int, int]  # batch, heads, sequence, head dim; causal
    copy_bytes: int
    collective_bytes: tuple[int, ...]
    launches: int
    repeats: int


GPU_SIZES = Sizes(
    products=(
        (8192, 8192, 8192),
        (8192, 14336, 4096),
        (8192, 4096, 4096),
        (8192, 2048, 2048),
        (8192, 5632, 2048),
        (8192, 32768, 2048),
        (2048, 2048, 2048),
        (16384, 768, 768),
        (1024, 1024, 1024),
        (8192, 1430, 1000),  # see Note [Odd sizes] in rates.py
        (8192, 50258, 768),
        (8192, 1429, 1000),
        (8192, 50257, 768),
    ),
    product_fp32=(4096, 4096, 4096),
    attention=(4, 16, 2048, 128),
    copy_bytes=1 << 30,
    collective_bytes=tuple(1 << shift for shift in (12, 20, 23, 25, 27, 28)),
    launches=2000,
    repeats=5,
)
CPU_SIZES = Sizes(
    products=((256, 256, 256), (512, 256, 256), (512, 512, 512)),
    product_fp32=(512, 512, 512),
    attention=(1, 4, 256, 32),
    copy_bytes=1 << 25,
    collective_bytes=tuple(1 << shift for shift in (12, 18, 21, 23)),
    launches=500,
    repeats=2,
)


@dataclass(frozen=True)
class Measured:
    """What rank 0 found; rates in the units of `Machine`, 0 where there was nothing to measure."""

    ranks: int
    backend: str  # "" for one rank
    products: tuple[MatrixPoint, ...]
    attention_forward_flops_per_s: float
    attention_backward_flops_per_s: float
    memory_bytes_per_s: float
    launch_us: float
    collectives: tuple[CollectivePoint, ...]
    interference: float
    fixed_bytes: int
    communicator_bytes: int  # of one of a sharded model's, that of a few numbers left out
    transports: dict[str, str] = field(default_factory=dict)  # name -> why it does not work, or ""
    kernel_us: float = 0.0
    clock: str = ""  # under which products and attention were timed


class Bench(abc.ABC):
    """Takes times on one kind of device."""

    sizes: Sizes
    device: torch.device

    @abc.abstractmethod
    def time_ms(self, call: Callable[[], object], repeats: int) -> float:
        """Mean time of `call` in the fastest of a few groups of `repeats`, after one call that does not count."""

    @abc.abstractmethod
    def busy_ms(self, call: Callable[[], object], repeats: int) -> float:
        """The same on a device that is as busy as in a training step: at the clock that it holds there."""

    @abc.abstractmethod
    def clock(self) -> str:
        """That clock, in words; "" where nobody knows."""

    @abc.abstractmethod
    def kernel_us(self) -> float:
        """What an operation costs the device beside its work; 0 where the host does that work."""

    @abc.abstractmethod
    def used_bytes(self) -> int:
        """Memory of the device that is gone beside torch's own."""

    @abc.abstractmethod
    def beside_ms(self, work: Callable[[], object], other: Callable[[], object]) -> float:
        """Time of `work` while `other` runs on a lane of its own; 0 where there are no lanes."""

    @abc.abstractmethod
    def neighbour(self) -> torch.device | None:
        """Where memory of another rank lies that this one can read without that rank's help."""


class CpuBench(Bench):
    def __init__(self, sizes: Sizes = CPU_SIZES) -> None:
        self.sizes, self.device = sizes, torch.device("cpu")

    def time_ms(self, call: Callable[[], object], repeats: int) -> float:
        call()
        best = float("inf")
        for _ in range(GROUPS):
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            best = min(best, (time.perf_counter() - begin) / repeats)
        return best * 1e3

    def busy_ms(self, call: Callable[[], object], repeats: int) -> float:
        return self.time_ms(call, repeats)

    def clock(self) -> str:
        return ""

    def kernel_us(self) -> float:
        return 0.0

    def used_bytes(self) -> int:
        return 0

    def beside_ms(self, work: Callable[[], object], other: Callable[[], object]) -> float:
        return 0.0

    def neighbour(self) -> torch.device | None:
        return self.device  # shared memory is memory


class CudaBench(Bench):
    def __init__(self, sizes: Sizes = GPU_SIZES) -> None:
        self.sizes, self.device = sizes, torch.device("cuda", torch.cuda.current_device())
        self._lane = torch.cuda.Stream(self.device)

    def time_ms(self, call: Callable[[], object], repeats: int) -> float:
        call()
        best = float("inf")
        for _ in range(GROUPS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            for _ in range(repeats):
                call()
            end.record()
            torch.cuda.synchronize()
            best = min(best, begin.elapsed_time(end) / repeats)
        return best

    @functools.cached_property
    def _load(self) -> Load:
        return Load(self.device)

    def busy_ms(self, call: Callable[[], object], repeats: int) -> float:
        return busy_ms(self._load, call, LEAST_REPEATS * repeats, GROUPS)

    def clock(self) -> str:
        return clock_of(self._load)

    def kernel_us(self) -> float:
        return kernel_us(self.device)

    def used_bytes(self) -> int:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        return total_bytes - free_bytes - torch.cuda.memory_reserved(self.device)

    def beside_ms(self, work: Callable[[], object], other: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(GROUPS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            with torch.cuda.stream(self._lane):
                other()
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            best = min(best, begin.elapsed_time(end))
        return best

    def neighbour(self) -> torch.device | None:
        own, count = self.device.index, torch.cuda.device_count()
        other = (own + 1) % count
        reachable = other != own and torch.cuda.can_device_access_peer(own, other)
        return torch.device("cuda", other) if reachable else None


def bench_of(kind: str) -> Bench:
    return CudaBench() if kind == "cuda" else CpuBench()


def measure(bench: Bench) -> Measured:
    """Everything, on this rank; collective if there is a process group."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    products = tuple(_product(bench, shape, torch.bfloat16) for shape in bench.sizes.products)
    products += (_product(bench, bench.sizes.product_fp32, torch.float32),)
    forward, backward = _attention(bench)
    kernel, clock = bench.kernel_us(), bench.clock()
    collectives: tuple[CollectivePoint, ...] = ()
    interference, transports = 0.0, {}
    fixed_bytes, communicator_bytes = bench.used_bytes(), 0  # libraries are loaded, nobody has met
    if ranks > 1:
        collectives = _collectives(bench, ranks)
        interference = _interference(bench, ranks)
        before_bytes, made = bench.used_bytes(), communicators(resolve("zero3", ranks))
        transports["c10d"] = try_transport("c10d", bench.device)
        communicator_bytes = max(0, bench.used_bytes() - before_bytes) // made
        transports["peer"] = try_transport("peer", bench.device)
        dist.barrier()
        collectives += _copies(bench, ranks)
    return Measured(
        ranks,
        dist.get_backend_config() if ranks > 1 else "",
        products,
        forward,
        backward,
        _memory_rate(bench),
        _launch_us(bench),
        collectives,
        interference,
        fixed_bytes,
        communicator_bytes,
        transports,
        kernel,
        clock,
    )


def _product(bench: Bench, shape: tuple[int, int, int], dtype: torch.dtype) -> MatrixPoint:
    m, n, k = shape
    a = torch.randn(m, k, device=bench.device, dtype=dtype)
    b = torch.randn(n, k, device=bench.device, dtype=dtype)
    ms = bench.busy_ms(lambda: nn.functional.linear(a, b), bench.sizes.repeats)
    return MatrixPoint(m, n, k, ms, dtype.itemsize)


def _attention(bench: Bench) -> tuple[float, float]:
    """Rates of forward and backward; backward has two and a half times the operations, as it forms scores again."""
    batch, heads, length, width = bench.sizes.attention
    q, k, v = (
        torch.randn(
            batch, heads, length, width, device=bench.device, dtype=torch.bfloat16, requires_grad=True
        )  # (batch, heads, length, width)
        for _ in range(3)
    )
    grad = torch.randn_like(q)
    attend = nn.functional.scaled_dot_product_attention

    def both() -> None:
        torch.autograd.grad(attend(q, k, v, is_causal=True), (q, k, v), grad)

    with torch.no_grad():
        forward_ms = bench.busy_ms(lambda: attend(q, k, v, is_causal=True), bench.sizes.repeats)
    backward_ms = max(bench.busy_ms(both, bench.sizes.repeats) - forward_ms, forward_ms)
    flops = 2.0 * batch * heads * length * length * width  # two products, half of each
    return flops / forward_ms * 1e3, 2.5 * flops / backward_ms * 1e3


def _memory_rate(bench: Bench) -> float:
    source = torch.empty(bench.sizes.copy_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * bench.sizes.copy_bytes / bench.time_ms(lambda: target.copy_(source), bench.sizes.repeats) * 1e3


def _launch_us(bench: Bench) -> float:
    """Host time of an operation of eager torch that autograd records; its kernel is next to nothing."""
    number = torch.ones(1, device=bench.device, requires_grad=True)

    def launches(count: int) -> float:
        value = number
        begin = time.perf_counter()
        for _ in range(count):
            value = value * 1.0
        return (time.perf_counter() - begin) / count * 1e6

    launches(bench.sizes.launches // 10)
    return min(launches(bench.sizes.launches // GROUPS) for _ in range(GROUPS))


def _collectives(bench: Bench, ranks: int) -> tuple[CollectivePoint, ...]:
    """Sums in fp32, as lamina's are; Gloo takes a tenth longer for as many bytes of bf16, which it converts."""
    points = []
    for size_bytes in bench.sizes.collective_bytes:
        part = size_bytes // 4 // ranks
        whole, own = torch.zeros(part * ranks, device=bench.device), torch.zeros(part, device=bench.device)
        inbox = torch.zeros_like(whole)
        calls: dict[str, Callable[[], object]] = {
            "all_gather": gather_call(whole, own),
            "reduce_scatter": reduce_call(whole, own),
            "all_to_all": functools.partial(dist.all_to_all_single, inbox, whole),
            "all_reduce": functools.partial(dist.all_reduce, whole),
        }
        for kind, call in calls.items():
            dist.barrier()
            points.append(CollectivePoint(kind, ranks, size_bytes, bench.time_ms(call, bench.sizes.repeats)))
    return tuple(points)


def _copies(bench: Bench, ranks: int) -> tuple[CollectivePoint, ...]:
    """Every rank reads its neighbour's memory at the same time."""
    there = bench.neighbour()
    if there is None:
        return ()
    points = []
    for size_bytes in bench.sizes.collective_bytes[1:]:
        source = torch.empty(size_bytes, dtype=torch.uint8, device=there)
        target = torch.empty(size_bytes, dtype=torch.uint8, device=bench.device)
        ms = bench.time_ms(lambda a=target, b=source: a.copy_(b), bench.sizes.repeats)  # type: ignore[misc]
        points.append(CollectivePoint("copy", ranks, size_bytes, ms))
    return tuple(points)


def gather_call(whole: torch.Tensor, own: torch.Tensor) -> Callable[[], object]:
    if hasattr(dist, "all_gather_single"):  # torch 2.13 deprecates the other names, 2.11 has no others
        return lambda: dist.all_gather_single(whole, own)
    return lambda: dist.all_gather_into_tensor(whole, own)


def reduce_call(whole: torch.Tensor, own: torch.Tensor) -> Callable[[], object]:
    if hasattr(dist, "reduce_scatter_single"):
        return lambda: dist.reduce_scatter_single(own, whole)
    return lambda: dist.reduce_scatter_tensor(own, whole)


def _interference(bench: Bench, ranks: int) -> float:
    """Extra time of products for each ms of an all-gather that runs beside them."""
    if bench.device.type == "cpu":
        return 0.0  # null lanes: nothing runs beside anything
    m, n, k = bench.sizes.products[1]
    a = torch.randn(m, k, device=bench.device, dtype=torch.bfloat16)
    b = torch.randn(n, k, device=bench.device, dtype=torch.bfloat16)
    part = bench.sizes.collective_bytes[-1] // 2 // ranks
    whole = torch.zeros(part * ranks, dtype=torch.bfloat16, device=bench.device)
    gather = gather_call(whole, torch.zeros(part, dtype=torch.bfloat16, device=bench.device))

    def products() -> None:
        for _ in range(10):
            nn.functional.linear(a, b)

    def gathers() -> None:
        for _ in range(6):
            gather()

    dist.barrier()
    alone_ms, gathers_ms = bench.time_ms(products, 1), bench.time_ms(gathers, 1)
    dist.barrier()
    return max(0.0, (bench.beside_ms(products, gathers) - alone_ms) / min(gathers_ms, alone_ms))


def try_transport(name: str, device: torch.device) -> str:
    """Why lamina cannot move bytes this way between these ranks; "" if it can. Collective: a small model steps."""
    from lamina.runtime.api import shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device)
    try:
        shard(model, "zero3", transport=name)
        model(torch.ones(2, 64, device=device)).sum().backward()
    except Exception as problem:  # whatever it is, it is the answer
        return f"{type(problem).__name__}: {problem}"
    return ""
