"""Unit plans: what the user names, what `auto` finds, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from lamina.errors import UnitError
from lamina.runtime.units import name_of, plan_units
from runtime.unit_models import LAYERS, Block, Mlp, Model, planned, titles


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


class Prompts(nn.Module):
    """As PEFT builds it: the embedding stands beside the model that holds it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Model()
        self.prompt = nn.Embedding(4, 8)
        self.word_embeddings = self.base.emb

    def forward(self, tokens: Tensor) -> Tensor:
        return self.base(tokens) + self.prompt.weight.sum() + self.word_embeddings(tokens).sum()


def test_a_module_that_is_registered_twice_is_one_unit() -> None:
    plans = planned(Prompts())
    assert list(plans) == ["root", "base.emb", *(f"base.{name}" for name in LAYERS), "base.head"]
    assert plans["base.emb"].modules == ("base.emb",)


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


class Row(nn.Module):
    """Blocks of 4 x dim x dim elements side by side."""

    def __init__(self, count: int, dim: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(dim) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Choices(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"{i:02}": Mlp() for i in range(count)})

    def forward(self, x: Tensor, name: str) -> Tensor:
        return self.layers[name](x)


def sizes(model: nn.Module) -> list[int]:
    return [len(plan.modules) for plan in plan_units(model) if plan.is_block]


def test_small_neighbours_share_a_unit() -> None:
    assert sizes(Row(11)) == [1] * 11
    assert sizes(Row(12)) == [2] * 6
    assert sizes(Row(13)) == [1, 2, 2, 2, 2, 2, 2]
    assert sizes(Row(24)) == [4] * 6
    assert plan_units(Row(12))[1].modules == ("layers.2", "layers.3")
    assert sizes(Choices(12)) == [1] * 12  # a forward takes one


def test_units_grow_no_larger_than_is_enough() -> None:
    with torch.device("meta"):
        models = [Row(24, dim=dim) for dim in (1024, 1200, 1500, 2048)]  # 4, 5.5, 8.6 and 16 M a block
    assert [sizes(model) for model in models] == [[4] * 6, [3] * 8, [2] * 12, [1] * 24]


def test_blocks_around_others_and_your_own_list_are_left_as_they_are() -> None:
    model = Row(12)
    for layer in model.layers:
        layer.inner = Row(4)
    plans = plan_units(model, ["layers.*", "layers.*.inner.layers.*"])
    assert {len(plan.modules) for plan in plans} == {1}
    assert [plan.modules for plan in plan_units(Row(12), ["layers.*"])] == [(f"layers.{i}",) for i in range(12)]


@pytest.mark.parametrize(
    ("modules", "name"),
    [
        (["layers.0"], "layers.0"),
        (["layers.0", "layers.1", "layers.2"], "layers.0-2"),
        (["layers.9", "layers.10", "norm", "head"], "layers.9-10+norm+head"),
        (["a.1", "b.2", "a.2", "a.4"], "a.1+b.2+a.2+a.4"),
        (["down1", "down2", "x.07", "x.08"], "down1-down2+x.07+x.08"),
        ([""], ""),
    ],
)
def test_names_of_units(modules: list[str], name: str) -> None:
    assert name_of(modules) == name


class Hidden(nn.Module):
    """Its layers are in a plain container, where torch does not find them."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.inside = nn.Identity()
        self.inside.layers = layers


@pytest.mark.parametrize(
    ("layers", "words"),
    [([nn.Linear(2, 2)], "plain list.*nn.ModuleList"), ({"a": nn.Linear(2, 2)}, "plain dict.*nn.ModuleDict")],
)
def test_layers_that_torch_does_not_see_are_named(layers: Any, words: str) -> None:
    with pytest.raises(UnitError, match=f"`inside.layers` is a {words}"):
        plan_units(Hidden(layers))


def test_a_model_without_any_is_just_that() -> None:
    with pytest.raises(UnitError, match="nothing to shard$"):
        plan_units(Hidden([1, 2]))
