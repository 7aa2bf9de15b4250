"""The loss of an output layer in chunks is that of its whole logits, and so are the gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lamina.train.chunked_loss import ChunkedHead, summed_loss
from lamina.train.data import IGNORED

TOKENS, WIDTH, VOCABULARY, CHUNK = 37, 24, 50, 8


class Scaled(nn.Linear):
    """More than a linear layer."""

    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * super().forward(input)


def problem(kind: type[nn.Linear], bias: bool, dtype: torch.dtype) -> tuple[nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    head = kind(WIDTH, VOCABULARY, bias=bias).to(dtype)
    hidden = torch.randn(1, TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator, dtype=torch.int32)
    labels[::5] = IGNORED
    return head, hidden.requires_grad_(), labels


def whole(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    return summed_loss(head(hidden).flatten(0, -2), labels.long())


def in_chunks(head: nn.Linear, hidden: Tensor, labels: Tensor, factor: float = 1 / 7) -> Tensor:
    chunked = ChunkedHead(head, VOCABULARY)
    chunked.chunk, chunked.labels, chunked.factor = CHUNK, labels.long(), factor
    try:
        return head(hidden).sum()
    finally:
        chunked.remove()


def results(loss_of: Callable[..., Tensor], head: nn.Linear, hidden: Tensor, labels: Tensor) -> list[Tensor | None]:
    """The loss, and what the mean over 7 leaves as gradients."""
    leaves = [hidden, *head.parameters()]
    for leaf in leaves:
        leaf.grad = None
    loss = loss_of(head, hidden, labels)
    if loss.requires_grad:
        (loss / 7).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [nn.Linear, Scaled])
@pytest.mark.parametrize("frozen", ["", "weight", "hidden", "all"])
def test_equals_whole_logits(kind: type[nn.Linear], bias: bool, frozen: str) -> None:
    head, hidden, labels = problem(kind, bias, torch.float64)
    head.weight.requires_grad_(frozen not in ("weight", "all"))
    hidden.requires_grad_(frozen not in ("hidden", "all"))
    if bias:
        head.bias.requires_grad_(frozen != "all")
    wanted, found = (results(loss_of, head, hidden, labels) for loss_of in (whole, in_chunks))
    for a, b in zip(wanted, found, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_sixteen_bits_are_as_near_to_float64_as_whole_logits() -> None:
    """Chunks add up and are scaled; neither may round again."""
    exact_head, exact_hidden, labels = problem(nn.Linear, True, torch.bfloat16)
    head, hidden = exact_head, exact_hidden
    wide = nn.Linear(WIDTH, VOCABULARY).double()
    wide.load_state_dict(head.state_dict())
    exact = results(whole, wide, hidden.detach().double().requires_grad_(), labels)
    errors = [
        [
            float((a.double() - b).norm() / b.norm())
            for a, b in zip(found, exact, strict=True)
            if a is not None and b is not None
        ]
        for found in (results(loss_of, head, hidden, labels) for loss_of in (whole, in_chunks))
    ]
    assert len(errors[0]) == 4
    for by_whole, by_chunks in zip(*errors, strict=True):
        assert by_chunks <= 1.2 * by_whole, errors


@pytest.mark.parametrize("factor", [1.0, 1 / 14, 3.0])
def test_any_factor_is_right(factor: float) -> None:
    """What is expected only decides where numbers are rounded."""
    head, hidden, labels = problem(nn.Linear, True, torch.float64)
    wanted = results(whole, head, hidden, labels)
    found = results(functools.partial(in_chunks, factor=factor), head, hidden, labels)
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_words_that_cannot_follow_and_no_labels_at_all() -> None:
    head, hidden, labels = problem(nn.Linear, True, torch.float64)
    with torch.no_grad():
        head.bias[0] = -torch.inf
    labels[labels == 0] = 1
    wanted, found = (results(loss_of, head, hidden, labels) for loss_of in (whole, in_chunks))
    for a, b in zip(wanted, found, strict=True):
        assert a is not None and b is not None and torch.isfinite(b).all()
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
    for value in results(in_chunks, head, hidden, torch.full_like(labels, IGNORED)):
        assert value is not None and not value.any()


def test_a_second_backward_is_refused() -> None:
    head, hidden, labels = problem(nn.Linear, True, torch.float64)
    loss = in_chunks(head, hidden, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    head, hidden, labels = problem(nn.Linear, False, torch.float64)
    with torch.no_grad():
        loss = in_chunks(head, hidden, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, whole(head, hidden, labels).detach())
