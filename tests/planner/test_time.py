"""Forecast times: a step by hand, laws that any forecast keeps, and steps that were measured on GPUs."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.core.layout import ParamSpec
from lamina.core.program import Op, Program
from lamina.core.strategy import Strategy, resolve
from lamina.errors import UsageError
from lamina.planner.machine import Machine, load_machine
from lamina.planner.passes import gather_bytes, reduce_bytes, update_bytes
from lamina.planner.rates import Reached
from lamina.planner.time import StepTime, forecast_time, stretch
from lamina.planner.timeline import Schedule, Span
from lamina.planner.workload import Choice, MatrixProduct, UnitWork, Workload

BARE = Reached(memory=1.0, network=1.0, interference=0.0, unit_host_ms=0.0, step_ms=0.0)
# Round numbers: a TFLOP takes 1 s, a GB of memory 1 ms, a GB on a link 10 ms.
ROUND = dataclasses.replace(
    load_machine("h100"),
    matrix_flops_per_s=1e12,
    memory_bytes_per_s=1e12,
    gather_bytes_per_s=1e11,
    gather_latency_us=0.0,
    reduce_bytes_per_s=1e11,
    reduce_latency_us=0.0,
    exchange_bytes_per_s=1e11,
    exchange_latency_us=0.0,
    sum_bytes_per_s=1e11,
    sum_latency_us=0.0,
    launch_us=0.0,
    kernel_us=0.0,
)
MB = 10**6
LAID_MS = 0.4  # a unit of 100 M elements: gradients of 2 bytes read and written on their way into the buffer
# what two ranks do beside it for such a unit: half of its masters cast in a gather, of its gradients summed by a ring
CAST_MS, SUM_MS = 0.3, 0.3


def ring(strategy: str | Strategy, world: int, shard_size: int | None = None, **more: Any) -> Choice:
    return Choice(strategy, world, shard_size, sums="ring", **more)


def blocks(count: int, numel: int = 100 * MB, memory_bytes: float = 4e9, frozen: bool = False) -> Workload:
    """Units of nothing but passes over memory: 4 ms forward, 6 ms backward each on ROUND."""
    own = {"trainable_numel": 0 if frozen else numel, "frozen_numel": numel if frozen else 0}
    units = tuple(
        UnitWork(
            f"blocks.{i}", forward_products=(), forward_memory_bytes=memory_bytes, kernel_count=0, block_index=i, **own
        )
        for i in range(count)
    )
    return Workload("blocks", units, 1, 1000)


def forecast(workload: Workload, choice: Choice, machine: Machine = ROUND, reached: Reached = BARE) -> StepTime:
    return forecast_time(workload, choice, machine, reached)


def test_three_units_by_hand() -> None:
    """200 MB a unit: gathers and reductions of 1 ms over two ranks; the first gather and the last reduction show."""
    found = forecast(blocks(3), ring("zero3", 2))
    optimizer_ms, own_ms = 3 * 100 * MB / 2 * 32 / 1e12 * 1e3, 3 * (CAST_MS + LAID_MS + SUM_MS)
    assert found.compute_ms == pytest.approx(30 + own_ms)
    assert found.gather_ms == pytest.approx(3) and found.reduce_ms == pytest.approx(3)
    assert found.exposed_ms == pytest.approx(2)
    assert found.hidden_share == pytest.approx(4 / 6)
    assert found.optimizer_ms == pytest.approx(optimizer_ms)
    assert found.total_ms == pytest.approx(32 + own_ms + optimizer_ms)
    assert found.tokens_per_s == pytest.approx(2 * 1000 / found.total_ms * 1e3)
    assert found.spans[0] == Span("gather", "AG0", 0, pytest.approx(1.0))
    assert "67% hidden" in found.text()


def test_one_rank_moves_nothing() -> None:
    found = forecast(blocks(3), ring("zero3", 1))
    assert found.gather_ms == found.reduce_ms == found.exposed_ms == 0 and found.hidden_share == 1


@pytest.mark.parametrize(
    "strategy, gathered_ms, reduced_ms",
    [
        ("ddp", 0, 3 * 4),  # an all-reduce in fp32: 400 MB there and back
        ("zero1", 3 * 1, 3 * 1),
        ("zero2", 3 * 1, 3 * 1),
        ("zero3", 3 * 1, 3 * 1),
        (Strategy(1, 1, None), 3 * 1, 3 * 1),
    ],
)
def test_what_strategies_move(strategy: str | Strategy, gathered_ms: float, reduced_ms: float) -> None:
    found = forecast(blocks(3), ring(strategy, 2))
    assert (found.gather_ms, found.reduce_ms) == (pytest.approx(gathered_ms), pytest.approx(reduced_ms))


def test_micro_batches_repeat_what_each_needs() -> None:
    one, four = (forecast(blocks(6), ring("zero3", 2, accumulation=count)) for count in (1, 4))
    assert four.total_ms - four.optimizer_ms == pytest.approx(4 * (one.total_ms - one.optimizer_ms))
    # zero1 reduces once for all micro-batches, sums of 4 bytes, zero2 each
    reduced = [forecast(blocks(6), ring(name, 2, accumulation=4)).reduce_ms for name in ("zero1", "zero2")]
    assert reduced == [pytest.approx(12), pytest.approx(24)]


def test_recomputation_repeats_forwards() -> None:
    products = (MatrixProduct(1000, 1000, 1000),)
    units = tuple(dataclasses.replace(unit, forward_products=products) for unit in blocks(4).units)
    workload = dataclasses.replace(blocks(4), units=units)
    busy = {r: forecast(workload, ring("zero3", 2, recompute=r)).compute_ms for r in ("none", "full", "selective", 2)}
    product_ms = 2.0 + 6e6 / 1e12 * 1e3
    assert busy["full"] - busy["none"] == pytest.approx(4 * (4 + product_ms))
    assert busy["selective"] - busy["none"] == pytest.approx(4 * 4)
    assert busy[2] - busy["none"] == pytest.approx(2 * (4 + product_ms))


def test_attention_costs_more_backward() -> None:
    unit = dataclasses.replace(
        blocks(1).units[0],
        forward_memory_bytes=0.0,
        forward_products=(MatrixProduct(1000, 1000, 100, batch=10, is_attention=True),),
    )
    machine = dataclasses.replace(ROUND, attention_forward_flops_per_s=2e12, attention_backward_flops_per_s=1e12)
    found = forecast(dataclasses.replace(blocks(1), units=(unit,)), ring("zero3", 1), machine)
    assert found.compute_ms == pytest.approx(1.0 + 5.0 + LAID_MS + 2 * CAST_MS + 2 * SUM_MS)


def test_frozen_units_are_cheaper_and_not_reduced() -> None:
    frozen = forecast(blocks(3, frozen=True), ring("zero3", 2))
    assert frozen.reduce_ms == 0 and frozen.optimizer_ms == 0


def test_small_units_wait_for_the_host() -> None:
    workload = blocks(4, numel=1, memory_bytes=1e6)
    found = forecast(workload, ring("zero3", 1), reached=dataclasses.replace(BARE, unit_host_ms=1.0))
    assert found.host_ms == pytest.approx(4 - 4 * 2.5e-3) and found.compute_ms == pytest.approx(4)


def test_a_captured_step_waits_for_no_host_but_pays_for_its_kernels() -> None:
    unit = dataclasses.replace(blocks(1, numel=1, memory_bytes=1e6).units[0], kernel_count=30)
    counted = dataclasses.replace(unit, backward_memory_bytes=2e6, backward_kernel_count=50)
    machine = dataclasses.replace(ROUND, launch_us=10.0, kernel_us=2.0)
    for work, backward_ms in ((unit, 1.5e-3 + 60 * 2e-3), (counted, 2e-3 + 50 * 2e-3)):
        workload = dataclasses.replace(blocks(1), units=(work,))
        eager, captured = (
            forecast(workload, ring("zero3", 1, captured=captured), machine) for captured in (False, True)
        )
        assert captured.host_ms == 0 and captured.compute_ms == pytest.approx(1e-3 + 30 * 2e-3 + backward_ms)
        assert eager.compute_ms == pytest.approx(0.3 + 1.3 * 0.3)  # its launches take longer than its kernels


def test_collectives_slow_what_runs_beside_them() -> None:
    slowed = dataclasses.replace(BARE, interference=1.0)
    machine = dataclasses.replace(ROUND, interference=0.5)
    found = forecast(blocks(3), ring("zero3", 2), machine, slowed)
    assert found.stretched_ms == pytest.approx(0.5 * 4)  # all but the first gather and the last reduction
    assert found.compute_ms == pytest.approx(30 + 2 + 3 * (CAST_MS + LAID_MS + SUM_MS))


def test_copies_slow_compute_less_and_move_more() -> None:
    machine = dataclasses.replace(ROUND, interference=0.5, copy_bytes_per_s=2e11)
    slowed = dataclasses.replace(BARE, interference=1.0)
    choices = [Choice("zero3", 2, transport=transport) for transport in ("c10d", "peer")]
    collectives, copies = (forecast(blocks(3), choice, machine, slowed) for choice in choices)
    assert copies.gather_ms == pytest.approx(collectives.gather_ms / 2)
    assert copies.stretched_ms < 0.55 * collectives.stretched_ms and copies.total_ms < collectives.total_ms


@pytest.mark.parametrize(
    "spared, strategy, numel, more",
    [
        (3, "zero3", MB, {}),
        (0, "zero2", MB, {}),  # no peers: nothing is published where parameters are not split
        (6, "zero3", MB, {"accumulation": 2}),
        (0, "zero3", MB, {"transport": "c10d"}),
        (0, "zero3", MB, {"wire": torch.float32}),
        (0, "zero1", MB, {"accumulation": 2}),  # sums wait
        (0, "ddp", MB, {}),
        (0, "hsdp", MB, {"shard_size": 2}),
        (0, Strategy(2, 2, 4), MB, {}),
        (0, "zero3", 2**18, {}),  # pieces of half a MiB
    ],
)
def test_gradients_are_laid_out_where_the_runtime_does_so(spared: int, strategy: Any, numel: int, more: Any) -> None:
    """docs/decisions/gradients-where-they-are.md; `spared`: how often it does not."""
    each = tuple(ParamSpec(f"p{i}", (numel,), torch.bfloat16, torch.float32, True) for i in range(100))
    units = tuple(dataclasses.replace(unit, params=each) for unit in blocks(3).units)
    workload, choice = (
        dataclasses.replace(blocks(3), units=units),
        Choice(strategy, 4, **({"transport": "peer"} | more)),
    )
    laid, found = (forecast(workload, dataclasses.replace(choice, gradients=word)) for word in ("laid out", "auto"))
    assert laid.compute_ms - found.compute_ms == pytest.approx(spared * LAID_MS, abs=1e-9)


@pytest.mark.parametrize(
    "choice, gathered, reduced, updated",
    [
        (Choice("ddp", 1), 6, 4 + 6, 32),
        (Choice("ddp", 1, compute_bytes=4), 0, 0, 32),  # torch's own autograd
        (Choice("ddp", 2), 6, 4 + 6 + 8, 32),  # to fp32, which is summed; and out of there
        (Choice("ddp", 2, compute_bytes=4), 0, 8 + 8, 32),
        (Choice("ddp", 2, accumulation=4), 1.5, 4 + 10 + 8 / 4, 32),  # each micro-batch is added to sums in fp32
        (Choice("zero3", 4), 6 / 4, 4 + (4 * 2 + 4) / 4, 32),
        (Choice("zero3", 4, sums="ring"), 6 / 4, 4 + (2 + 4) / 4, 32),
        (Choice("zero3", 4, transport="peer"), 4 / 4, 4 + (4 * 2 + 4) / 4, 34),
        (Choice("zero1", 4, accumulation=2), 6 / 4 / 2, 4 + 10 + (4 + 4) / 4 / 2, 32),
        (Choice("hsdp", 4, 2), 6 / 2, 4 + (2 * 2 + 4) / 2 + 8 / 2, 32),
    ],
)
def test_what_the_runtime_moves_by_hand(choice: Choice, gathered: float, reduced: float, updated: int) -> None:
    """Bytes of an element of a unit, of one micro-batch; of an owned one, of a step."""
    factors, unit = resolve(choice.strategy, choice.world, choice.shard_size), blocks(1, numel=1).units[0]
    assert gather_bytes(unit, choice, factors) == pytest.approx(gathered)
    assert reduce_bytes(unit, choice, factors, on_cpu=False) == pytest.approx(reduced)
    assert update_bytes(choice, factors) == updated
    if choice.sums == "auto" and choice.strategy == "zero3" and choice.transport == "c10d":  # row by row, in place
        # a row is 2 bytes read and 4 written (the first) or updated, of which a copy moves three for two
        assert reduce_bytes(unit, choice, factors, on_cpu=True) == pytest.approx(4 + 4 * (2 + 2 * 4) * 2 / 3 / 4)


@pytest.mark.parametrize(
    "choice, gathered, reduced, updated",
    [
        # masters are cast; gradients laid out, added row by row; update: two reads, three written where they were read
        (Choice("zero1", 4, compute_bytes=4, sums="exchange"), 12 / 4, 12 + 4 * 12 / 4, 8 + 24),
        (Choice("ddp", 2, compute_bytes=4), 0, 12 + 12, 8 + 24),
        # what is published is copied whole, what is the others' laid out once more, and each row read where it is
        (Choice("zero3", 4, transport="peer"), 2 + 4, 2 + 4 + 0.75 * (2 + 4) + 4 * (2 + 8) / 4, 8 + 24 + 4 + 4),
        (Choice("zero3", 4, transport="peer", halved=True), 2 + 4, 2 + 4 + 4.5 + 10, 8 + 24 + (16 + 42) * 3 / 2),
    ],
)
def test_what_a_cpu_moves_by_hand(choice: Choice, gathered: float, reduced: float, updated: float) -> None:
    """As it fetches what it writes: a fresh write counts twice, and a copy's rate is that of three bytes for two."""
    factors, unit = resolve(choice.strategy, choice.world, None), blocks(1, numel=1).units[0]
    assert gather_bytes(unit, choice, factors, on_cpu=True) == pytest.approx(gathered * 2 / 3)
    assert reduce_bytes(unit, choice, factors, on_cpu=True) == pytest.approx(reduced * 2 / 3)
    assert update_bytes(choice, factors, on_cpu=True) == pytest.approx(updated * 2 / 3)
    if choice.transport == "peer":  # nothing runs on a lane: the rank that gathers copies
        cpu = dataclasses.replace(ROUND, device="CPU, 4 cores")
        found = forecast(blocks(3), choice, cpu)
        assert (found.gather_ms, found.reduce_ms, found.exposed_ms) == (0.0, 0.0, 0.0)


