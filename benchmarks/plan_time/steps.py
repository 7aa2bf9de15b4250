"""Forecast beside every step that was measured on GPUs: all files of benchmarks/gpu_step and benchmarks/train.

    python benchmarks/plan_time/steps.py [--machine FILE] [--save benchmarks/plan_time/results/steps.md]    # no GPU

Each way of gpu_step that a forecast can say something about is forecast from what the model asks for on meta tensors,
for the machine file of the card that the row was measured on (`--machine`: what `lamina doctor` wrote on such a card):

    lamina, lamina-peer     zero3 over two GPUs, by collectives or by copies (files in HALVED: with masters in halves)
    lamina-auto             the same, by copies
    lamina-peer-whole       the same with whole masters
    lamina-ddp, ...         other strategies, by collectives
    ...-captured            the same as one CUDA graph: no host, what a kernel costs the device stays
    bound                   the same without anything that moves, and without the runtime's host time; its optimizer is
                            torch's, with casts, clipping and copies of its own: bytes counted from gpu_step/run.py

Runtimes of then moved more: *more, bytes* an owned element is counted in (clipping by a pass of its own 8, publishing
behind the update 4), and over peers gradients were laid out. *later* marks rows of which a later runtime has another.

The rows of parts*_h200.json are of one GPU (`parts.py`), 3 B among them, of which no value of a machine file was taken.
No constant is fitted to a row here. `unit_host_ms` of lamina's defaults was set from one row (2048 tokens, marked).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

import lamina
from lamina.planner.machine import Machine, load_machine
from lamina.planner.measure import measure
from lamina.planner.measure_data import Measured
from lamina.planner.passes import READ, UPDATED
from lamina.planner.rates import Rates, Reached
from lamina.planner.time import forecast_time
from lamina.planner.workload import Choice
from lamina.train.planned import token_loss

BENCHMARKS = Path(__file__).parents[1]
DIFFERENT = 0.05  # steps nearer than this have no order
SEQ = 2048
STRATEGIES = {f"lamina-{name}": name for name in ("ddp", "zero1", "zero2")}
KNOWN = ("bound", "lamina", "lamina-peer", "lamina-peer-whole", "lamina-auto", *STRATEGIES)
TRAINED = {  # the shape of benchmarks/train, that of Llama 3.2 1B
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
# bound, bytes an owned element: gradients to fp32 6, their norm 4, clipping 8, AdamW 28, weights to bf16 6
BOUND_BYTES, BOUND_CLIPS_BYTES = 52, 12
# files in the order of their runtimes, with what those moved once a step and today's does not: by c10d, over peers
BEFORE = {
    "nccl_1b_2xH100": (8, 0),
    "nccl_1b_2xH200": (8, 0),
    "nccl_1b_2048_2xH200": (8, 0),
    "nccl_1b_2xH100_second": (8, 0),
    "peer_1b_2xH200": (8, 12),
    "peer_1b_2048_2xH200": (8, 12),
    "train/one_h200": (8, 8),
    "clip_in_step_1b_2xH200": (0, 4),
    "clip_in_step_1b_2048_2xH200": (0, 4),
    "early_gathers_1b_2xH200": (0, 4),
    "captured_first_1b_2048_2xH200": (0, 0),
    "published_in_the_step_1b_2xH200": (0, 0),
    "experts_1xH200": (0, 0),
    "interleaved_1b_2xH200": (0, 0),
    "interleaved_compiled_1b_2xH200": (0, 0),
    "interleaved_recompute_3b_2xH200": (0, 0),
    "interleaved_1b_2048_2xH200": (0, 0),
}
HALVED = tuple(  # in which masters of `lamina-peer` lie in halves by themselves, but for captured steps
    f"{name}_2xH200"
    for name in (
        "auto_3b",
        "core_1b",
        "compiled_1b",
        "eager_1b_2048",
        "expandable_1b",
        "experts",
        "micro_batches_1b",
        "recompute_3b",
        "slow_host_auto_3b",
        "slow_host_core_1b",
        "slow_host_eager_1b_2048",
        "slow_host_micro_batches_1b",
    )
)
SET_FROM = ("peer_1b_2048_2xH200", "lamina")  # unit_host_ms


@dataclass(frozen=True)
class Step:
    """One measured step and its forecast."""

    file: str
    job: str  # model and what else makes it another step: "1b", "3b, recomputed", "1b, one GPU"
    card: str
    tokens: int  # of one GPU
    way: str
    measured_ms: float
    forecast_ms: float
    more_bytes: int = 0  # that its runtime moved

    @property
    def what(self) -> tuple[str, int, str, str]:
        """The same in rows of another runtime."""
        return self.card, self.tokens, self.way, self.job

    @property
    def is_of_the_host(self) -> bool:
        return self.tokens == 2048 and not self.way.endswith("-captured")

    @property
    def error(self) -> float:
        return self.forecast_ms / self.measured_ms - 1


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def forecast(
    way: str,
    measured: Measured,
    machine: Machine,
    world: int,
    before_bytes: int = 0,
    is_todays: bool = False,
    micro_batches: int = 1,
    clips: bool = True,
    halved: bool = False,
) -> float:
    """ms of a step; `before_bytes`: that the row's runtime moved once a step and today's does not, an owned element."""
    reached, captured, compiled = Reached(), way.endswith("-captured"), way.endswith("-compiled")
    transport = "peer" if "peer" in way or "auto" in way else "c10d"
    gradients = "auto" if is_todays else "laid out"  # runtimes of before laid them out over peers as well
    strategy = STRATEGIES.get(way, "zero3")
    choice = Choice(strategy, world, transport=transport, captured=captured, compiled=compiled, gradients=gradients)
    choice = dataclasses.replace(choice, recompute=measured.recompute, accumulation=micro_batches, halved=halved)
    more_bytes = measured.numel / world * before_bytes
    if way.startswith("bound"):  # parameters that are their own masters move nothing but what the model does
        reached = dataclasses.replace(reached, unit_host_ms=0.0)
        choice = dataclasses.replace(choice, world=1, compute_bytes=4)
        bound_bytes = BOUND_BYTES if clips else BOUND_BYTES - BOUND_CLIPS_BYTES
        more_bytes = measured.numel / world * bound_bytes - measured.numel * (READ + 2 * UPDATED)
    ms = forecast_time(measured.workload, choice, machine, reached).total_ms
    return ms + Rates(machine, reached).memory_ms(more_bytes)


@functools.cache
def measured_model(size: str, tokens: int, recompute: str = "none", is_todays: bool = False) -> Measured:
    """gpu_step's model of this size, by what it asks for on meta."""
    with torch.device("meta"):
        model: nn.Module = module_at(BENCHMARKS / "gpu_step" / "model.py").Model(size)
    precision = lamina.Precision(compute=torch.bfloat16, keep=())
    found = measure(model, tokens // SEQ, SEQ, precision=precision, recompute=recompute)
    if is_todays:
        return found
    # runtimes of before gathered embeddings for their backward as well
    units = tuple(dataclasses.replace(unit, is_lookup=False) for unit in found.workload.units)
    return dataclasses.replace(found, workload=dataclasses.replace(found.workload, units=units))


def of_gpu_step(machines: dict[str, Machine]) -> Iterator[Step]:
    for path in sorted((BENCHMARKS / "gpu_step" / "results").glob("*.json")):
        data = json.loads(path.read_text())
        command = data["command"]
        found = re.search(r"--tokens (\d+)", command)
        tokens = int(found[1]) if found else 8192
        size, gpus = re.search(r"(1b|3b|8b|deep|experts)_", path.name), re.search(r"_(\d)x", path.name)
        assert size is not None and gpus is not None, f"{path.name}: no size or number of GPUs that is known"
        micro_batches = re.search(r"--micro-batches (\d+)", command)
        recompute = "full" if "--recompute" in command else "none"
        job = {"micro_batches": int(micro_batches[1]) if micro_batches else 1, "clips": "--unclipped" not in command}
        named = size[1] + ", recomputed" * (recompute == "full") + ", one GPU" * (gpus[1] == "1")
        named += f", {micro_batches[1]} micro-batches" if micro_batches else ""
        named += "" if job["clips"] else ", unclipped"
        is_todays = "rounds_ms" in data["rows"][0]  # ways have taken turns since this runtime
        measured = measured_model(size[1], tokens, recompute, is_todays)
        card = "h200" if "H200" in data["card"] else "h100"
        for row in data["rows"] if card in machines else ():
            way = row["way"]
            if way.removesuffix("-captured").removesuffix("-compiled") in KNOWN:
                more_bytes = 0 if "bound" in way else BEFORE.get(path.stem, (0, 0))["peer" in way]
                halved = path.stem in HALVED and way.removesuffix("-compiled") in ("lamina-peer", "lamina-auto")
                ms = forecast(way, measured, machines[card], int(gpus[1]), more_bytes, is_todays, halved=halved, **job)
                yield Step(path.stem, named, card, tokens, way, row["ms"], ms, more_bytes)


def of_parts(machine: Machine) -> Iterator[Step]:
    """Steps of one GPU, of 1.27 B and 3 B, once the card is hot; compiled ones were forecast before they were run."""
    for name in ("parts_h200", "parts_compiled_h200"):
        for row in json.loads((BENCHMARKS / "plan_time" / "results" / f"{name}.json").read_text())["steps"]:
            way, size, tokens = row["way"], row["size"], row["tokens"]
            if way.removesuffix("-captured").removesuffix("-compiled") in KNOWN:
                ms = forecast(way, measured_model(size, tokens), machine, 1)
                yield Step(name, f"{size}, one GPU", "h200", tokens, way, row["ms"], ms)


def of_train(machine: Machine) -> Iterator[Step]:
    """A Hugging Face Llama of another shape, 128,256 words, on one GPU, by `lamina train`; 4 x 2048 tokens."""
    import transformers

    data = json.loads((BENCHMARKS / "train" / "results" / "one_h200.json").read_text())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**TRAINED))
    model.tie_weights()
    measured = measure(model, 4, SEQ, precision="bf16", loss=token_loss)
    tokens, (more_bytes, _) = 4 * SEQ, BEFORE["train/one_h200"]
    more_ms = Rates(machine, Reached()).memory_ms(measured.numel * more_bytes)
    for way in ("eager", "compiled"):
        rates = sorted(row["tokens_per_s"] for row in data[way])
        ms = forecast_time(measured.workload, Choice("zero3", 1, compiled=way == "compiled"), machine).total_ms
        seen_ms = tokens / rates[len(rates) // 2] * 1e3
        yield Step(
            "train/one_h200",
            "Llama, one GPU",
            "h200",
            tokens,
            f"lamina train, {way}",
            seen_ms,
            ms + more_ms,
            more_bytes,
        )


def one_gpu(machine: Machine) -> Iterator[Step]:
    yield from of_parts(machine)
    yield from of_train(machine)


def report(steps: list[Step]) -> str:
    lines = ["| file | model | tokens a GPU | way | more, bytes | later | measured, ms | forecast, ms | error |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    steps = sorted(steps, key=lambda s: list(BEFORE).index(s.file) if s.file in BEFORE else len(BEFORE))
    latest = list({s.what: s for s in steps}.values())
    for s in steps:
        later = "" if any(s is one for one in latest) else "yes"
        note = " (`unit_host_ms` is from it)" if (s.file, s.way) == SET_FROM else ""
        times = f"{s.measured_ms:.1f} | {s.forecast_ms:.1f} | {s.error:+.1%}"
        lines.append(f"| {s.file} | {s.job} | {s.tokens} | {s.way}{note} | {s.more_bytes or ''} | {later} | {times} |")
    for title, chosen in (
        ("lamina on two GPUs", [s for s in steps if s.way in ("lamina", "lamina-peer") and "one GPU" not in s.job]),
        ("one GPU, 1.27 B and 3 B", [s for s in steps if s.job in ("1b, one GPU", "3b, one GPU")]),
        ("64 experts of odd sizes", [s for s in steps if s.job.startswith("experts")]),
        ("other strategies", [s for s in steps if s.way in STRATEGIES]),
        ("at 2048 tokens, eager: hosts", [s for s in steps if s.is_of_the_host]),
        ("captured", [s for s in steps if s.way.endswith("-captured")]),
        ("compiled", [s for s in steps if s.way.endswith("compiled")]),
        ("bound", [s for s in steps if s.way == "bound"]),
        ("of each way the latest", latest),
        ("all", steps),
    ):
        sizes = [abs(s.error) for s in chosen] or [0.0]
        within = sum(size <= 0.10 for size in sizes)
        lines.append(f"\n{title}: mean error {sum(sizes) / len(sizes):.1%}, {within} of {len(sizes)} within 10 %")
    right, pairs, wrong = order(steps)
    lines.append(
        f"\nOrder: of {pairs} pairs in one file that differ by more than {DIFFERENT:.0%}, {right} are forecast in the "
        f"measured order{': not ' + '; '.join(wrong) if wrong else ''}."
    )
    return "\n".join(lines) + "\n"


def order(steps: list[Step]) -> tuple[int, int, list[str]]:
    """Pairs of one file in the right order, all pairs, and those that are not."""
    right, pairs, wrong = 0, 0, []
    for i, one in enumerate(steps):
        for other in steps[:i]:
            quick, slow = sorted((one, other), key=lambda s: s.measured_ms)
            if one.file != other.file or slow.measured_ms <= (1 + DIFFERENT) * quick.measured_ms:
                continue
            pairs += 1
            if quick.forecast_ms < slow.forecast_ms:
                right += 1
            else:
                wrong.append(f"{quick.way} before {slow.way} ({one.file})")
    return right, pairs, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--machine", help="a machine file of H100 or H200 that takes the place of the shipped one")
    parser.add_argument("--save", type=Path, help="write the report here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machines = {name: load_machine(name) for name in ("h100", "h200")}
    if options.machine is not None:
        own = load_machine(options.machine)
        machines = {"h200" if "H200" in own.device else "h100": own}
    text = report([*of_gpu_step(machines), *(one_gpu(machines["h200"]) if "h200" in machines else ())])
    print(text)
    if options.save is not None:
        options.save.write_text(text)


if __name__ == "__main__":
    main()
