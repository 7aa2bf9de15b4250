"""How long a step takes, before it is run.

Operation counts times an efficiency say nothing about what is exposed. Here the step is the program that the runtime
walks: each use takes the time of its products, its attention and its passes over memory (rates.py), each gather and
reduction its time on the link, and the lane rules of timeline.py say what waits for what. Ranks that do the same are
one rank, so ten thousand of them cost no more than one.

    1. times of each unit's forward and backward on the device; on the host, the floor of its launches
    2. the program of the step, from the same packing and the same rules as the runtime's
    3. simulate, collectives sharing their links; where they run beside compute, compute is stretched; simulate again
    4. micro-batches one after the other, then the optimizer

Pure: no communication, no device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lamina.core.arena import Demand, pack
from lamina.core.program import Op, Step, UnitTraits, plan_step
from lamina.core.strategy import Factors, resolve
from lamina.planner.machine import Machine
from lamina.planner.passes import (
    WIDE,
    exchanges,
    gather_bytes,
    is_published,
    reduce_bytes,
    sent_bytes,
    update_bytes,
)
from lamina.planner.rates import Move, Rates, Reached
from lamina.planner.timeline import LANES, Loads, Schedule, Span
from lamina.planner.workload import Choice, UnitWork, Workload

ATTENTION_BACKWARD = 2.5  # operations of attention's backward over its forward's: scores are formed again
BACKWARD_MEMORY = 1.5  # bytes of backward's elementwise kernels over forward's where nobody counted them: sums 1, norms
# and GELU 1.5, products 2
HOST_OF_FORWARD = 0.4  # share of the runtime's host time for a unit that comes in its forward
BACKWARD_KERNELS = 2.0  # number of backward's kernels over forward's where nobody counted them
BACKWARD_LAUNCHES = 1.3  # host time of backward's kernels over forward's: twice as many, launched from C++
COPY_INTERFERENCE = 0.55  # over that of NCCL: beside 4.7 ms of copies ten products took 1.05 times as long, beside
# 7.0 ms of all-gathers of the same bytes 1.14 times (2 x H200)


@dataclass(frozen=True)
class UnitTimes:
    """One unit's times in ms; device and host apart."""

    forward_ms: float
    backward_ms: float
    forward_host_ms: float
    backward_host_ms: float
    gather: Move
    reduce: Move
    gathered_ms: float  # that a gather takes of the device beside its links

    def of(self, op: Op, beside_ms: float = 0.0) -> float:
        """How long a step of this unit holds its lane; `beside_ms`: what else the device computes for a use."""
        if op is Op.FORWARD:
            return max(self.forward_ms + beside_ms, self.forward_host_ms)
        if op is Op.BACKWARD:
            return max(self.backward_ms + beside_ms, self.backward_host_ms)
        return self.gather.ms if op is Op.GATHER else self.reduce.ms

    def loads_of(self, op: Op) -> Loads:
        """How much of each link a step of this unit takes."""
        return (self.reduce if op is Op.REDUCE else self.gather).loads if op.is_collective else (0.0, 0.0)

    @property
    def waiting_ms(self) -> float:
        """How long the device waits for the host."""
        waits_ms = self.forward_host_ms - self.forward_ms, self.backward_host_ms - self.backward_ms
        return sum(max(0.0, wait_ms) for wait_ms in waits_ms)


