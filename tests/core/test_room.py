"""Room for gradients: when it is asked for. What it spares: tests/planner/test_reserved.py."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import lamina
from harness import run_ranks
from lamina.runtime import gradients
from lamina.runtime.assemble import RUNTIMES


def trains_and_evaluates(strategy: str, frozen: str, recompute: str | int, **options: Any) -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    model[0].requires_grad_(frozen != "before")
    lamina.shard(model, strategy, start="broadcast", recompute=recompute, **options)
    model[0].requires_grad_(frozen == "")
    RUNTIMES[model].engine.gradients.gives_back = True  # as on a GPU
    data, optimizer = torch.ones(2, 8), torch.optim.SGD(model.parameters(), lr=0.1)
    asked: list[float] = []
    with patch.object(gradients, "make_room", lambda part, sizes_bytes, _: asked.append(part * sum(sizes_bytes))):
        with torch.no_grad():
            model(data)
        assert asked == []  # who only evaluates keeps the memory
        for _ in range(3):
            model(data).sum().backward()
            held = sum(grad.nbytes for unit in RUNTIMES[model].units for grad in unit.gradients.ranges)
            optimizer.step()
            optimizer.zero_grad()
    assert asked == ([] if options else [(0.6 if recompute in ("full", 1) else 0.5) * held])


def test_room_is_made_once_by_the_first_forward_of_a_training() -> None:
    for strategy in ("zero3", "zero1", "ddp"):
        run_ranks(2, trains_and_evaluates, strategy, "", "none")
    for frozen in ("before", "after"):
        run_ranks(2, trains_and_evaluates, "zero3", frozen, "none")


def test_none_where_masters_that_are_halved_leave_some() -> None:
    halves = lamina.Precision(compute=torch.bfloat16, halves=True)
    run_ranks(2, trains_and_evaluates, "zero3", "", "none", precision=halves, transport="peer")


def test_more_where_all_blocks_are_recomputed() -> None:
    for recompute in ("full", 1, 2):
        run_ranks(2, trains_and_evaluates, "zero3", "", recompute)


def nothing_to_train(ignore: tuple[str, ...]) -> list[float]:
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.ReLU())
    lamina.shard(model, start="broadcast", ignore=ignore)
    own = RUNTIMES[model].engine.gradients
    own.gives_back, own.room_part = True, 0.5
    asked: list[float] = []
    with patch.object(gradients, "make_room", lambda part, sizes_bytes, _: asked.append(part * sum(sizes_bytes))):
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    return asked


def test_none_where_nothing_trains_or_there_is_no_unit() -> None:
    for ignore in ((), ("0",)):
        assert run_ranks(2, nothing_to_train, ignore) == [[], []]
