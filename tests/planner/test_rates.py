"""Single operations: the roofline by hand, measured points that speak for their neighbourhood, links by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.core.strategy import Level, resolve
from lamina.planner.machine import Machine, MatrixPoint, load_machine
from lamina.planner.rates import NETWORK_HOP, Rates, Reached, correction, roofline_ms

H100 = dataclasses.replace(load_machine("h100"), matrix_flops_per_s=500e12, memory_bytes_per_s=2e12)
LINKS = dataclasses.replace(
    H100,
    gpus_per_node=4,
    gather_bytes_per_s=100e9,
    gather_latency_us=10.0,
    network_bytes_per_s=50e9,
    network_latency_us=5.0,
)
WHOLE = Reached(network=1.0, memory=1.0)


def test_a_product_is_its_operations_and_its_traffic() -> None:
    ms = roofline_ms(H100, 1000, 2000, 4000)
    assert ms == pytest.approx(16e9 / 500e12 * 1e3 + 2 * (4e6 + 8e6 + 2e6) / 2e12 * 1e3)
    assert Rates(H100).product_ms(1000, 2000, 4000) == pytest.approx(ms)
    assert Rates(H100, Reached(matrix=0.5)).product_ms(1000, 2000, 4000) == pytest.approx(2 * ms)
    assert Rates(H100).product_ms(1000, 2000, 4000, batch=3) == pytest.approx(3 * ms)


def test_sums_go_by_trees_where_there_are_many_nodes() -> None:
    """A ring between 512 nodes has 511 hops, a tree nine up and nine down; three nodes are a ring."""
    machine = load_machine("h100")
    rates = Rates(machine)
    for nodes, hops in ((3, 2), (512, 18)):
        latency_ms = (machine.sum_latency_us + hops * machine.network_latency_us) / 1e3
        assert rates.sum(8.0, Level(8 * nodes, 1)).ms == pytest.approx(latency_ms, rel=1e-3)
    assert rates.gather(8.0, Level(8 * 512, 1)).ms > 511 * machine.network_latency_us / 1e3


def test_wider_numbers_are_slower_and_narrower_ones_faster() -> None:
    of = {size: Rates(H100).product_ms(4096, 4096, 4096, dtype_bytes=size) for size in (1, 2, 4)}
    assert of[1] < of[2] < of[4]


def test_a_narrow_product_reaches_less_of_the_rate() -> None:
    wide, narrow = (2.0 * 8192 * n * n / Rates(H100).product_ms(8192, n, n) for n in (8192, 256))
    assert narrow < 0.5 * wide


def test_a_measured_shape_is_nearly_reproduced_and_far_ones_little_changed() -> None:
    slow = MatrixPoint(1024, 1024, 1024, 3 * roofline_ms(H100, 1024, 1024, 1024))
    plain = MatrixPoint(8192, 8192, 8192, roofline_ms(H100, 8192, 8192, 8192))
    machine = dataclasses.replace(H100, matrix_points=(slow, plain))
    assert correction(machine, 1024, 1024, 1024) == pytest.approx(3, rel=0.02)
    assert correction(machine, 8192, 8192, 8192) == pytest.approx(1, rel=0.02)
    assert 1 < correction(machine, 4096, 4096, 4096) < 1.5
    assert correction(machine, 4096, 4096, 4096, dtype_bytes=4) == 1  # no point of that kind


def test_a_batch_of_small_products_is_no_small_product() -> None:
    slow = MatrixPoint(256, 1024, 1024, 5 * roofline_ms(H100, 256, 1024, 1024))
    plain = MatrixPoint(16384, 1024, 1024, roofline_ms(H100, 16384, 1024, 1024))
    rates = Rates(dataclasses.replace(H100, matrix_points=(slow, plain)))
    assert rates.product_ms(256, 1024, 1024, batch=64) < 64 * 0.25 * rates.product_ms(256, 1024, 1024)


def test_odd_sizes_are_slower_in_16_bits_on_gpus() -> None:
    """Rows that are no multiple of 16 bytes long are for other kernels; what was measured speaks for its kind."""

    def ms(n: int, k: int, machine: Machine = H100, dtype_bytes: int = 2) -> float:
        return Rates(machine).product_ms(8192, n, k, dtype_bytes=dtype_bytes)

    assert ms(50264, 768) < 1.01 * ms(50304, 768) < 0.5 * ms(50258, 768) < 0.5 * ms(50257, 768)
    assert ms(768, 50258) == pytest.approx(ms(768, 50260), rel=1e-3) and ms(4096, 4095) > 3 * ms(4096, 4096)
    assert ms(50257, 768, dtype_bytes=4) < 1.01 * ms(50264, 768, dtype_bytes=4)
    host = dataclasses.replace(H100, device="CPU")
    assert ms(50257, 768, host) < 1.01 * ms(50264, 768, host)
    odd = MatrixPoint(8192, 1429, 1000, 2 * roofline_ms(H100, 8192, 1429, 1000))
    even = MatrixPoint(8192, 1432, 1000, roofline_ms(H100, 8192, 1432, 1000))
    machine = dataclasses.replace(H100, matrix_points=(odd, even))
    assert correction(machine, 8192, 1429, 1000) == 2 and correction(machine, 8192, 1432, 1000) == 1
    assert correction(dataclasses.replace(H100, matrix_points=(even,)), 8192, 1429, 1000) == 1


@given(st.integers(1, 1 << 15), st.integers(1, 1 << 15), st.integers(1, 1 << 15))
@settings(max_examples=60, deadline=None)
def test_the_correction_lies_between_what_was_measured(m: int, n: int, k: int) -> None:
    shapes = ((1024, 1024, 1024, 2.0), (8192, 256, 512, 0.9))
    points = tuple(MatrixPoint(*s, ratio * roofline_ms(H100, *s)) for *s, ratio in shapes)
    found = correction(dataclasses.replace(H100, matrix_points=points), m, n, k)
    assert 0.9 - 1e-9 <= found <= 2.0 + 1e-9


def test_memory_attention_and_launches() -> None:
    rates = Rates(H100, Reached(memory=0.5, attention=0.5))
    assert rates.memory_ms(1e9) == pytest.approx(1.0)
    assert rates.attention_ms(1e12) == pytest.approx(2e15 / H100.attention_forward_flops_per_s)
    assert rates.attention_ms(1e12, backward=True) == pytest.approx(2e15 / H100.attention_backward_flops_per_s)
    assert rates.launch_ms(100) == pytest.approx(0.1 * H100.launch_us)


def test_a_gather_inside_a_node() -> None:
    rates = Rates(LINKS, WHOLE)
    assert rates.gather_ms(1e8, Level(4, 1)) == pytest.approx(0.75 + 0.010)
    assert rates.gather_ms(1e8, Level(1, 1)) == 0 and rates.gather_ms(0, Level(4, 1)) == 0


def test_a_gather_over_nodes_is_bound_by_their_cards() -> None:
    assert Rates(LINKS, WHOLE).gather_ms(1e8, Level(8, 1)) == pytest.approx(1.0 + 0.015)  # half comes from outside


def test_groups_across_nodes_share_the_cards() -> None:
    """hsdp on two nodes: each rank's group of two has a member on each, four such groups a node, no hops inside."""
    replicas = resolve("hsdp", 8, 4).replicas
    assert replicas == Level(2, 4)
    assert Rates(LINKS, WHOLE).gather_ms(1e8, replicas) == pytest.approx(
        4 * 0.5e8 / 50e9 * 1e3 + 0.010 + NETWORK_HOP * 0.005
    )


@given(st.integers(1, 64), st.integers(0, 1 << 30))
@settings(max_examples=40, deadline=None)
def test_more_ranks_and_more_bytes_never_take_less(nodes: int, size_bytes: int) -> None:
    rates = Rates(LINKS, WHOLE)
    ms = rates.gather_ms(size_bytes, Level(4 * nodes, 1))
    assert ms <= rates.gather_ms(size_bytes + 1024, Level(4 * nodes, 1))
    assert ms <= rates.gather_ms(size_bytes, Level(4 * nodes + 4, 1)) + 1e-9
