"""Memory forecasts: allocation for allocation beside what real steps hold and save, and steps measured on GPUs."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lamina
from harness import run_ranks
from lamina.core import room
from lamina.core.strategy import Strategy, resolve
from lamina.errors import UsageError
from lamina.optim import capture
from lamina.planner import reserved
from lamina.planner.caching_allocator import CachingAllocator
from lamina.planner.machine import load_machine
from lamina.planner.measure import measure
from lamina.planner.measure_data import Measured
from lamina.planner.memory import NCCL_BYTES, forecast_memory
from lamina.planner.reserved import reserve
from lamina.planner.state import State, UnitShape, state_of
from lamina.planner.workload import Choice
from lamina.train.gpt import GPT, Shape

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GIB = 1 << 30
KINDS = ("masters", "gradients", "slots", "published", "reduction", "accumulated")
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", Strategy(params=2, grads=2, optimizer=4), Strategy(1, 2, 4))


def small_gpt() -> GPT:
    return GPT(Shape(width=24, layers=3, heads=2, length=16))


HALVED = lamina.Precision(compute=torch.bfloat16, halves=True)


def hold_memory(
    strategy: str | Strategy, precision: str | lamina.Precision | None, passes: int, transport: str = "c10d"
) -> dict[str, int]:
    """What a rank of a real step holds after its last backward, and its optimizer's state."""
    torch.manual_seed(0)
    model = lamina.shard(small_gpt(), strategy=strategy, precision=precision, transport=transport, start="trust")
    assert lamina.report(model).transport == transport
    optimizer = lamina.optim.AdamW(model.parameters(), max_norm=1.0)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    most: dict[str, int] = {}
    for _ in range(2):
        optimizer.zero_grad()
        for index in range(passes):
            with lamina.accumulate(model, last=index == passes - 1):
                model(tokens).float().sum().backward()
            held = lamina.report(model).memory
            most = {kind: max(held.get(kind, 0), most.get(kind, 0)) for kind in {*held, *most}}
        optimizer.step()
    states = {id(s[key]): s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")}
    owned = sum(getattr(t, "local", t).nbytes for t in states.values())
    return most | {"moments": owned}


@functools.cache
def measured_small(precision: str | lamina.Precision | None) -> Measured:
    return measure(small_gpt(), 2, 16, precision=precision, kind="cpu")


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_state_is_what_a_rank_allocates(strategy: str | Strategy, precision: str | None) -> None:
    world = 2 if isinstance(strategy, str) else 4
    passes = 2 if precision == "bf16" else 1
    real = run_ranks(world, hold_memory, strategy, precision, passes)[0]
    units = measured_small(precision).units
    state = state_of(units, resolve(strategy, world), accumulation=passes, on_gpu=False)
    check_state(state, real, units)


def over_peers() -> list[Any]:
    """Masters of other ranges than those that are published cannot be halved."""
    alike: list[tuple[str | Strategy, int]] = [("zero3", 2), ("zero3", 3), (Strategy(2, 2, 2), 4)]
    whole = [(*way, precision) for way in [*alike, (Strategy(2, 2, 4), 4)] for precision in (None, "bf16")]
    return [pytest.param(*row, id=f"{row[0]}-{row[1]}-{row[2]}") for row in whole] + [
        pytest.param(*way, HALVED, id=f"{way[0]}-{way[1]}-halves") for way in alike
    ]


@pytest.mark.parametrize("strategy, world, precision", over_peers())
def test_state_over_peers_is_what_a_rank_allocates(
    strategy: str | Strategy, world: int, precision: str | lamina.Precision | None
) -> None:
    """Published weights, outboxes, and masters of which one half is published."""
    factors, halved = resolve(strategy, world), precision is HALVED
    real = run_ranks(world, hold_memory, strategy, precision, 2, "peer")[0]
    units = measured_small(precision).units
    state = state_of(units, factors, accumulation=2, on_gpu=False, peers=True, halved=halved)
    check_state(state, real, units)
    assert state.is_one_sided and state.halved == halved
    whole = state_of(units, factors, accumulation=2, on_gpu=False, peers=True)
    owned = sum(s.range_numel for layout in state.layouts for s in layout.segments if s.compute is torch.bfloat16)
    assert whole.lasting - state.lasting == (2 * owned if halved else 0)


WIRES = {
    "as computed": lamina.Precision(compute=torch.bfloat16, wire=torch.bfloat16),
    "wider": lamina.Precision(compute=torch.bfloat16, wire=torch.float32),
    "narrower": lamina.Precision(wire=torch.bfloat16),
    "some computed in fp32": lamina.Precision(compute=torch.bfloat16, wire=torch.bfloat16, keep=("*norm*",)),
}
ON_A_WIRE: list[tuple[str | Strategy, int, str]] = [
    ("ddp", 1, "c10d"), ("zero1", 2, "c10d"), ("zero3", 1, "c10d"), ("zero3", 2, "peer"),
    (Strategy(1, 2, 4), 2, "c10d"), (Strategy(2, 2, 4), 1, "peer"),
]  # fmt: skip


def hold_on_wires(
    ways: Sequence[tuple[str | Strategy, int, str]],
) -> dict[tuple[str, int], dict[str, int]]:
    return {
        (name, index): hold_memory(strategy, precision, passes, transport)
        for index, (strategy, passes, transport) in enumerate(ways)
        for name, precision in WIRES.items()
    }


@pytest.mark.parametrize("world", [2, 4])
def test_state_of_gradients_that_travel_in_another_dtype(world: int) -> None:
    """They are laid out beside the weights, whatever their dtype; sums that wait are wide as ever."""
    ways = [way for way in ON_A_WIRE if isinstance(way[0], str) == (world == 2)]
    for (name, index), real in run_ranks(world, hold_on_wires, ways)[0].items():
        (strategy, passes, transport), precision = ways[index], WIRES[name]
        units = measured_small(precision).units
        its_factors, peers = resolve(strategy, world), transport == "peer"
        state = state_of(units, its_factors, accumulation=passes, on_gpu=False, peers=peers, wire=precision.wire)
        check_state(state, real, units)


def check_state(state: State, real: dict[str, int], units: Sequence[UnitShape]) -> None:
    forecast = {
        "masters": state.masters,
        "gradients": sum(state.gradients),
        "slots": state.slots,
        "published": state.published,
        "reduction": state.reduction,
        "accumulated": state.accumulated,
    }
    assert forecast == {kind: real.get(kind, 0) for kind in KINDS}
    padding = sum(4 * 256 for _ in units) + 8 * sum(len(unit.params) * 16 for unit in units)
    assert 0 <= state.optimizer - real["moments"] <= 2 * padding  # moments of what is owned, not of what is padded


def saved_by_a_real_step(model: nn.Module, tokens: Tensor, recompute: str = "none") -> int:
    """Bytes that autograd keeps when the forward has ended: each storage once, without weights and input."""
    known = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers(), tokens]}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(tokens)
        logits = getattr(output, "logits", output).flatten(0, -2).float()
        torch.nn.functional.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def hf_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96, "hidden_size": 32}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # whose masks differ between devices
    config = {
        "llama": lambda: transformers.LlamaConfig(intermediate_size=64, num_key_value_heads=2, **sizes),
        "qwen2": lambda: transformers.Qwen2Config(intermediate_size=64, num_key_value_heads=4, **sizes),
        "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, **no_dropout),
    }[name]()
    config.use_cache = False
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("name", ["gpt", "llama", "qwen2", "gpt2"])
def test_saved_activations_are_those_of_a_real_step(name: str) -> None:
    model = small_gpt() if name == "gpt" else hf_model(name)
    forecast = measure(model, 2, 16, kind="cpu")
    assert forecast.saved_bytes == saved_by_a_real_step(model, torch.zeros(2, 16, dtype=torch.long))
    assert next(model.parameters()).device.type == "cpu"  # it was copied


