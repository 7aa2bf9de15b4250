"""Selective recomputation keeps products; a forward that writes over a product must not change what was kept."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from operator import is_

import pytest
import torch
from torch import Tensor, nn

import lamina

WIDTH = 4


class Block(nn.Module):
    """(3, WIDTH) -> (3, WIDTH) by a function of the input and one of the modules."""

    def __init__(self, inner: nn.Module, act: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.act = inner, act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.inner, x)


def add_in_place(linear: nn.Module, x: Tensor) -> Tensor:
    y = linear(x)
    z = torch.tanh(y)
    return y.add_(1.0).sin_() * z.detach()


def write_a_part(linear: nn.Module, x: Tensor) -> Tensor:
    y = linear(x)
    y[:, 1:].mul_(2.0)
    y[0] = 0.5
    return torch.tanh(y)


def write_through_a_hidden_view(linear: nn.Module, x: Tensor) -> Tensor:
    first, second = torch.unsafe_chunk(linear(x), 2, dim=1)  # does not share the version counter
    return torch.cat([first.sigmoid_(), second.tanh_()], dim=1)


def write_out(linear: nn.Module, x: Tensor) -> Tensor:
    y = linear(x)
    with torch.no_grad():
        torch.mul(y, 3.0, out=y)
    return torch.sin(y)


RECURRENT = {
    "gru": lambda: Block(nn.GRU(WIDTH, WIDTH, batch_first=True), lambda m, x: m(x[:, None])[0][:, 0]),
    "lstm": lambda: Block(nn.LSTM(WIDTH, WIDTH, batch_first=True), lambda m, x: m(x[:, None])[0][:, 0]),
    "rnn": lambda: Block(nn.RNN(WIDTH, WIDTH, batch_first=True), lambda m, x: m(x[:, None])[0][:, 0]),
    "gru cell": lambda: Block(nn.GRUCell(WIDTH, WIDTH), lambda m, x: m(x, x)),
    "lstm cell": lambda: Block(nn.LSTMCell(WIDTH, WIDTH), lambda m, x: m(x, (x, x))[0]),
}
WRITES = {
    act.__name__: lambda act=act: Block(nn.Linear(WIDTH, WIDTH), act)
    for act in (add_in_place, write_a_part, write_through_a_hidden_view, write_out)
}


def gradients(make: Callable[[], Block], recompute: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), make(), make(), nn.Linear(WIDTH, 1)).double()
    model = lamina.shard(model, units=[Block], recompute=recompute)
    for _ in range(2):
        model(torch.linspace(-1, 1, 3 * WIDTH, dtype=torch.float64).view(3, WIDTH)).pow(2).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", [*RECURRENT, *WRITES])
def test_writes_over_kept_products_change_nothing(kind: str) -> None:
    make = {**RECURRENT, **WRITES}[kind]
    for wanted, found in zip(gradients(make, "none"), gradients(make, "selective"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("recompute", ["none", "full", "selective", 2])
def test_copies_and_pickles_run_again_what_is_their_own(recompute: str | int) -> None:
    """Of one process, whose model is torch's own but for this."""
    torch.manual_seed(0)
    model = lamina.shard(
        nn.Sequential(*[Block(nn.Linear(WIDTH, WIDTH), nn.Module.__call__) for _ in range(2)]), recompute=recompute
    )
    data = torch.randn(3, WIDTH)
    model(data).square().sum().backward()
    wanted = [param.grad for param in model.parameters()]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.zero_grad()
        other(data).square().sum().backward()
        assert all(map(torch.equal, [param.grad for param in other.parameters()], wanted))
        assert not any(map(is_, other.parameters(), model.parameters()))
