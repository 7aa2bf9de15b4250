"""Runs of one unit, whose segments can be counted by hand. What real runs reserved: test_plan_memory.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lamina.core.strategy import resolve
from lamina.planner.caching_allocator import MIB
from lamina.planner.machine import load_machine
from lamina.planner.measure import measure
from lamina.planner.measure_data import Event, Happens, Measured
from lamina.planner.memory import NCCL_BYTES, SUMS_COMMUNICATOR_BYTES, communicators, forecast_memory
from lamina.planner.meta_run import LiveBytes
from lamina.planner.reserved import Reserved, reserve
from lamina.planner.state import state_of
from lamina.planner.workload import Choice

TAKE, GIVE, PRODUCT, GRADIENT, REDUCE = Happens
# an activation beside a product, then the reduction of the only unit
STEP = (Event(TAKE, 0, 16 * MIB), Event(PRODUCT, 0), Event(REDUCE, 0), Event(GIVE, 0))


@pytest.fixture(scope="module")
def measured() -> Measured:
    """One weight of 32 MiB in fp32."""
    with torch.device("meta"):
        model = nn.Linear(1024, 8192, bias=False)
    found = measure(model, 1, 1, inputs=[torch.zeros(1, 1024, device="meta")], precision="bf16")
    return replace(found, events=STEP)


def follow(measured: Measured, strategy: str, world: int, room_part: float = 0.0, **options) -> Reserved | None:
    factors = resolve(strategy, world)
    return reserve(measured, state_of(measured.units, factors), factors, room_part=room_part, **options)


def test_a_model_that_is_made_unit_by_unit(measured: Measured) -> None:
    """Whole value 32, shard 16; arena and activation in what the value leaves. Workspace 32, gradient 16, inbox 16 on
    its lane; one moment where the activation was, the other 16. In the second step the gradient's memory is the
    activation's, and the gradient needs 16 more. And 2 for what is small, on either lane."""
    found = follow(measured, "zero3", 2)
    assert found is not None and found.reserved_bytes == (32 + 16 + 32 + 16 + 16 + 16 + 16 + 2 + 2) * MIB
    assert found.retries == 0


def test_a_model_that_was_on_the_device(measured: Measured) -> None:
    """Its value is there while weights are compared, for which three pieces of 8 take two segments of 20: shard and
    arena come to lie in these, activation and gradient in what the value leaves."""
    found = follow(measured, "zero3", 2, given=True, gives_back=False)
    assert found is not None and found.reserved_bytes == (32 + 40 + 32 + 16 + 16 + 16 + 2 + 2) * MIB


def test_a_model_that_was_on_the_device_gives_back_what_is_free(measured: Measured) -> None:
    """Of value and pieces only the segment of 20 in which the shard lies is left: arena, activation and gradient take
    new ones, and the last moment the activation's."""
    found = follow(measured, "zero3", 2, given=True)
    assert found is not None and found.reserved_bytes == (20 + 16 + 16 + 32 + 16 + 16 + 16 + 16 + 2 + 2) * MIB


def test_gradients_that_nobody_reduces_stay_until_the_next_forward() -> None:
    """One rank in fp32: value 32 and master 32; the gradient in what the value leaves, and moments of 32 each."""
    with torch.device("meta"):
        model = nn.Linear(1024, 8192, bias=False)
    plain = measure(model, 1, 1, inputs=[torch.zeros(1, 1024, device="meta")])
    events = (Event(TAKE, 0, 32 * MIB), Event(GRADIENT, 0), Event(REDUCE, 0), Event(GIVE, 0))
    found = follow(replace(plain, events=events), "zero3", 1)
    assert found is not None and found.reserved_bytes == (32 + 32 + 64 + 2) * MIB


def test_gradients_lie_where_activations_lay(measured: Measured) -> None:
    """Six activations of 12 MiB are gone before the gradient of 16 is made, which fits into none of their places. With
    room for 8, a segment of 20, the first activation and then the gradient lie there."""
    taken = [Event(TAKE, number, 12 * MIB) for number in range(6)]
    given = [Event(GIVE, number) for number in range(6)]
    narrow = replace(measured, events=(*taken, *given, Event(REDUCE, 0)))
    before, now = (follow(narrow, "zero3", 2, given=True, room_part=part) for part in (0.0, 0.5))
    assert before is not None and now is not None and before.allocated_bytes == now.allocated_bytes
    assert before.reserved_bytes - now.reserved_bytes == (6 * 12 + 16 - 20 - 5 * 12) * MIB


def test_a_device_with_a_limit(measured: Measured) -> None:
    free = follow(measured, "zero3", 2)
    assert free is not None and follow(measured, "zero3", 2, limit_bytes=free.reserved_bytes) == free
    assert follow(measured, "zero3", 2, limit_bytes=free.allocated_bytes - 1) is None


def test_pages_reserve_no_more_than_one_each_beyond(measured: Measured) -> None:
    grown = follow(measured, "zero3", 2, expandable=True)
    assert grown is not None
    assert grown.allocated_bytes <= grown.reserved_bytes < grown.allocated_bytes + 4 * 20 * MIB


def test_sums_of_gradients_are_made_in_place_where_nobody_else_has_the_first() -> None:
    watch = LiveBytes("cuda")
    watch.events = [Event(TAKE, n, 8) for n in range(3)] + [Event(GIVE, n) for n in range(3)]
    watch._sums = {2: 0}
    assert list(watch.settled_events()) == [Event(TAKE, 0, 8), Event(TAKE, 1, 8), Event(GIVE, 1), Event(GIVE, 0)]
    watch.events.insert(3, Event(TAKE, 3, 8))
    assert list(watch.settled_events()) == watch.events


@pytest.mark.parametrize(
    "strategy, world, count", [("ddp", 1, 0), ("ddp", 2, 1), ("zero1", 2, 2), ("zero3", 8, 2), ("hsdp", 8, 3)]
)
def test_communicators_are_counted_and_paid_for(measured: Measured, strategy: str, world: int, count: int) -> None:
    factors = resolve(strategy, world, 4 if strategy == "hsdp" else None)
    assert communicators(factors) == count
    machine = load_machine("h200")
    choice = Choice(strategy, world, shard_size=4 if strategy == "hsdp" else None)
    forecast = forecast_memory(measured, choice, machine)
    beside_bytes = forecast.used_bytes - forecast.reserved_bytes
    sums_bytes = 0 if strategy == "ddp" else SUMS_COMMUNICATOR_BYTES
    nccl_bytes = NCCL_BYTES + sums_bytes if world > 1 else 0
    assert beside_bytes == int(machine.fixed_bytes + nccl_bytes + count * machine.communicator_bytes)