@dataclass(frozen=True)
class StepTime:
    """Forecast of one optimizer step; times in ms, all micro-batches together."""

    total_ms: float
    compute_ms: float  # compute lane busy, stretching included
    gather_ms: float  # lane busy, sharing of links included
    reduce_ms: float
    exposed_ms: float  # compute waited for gathers and reductions
    stretched_ms: float  # compute was slower beside collectives
    host_ms: float  # compute waited for the host
    optimizer_ms: float  # optimizer, norm, and what comes once a step
    tokens_per_s: float  # of the whole world
    schedule: Schedule  # of one micro-batch
    durations_ms: tuple[float, ...]  # of its steps; of collectives alone
    loads: tuple[Loads, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        """One micro-batch, to be drawn."""
        return self.schedule.spans(self.durations_ms, self.loads)

    @property
    def hidden_share(self) -> float:
        """Share of the collectives' time that nobody waited for; 1 if there are none."""
        moved_ms = self.gather_ms + self.reduce_ms
        return 1.0 if moved_ms <= 0 else max(0.0, 1.0 - self.exposed_ms / moved_ms)

    def text(self) -> str:
        waits = f"{self.stretched_ms:.1f} slowed by collectives, {self.host_ms:.1f} waiting for the host"
        moves = f"gathers {self.gather_ms:.1f} and reductions {self.reduce_ms:.1f}, {self.hidden_share:.0%} hidden"
        exposed = f"exposed {self.exposed_ms:.1f} ({moves})"
        return (
            f"{self.total_ms:.1f} ms: compute {self.compute_ms:.1f} ({waits}), {exposed}, once {self.optimizer_ms:.1f}"
        )


def forecast_time(workload: Workload, choice: Choice, machine: Machine, reached: Reached | None = None) -> StepTime:
    """Time of a step of `workload` under `choice` on `machine`.

    Raises `UsageError` for a strategy whose factors do not divide the world.
    """
    factors = resolve(choice.strategy, choice.world, choice.shard_size)
    if is_published(choice, factors) and not machine.is_cpu:
        machine = by_copies(machine)
    rates = Rates(machine, reached)
    times = unit_times(workload.units, choice, factors, rates)
    schedule = schedule_of(tuple(_shape(unit, choice, factors) for unit in workload.units), choice.slots)
    step_ms = durations(times, schedule.program.steps)
    loads = tuple(times[step.unit].loads_of(step.op) for step in schedule.program.steps)
    slowed_ms = stretch(schedule, step_ms, machine.interference * rates.reached.interference, loads)
    durations_ms = tuple(ms + extra_ms for ms, extra_ms in zip(step_ms, slowed_ms, strict=True))
    once_ms = optimizer_ms(workload, choice, factors, rates)
    return _sum_up(workload.tokens, choice, times, schedule, durations_ms, loads, sum(slowed_ms), once_ms)


def durations(times: Sequence[UnitTimes], steps: Sequence[Step]) -> list[float]:
    """How long each step holds its lane; what a gather takes of the device is added to the use that it is for."""
    beside_ms = [0.0] * len(times)
    found = []
    for step in steps:
        found.append(times[step.unit].of(step.op, beside_ms[step.unit]))
        beside_ms[step.unit] = times[step.unit].gathered_ms if step.op is Op.GATHER else 0.0
    return found


def by_copies(machine: Machine) -> Machine:
    """The same with copies between devices in the place of collectives inside a node."""
    return replace(
        machine,
        gather_bytes_per_s=machine.copy_bytes_per_s,
        exchange_bytes_per_s=machine.copy_bytes_per_s,
        interference=machine.interference * COPY_INTERFERENCE,
    )


def unit_times(units: Sequence[UnitWork], choice: Choice, factors: Factors, rates: Rates) -> list[UnitTimes]:
    """Times of each unit; units alike are one, as ranks are."""
    known: dict[tuple[object, ...], UnitTimes] = {}
    found = []
    for unit in units:
        again = _recomputed(unit, choice)
        numel = (unit.trainable_numel, unit.frozen_numel, tuple((p.shape, p.trainable, p.master) for p in unit.params))
        moved = (unit.forward_memory_bytes, unit.backward_memory_bytes, unit.fused_memory_bytes)
        kind = (unit.forward_products, moved, unit.kernel_count, unit.backward_kernel_count, numel, again)
        if kind not in known:
            known[kind] = _times_of(unit, again, choice, factors, rates)
        found.append(known[kind])
    return found


def _times_of(unit: UnitWork, again: Again, choice: Choice, factors: Factors, rates: Rates) -> UnitTimes:
    """Device and host time of one unit's forward and backward, with what backward computes again, and its moves."""
    products_ms, attention_ms = 0.0, 0.0
    backward_attention_ms = 0.0
    for p in unit.forward_products:
        if p.is_attention:
            flops = 2.0 * p.m * p.n * p.k * p.batch * p.count
            attention_ms += rates.attention_ms(flops)
            backward_attention_ms += rates.attention_ms(ATTENTION_BACKWARD * flops, backward=True)
        else:
            products_ms += p.count * rates.product_ms(p.m, p.n, p.k, p.batch, p.dtype_bytes)
    memory_bytes, kernels = unit.forward_memory_bytes, unit.kernel_count
    if choice.compiled and not unit.encloses and unit.fused_memory_bytes is not None:
        memory_bytes, kernels = unit.fused_memory_bytes, unit.fused_kernel_count or 0
    memory_ms = rates.memory_ms(memory_bytes)
    forward_ms = products_ms + attention_ms + memory_ms + rates.kernels_ms(kernels)
    launches_ms, ours_ms = rates.launch_ms(kernels), rates.reached.unit_host_ms
    host_ms = launches_ms + HOST_OF_FORWARD * ours_ms
    weights = 2.0 if unit.trainable_numel else 1.0  # gradients of inputs, and of weights
    backward_bytes, backward_kernels = BACKWARD_MEMORY * memory_bytes, BACKWARD_KERNELS * kernels
    if unit.backward_memory_bytes is not None and memory_bytes == unit.forward_memory_bytes:
        backward_bytes, backward_kernels = unit.backward_memory_bytes, float(unit.backward_kernel_count or 0)
    backward_bytes += reduce_bytes(unit, choice, factors, rates.machine.is_cpu)
    backward_ms = weights * products_ms + backward_attention_ms
    backward_ms += rates.memory_ms(backward_bytes) + rates.kernels_ms(backward_kernels)
    backward_host_ms = BACKWARD_LAUNCHES * launches_ms + (1 - HOST_OF_FORWARD) * ours_ms
    backward_ms += again.share * (forward_ms if again.products else memory_ms)
    backward_host_ms += again.share * launches_ms
    if choice.captured:
        host_ms = backward_host_ms = 0.0
    size_bytes = (unit.trainable_numel + unit.frozen_numel) * choice.compute_bytes
    return UnitTimes(
        forward_ms,
        backward_ms,
        host_ms,
        backward_host_ms,
        gather(size_bytes, choice, factors, rates),
        reduce(unit.trainable_numel, choice, factors, rates),
        rates.memory_ms(gather_bytes(unit, choice, factors, rates.machine.is_cpu)),
    )


class UnitShape(NamedTuple):
    """What the program and the arena must know about a unit."""

    size_bytes: int
    resident: bool
    trainable: bool
    encloses: bool
    is_lookup: bool


def _shape(unit: UnitWork, choice: Choice, factors: Factors) -> UnitShape:
    size_bytes = (unit.trainable_numel + unit.frozen_numel) * choice.compute_bytes
    resident = unit.encloses or not factors.shards_parameters
    is_lookup = unit.is_lookup and not choice.compiled
    return UnitShape(size_bytes, resident, unit.trainable_numel > 0, unit.encloses, is_lookup)


@functools.lru_cache(maxsize=256)
def schedule_of(shapes: tuple[UnitShape, ...], slots: int) -> Schedule:
    """The program of one micro-batch, by the runtime's own rules, ready to be timed."""
    packing = pack([Demand(f"unit {i}", s.size_bytes, s.resident) for i, s in enumerate(shapes)], slots)
    sharing = [packing.conflicts(index) for index in range(len(shapes))]  # each answer walks all units: ask once
    traits = [UnitTraits(s.trainable, s.resident, s.encloses, s.is_lookup) for s in shapes]
    return Schedule(plan_step(traits, sharing.__getitem__), sharing.__getitem__)


def gather(size_bytes: float, choice: Choice, factors: Factors, rates: Rates) -> Move:
    """From shards to full weights; levels that only the optimizer splits are gathered once a step, not once a use."""
    parameters, *outer = factors.levels
    once = sum((rates.gather(size_bytes / level.stride, level) for level in outer), Move())
    inner = Move() if by_host(choice, factors, rates.machine) else rates.gather(size_bytes, parameters)
    return inner + once / choice.accumulation


def by_host(choice: Choice, factors: Factors, machine: Machine) -> bool:
    """Peers on a CPU: each rank copies and sums in its own time, and nothing runs on a lane (passes.py)."""
    return machine.is_cpu and is_published(choice, factors)


def reduce(numel: float, choice: Choice, factors: Factors, rates: Rates) -> Move:
    """From full gradients to shards of their sum; levels that gradients are not split over come once a step."""
    total, summed, sent = Move(), 1, sent_bytes(choice, factors)
    is_copied = by_host(choice, factors, rates.machine)
    for index, level in enumerate(factors.levels):
        if level.size == 1:
            continue
        size_bytes = numel * (sent if summed == 1 else WIDE) / summed
        is_exchange = summed == 1 and exchanges(choice, sent)
        if is_copied and summed == 1:
            summed *= level.size
            continue
        moved = rates.exchange(size_bytes, level) if is_exchange else rates.reduce(size_bytes, level)
        total += moved / (1 if index < 2 else choice.accumulation)
        summed *= level.size
    replicas = factors.replicas
    if replicas.size > 1:  # an all-reduce in fp32
        total += rates.sum(numel * WIDE / factors.optimizer, replicas) / choice.accumulation
    return total


def stretch(
    schedule: Schedule, step_ms: Sequence[float], per_ms: float, loads: Sequence[Loads] | None = None
) -> list[float]:
    """By how many ms each step is slowed: uses by `per_ms` for each ms of a collective beside them."""
    starts_ms, ends_ms = schedule.times(step_ms, loads)
    placed = list(zip(schedule.lanes, starts_ms, ends_ms, strict=True))
    merged: list[list[float]] = []  # when anything moves
    for start_ms, stop_ms in sorted((start, stop) for lane, start, stop in placed if lane and stop > start):
        if merged and start_ms <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop_ms)
        else:
            merged.append([start_ms, stop_ms])
    slowed, first = [0.0] * len(placed), 0
    for position, (lane, start_ms, stop_ms) in enumerate(placed):
        if lane:
            continue
        while first < len(merged) and merged[first][1] <= start_ms:  # uses come in the order of time
            first += 1
        index = first
        while index < len(merged) and merged[index][0] < stop_ms:
            beside_ms = min(merged[index][1], stop_ms) - max(merged[index][0], start_ms)
            slowed[position] += per_ms * beside_ms
            index += 1
    return slowed