def test_stretching_counts_each_moment_once() -> None:
    schedule = Schedule(Program.parse("AG0 FWD0 AG1 BWD0 RS0 FWD1"))
    assert stretch(schedule, [1, 10, 2, 4, 3, 5], 1.0) == pytest.approx([0, 2, 0, 0, 0, 3])


def test_a_larger_world_never_moves_faster() -> None:
    found = [forecast(blocks(8), ring("zero3", 8 * nodes)) for nodes in (1, 2, 8, 64, 512)]
    moved_ms = [f.gather_ms + f.reduce_ms for f in found]  # what is a rank's own shrinks with the world
    assert moved_ms == sorted(moved_ms)
    assert found[0].optimizer_ms == pytest.approx(512 * found[-1].optimizer_ms)


def test_gradients_exchanged_between_nodes_take_every_card_many_times() -> None:
    """16-bit gradients go all-to-all: between nodes of 8 that is 8 times a ring's traffic, inside one the same."""
    machine = dataclasses.replace(ROUND, network_bytes_per_s=20e9)

    def reduce_ms(world: int, sums: str, wire: torch.dtype | None = None) -> float:
        choice = Choice("zero3", world, sums=sums, wire=wire)
        return forecast(blocks(1), choice, machine).reduce_ms

    assert reduce_ms(8, "exchange") == pytest.approx(reduce_ms(8, "ring"))
    assert reduce_ms(64, "exchange") == pytest.approx(8 * reduce_ms(64, "ring"), rel=0.05)
    assert reduce_ms(64, "auto") == reduce_ms(64, "exchange")
    auto, by_ring, exchanged = (reduce_ms(64, sums, torch.float32) for sums in ("auto", "ring", "exchange"))
    assert auto == by_ring < exchanged


