"""Calls that come past the forward which gathers: what is named, and that typing it helps."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from cases.training import TOLERANCE, batch_of
from harness import expect_error, run_ranks
from parity.structures import Chain
from parity.test_outputs import seeded


def in_evaluation(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As libraries decorate their `generate`, by a function that takes no name from the method."""

    def inner(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        was_training = self.training
        self.eval()
        output = method(self, *args, **kwargs)
        self.train(was_training)
        return output

    return inner


def with_a_name(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        return method(*args, **kwargs)

    return wrapper


class Autoencoder(Chain):
    """Used by other methods than its forward."""

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    @with_a_name
    def decode(self, x: Tensor) -> Tensor:
        return self.last(self.blocks[0](x))

    @in_evaluation
    def generate(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))

    def get_head(self) -> nn.Module:
        return self.last

    def set_head(self, head: nn.Module) -> None:
        self.last = head

    def scale_of(self, x: Tensor) -> Tensor:
        return x.exp()


class Trainer(nn.Module):
    """Around the model that is sharded; its own methods are nobody's entry points."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, x: Tensor) -> Tensor:
        return self.model.encode(x).sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.model.blocks[0](x) + self.model.encode(x)


def autoencoder(*entry_points: str) -> Autoencoder:
    built = seeded(lambda: Autoencoder(*(nn.Linear(5, 5) for _ in range(3))))
    return lamina.shard(built, units=["blocks.*"], entry_points=entry_points)


def by_forward() -> None:
    autoencoder().forward(batch_of(0, 0))


def by_forward_of_a_part() -> None:
    autoencoder().blocks[0].forward(batch_of(0, 0))


def by_two_methods() -> None:
    autoencoder().encode(batch_of(0, 0))


def by_the_last_method() -> None:
    autoencoder("encode", "generate").decode(batch_of(0, 0))


def by_a_decorated_method() -> None:
    autoencoder("encode", "decode").generate(batch_of(0, 0))


def by_a_method_around() -> None:
    Trainer(autoencoder()).training_step(batch_of(0, 0))


def by_a_call_around() -> None:
    Trainer(autoencoder())(batch_of(0, 0))


def by_a_part() -> None:
    autoencoder().last(batch_of(0, 0))


def average_of_whole_weights() -> None:
    average = seeded(lambda: Autoencoder(nn.Linear(5, 5)))
    model = lamina.shard(seeded(lambda: Autoencoder(nn.Linear(5, 5))))
    with torch.no_grad():
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.mul_(0.9).add_(weight, alpha=0.1)


SAID: dict[Callable[[], None], tuple[list[str], list[str]]] = {
    by_forward: (["`Autoencoder.forward`", "`model(...)` instead"], ["entry_points"]),
    by_forward_of_a_part: (["`Linear.forward`", "`model(...)` instead"], ["entry_points"]),
    by_two_methods: (["entry_points=('encode',)", "`decode`"], ["scale_of", "reset_parameters", "_head"]),
    by_the_last_method: (["entry_points=('decode',)"], ["`encode`", "`generate`", "wrapper"]),
    by_a_decorated_method: (["entry_points=('generate',)"], ["inner"]),
    by_a_method_around: (["`Autoencoder.encode`", "entry_points=('encode',)"], ["training_step"]),
    by_a_call_around: (["entry_points=('encode',)"], ["Trainer"]),
    by_a_part: (["call the model itself"], ["Linear.forward"]),
    average_of_whole_weights: (["first.weight", "copy the model after lamina.shard()"], []),
}


@pytest.mark.parametrize("call", SAID, ids=lambda call: call.__name__)
def test_what_to_type_is_said(call: Callable[[], None]) -> None:
    words, others = SAID[call]
    errors = expect_error(2, call, error="ShardOpError", contains=words, timeout=15)
    assert not [word for word in others for error in errors.values() if word in error.message], errors


def as_it_was_said() -> float:
    model, plain = (
        autoencoder("encode", "decode", "generate"),
        seeded(lambda: Autoencoder(*(nn.Linear(5, 5) for _ in range(3)))),
    )
    x = batch_of(0, 0)
    pairs = [(each.decode(each.encode(x)), each.generate(x), each(x)) for each in (model, plain)]
    return max((ours - theirs).abs().max().item() for ours, theirs in zip(*pairs, strict=True))


def file_of_another_rank() -> None:
    """All ranks have saved under one name: what is there is the part of whoever was last."""
    model, file = autoencoder(), io.BytesIO()
    torch.save(model.state_dict(), file)
    files = [b""] * dist.get_world_size()
    dist.all_gather_object(files, file.getvalue())
    model.load_state_dict(torch.load(io.BytesIO(files[dist.get_rank() - 1])))


def test_a_file_of_another_rank_is_named() -> None:
    words = ["first.weight", "rank 1 of 2", "lamina.save"]
    errors = expect_error(2, file_of_another_rank, error="RuntimeError", contains=words, timeout=15)
    assert not [error for error in errors.values() if "was called" in error.message]


def without_the_model() -> None:
    """A bound method keeps its object in Python; one of a sharded model does not keep that."""
    autoencoder("encode").encode(batch_of(0, 0))


def test_the_method_of_a_model_that_is_gone() -> None:
    expect_error(2, without_the_model, error="StateError", contains=["`encode`", "keep the model"], timeout=15)


def test_typing_it_helps() -> None:
    assert max(run_ranks(2, as_it_was_said)) <= TOLERANCE
