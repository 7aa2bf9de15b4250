"""Unit plans: what the user names, what `auto` finds, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from lamina.errors import UnitError
from lamina.runtime.units import UnitPlan, check_units, plan_units


class Mlp(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Embedding and head as large as a block."""

    def __init__(self, vocabulary: int = 40, dim: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def body(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens))


LAYERS = ["layers.0", "layers.1", "layers.2"]


def titles(plans: tuple[UnitPlan, ...]) -> list[str]:
    return [plan.title for plan in plans]


def planned(model: nn.Module, *args: object, **kwargs: object) -> dict[str, UnitPlan]:
    plans = plan_units(model, *args, **kwargs)  # type: ignore[arg-type]
    check_units(model, plans, kwargs.get("ignore", ()))  # type: ignore[arg-type]
    return {plan.title: plan for plan in plans}


# --- auto ---


def test_auto_finds_blocks_and_big_leaves() -> None:
    plans = planned(Model())
    assert list(plans) == ["root", "emb", *LAYERS, "head"]
    assert plans["root"].parameters == ("norm.weight", "norm.bias")
    assert [title for title, plan in plans.items() if plan.is_block] == LAYERS
    assert plans["layers.1"].modules == ("layers.1",)
    assert plans["layers.1"].parameters[0] == "layers.1.norm.weight"


def test_small_leaves_stay_in_the_root() -> None:
    assert list(planned(Model(vocabulary=4))) == ["root", *LAYERS]


def test_tied_pair_belongs_to_the_root_with_every_slot() -> None:
    model = Model()
    model.head.weight = model.emb.weight
    root = planned(model)["root"]
    assert ("emb.weight", "emb.weight") in root.aliases
    assert ("head.weight", "emb.weight") in root.aliases
    assert root.parameters.count("emb.weight") == 1


def test_tie_inside_a_block_stays_in_the_block() -> None:
    model = Model()
    block = model.layers[0]
    block.mlp.down.weight = nn.Parameter(block.mlp.up.weight.detach().t().clone())
    block.extra = nn.Linear(8, 16, bias=False)
    block.extra.weight = block.mlp.up.weight
    assert ("layers.0.extra.weight", "layers.0.mlp.up.weight") in planned(model)["layers.0"].aliases


def test_shared_module_is_one_unit_with_one_slot() -> None:
    model = Model()
    model.layers.append(model.layers[0])
    plans = planned(model)
    assert list(plans) == ["root", "emb", *LAYERS, "head"]
    assert len(plans["layers.0"].aliases) == 6


