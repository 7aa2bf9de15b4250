"""What a type checker knows of a training script: read by mypy, never run. See test_code_style.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_type

import torch
from torch import Tensor, nn

import lamina
from lamina.runtime.report import Report


class Net(nn.Module):
    def loss(self, batch: Tensor) -> Tensor:
        return batch.square().sum()


def train(batches: list[Tensor]) -> None:
    with lamina.deferred(seed=0):
        net = Net()
    model = lamina.shard(net, "hsdp", precision="bf16", recompute="full")
    assert_type(model, Net)
    optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-3, max_norm=1.0)
    assert_type(lamina.even(batches), Iterator[Tensor])
    for number, batch in enumerate(lamina.even(batches)):
        with lamina.accumulate(model, last=number % 2 == 1):
            model.loss(batch).backward()
        optimizer.step()
    assert_type(lamina.clip_grad_norm_(model.parameters(), 1.0), Tensor)
    assert_type(lamina.report(model), Report)
    with lamina.gathered(model), torch.no_grad():
        model.loss(batches[0])