def optimizer_ms(workload: Workload, choice: Choice, factors: Factors, rates: Rates) -> float:
    """AdamW over this rank's part, the norm, and what comes once a step."""
    owned = sum(unit.trainable_numel for unit in workload.units) / factors.optimizer
    return rates.memory_ms(owned * update_bytes(choice, factors, rates.machine.is_cpu)) + rates.reached.step_ms


def _sum_up(
    tokens: int,
    choice: Choice,
    times: Iterable[UnitTimes],
    schedule: Schedule,
    durations_ms: tuple[float, ...],
    loads: tuple[Loads, ...],
    slowed_ms: float,
    once_ms: float,
) -> StepTime:
    count = choice.accumulation
    busy_ms = [0.0] * len(LANES)
    starts_ms, ends_ms = schedule.times(durations_ms, loads)
    for lane, start_ms, stop_ms in zip(schedule.lanes, starts_ms, ends_ms, strict=True):
        busy_ms[lane] += stop_ms - start_ms
    end_ms = max(ends_ms, default=0.0)
    total_ms = count * end_ms + once_ms
    return StepTime(
        total_ms=total_ms,
        compute_ms=count * busy_ms[0],
        gather_ms=count * busy_ms[1],
        reduce_ms=count * busy_ms[2],
        exposed_ms=count * (end_ms - busy_ms[0]),
        stretched_ms=count * slowed_ms,
        host_ms=count * sum(t.waiting_ms for t in times),
        optimizer_ms=once_ms,
        tokens_per_s=tokens * count * choice.world / total_ms * 1e3,
        schedule=schedule,
        durations_ms=durations_ms,
        loads=loads,
    )


class Again(NamedTuple):
    """What of a unit's forward runs again in its backward."""

    share: float  # of its blocks
    products: bool  # matrix products and attention, too


def _recomputed(unit: UnitWork, choice: Choice) -> Again:
    if unit.holds_head and choice.chunked_loss:
        return Again(1.0, True)
    if not unit.recomputable or choice.recompute == "none":
        return Again(0.0, False)
    if isinstance(choice.recompute, int):
        numbers = range(unit.block_index, unit.block_index + unit.blocks)
        return Again(sum(number % choice.recompute == 0 for number in numbers) / unit.blocks, True)
    return Again(1.0, choice.recompute == "full")
