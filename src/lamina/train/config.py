"""What a run is: one frozen record, which is flags, a TOML file, and the head of every result.

A training script grows an argument parser, a configuration file and a dictionary that is saved, and the three drift
apart. Here `Config` is the only list of settings: tyro makes the flags from it, `read_toml` and `write_toml` its file,
and `resolve` replaces every `None` by the value that this machine and this model get, with a word on why. What is
written into the run's folder is the resolved one, so the same file gives the same run on any number of ranks.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from lamina.errors import UsageError

Part = TypeVar("Part")
ELSEWHERE = {  # what other programs call it
    "learning_rate": "lr",
    "max_steps": "steps",
    "batch_size": "batch",
    "seq_len": "length",
    "sequence_length": "length",
    "max_length": "length",
    "block_size": "length",
    "warmup_steps": "warmup",
    "gradient_accumulation_steps": "accumulate",
    "max_grad_norm": "clip",
    "eval_steps": "evaluate_every",
    "save_steps": "save_every",
    "logging_steps": "log_every",
    "lr_scheduler_type": "schedule",
    "output_dir": "output",
    "gradient_checkpointing": "recompute",
    "bf16": "precision",
    "dtype": "precision",
    "lora_r": "lora",
    "gpus": "nprocs",
    "nproc_per_node": "nprocs",
}
StrategyName = Literal["auto", "ddp", "zero1", "zero2", "zero3", "hsdp"]


@dataclass(frozen=True)
class Architecture:
    """Sizes of the small GPT that is trained where no model is given."""

    width: int | None = None
    """width of its layers (None: 192 on CPUs, 384 on GPUs)"""
    layers: int | None = None
    """number of its blocks (None: 4 on CPUs, 6 on GPUs)"""
    heads: int | None = None
    """attention heads in each block (None: 6)"""


@dataclass(frozen=True)
class Batches:
    """What the model reads in a step."""

    length: int | None = None
    """tokens in a sequence (None: 128 on CPUs, 256 on GPUs; with a model 256 and 1024)"""
    batch: int | None = None
    """sequences in a step, over all ranks and passes"""
    accumulate: int = 1
    """passes (micro-batches) that a step is made of"""
    packing: Literal["documents", "padded"] = "documents"
    """with a model: several documents in a sequence, kept apart; or one document in each"""


@dataclass(frozen=True)
class Optimisation:
    """AdamW and its schedule."""

    steps: int | None = None
    """optimizer steps (None: what the built-in job needs; with a model, one pass over the data)"""
    lr: float | None = None
    """learning rate at its height"""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """how the learning rate falls after the warm-up"""
    warmup: int | None = None
    """steps over which it rises (None: a twentieth of all)"""
    final_lr: float = 0.05
    """what is left of the learning rate at the end, as a fraction"""
    weight_decay: float = 0.1
    """of matrices; norms and biases have none"""
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    """largest norm of the gradients; 0: no clipping"""
    seed: int = 0
    """decides weights and the order of the data, on any number of ranks"""


@dataclass(frozen=True)
class Sharding:
    """How the run lies on the devices: arguments of `lamina.shard`."""

    strategy: StrategyName | None = None
    """what is split over the ranks; auto: the simplest that fits (None: auto, zero3 for the built-in job)"""
    precision: Literal["fp32", "bf16", "fp64"] | None = None
    """of forward and backward (None: bf16 on GPUs, fp32 on CPUs); masters are fp32 at least"""
    recompute: str = "none"
    """none, full, selective, or n for every n-th block"""
    slots: int | None = None
    """units in memory at the same time"""
    transport: Literal["auto", "c10d", "peer"] = "auto"
    halves: bool | None = None
    """masters in 16-bit halves, of which peers read one: 2 bytes less an element (bf16, zero3 or hsdp, peers)
    (None: on GPUs, where there are peers)"""
    compile: bool = False
    """compile each unit's forward"""
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True)
class Watching:
    """What is measured, shown and kept."""

    evaluate_every: int | None = None
    """steps between evaluations on held-out text (None: a fifth of all)"""
    evaluate_batches: int = 20
    """sequences of an evaluation, in batches"""
    log_every: int = 10
    """steps between lines of metrics.jsonl"""
    save_every: int | None = None
    """steps between checkpoints (None: at each evaluation)"""
    sample_tokens: int | None = None
    """length of the text shown before and after (None: 240 bytes, or 60 words; 0: none)"""
    log: Literal["none", "tensorboard", "wandb"] = "none"
    """where metrics go besides metrics.jsonl, if it is installed"""
    trace: bool = False
    """record three steps: trace.json for Perfetto and trace.png, in the run's folder"""


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    model: str | None = None
    """a Hugging Face folder or name, or the folder of an earlier run (None: a small GPT of our own)"""
    data: str | None = None
    """a .txt or .jsonl file or a folder of such (None: the sources of Python's standard library)"""
    output: str | None = None
    """the run's folder; it must not exist (None: runs/1, runs/2, ...)"""
    lora: str | None = None
    """train low-rank adapters only: r=16 or r=16,alpha=32"""
    batches: Batches = field(default_factory=Batches)
    optimisation: Optimisation = field(default_factory=Optimisation)
    architecture: Architecture = field(default_factory=Architecture)
    sharding: Sharding = field(default_factory=Sharding)
    watching: Watching = field(default_factory=Watching)


