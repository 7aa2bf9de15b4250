"""Times of single operations on a machine: a matrix product, attention, a pass over memory, a collective.

A table of measured products cannot hold every shape, and peak operations times one efficiency is wrong by a factor of
two for narrow ones. Here a product takes the time of its operations at the plain rate plus that of its traffic
(a roofline whose corner is round, as measured ones are), corrected by what nearby measured shapes took. A collective
takes a latency plus its bytes over the slowest link in its way.

`Reached` is what a program makes of these rates; it is the only thing that is ever fitted to whole steps.

Note [Odd sizes]
    A GPU's fast kernels for 16-bit products read 16 bytes at once, which each row of the three matrices must begin at a
    multiple of. Rows are n or k elements long, so where one of them is no multiple of 8, another kernel runs, at a rate
    of its own. One H200, torch 2.11, (64 x 320 and 8192, k) by (k, n) and both products of its backward, n and k around
    1000 and 1430: 407 to 587 TFLOP/s for multiples of 8, 154 to 200 for multiples of 4 and of 2, 79 to 124 for odd ones
    (benchmarks/plan_time/results/odd_sizes_h200.txt).

Pure: no communication, no device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lamina.core.strategy import Level
from lamina.planner.machine import Machine, MatrixPoint

# Share of the network itself in what a ring takes from node to node; the rest are the links inside a node, one for each
# further member of the group there. NCCL's own cost model (src/graph/tuning.cc, ring, LL128): 4.0 us and seven of 1.9
NETWORK_HOP = 0.25
# Note [Odd sizes]: how many times the operations of an aligned product take, by the largest power of 2 in n and k
ODD_TIMES = {1: 7.0, 2: 3.6, 4: 3.6, 8: 1.0}
NEAR = 0.25  # squared distance in octaves at which a measured shape speaks for half of what it could


@dataclass(frozen=True)
class Reached:
    """Shares of a machine's rates that a program reaches; one set for all machines, models and sizes."""

    matrix: float = 1.0
    attention: float = 1.0
    memory: float = 0.85  # of the data sheet's rate, in separate elementwise kernels
    network: float = 0.8
    interference: float = 1.0  # times what the machine file says of a collective beside products
    unit_host_ms: float = 2.0  # the runtime's own host time for a unit's forward and backward together
    step_ms: float = 1.0  # once a step: the norm's synchronisation, the optimizer's launches, the loader
    fp8_speedup: float = 1.6  # of products in 8 bit over those in 16


@dataclass(frozen=True)
class Move:
    """A collective, or several in a row: how long they take alone, and for how much of that they fill each link."""

    ms: float = 0.0
    bus_ms: float = 0.0  # inside the node
    network_ms: float = 0.0  # the node's cards

    def __add__(self, other: Move) -> Move:
        return Move(self.ms + other.ms, self.bus_ms + other.bus_ms, self.network_ms + other.network_ms)

    def __truediv__(self, count: float) -> Move:
        return Move(self.ms / count, self.bus_ms / count, self.network_ms / count)

    @property
    def loads(self) -> tuple[float, float]:
        """Mean share of each link while it runs alone; latency and sums leave links free."""
        return (self.bus_ms / self.ms, self.network_ms / self.ms) if self.ms > 0 else (0.0, 0.0)