def test_hybrid_spares_a_slow_network_once_it_accumulates() -> None:
    """zero3 sends each element over the network three times in 16 bit, hsdp twice in 32 bit, but once a step."""
    machine = dataclasses.replace(ROUND, network_bytes_per_s=20e9)
    for accumulation, hybrid_is_faster in ((1, False), (8, True)):
        hybrid = forecast(blocks(8), ring("hsdp", 64, 8, accumulation=accumulation), machine)
        whole = forecast(blocks(8), ring("zero3", 64, accumulation=accumulation), machine)
        assert hybrid.gather_ms < 0.25 * whole.gather_ms
        assert (hybrid.total_ms < whole.total_ms) == hybrid_is_faster


@given(
    st.integers(1, 9),
    st.sampled_from((2, 8, 64, 512, 4096)),
    st.sampled_from((1, 2, 8)),
    st.sampled_from((1e9, 20e9, 400e9)),
    st.sampled_from((0.0, 5.0)),
    st.sampled_from(("ring", "exchange")),
    st.integers(2, 4),
)
@settings(max_examples=30, deadline=None)
def test_what_splits_more_is_never_faster(
    count: int, world: int, accumulation: int, network: float, latency_us: float, sums: str, slots: int
) -> None:
    """zero1, zero2 and zero3 move more and more and own the same: their times stand in that order, but for the sums of
    micro-batches that zero1 keeps whole.
    """
    machine = dataclasses.replace(ROUND, network_bytes_per_s=network, network_latency_us=latency_us)
    choices = [Choice(f"zero{n}", world, sums=sums, accumulation=accumulation, slots=slots) for n in (1, 2, 3)]
    one, two, three = (forecast(blocks(count), choice, machine).total_ms for choice in choices)
    kept_ms = 0.0 if accumulation == 1 else 1.0 * count * accumulation  # 10 bytes an element
    assert one - kept_ms <= two * (1 + 1e-9) and two <= three * (1 + 1e-9)


