"""Meta modules run their own initialisers, the same values at every order of units; or an error names what is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lamina.errors import InitialisationError
from lamina.runtime.materialise import InitRecord, materialise, materialise_buffers
from runtime.init_models import SEED, AdaLN, Rotary, SmallLanguageModel, materialise_all


class Counted(nn.Linear):
    calls = 0

    def reset_parameters(self) -> None:
        Counted.calls += 1
        super().reset_parameters()


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def test_reset_parameters_does_not_depend_on_units_or_order() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.Sequential(nn.LayerNorm(6), nn.Conv2d(2, 3, 3)), nn.LSTM(6, 4))

    before = torch.get_rng_state()
    together = materialise_all(build_on_meta(build))
    apart = build_on_meta(build)
    for name in ("2", "1.1", "1.0", "0"):
        prefixed = [(n, p) for n, p in apart.named_parameters() if n.startswith(name + ".")]
        got = materialise(apart, prefixed, "cpu", SEED)
        assert all(torch.equal(value, together.values[n]) for n, value in got.values.items())
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.is_meta for p in apart.parameters())
    assert {record.source for record in together.records} == {"reset_parameters"}
    assert not torch.equal(together.values["0.weight"], materialise_all(build_on_meta(build), 4).values["0.weight"])


def test_nothing_is_initialised_twice() -> None:
    model = build_on_meta(lambda: nn.Sequential(Counted(3, 3), nn.ModuleList([Counted(3, 3), nn.ReLU()])))
    Counted.calls = 0
    for name in ("0", "1.0"):
        materialise(model, [(n, p) for n, p in model.named_parameters() if n.startswith(name)], "cpu", SEED)
    assert Counted.calls == 2


def test_a_parent_may_set_its_childrens_parameters() -> None:
    values = materialise_all(build_on_meta(lambda: nn.MultiheadAttention(8, 2))).values
    assert not values["out_proj.bias"].any() and not values["in_proj_bias"].any()
    assert values["in_proj_weight"].std() > 0


def test_init_weights_of_the_root_wins_and_runs_once() -> None:
    seen: list[nn.Module] = []

    class Model(SmallLanguageModel):
        def _init_weights(self, module: nn.Module) -> None:
            seen.append(module)
            super()._init_weights(module)

    model = build_on_meta(Model)
    seen.clear()
    whole = materialise_all(model)
    leaves = [module for module in seen if isinstance(module, (nn.Embedding, nn.Linear, nn.LayerNorm))]
    assert len(leaves) == len(set(leaves)) == 1 + 2 * 5
    assert not whole.values["emb.weight"][1].any()
    sources = {record.name: record.source for record in whole.records}
    assert sources["emb.weight"] == "_init_weights" and sources["blocks.0.linear1.weight"] == "_init_weights"
    assert sources["blocks.0.self_attn.in_proj_weight"] == "reset_parameters"
    assert whole.values["blocks.0.linear1.weight"].std().item() == pytest.approx(0.02, rel=0.2)
    first, second = (whole.values[f"blocks.{i}.linear1.weight"] for i in range(2))
    assert not torch.equal(first, second)


def test_a_module_without_initialiser_is_named() -> None:
    model = build_on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(AdaLN())))
    with pytest.raises(
        InitialisationError, match=r"`1.0.gate` is on meta .*`AdaLN` has no `reset_parameters`.*deferred"
    ):
        materialise_all(model)
    assert all(p.is_meta for p in model.parameters())


def test_an_initialiser_that_forgets_elements_is_named() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(4, 4))

        def reset_parameters(self) -> None:
            nn.init.normal_(self.w[:2])

    with pytest.raises(InitialisationError, match=r"`w` .*`Half.reset_parameters` leaves 8 of its 16 elements"):
        materialise_all(build_on_meta(Half))


def test_an_initialiser_may_replace_its_tensors() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reset_parameters()

        def reset_parameters(self) -> None:
            self.w = nn.Parameter(torch.ones(3) * 2)

    model = build_on_meta(Replacing)
    original = model.w
    assert torch.equal(materialise_all(model).values["w"], torch.full((3,), 2.0))
    assert model.w is original


def test_an_initialiser_over_several_units_is_refused() -> None:
    model = build_on_meta(lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True))
    unit = [(n, p) for n, p in model.named_parameters() if n.startswith("encoder.")]
    with pytest.raises(InitialisationError, match=r"`Transformer._reset_parameters` initialises parameters of several"):
        materialise(model, unit, "cpu")
    assert materialise_all(model).values


def test_other_units_are_out_of_reach() -> None:
    class Nosy(nn.Module):
        def __init__(self, other: nn.Linear) -> None:
            super().__init__()
            self.w, self.other = nn.Parameter(torch.empty(3)), other

        def reset_parameters(self) -> None:
            nn.init.ones_(self.w)
            nn.init.zeros_(self.other.weight)

    other = nn.Linear(2, 2)
    weight = other.weight.detach().clone()
    model = build_on_meta(lambda: Nosy(other))
    assert torch.equal(materialise(model, [("w", model.w)], "cpu").values["w"], torch.ones(3))
    assert torch.equal(other.weight, weight)


def test_meta_buffers_are_filled_or_named() -> None:
    model = build_on_meta(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False)))
    records = materialise_all(model).records
    assert InitRecord("0.running_var", "reset_parameters") in records
    assert torch.equal(model[0].running_var, torch.ones(3)) and model[1].running_var.is_meta
    assert {record.name for record in materialise_buffers(model, "cpu")} == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    assert torch.equal(model[1].running_var, torch.ones(3))
    rotary = build_on_meta(lambda: nn.Sequential(Rotary()))
    with pytest.raises(InitialisationError, match=r"buffer `0.inv_freq` is on meta .* constructor only"):
        materialise_buffers(rotary, "cpu")
    assert rotary[0].inv_freq.is_meta


def test_given_values_are_passed_through() -> None:
    layer = nn.Linear(2, 2)
    got = materialise_all(layer)
    assert torch.equal(got.values["weight"], layer.weight)
    assert {record.source for record in got.records} == {"given"}