class Rates:
    """Times in ms on one machine, as one program reaches them."""

    def __init__(self, machine: Machine, reached: Reached | None = None) -> None:
        self.machine = machine
        self.reached = reached or Reached()
        self._memory = machine.memory_bytes_per_s * self.reached.memory
        self._products: dict[tuple[int, int, int, int, int], float] = {}
        self._links: dict[tuple[float, Level, float, float, int, bool], Move] = {}

    def product_ms(self, m: int, n: int, k: int, batch: int = 1, dtype_bytes: int = 2) -> float:
        """(m, k) by (k, n), `batch` of them at once. Both products of its backward take as long each."""
        key = (m, n, k, batch, dtype_bytes)
        if key not in self._products:
            plain = roofline_ms(self.machine, m, n, k, batch, dtype_bytes, self.reached.fp8_speedup)
            # a batch fills the device as one product of so many more rows does, which is what small ones lack
            speed = self.reached.matrix / correction(self.machine, m * batch, n, k, dtype_bytes)
            self._products[key] = plain / speed
        return self._products[key]

    def attention_ms(self, flops: float, backward: bool = False) -> float:
        """`flops` count what is computed: half of the square under a causal mask."""
        machine = self.machine
        rate = machine.attention_backward_flops_per_s if backward else machine.attention_forward_flops_per_s
        return flops / (rate * self.reached.attention) * 1e3

    def memory_ms(self, size_bytes: float) -> float:
        """Reading and writing `size_bytes` in all."""
        return size_bytes / self._memory * 1e3

    def launch_ms(self, kernels: float) -> float:
        return kernels * self.machine.launch_us / 1e3

    def kernels_ms(self, kernels: float) -> float:
        """On the device, of so many that do nothing, one behind the other."""
        return kernels * self.machine.kernel_us / 1e3

    def gather_ms(self, size_bytes: float, level: Level) -> float:
        """All ranks of the level end with `size_bytes`."""
        return self.gather(size_bytes, level).ms

    def gather(self, size_bytes: float, level: Level) -> Move:
        machine = self.machine
        return self._move(size_bytes, level, machine.gather_bytes_per_s, machine.gather_latency_us)

    def reduce(self, size_bytes: float, level: Level) -> Move:
        """Each rank of the level ends with its part of the sum of `size_bytes`."""
        machine = self.machine
        return self._move(size_bytes, level, machine.reduce_bytes_per_s, machine.reduce_latency_us)

    def exchange(self, size_bytes: float, level: Level) -> Move:
        """Each rank sends every other its part of `size_bytes`.

        Between nodes every rank's parts take their own way: the cards of a node carry as many times what a ring needs
        as the group has members there.
        """
        machine = self.machine
        ways = max(1, min(level.size, machine.gpus_per_node // level.stride))
        return self._move(size_bytes, level, machine.exchange_bytes_per_s, machine.exchange_latency_us, ways)

    def sum(self, size_bytes: float, level: Level) -> Move:
        """All ranks of the level end with the whole sum of `size_bytes`: there and back."""
        machine = self.machine
        return self._move(2 * size_bytes, level, machine.sum_bytes_per_s, machine.sum_latency_us, is_tree=True)

    def _move(
        self,
        size_bytes: float,
        level: Level,
        bus_bytes_per_s: float,
        latency_us: float,
        ways: int = 1,
        is_tree: bool = False,
    ) -> Move:
        if level.size == 1 or size_bytes <= 0:
            return Move()
        key = (size_bytes, level, bus_bytes_per_s, latency_us, ways, is_tree)
        if key not in self._links:
            self._links[key] = self._over_links(*key)
        return self._links[key]

    def _over_links(
        self, size_bytes: float, level: Level, bus_bytes_per_s: float, latency_us: float, ways: int, is_tree: bool
    ) -> Move:
        gpus = self.machine.gpus_per_node
        inside = min(level.size, max(1, gpus // level.stride))  # members of one group on one node
        nodes = math.ceil(level.size / inside)
        bus_s = size_bytes * (level.size - 1) / level.size / bus_bytes_per_s if inside > 1 else 0.0
        network_s, hops_us = 0.0, 0.0
        if nodes > 1:
            groups = max(1, min(gpus, level.stride * inside) // inside)  # that share the cards of a node
            network = max(self.machine.network_bytes_per_s * self.reached.network, 1.0)
            network_s = ways * groups * size_bytes * (nodes - 1) / nodes / network
            hops = nodes - 1  # NCCL's ring passes every node in turn
            if is_tree:  # sums go up and down its trees where that is shorter; gathers and reduce-scatters know none
                hops = min(hops, 2 * math.ceil(math.log2(nodes)))
            within = (inside - 1) / (gpus - 1) if gpus > 1 else 1.0
            hops_us = self.machine.network_latency_us * hops * (NETWORK_HOP + (1 - NETWORK_HOP) * within)
        ms = max(bus_s, network_s) * 1e3 + (latency_us + hops_us) / 1e3
        return Move(ms, bus_s * 1e3, network_s * 1e3)


def roofline_ms(
    machine: Machine, m: int, n: int, k: int, batch: int = 1, dtype_bytes: int = 2, fp8_speedup: float = 1.0
) -> float:
    """Operations at the plain rate plus traffic: what a product of this shape should take."""
    rate = machine.matrix_fp32_flops_per_s if dtype_bytes > 2 else machine.matrix_flops_per_s
    if dtype_bytes == 1:
        rate *= fp8_speedup
    if dtype_bytes == 2 and not machine.is_cpu:
        rate /= ODD_TIMES[alignment(n, k)]
    traffic_bytes = batch * dtype_bytes * (m * k + k * n + m * n)
    return (2.0 * batch * m * n * k / rate + traffic_bytes / machine.memory_bytes_per_s) * 1e3


def correction(machine: Machine, m: int, n: int, k: int, dtype_bytes: int = 2) -> float:
    """Measured over expected time near this shape: a mean of the measured points, the nearest first.

    Points of another alignment are of other kernels, and say something only where there are none of this one.
    """
    of_dtype = [p for p in machine.matrix_points if p.dtype_bytes == dtype_bytes]
    points = [p for p in of_dtype if alignment(p.n, p.k) == alignment(n, k)] or of_dtype
    if not points:
        return 1.0
    weighted, weights = 0.0, 0.0
    for point in points:
        weight = 1.0 / (NEAR + _distance2(point, m, n, k)) ** 2
        weighted += weight * math.log(point.ms / roofline_ms(machine, point.m, point.n, point.k, 1, dtype_bytes))
        weights += weight
    return math.exp(weighted / weights)


def alignment(n: int, k: int) -> int:
    """The largest power of 2, up to 8, that divides the length of every row of the three matrices."""
    return math.gcd(n, k, 8)


def _distance2(point: MatrixPoint, m: int, n: int, k: int) -> float:
    """In octaves; m and n may change places."""

    def between(rows: int, columns: int) -> float:
        pairs = ((rows, point.m), (columns, point.n), (k, point.k))
        return sum(math.log2(a / b) ** 2 for a, b in pairs)

    return min(between(m, n), between(n, m))
