"""Backwards through tensors that nobody finds, past a unit's outputs, while the unit's weights are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import lamina
from harness import run_ranks
from parity.leaving import BLOCKS, batch, left, net
from parity.reference import TOLERANCE, gradient_deviation

GATHERED: tuple[dict[str, Any], ...] = (
    {"slots": 2 * BLOCKS},
    {"slots": 2 * BLOCKS, "transport": "peer"},
    {"strategy": "zero1"},
    {"strategy": "ddp"},
)


def of_weights_that_are_there() -> list[float]:
    """By way, where all units are still gathered after the forward: of a backward through what nobody finds."""
    found, rank, world = [], dist.get_rank(), dist.get_world_size()
    for way in GATHERED:
        model, plain = (net("elsewhere") for _ in range(2))
        lamina.shard(model, units=[*map(str, range(BLOCKS + 1))], **way)
        for step in range(2):
            for each, scale, places in ((model, 1, [rank]), (plain, world, range(world))):
                each.zero_grad()
                for place in places:
                    left.clear()
                    each(batch(place, step))
                    (left[step].square().mean() / scale).backward()
            found.append(gradient_deviation(model, {n: p.grad for n, p in plain.named_parameters()}))
    return found


def test_gradients_through_weights_that_are_still_there_are_reduced() -> None:
    for found in run_ranks(2, of_weights_that_are_there):
        assert max(found) <= TOLERANCE, found


def of_changed_weights() -> list[str]:
    """By way, of a graph that nobody finds, whose weights were changed and gathered again."""
    said = []
    for way in GATHERED:
        model = lamina.shard(net("elsewhere"), units=[*map(str, range(BLOCKS + 1))], **way)
        left.clear()
        model(batch(0, 0))
        old = left[1]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        model(batch(0, 1))
        with pytest.raises(RuntimeError) as raised:
            old.square().mean().backward()
        said.append(str(raised.value))
    return said


def test_graphs_whose_weights_were_changed_are_refused() -> None:
    """As in one process: autograd compares versions."""
    for said in run_ranks(2, of_changed_weights):
        assert all("modified by an inplace operation" in message for message in said), said
