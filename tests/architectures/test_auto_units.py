"""Automatic units on every architecture of the table: legal, balanced, and never a weight outside its window."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from architectures.double import in_double
from architectures.models import ARCHITECTURES
from architectures.table import PAGE, parity_of_page, with_table
from architectures.windows import ClosedError, only_in_windows
from lamina.runtime.units import UnitPlan, check_units, plan_units

BLOCKS = {  # what a reader of the model would call its blocks
    "llama": ["model.layers.0", "model.layers.1", "model.layers.2"],
    "deepseek-v3": ["model.layers.0", "model.layers.1", "model.layers.2"],
    "gpt2": ["transformer.h.0", "transformer.h.1", "transformer.h.2"],
    "t5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    "unet": ["down.0", "down.1", "middle", "up.0", "up.1"],
    "lstm": [],
    "multihead-attention": [],
}
FEW_OWNED = 0.3  # the root's part of a model whose vocabulary is small


@pytest.fixture(params=sorted(ARCHITECTURES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_weights_are_used_in_their_windows_only(name: str) -> None:
    entry = ARCHITECTURES[name]
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with in_double(), torch.no_grad():
            model = entry.build()
            batch = entry.batch(1, 2)
            plain = entry.loss(model(**batch))
            plans = plan_units(model)
            with only_in_windows(model, plans) as opened:
                in_windows = entry.loss(model(**batch))
    finally:
        torch.set_default_dtype(previous)
    assert in_windows.item() == plain.item()
    assert set(opened.values()) == {1}, opened


def test_plans_are_legal_and_balanced(name: str) -> None:
    model = ARCHITECTURES[name].build()
    plans = plan_units(model)
    check_units(model, plans)
    sizes = numel_of(model, plans)
    assert sum(sizes.values()) == sum(parameter.numel() for parameter in model.parameters()) < 200_000
    assert sizes.get("root", 0) <= FEW_OWNED * sum(sizes.values())
    if name in BLOCKS:
        assert [plan.name for plan in plans if plan.is_block] == BLOCKS[name]


def test_builds_are_repeatable(name: str) -> None:
    entry = ARCHITECTURES[name]
    first, second = entry.build(), entry.build()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    batch, again = entry.batch(3, 4), entry.batch(3, 4)
    assert all(torch.equal(batch[key], again[key]) and len(batch[key]) == 4 for key in batch)


def test_the_window_check_sees_a_bad_plan() -> None:
    entry = ARCHITECTURES["tied-by-hand"]
    model = entry.build()
    owned = ("embedding.weight",)
    bad = UnitPlan("embedding", ("embedding",), owned, (("embedding.weight", "embedding.weight"),), False)
    with pytest.raises(ClosedError, match=r"embedding\.weight"), only_in_windows(model, [bad]):
        model(**entry.batch(1, 2))


def numel_of(model: nn.Module, plans: tuple[UnitPlan, ...]) -> dict[str, int]:
    parameters = dict(model.named_parameters())
    return {plan.title: sum(parameters[name].numel() for name in plan.parameters) for plan in plans}


def test_table_in_the_docs_is_current() -> None:
    """Parity is taken from the page here; test_parity.py holds it against a run."""
    page = PAGE.read_text()
    assert with_table(page, parity_of_page(page)) == page, "run python docs/make_units_table.py"