def test_recomputation_saves_what_enters_a_block() -> None:
    nothing, everything = (measure(small_gpt(), 2, 16, kind="cpu", recompute=r) for r in ("none", "full"))
    blocks = [unit for unit in everything.workload.units if unit.name.startswith("layers.")]
    hidden_bytes, turns_bytes = 2 * 16 * 24 * 4, 2 * 16 * 6 * 4
    assert [unit.saved_bytes for unit in blocks] == [hidden_bytes + turns_bytes, hidden_bytes, hidden_bytes]
    assert everything.workload.units[2].forward_products == nothing.workload.units[2].forward_products
    peaks = [max(moment.activation_bytes for moment in m.moments) for m in (nothing, everything)]
    assert peaks[1] < peaks[0]


def test_nothing_stays_alive_after_a_step() -> None:
    end = measured_small(None).moments[-1]
    embedding_bytes = 256 * 24 * 4
    assert end.activation_bytes <= 2 * embedding_bytes + 2 * 2 * 16 * 24 * 4
    assert len(end.reduced) == len(measured_small(None).units)


def gpu_row(name: str, way: str) -> dict:
    data = json.loads((BENCHMARKS / "gpu_step" / "results" / f"{name}_2xH200.json").read_text())
    return next(row for row in data["rows"] if row["way"] == way)


