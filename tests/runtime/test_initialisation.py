"""`deferred` equals eager construction bit for bit; meta modules run their initialisers; or an error."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lamina
from lamina.errors import InitialisationError, StateError
from lamina.runtime.deferred import deferred
from lamina.runtime.materialise import InitRecord, materialise
from runtime.init_models import SEED, AdaLN, Owner, Rotary, SmallLanguageModel, materialise_all


def assert_equals_eager(build: Callable[[], nn.Module], backwards: bool = False) -> nn.Module:
    """Deferred and eager construction agree in every bit, one parameter at a time, and nothing outside moves."""
    torch.manual_seed(SEED)
    eager = build()
    torch.manual_seed(99)
    before = torch.get_rng_state()
    with deferred(SEED):
        lazy = build()
    assert torch.equal(before, torch.get_rng_state())
    want = dict(eager.named_parameters())
    named = list(lazy.named_parameters())
    assert [name for name, _ in named] == list(want)
    assert all(type(p) is nn.Parameter and p.is_meta for _, p in named)
    for name, parameter in reversed(named) if backwards else named:
        got = materialise(lazy, [(name, parameter)], "cpu")
        value = got.values[name]
        assert value.dtype == want[name].dtype and value.is_contiguous() and not value.requires_grad
        assert torch.equal(value, want[name]), name
        assert parameter.requires_grad == want[name].requires_grad
        assert got.records == (InitRecord(name, "deferred"),)
    assert torch.equal(before, torch.get_rng_state())
    buffers = dict(lazy.named_buffers())
    for name, buffer in eager.named_buffers():
        assert not buffers[name].is_meta and torch.equal(buffers[name], buffer), name
    return lazy


def _own_arithmetic() -> nn.Module:
    model = nn.Module()
    model.table = nn.Parameter(torch.randn(30, 5) * 0.02)
    model.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
    model.eps = nn.Parameter(torch.ones(()) * 1e-3)
    model.copy = nn.Parameter(model.table[:3] * 2)
    model.register_buffer("norm", model.table.norm())
    model.frozen = nn.Parameter(torch.arange(6, dtype=torch.int32), requires_grad=False)
    return model


def _aliases() -> nn.Module:
    """A tensor and the parameter made from it share memory, whichever is written."""
    model = nn.Module()
    base = torch.zeros(4, 3)
    model.w = nn.Parameter(base)
    nn.init.normal_(base[:2])
    with torch.no_grad():
        model.w[2:].uniform_()
    model.register_buffer("twice", base * 2)
    model.t = nn.Parameter(base.t())
    return model


def _reads_and_writes(w: nn.Parameter) -> None:
    with torch.no_grad():
        w.normal_()
        for row in range(1, w.shape[0]):
            w[row] = w[row - 1] * 0.5 + w[row]
        w[w > 1] = 0
        w[torch.tensor([0, 2])] += 1
        w /= w.norm()
        w[0, 0] = w.sum().item() + sum(w[1].tolist()) + float(w.detach().numpy()[2, 2])


def _generator(w: nn.Parameter) -> None:
    nn.init.normal_(w, generator=torch.Generator().manual_seed(5))


def _reseeded() -> nn.Module:
    first = nn.Linear(5, 5)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        second = nn.Linear(5, 5)
    return nn.Sequential(first, second, nn.Linear(5, 5))


def _device_dependent() -> nn.Module:
    layer = nn.Linear(4, 4)
    assert layer.weight.device.type == "cpu" and not layer.weight.is_meta
    assert layer.weight.to("cpu") is layer.weight and layer.weight.cpu() is layer.weight
    layer.register_buffer("mask", torch.ones(4, 4, device=layer.weight.device).tril())
    layer.register_buffer("start", layer.weight.detach().clone())
    return layer


def _tied_cast() -> nn.Module:
    model = nn.Module()
    model.a, model.b = nn.Linear(4, 4), nn.Linear(4, 4)
    model.b.weight = model.a.weight
    model.bfloat16()
    assert model.a.weight is model.b.weight
    return model


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(33, 17),
    "embedding": lambda: nn.Embedding(11, 5, padding_idx=2),
    "layer_norm": lambda: nn.LayerNorm(5),
    "batch_norm": lambda: nn.BatchNorm2d(4),
    "conv": lambda: nn.Conv2d(3, 4, 3),
    "conv_channels_last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "lstm": lambda: nn.LSTM(5, 6, 2),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "encoder_layer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "transformer": lambda: nn.Transformer(8, 2, 1, 2, 16, batch_first=True),
    "adaln": lambda: nn.Sequential(AdaLN(), nn.Sequential(AdaLN(), nn.Linear(3, 3))),
    "rotary": Rotary,
    "language_model": SmallLanguageModel,
    "deepcopies": lambda: nn.Sequential(*(copy.deepcopy(layer) for layer in [nn.Linear(4, 4)] * 3)),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)),
    "orthogonal_parametrization": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 5)),
    "bfloat16": lambda: nn.Linear(5, 6).bfloat16(),
    "tied_cast": _tied_cast,
    "arithmetic": _own_arithmetic,
    "aliases": _aliases,
    "reseeded": _reseeded,
    "device": _device_dependent,
    "inside_meta_device": lambda: Owner(nn.init.xavier_normal_),
    "orthogonal": lambda: Owner(nn.init.orthogonal_),
    "trunc_normal": lambda: Owner(nn.init.trunc_normal_),
    "eye": lambda: Owner(nn.init.eye_),
    "dirac": lambda: Owner(nn.init.dirac_, (4, 3, 3)),
    "sparse": lambda: Owner(lambda w: nn.init.sparse_(w, 0.3)),
    "kaiming": lambda: Owner(lambda w: nn.init.kaiming_normal_(w, nonlinearity="relu")),
    "data_normal": lambda: Owner(lambda w: w.data.normal_().clamp_(-1, 1)),
    "halves": lambda: Owner(lambda w: (nn.init.normal_(w[:5]), nn.init.zeros_(w[5:]))),
    "reads_and_writes": lambda: Owner(_reads_and_writes),
    "generator": lambda: Owner(_generator),
    "parameter_list": lambda: nn.ParameterList(torch.randn(3) for _ in range(3)),
}


@pytest.mark.parametrize("name", BUILDS)
def test_deferred_equals_eager(name: str) -> None:
    assert_equals_eager(BUILDS[name])


@pytest.mark.parametrize("name", ["transformer", "language_model", "arithmetic", "reads_and_writes", "aliases"])
def test_the_order_of_materialising_does_not_matter(name: str) -> None:
    assert_equals_eager(BUILDS[name], backwards=True)


def test_deferred_inside_a_meta_device_context_is_still_recorded() -> None:
    torch.manual_seed(SEED)
    eager = AdaLN()
    with deferred(SEED), torch.device("meta"):
        lazy = AdaLN()
    values = materialise_all(lazy).values
    assert all(torch.equal(values[name], p) for name, p in eager.named_parameters())


def test_identity_and_ties_are_kept() -> None:
    with deferred(SEED):
        model = SmallLanguageModel()
    assert model.head.weight is model.emb.weight
    assert "head.weight" not in materialise_all(model).values


def test_a_cast_after_the_block_is_a_cast_of_the_value() -> None:
    torch.manual_seed(SEED)
    want = nn.Linear(5, 6).bfloat16().weight
    with deferred(SEED):
        model = nn.Linear(5, 6)
    assert torch.equal(materialise_all(model.bfloat16()).values["weight"], want)


def test_std_on_the_full_shape() -> None:
    with deferred(SEED):
        model = Owner(nn.init.xavier_normal_, (400, 300))
    std = materialise_all(model).values["w"].std().item()
    assert std == pytest.approx(math.sqrt(2 / 700), rel=0.01)


def test_a_recording_is_used_once() -> None:
    with deferred(SEED):
        model = Owner(nn.init.normal_)
    materialise_all(model)
    with pytest.raises(InitialisationError, match="`w` is on meta"):
        materialise_all(model)


# -- refused by name


def test_elements_that_nobody_wrote_are_named() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), Owner(lambda w: nn.init.normal_(w[:5])))

    with deferred(SEED):
        model, cast = build(), build().bfloat16()
    with pytest.raises(InitialisationError, match=r"49 of the 84 elements of `1.w`"):
        materialise_all(model)
    with deferred(SEED):
        legacy = nn.Module()
        legacy.w = nn.Parameter(torch.Tensor(3, 4))
    with pytest.raises(InitialisationError, match=r"12 of the 12 elements of `w`"):
        materialise_all(legacy)
    with deferred(SEED):
        cast = Owner(lambda w: None).bfloat16()
    with pytest.raises(InitialisationError, match=r"84 of the 84 elements of `w`"):
        materialise_all(cast)


def test_a_write_after_the_block_is_an_error() -> None:
    with deferred(SEED):
        model = nn.Sequential(nn.Linear(3, 3))
    nn.init.zeros_(model[0].weight)
    with pytest.raises(InitialisationError, match=r"`0.weight` was written to after"):
        materialise_all(model)


def test_a_constant_that_changed_is_an_error() -> None:
    table = torch.ones(4, 3)
    with deferred(SEED):
        model = nn.Embedding.from_pretrained(table)
    table.zero_()
    with pytest.raises(InitialisationError, match=r"`weight` cannot be computed: .* changed since"):
        materialise_all(model)


def test_a_constant_changed_inside_the_block_is_followed() -> None:
    table = torch.ones(4, 3)
    with deferred(SEED):
        model = Owner(lambda w: w.data.copy_(table), (4, 3))
        table.zero_()
    assert torch.equal(materialise_all(model).values["w"], torch.ones(4, 3))


def test_shape_errors_show_where_they_are_made() -> None:
    with deferred(SEED), pytest.raises(RuntimeError):
        Owner(lambda w: w.data.copy_(torch.zeros(5)))


def test_nesting_is_refused_and_a_failed_block_leaves_nothing() -> None:
    with deferred(SEED), pytest.raises(StateError, match="already open"), deferred(SEED):
        pass
    with pytest.raises(ZeroDivisionError), deferred(SEED):
        _ = 1 / 0
    assert not nn.Linear(2, 2).weight.is_meta


# -- memory


LARGEST_MIB = 6.75

MEMORY_PROGRAM = """
import resource, torch
from torch import nn
from lamina.runtime.deferred import deferred
from lamina.runtime.materialise import materialise

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def run(count, width):
    with deferred(0):
        layers = [nn.TransformerEncoderLayer(width, 2, width, batch_first=True) for _ in range(count // 2)]
        model = nn.Sequential(*layers, nn.TransformerEncoder(layers[0], count // 2, enable_nested_tensor=False))
    for name, parameter in model.named_parameters():
        materialise(model, [(name, parameter)], "cpu")

torch.set_num_threads(1)
run(2, 8)
before = peak_mib()
run(6, 768)  # 6 layers of 13.5 MiB, the largest parameter is in_proj_weight of 6.75 MiB
print(peak_mib() - before)
"""


def test_peak_memory_is_a_few_parameters_not_the_model() -> None:
    # Without a fixed threshold the allocator keeps freed memory that it cannot use again, and counts it as ours.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    result = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM], capture_output=True, text=True, check=True, env=environment
    )
    assert float(result.stdout) < 4 * LARGEST_MIB  # the model: 81 MiB


@pytest.mark.parametrize("seed", [10**20, 2**63, -(2**63) - 1, 1.5, True, "3", None])
def test_a_seed_that_is_none_is_refused_and_leaves_nothing_open(seed: Any) -> None:
    with pytest.raises(lamina.UsageError, match=r"deferred\(seed="), lamina.deferred(seed=seed):
        pass
    with lamina.deferred(seed=-1):
        model = nn.Linear(2, 2)
    if seed is not None:
        with pytest.raises(lamina.UsageError, match=r"shard\(seed="):
            lamina.shard(model, seed=seed)
    lamina.shard(model, seed=2**63 - 1)
