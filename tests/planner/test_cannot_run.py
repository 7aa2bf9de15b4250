"""Models that a plan cannot run: whatever goes wrong inside, the answer is one line that says where, and what works."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lamina.errors import UsageError
from lamina.planner.measure import measure


class Calls(nn.Module):
    """What a function makes of tokens and their hidden states."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.embedding, self.inner, self.function = nn.Embedding(16, 8), nn.Linear(8, 8), function
        vars(self).update(attributes)

    def forward(self, tokens: Tensor) -> Any:
        return self.function(tokens, self.inner(self.embedding(tokens)))


class Doubles(torch.autograd.Function):
    """Backward is told what to do by the forward's keyword."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.way = way
        return torch.as_tensor(np.asarray(x.detach())) if way == "numpy" else 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.way == "raise":
            raise NotImplementedError("no backward yet")
        return gradients[0] * (float(ctx.saved_tensors[0].sum()) if ctx.way == "values" else 2.0), None


def repeats(tokens: Tensor, x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = x / 2
    return x


INNER = "in `inner` or just behind it"
VALUES = rf"Calls cannot run without values: {INNER}.* plan the model again"
INPUTS = rf"Calls does not run on the inputs of this plan \(tokens int64 \[1, 4\]\), {INNER}: %s.*inputs="


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda t, x: x * x.mean().item(), VALUES),
        (repeats, VALUES),
        (lambda t, x: x[t > 3], VALUES),
        (lambda t, x: x[:, : len(torch.unique(t))], VALUES),
        (lambda t, x: x * sum(t.tolist()[0]), VALUES),
        (lambda t, x: x + torch.from_numpy(x.detach().numpy()), VALUES),
        (lambda t, x: x * x.detach().cpu().numpy().mean(), VALUES),
        (lambda t, x: Doubles.apply(x, "numpy"), VALUES),
        (lambda t, x: Doubles.apply(x, "values"), "cannot run without values: in its backward"),
        (lambda t, x: Doubles.apply(x, "raise"), "the backward of Calls fails: .*no backward yet.* try one step"),
        (lambda t, x: x + torch.ones(8, device="cpu"), r"does not run without a device: .*device=x.device"),
        (lambda t, x: {}["word"], INPUTS % "KeyError: 'word'"),
        (lambda t, x: [][3], INPUTS % "IndexError"),
        (lambda t, x: x / (1 // 0), INPUTS % "ZeroDivisionError"),
        (lambda t, x: repeats(), INPUTS % "TypeError: .*missing 2"),  # type: ignore[call-arg]
        (lambda t, x: None, "returned NoneType, which holds no tensor.*loss="),
        (lambda t, x: 3, "returned int, which holds no tensor"),
        (lambda t, x: iter([x]), "returned list_iterator, which holds no tensor"),
        (lambda t, x: x.detach(), "depends on none of its parameters.*give loss="),
        (lambda t, x: x.argmax(-1), "depends on none of its parameters"),
    ],
)
def test_one_line_with_the_place_and_what_works(function: Callable[[Tensor, Tensor], Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        measure(Calls(function), 1, 4)
    assert "\n" not in str(caught.value)


def test_what_runs_still_runs() -> None:
    assert measure(Calls(lambda t, x: Doubles.apply(x, "twice")), 1, 4).numel == 16 * 8 + 8 * 8 + 8
    frozen = Calls(lambda t, x: x).requires_grad_(False)  # nothing to train is no mistake: there is no gradient to miss
    assert measure(frozen, 1, 4).numel == 16 * 8 + 8 * 8 + 8


def test_models_that_cannot_be_copied_are_named() -> None:
    for build, words in (
        (lambda: Calls(lambda t, x: x, stream=iter(zip([1], [2], strict=True)), lines=(i for i in [1])), "`lines`: "),
        (lambda: torch.jit.script(nn.Linear(4, 4)), "this model is compiled by torch.jit.*the module it was made of"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 4))), "`0` of this Sequential is compiled by torch.jit"),
    ):
        with pytest.raises(UsageError, match=words):
            measure(build(), 1, 4)


def test_gradients_that_are_sparse() -> None:
    with pytest.raises(UsageError, match="sparse gradients.*sparse=False"):
        measure(nn.Sequential(nn.Embedding(16, 8, sparse=True), nn.Linear(8, 8)), 1, 4)


def test_a_loss_that_is_no_tensor() -> None:
    with pytest.raises(UsageError, match="loss= returned float, wanted a tensor"):
        measure(nn.Linear(4, 4), 1, 4, inputs=[torch.zeros(1, 4)], loss=lambda model, inputs: 1.5)  # type: ignore[arg-type, return-value]


def test_more_positions_than_the_model_has() -> None:
    table = nn.Parameter(torch.zeros(4, 8))
    model = Calls(lambda t, x: x + table[: t.shape[1]].to(x.device), config=SimpleNamespace(max_position_embeddings=4))
    with pytest.raises(UsageError, match="Its configuration has 4 positions: type --seq 4, or less"):
        measure(model, 1, 8)


def test_a_long_run_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.planner.measure.MANY_OPERATIONS", 3)
    with pytest.warns(UserWarning, match="Calls has run 3 operations without memory, now in `inner`.*shorter --seq"):
        measure(Calls(lambda t, x: x), 1, 4)