class ReadsWeight(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.linear(self.body(tokens), self.emb.weight) + 0 * self.head.weight.shape[0]


class ReadsThroughLocal(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        table = self.emb
        return self.body(tokens) @ table.weight.t()


def _project(module: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, module.weight)


class ReadsInHelper(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        return _project(self.head, self.body(tokens))


class ReadsInProperty(Model):
    @property
    def table(self) -> Tensor:
        return self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(tokens) @ self.table.t()


class ReadsByAccessor(Model):
    def output(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(tokens) @ self.output().weight.t()


class CallsUnboundly(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head.forward(self.body(tokens))


@pytest.mark.parametrize(
    ("kind", "merged"),
    [
        (ReadsWeight, "emb"),
        (ReadsThroughLocal, "emb"),
        (ReadsInHelper, "head"),
        (ReadsInProperty, "emb"),
        (ReadsByAccessor, "head"),
        (CallsUnboundly, "head"),
    ],
)
def test_weights_read_by_the_parent_stay_with_the_parent(kind: type[Model], merged: str) -> None:
    plans = planned(kind())
    assert f"{merged}.weight" in plans["root"].parameters
    assert set(plans) == {"root", "emb", *LAYERS, "head"} - {merged}


class Careful(Model):
    """Looks at weights without reading them, and calls in unusual ways."""

    def forward(self, tokens: Tensor) -> Tensor:
        if self.head is None or self.emb.weight.dtype.is_complex or not isinstance(self.emb, nn.Embedding):
            raise TypeError
        x = self.emb(tokens.to(self.head.weight.device))
        for index, layer in enumerate(self.layers[: len(self.layers)]):
            x = checkpoint(layer, x, use_reentrant=False) if index % 2 else layer.__call__(x)
        for last in (self.norm, self.head):
            x = last(x)
        return x


def test_looking_is_not_reading() -> None:
    assert list(planned(Careful())) == ["root", "emb", *LAYERS, "head"]


def test_reads_through_an_unregistered_reference() -> None:
    class Head(nn.Module):
        def __init__(self, emb: nn.Embedding) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.shared = [emb]

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * nn.functional.linear(x, self.shared[0].weight)

    model = Model()
    model.head = Head(model.emb)
    assert "emb.weight" in planned(model)["root"].parameters


def test_read_inside_a_submodule_goes_to_that_submodule_not_to_the_root() -> None:
    class Text(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            return nn.functional.linear(self.body(tokens), self.emb.weight)

    model = nn.Sequential(Text(), nn.Linear(40, 4))
    plans = planned(model, [["0"], "0.layers.*"])
    assert "0.emb.weight" in plans["0"].parameters


def test_entry_points_are_followed() -> None:
    class Searcher(Model):
        def scores(self, x: Tensor) -> Tensor:
            return x @ self.emb.weight.t()

    assert "emb" in planned(Searcher())
    assert "emb" not in planned(Searcher(), entry_points=("scores",))


def test_without_source_leaves_are_not_split_off() -> None:
    program = (
        "class Typed(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.emb = nn.Embedding(400, 8)\n"
        "        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))\n"
        "    def forward(self, x): return self.emb(x) @ self.emb.weight.t()\n"
    )
    names: dict[str, Any] = {"nn": nn, "__name__": "typed_at_a_prompt"}
    exec(compile(program, "<prompt>", "exec"), names)
    assert list(planned(names["Typed"]())) == ["root", "layers.0", "layers.1"]


def test_attention_recurrence_and_parametrized_modules_are_not_split() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2)
            self.lstm = nn.LSTM(16, 16)
            self.normed = weight_norm(nn.Linear(16, 64))

        def forward(self, x: Tensor) -> Tensor:
            x, _ = self.lstm(self.attention(x, x, x)[0])
            return self.normed(x)

    plans = planned(Mixed())
    assert list(plans) == ["attention", "lstm", "normed"]
    assert "attention.out_proj.weight" in plans["attention"].parameters
    assert len(plans["normed"].parameters) == 3


def test_model_that_is_one_atom() -> None:
    assert titles(plan_units(nn.MultiheadAttention(8, 2))) == ["root"]


class Bottleneck(Mlp):
    pass


def test_stages_and_numbered_attributes_are_looked_through() -> None:
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer1 = nn.Sequential(Bottleneck(8), Bottleneck(8))
            self.layer2 = nn.Sequential(Bottleneck(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer2(self.layer1(x))

    assert list(planned(Stages())) == ["layer1.0", "layer1.1", "layer2.0"]


def test_lists_of_pairs_are_looked_through() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleList([Block(), Mlp()]) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block, mlp in self.layers:
                x = mlp(block(x))
            return x

    assert list(planned(Pairs())) == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]


def test_sequential_run_by_hand_opens_nothing() -> None:
    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for stage in self.stages:
                for layer in stage:
                    x = layer(x)
            return x

    assert list(planned(ByHand())) == ["stages.0.0", "stages.1.0", "stages.2.0"]


def test_experts_stay_in_their_block_and_towers_are_split() -> None:
    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Mlp() for _ in range(12))

        def forward(self, x: Tensor) -> Tensor:
            return sum(expert(x) for expert in self.experts)

    assert list(planned(nn.Sequential(Moe(), Moe()))) == ["0", "1"]
    towers = nn.ModuleDict({"query": nn.Sequential(*(Block() for _ in range(8))), "key": Model(layers=8)})
    chosen = list(planned(nn.Sequential(towers)))  # container in a container: only the shape matters here
    assert chosen.count("0.query.3") == 1 and chosen.count("0.key.layers.3") == 1


def test_two_models_of_one_class_side_by_side() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList([Model(layers=6), Model(layers=6)])

        def forward(self, tokens: Tensor) -> Tensor:
            return self.towers[0](tokens) + self.towers[1](tokens)

    assert "towers.1.layers.5" in planned(Pair())


def test_uneven_stages_are_split_into_their_blocks() -> None:
    class Stage(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(dim) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    even, uneven = (nn.Sequential(*(Stage(dim) for dim in dims)) for dims in ((8, 8, 8), (8, 16, 32)))
    assert list(planned(even)) == ["0", "1", "2"]
    assert "2.blocks.1" in planned(uneven)


# --- what the user names ---


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