# -- TOML


def read_toml(path: Path) -> Config:
    """The settings in a file; `UsageError` for a file that is none, an unknown key (the nearest named) or type."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise UsageError(
            f"{path}: there is no such file. `lamina train --print-config` writes one to begin with"
        ) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{path} cannot be read: {problem}") from None
    try:
        return from_dict(tomllib.loads(text), str(path))
    except tomllib.TOMLDecodeError as problem:
        raise UsageError(f"{path} is no TOML: {problem}") from None


def from_dict(given: dict[str, Any], where: str) -> Config:
    return _build(Config, given, where, "")


def _build(kind: type[Part], given: dict[str, Any], where: str, section: str) -> Part:
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in hints:
            raise UsageError(f"{where}: unknown key `{section}{key}`. {_nearest(key, section)}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, dict):
                raise UsageError(f"{where}: `{key}` is a section: write `[{key}]` and its keys below")
            values[key] = _build(hints[key], value, where, f"{key}.")  # type: ignore[arg-type]
        else:
            values[key] = _fitting(hints[key], value, f"{where}: `{section}{key}`")
    return kind(**values)


def _nearest(key: str, section: str) -> str:
    """The cure for a key that does not exist: where it, or what it resembles, belongs."""
    places = {name: part for part, names in _sections().items() for name in names}
    known = ELSEWHERE.get(key.lower())
    match = [known] if known in places else difflib.get_close_matches(key, places, n=1, cutoff=0.5)
    if not match:
        keys = _sections().get(section.rstrip("."), [])
        return f"Keys here are {', '.join(keys)}"
    part = places[match[0]]
    if f"{part}." == section or part == section == "":
        return f"Did you mean `{match[0]}`?"
    return f"Did you mean `{match[0]}` {f'in section [{part}]' if part else 'above all sections'}?"


def _sections() -> dict[str, list[str]]:
    """Keys by section; "" are those above all sections, the names of sections among them."""
    found: dict[str, list[str]] = {"": []}
    for f in dataclasses.fields(Config):
        found[""].append(f.name)
        kind = get_type_hints(Config)[f.name]
        if dataclasses.is_dataclass(kind):
            found[f.name] = [inner.name for inner in dataclasses.fields(kind)]
    return found


def _fitting(hint: Any, value: Any, what: str) -> Any:
    kinds = [k for k in (get_args(hint) if get_origin(hint) not in (None, Literal) else (hint,)) if k is not type(None)]
    for kind in kinds:
        choices = get_args(kind)
        if choices:
            if value in choices:
                return value
            near = difflib.get_close_matches(str(value), choices, n=1)
            raise UsageError(f"{what} = {value!r}: use one of {', '.join(choices)}" + (f"; {near[0]}?" if near else ""))
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is kind:
            return value
    names = " or ".join(kind.__name__ for kind in kinds)
    raise UsageError(f"{what} = {value!r}: wanted {names}, got {type(value).__name__}")


def to_toml(config: Config) -> str:
    """The file of a configuration; what is None is left out, because TOML has no word for it."""
    lines = _lines(config)
    for f in dataclasses.fields(config):
        part = getattr(config, f.name)
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            lines += ["", f"[{f.name}]", *_lines(part)]
    return "\n".join(lines).lstrip("\n") + "\n"


def _lines(part: Any) -> list[str]:
    values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    return [f"{n} = {_literal(v)}" for n, v in values.items() if v is not None and not dataclasses.is_dataclass(v)]


def _literal(value: str | bool | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or c in '"\\\x7f' else c for c in value)
        return f'"{escaped}"'
    text = repr(value)
    return text if not isinstance(value, float) or any(c in text for c in ".en") else text + ".0"


# -- what a run does with it


def learning_rate(step: int, config: Optimisation) -> float:
    """Of step `step`, from 0: a function of the step alone, so that nothing of a schedule has to be saved."""
    assert config.steps is not None and config.warmup is not None and config.lr is not None
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    through = min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))
    left = {
        "constant": 1.0,
        "linear": 1.0 - through * (1.0 - config.final_lr),
        "cosine": config.final_lr + (1.0 - config.final_lr) * 0.5 * (1.0 + math.cos(math.pi * through)),
    }[config.schedule]
    return config.lr * left