@functools.cache
def measured_1b(tokens: int, recompute: str) -> Measured:
    sys.path.insert(0, str(BENCHMARKS / "gpu_step"))
    try:
        from model import Model
    finally:
        sys.path.pop(0)
    with torch.device("meta"):
        model = Model("1b")
    precision = lamina.Precision(compute=torch.bfloat16, keep=())
    return measure(model, tokens // 2048, 2048, precision=precision, recompute=recompute)


@pytest.mark.parametrize("transport", ["c10d", "peer"])
def test_measured_steps_of_two_gpus(transport: str) -> None:
    """Nothing in a forecast comes from these rows. The job had built its model on the device. Over peers nothing was
    known."""
    machine, way = load_machine("h200"), "lamina-peer" if transport == "peer" else "lamina"
    for name, tokens in (("peer_1b", 8192), ("peer_1b_2048", 2048)):
        row = gpu_row(name, way)
        measured = measured_1b(tokens, "none")
        forecast = forecast_memory(measured, Choice("zero3", 2, transport=transport), machine)
        assert forecast.allocated_bytes / GIB == pytest.approx(row["allocated_gib"], rel=0.001), name
        assert forecast.peak.place == "backward loss"
        found = reserve(measured, forecast.state, resolve("zero3", 2), given=True, gives_back=False, room_part=0.0)
        assert found is not None and found.reserved_bytes / GIB == pytest.approx(row["reserved_gib"], abs=0.001), name


@pytest.mark.parametrize(
    ("file", "way", "transport", "tokens", "halved"),
    [
        ("sums_1b", "lamina", "c10d", 8192, False),
        ("sums_1b", "lamina-peer", "peer", 8192, False),
        ("sums_1b", "lamina-auto", "peer", 8192, False),
        ("core_1b", "lamina", "c10d", 8192, False),
        ("core_1b", "lamina-peer", "peer", 8192, True),
        ("halves_1b", "lamina-peer", "peer", 8192, False),
        ("eager_1b_2048", "lamina", "c10d", 2048, False),
        ("eager_1b_2048", "lamina-peer", "peer", 2048, True),
        ("eager_1b_2048", "lamina-peer-whole", "peer", 2048, False),
    ],
)
def test_measured_use_of_two_gpus(file: str, way: str, transport: str, tokens: int, halved: bool) -> None:
    """What communicators take was set from the first two. The job had one of its own, as the unsharded loop of another
    run."""
    machine, row, loop = load_machine("h200"), gpu_row(file, way), gpu_row("core_1b", "reference")
    measured = measured_1b(tokens, "none")
    forecast = forecast_memory(measured, Choice("zero3", 2, transport=transport, halved=halved), machine)
    room_part = room.part("none", 2, halved)
    found = reserve(measured, forecast.state, resolve("zero3", 2), given=True, room_part=room_part)
    assert found is not None and found.reserved_bytes / GIB == pytest.approx(row["reserved_gib"], rel=0.001)
    beside = (forecast.used_bytes - forecast.reserved_bytes) / GIB
    own = loop["used_gib"] - loop["reserved_gib"] - (machine.fixed_bytes + NCCL_BYTES) / GIB
    assert found.reserved_bytes / GIB + beside + own == pytest.approx(row["used_gib"], abs=0.05)


@pytest.mark.parametrize(
    ("file", "way", "strategy", "transport"),
    [
        ("core_1b", "lamina", "zero3", "c10d"),
        ("unclipped_1b", "lamina-peer", "zero3", "peer"),
        ("strategies_1b", "lamina-ddp", "ddp", "c10d"),
        ("strategies_1b", "lamina-zero1", "zero1", "c10d"),
        ("before_room_1b", "lamina", "zero3", "c10d"),
        ("before_room_1b", "lamina-peer", "zero3", "peer"),
        ("before_room_strategies_1b", "lamina-ddp", "ddp", "c10d"),
        ("before_room_strategies_1b", "lamina-zero1", "zero1", "c10d"),
    ],
)
def test_steps_measured_after_their_forecast(file: str, way: str, strategy: str, transport: str) -> None:
    """Two GPUs, 8192 tokens each, a model that was built on the device: what it lay in is given back."""
    row = gpu_row(file, way)
    measured = measured_1b(8192, "none")
    forecast = forecast_memory(measured, Choice(strategy, 2, transport=transport), load_machine("h200"))
    assert forecast.allocated_bytes / GIB == pytest.approx(row["allocated_gib"], rel=0.001)
    room_part = 0.0 if file.startswith("before_room") else room.KEPT
    found = reserve(measured, forecast.state, resolve(strategy, 2), given=True, room_part=room_part)
    assert found is not None and found.reserved_bytes / GIB == pytest.approx(row["reserved_gib"], rel=0.001)


@pytest.mark.parametrize("file", ["captured_1b_2048", "slow_host_captured_1b_2048"])
@pytest.mark.parametrize("transport", ["c10d", "peer"])
def test_measured_captured_steps(transport: str, file: str) -> None:
    """Of the runtime before: eager steps kept the memory of gradients, and had room made for half of them."""
    row = gpu_row(file, "lamina-peer-captured" if transport == "peer" else "lamina-captured")
    measured, choice = measured_1b(2048, "none"), Choice("zero3", 2, transport=transport, captured=True)
    forecast = forecast_memory(measured, choice, load_machine("h200"))
    run = reserved._Run(measured, forecast.state, resolve("zero3", 2), 1, CachingAllocator())
    run.shard(given=True, gives_back=True)
    run.stream = 9  # the stream of the eager steps
    run.make_room(room.KEPT)
    for _ in range(reserved.EAGER_CALLS):
        run.step()
    run.memory.give_back_segments()
    run.stream = reserved.GRAPH_POOL
    run.step()
    assert run.memory.peak_allocated_bytes / GIB == pytest.approx(row["allocated_gib"], rel=0.001)
    assert run.memory.peak_reserved_bytes / GIB == pytest.approx(row["reserved_gib"], rel=0.001)
    assert forecast.allocated_bytes == run.memory.peak_allocated_bytes
    assert forecast.reserved_bytes < 0.78 * run.memory.peak_reserved_bytes


def test_a_step_is_recorded_after_as_many_calls_as_a_plan_follows() -> None:
    assert reserved.EAGER_CALLS == capture.EAGER_CALLS


@pytest.mark.parametrize("number", [0, 1, 4, 5])
def test_measured_steps_of_one_gpu(number: int) -> None:
    """The second is 0.5 % off if attention takes what its backward needs in pieces, the third 1 % if sums of gradients
    take memory of their own; all are 0.1 to 0.5 % off with staging on compute's lane, and in the last gradients travel
    in fp32.
    """
    data = json.loads((BENCHMARKS / "plan_memory" / "results" / "one_h200.json").read_text())["rows"][number]
    row = data["row"]
    measured = measured_1b(row["tokens"], row["recompute"])
    wire = getattr(torch, row["wire"]) if row["wire"] else None
    choice = Choice(row["strategy"], 1, recompute=row["recompute"], wire=wire)
    forecast = forecast_memory(measured, choice, load_machine("h200"))
    assert forecast.allocated_bytes / GIB == pytest.approx(data["allocated"], rel=0.001)
    found = reserve(measured, forecast.state, resolve(row["strategy"], 1), room_part=0.0)
    assert found is not None and found.reserved_bytes == data["reserved"] * GIB  # segment for segment
    beside_bytes = forecast.used_bytes - forecast.reserved_bytes
    assert (found.reserved_bytes + beside_bytes) / GIB == pytest.approx(data["used"], abs=0.05)


class Peeks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.sum().item() > 0:
                x = -x
        return x


def test_a_model_that_reads_values_is_named() -> None:
    with pytest.raises(UsageError, match=r"Peeks cannot run without values: in `layers.0` or .*'layers.1'\).*inputs="):
        measure(Peeks(), 1, 1, inputs=[torch.zeros(2, 4)])
    with pytest.raises(UsageError, match="batch=0"):
        measure(small_gpt(), 0, 16)


def test_values_that_no_input_decides_are_read() -> None:
    class Packs(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(x.shape[0])
            whole = bool((positions.diff() == 1).all())
            return super().forward(x) if whole else x

    products = measure(Packs(4, 4), 1, 1, inputs=[torch.zeros(3, 4)]).workload.units[0].forward_products
    assert [(p.m, p.n, p.k) for p in products] == [(3, 4, 4)]
