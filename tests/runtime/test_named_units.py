"""Units that the user names: classes, patterns, instances and lists; mistakes are named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lamina.errors import UnitError
from lamina.runtime.units import plan_units
from runtime.unit_models import LAYERS, Block, Mlp, Model, planned


@pytest.mark.parametrize("item", [Block, "layers.*", "layers.[0-9]"])
def test_classes_and_patterns_name_one_unit_each(item: object) -> None:
    assert list(planned(Model(), [item])) == ["root", *LAYERS]
    assert all(plan.is_block for plan in plan_units(Model(), [item]) if plan.name)  # type: ignore[list-item]


def test_instances_and_lists() -> None:
    model = Model()
    plans = planned(model, [model.layers[1], [model.norm, "head"]])
    assert list(plans) == ["root", "layers.1", "norm+head"]
    assert plans["norm+head"].modules == ("norm", "head")
    assert plans["norm+head"].parameters == ("norm.weight", "norm.bias", "head.weight")


def test_nested_units_share_by_depth() -> None:
    plans = planned(Model(), ["layers.*", Mlp])
    assert plans["layers.0"].parameters == ("layers.0.norm.weight", "layers.0.norm.bias")
    assert len(plans["layers.0.mlp"].parameters) == 4


def test_tied_across_named_units_goes_to_the_root() -> None:
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False))
    model[2].weight = model[0].weight
    assert list(planned(model, ["0", "1", "2"])) == ["root", "1"]
    assert list(planned(model, [["0", "2"], "1"])) == ["0+2", "1"]


def test_named_units_are_kept_from_the_inside_of_attention() -> None:
    plans = planned(nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8)), [nn.Linear])
    assert list(plans) == ["root", "1"]


def test_ignore_and_replicate() -> None:
    model = Model()
    model.emb.requires_grad_(False)
    plans = planned(model, "auto", ignore=["emb"], replicate=["*norm*"])
    assert list(plans) == ["layers.0", "layers.1", "layers.2", "head", "replicated"]
    assert plans["replicated"].replicated and len(plans["replicated"].parameters) == 8


def test_meta_parameters_and_plans_leave_the_model_alone() -> None:
    with torch.device("meta"):
        model = Model()
    before = list(vars(model))
    assert list(planned(model)) == ["root", "emb", *LAYERS, "head"]
    assert list(vars(model)) == before


REFUSED = [
    (["layer.*"], (), (), ["layer.*", "matches no module", "layers.0"]),
    ([nn.Conv2d], (), (), ["Conv2d", "matches no module"]),
    (["layers"], (), (), ["layers", "ModuleList", "layers.*"]),
    (["layers.0", Block], (), (), ["layers.0", "two units"]),
    ([nn.ReLU()], (), (), ["ReLU", "not a module of the model"]),
    (["layers.0.mlp", "layers.0.mlp.up", "layers.0.mlp.down"], (), (), ["layers.0.mlp", "without parameters"]),
    ([3], (), (), ["3", "int", "layers.*"]),
    ("blocks", (), (), ["blocks", "auto"]),
    ("auto", ["emb"], (), ["emb.weight", "requires gradients", "replicate"]),
    ("auto", ["embedding"], (), ["ignore", "embedding", "emb"]),
    ("auto", (), "emb", ["replicate", "list"]),
]


@pytest.mark.parametrize(("units", "ignore", "replicate", "words"), REFUSED)
def test_mistakes_are_named(units: object, ignore: object, replicate: object, words: list[str]) -> None:
    with pytest.raises(UnitError) as caught:
        plan_units(Model(), units, ignore=ignore, replicate=replicate)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value


def test_models_without_parameters_or_shapes_are_refused() -> None:
    with pytest.raises(UnitError, match="no parameters"):
        plan_units(nn.Sequential(nn.ReLU()))
    with pytest.raises(UnitError, match="run one batch"):
        plan_units(nn.Sequential(nn.LazyLinear(4)))
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    with pytest.raises(UnitError, match="no parameters"):
        plan_units(model, ["0"])


def test_planning_needs_neither_distributed_nor_cuda() -> None:
    import lamina.runtime.auto_units as auto_units
    import lamina.runtime.module_graph as module_graph
    import lamina.runtime.weight_reads as weight_reads

    for module in (auto_units, module_graph, weight_reads):
        assert module.__file__ is not None
        with open(module.__file__) as file:
            text = file.read()
        assert "torch.distributed" not in text and "torch.cuda" not in text


def test_large_models_are_planned_quickly() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleDict({"experts": nn.ModuleList(Mlp(2) for _ in range(16)), "norm": nn.LayerNorm(2)})
                for _ in range(40)
            )

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer["norm"](sum(expert(x) for expert in layer["experts"]))
            return x

    plans = plan_units(Wide())
    assert sum(len(plan.parameters) for plan in plans) == 40 * (16 * 4 + 2)