@pytest.mark.parametrize("world", [64, 4096])
def test_gathers_share_the_network_with_reductions(world: int) -> None:
    """Where the network decides, zero3's further gathers cost what they carry; without sharing they were free."""
    machine = dataclasses.replace(ROUND, network_bytes_per_s=20e9, network_latency_us=0.0)
    zero2, zero3 = (forecast(blocks(8), ring(name, world), machine) for name in ("zero2", "zero3"))
    again = sum(step.op is Op.GATHER for step in zero3.schedule.program.steps) - 8
    alone_ms = zero3.durations_ms[0]
    assert again == 5 and zero3.total_ms - zero2.total_ms == pytest.approx(again * alone_ms, rel=0.2)


def test_thousands_of_ranks_take_no_longer() -> None:
    begin = time.process_time()
    forecast(blocks(126), ring("zero3", 16384))
    assert time.process_time() - begin < 2.0


def test_factors_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match="do not divide"):
        forecast(blocks(2), ring(Strategy(3, 3, 3), 8))


def llama_1b(tokens: int, seq: int = 2048) -> Workload:
    """The model of benchmarks/gpu_step, by formula."""
    dim, layers, heads, hidden, words = 2048, 24, 16, 5632, 32768
    wide = 2 * tokens * dim  # bytes of one activation
    products = (
        MatrixProduct(tokens, dim, dim, count=2),
        MatrixProduct(tokens, dim // 2, dim, count=2),
        MatrixProduct(tokens, hidden, dim, count=2),
        MatrixProduct(tokens, dim, hidden),
        MatrixProduct(seq, seq, dim // heads, batch=tokens // seq * heads, is_attention=True),
    )
    numel = 3 * dim * dim + 3 * dim * hidden + 2 * dim
    # two fused norms, two sums; SiLU and the product behind it
    memory_bytes = wide * (2 * 2 + 2 * 3 + 5 * hidden / dim)
    root = UnitWork("", dim, 0, (), 2 * wide, 4, encloses=True, recomputable=False)
    embedding = UnitWork("emb", words * dim, 0, (), 2 * wide, 2, recomputable=False)
    many = tuple(UnitWork(f"blocks.{i}", numel, 0, products, memory_bytes, 30, block_index=i) for i in range(layers))
    head = UnitWork("head", words * dim, 0, (MatrixProduct(tokens, words, dim),), tokens * words * 14.0, 8)
    return Workload("1b", (root, embedding, *many, head), tokens // seq, seq)


@pytest.mark.parametrize("machine, measured_ms", [("h200", 141.7), ("h100", 154.7)])
def test_measured_steps(machine: str, measured_ms: float) -> None:
    """benchmarks/gpu_step: two GPUs, 8192 tokens each, c10d; nothing in the forecast was fitted to these steps."""
    found = forecast_time(llama_1b(8192), Choice("zero3", 2), load_machine(machine))
    assert found.total_ms == pytest.approx(measured_ms, rel=0.10)
