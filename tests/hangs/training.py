"""A loop that is fast enough for many steps, in which one rank does something else at one of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import lamina
from lamina.core import watch

# Under pytest on a busy machine; what is proven does not depend on them.
SHORT = watch.Limits(silent_s=1.2, proof_s=0.4, stopped_s=0.8, grace_s=0.4, beat_s=0.2)
WIDTH = 8


@contextlib.contextmanager
def short_limits() -> Iterator[None]:
    watch.configure(SHORT)
    try:
        yield
    finally:
        watch.configure(watch.Limits())


def under_short_limits(act: Callable[..., Any], *args: Any) -> Any:
    with short_limits():
        return act(*args)


def build(transport: str = "auto") -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    return lamina.shard(layers, units=[nn.Linear], transport=transport)


def step(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()
    model.zero_grad()


def train(at: int, odd: Callable[[nn.Module], object], after: int = 3, transport: str = "auto") -> None:
    """Call `odd` before step `at`, counted from 1."""
    model = build(transport)
    for number in range(1, at + after):
        if number == at:
            odd(model)
        step(model)


def timed(act: Callable[[], object]) -> tuple[str, str, float]:
    """The code and text of the error that ends it, and the seconds until then."""
    began = time.monotonic()
    try:
        act()
    except lamina.LaminaError as error:
        return error.code, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began
