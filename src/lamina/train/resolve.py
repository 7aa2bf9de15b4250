"""Every setting that was left open gets its value here: from the machine, the model and the data, by stated rules."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from lamina.errors import UsageError
from lamina.runtime.precision import Precision
from lamina.train.config import Architecture, Config
from lamina.train.lora import read_rank

BELOW_ONE = math.nextafter(1.0, 0.0)
MOST_SEED = 2**62


@dataclass(frozen=True)
class Machine:
    """Where the run is to take place."""

    ranks: int
    on_gpu: bool

    @property
    def text(self) -> str:
        one, more = ("GPU", "GPUs") if self.on_gpu else ("CPU process", "CPU processes")
        return f"{self.ranks} {one if self.ranks == 1 else more}"


def resolve(config: Config, machine: Machine) -> Config:
    """The configuration without open ends, but for `steps` with a model, which is one pass over data yet to be read.

    Raises `UsageError` for values that no run can have.
    """
    _check_numbers(config)
    gpu, tuned = machine.on_gpu, config.model is not None
    arch, batches, opt, shards, watching = (
        config.architecture,
        config.batches,
        config.optimisation,
        config.sharding,
        config.watching,
    )
    if not tuned:
        arch = Architecture(arch.width or (384 if gpu else 192), arch.layers or (6 if gpu else 4), arch.heads or 6)
        width, heads = arch.width or 0, arch.heads or 1
        if width % (2 * heads):
            raise UsageError(f"architecture.width={width} must be a multiple of twice its heads ({2 * heads})")
    base = (8 if gpu else 2) if tuned else (64 if gpu else 16)
    unit = machine.ranks * batches.accumulate
    batch = batches.batch or -(-base // unit) * unit
    length = batches.length or ((1024 if gpu else 256) if tuned else (256 if gpu else 128))
    batches = replace(batches, batch=batch, length=length)
    if opt.steps is None and not tuned:
        opt = replace(opt, steps=2000 if gpu else 300)
    if opt.lr is None:
        opt = replace(opt, lr=(2e-4 if config.lora else 2e-5) if tuned else 3e-3)
    strategy = shards.strategy or ("auto" if tuned else "zero3")
    shards = replace(shards, strategy=strategy, precision=shards.precision or ("bf16" if gpu else "fp32"))
    config = replace(config, architecture=arch, batches=batches, optimisation=opt, sharding=shards, watching=watching)
    _check(config, machine)
    return config if opt.steps is None else with_steps(config, opt.steps)


def with_steps(config: Config, steps: int) -> Config:
    """What follows from the number of steps."""
    opt, watching = config.optimisation, config.watching
    opt = replace(opt, steps=steps, warmup=max(1, steps // 20) if opt.warmup is None else opt.warmup)
    every = watching.evaluate_every or max(1, -(-steps // 5))
    watching = replace(watching, evaluate_every=every, save_every=watching.save_every or every)
    return replace(config, optimisation=opt, watching=watching)


def _check_numbers(config: Config) -> None:
    batches, opt, arch = config.batches, config.optimisation, config.architecture
    positive = {
        "architecture.width": arch.width,
        "architecture.layers": arch.layers,
        "architecture.heads": arch.heads,
        "batches.length": batches.length,
        "batches.batch": batches.batch,
        "batches.accumulate": batches.accumulate,
        "optimisation.steps": opt.steps,
        "optimisation.lr": opt.lr,
        "watching.evaluate_every": config.watching.evaluate_every,
        "watching.evaluate_batches": config.watching.evaluate_batches,
        "watching.log_every": config.watching.log_every,
        "watching.save_every": config.watching.save_every,
    }
    for name, value in positive.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UsageError(f"{name}={value}: must be positive")
    ranges: dict[str, tuple[float | None, float]] = {  # from 0, up to what
        "optimisation.warmup": (opt.warmup, math.inf),
        "optimisation.final_lr": (opt.final_lr, 1.0),
        "optimisation.weight_decay": (opt.weight_decay, math.inf),
        "optimisation.clip": (opt.clip, math.inf),
        "optimisation.beta1": (opt.beta1, BELOW_ONE),
        "optimisation.beta2": (opt.beta2, BELOW_ONE),
        "optimisation.seed": (opt.seed, float(MOST_SEED)),
        "watching.sample_tokens": (config.watching.sample_tokens, math.inf),
    }
    for name, (value, most) in ranges.items():
        if value is not None and not (0 <= value <= most and math.isfinite(value)):
            upper = "" if most == math.inf else f", and at most {most:g}"
            raise UsageError(f"{name}={value}: wanted a number that is not negative{upper}")


def _check(config: Config, machine: Machine) -> None:
    batches = config.batches
    assert batches.batch is not None
    unit = machine.ranks * batches.accumulate
    if batches.batch % unit:
        near = max(unit, round(batches.batch / unit) * unit)
        raise UsageError(
            f"batches.batch={batches.batch} sequences cannot be dealt evenly to {machine.ranks} ranks in "
            f"{batches.accumulate} passes: type --batch {near}"
        )
    if config.lora is not None:
        read_rank(config.lora)
        if config.model is None:
            raise UsageError("--lora needs --model: adapters are trained beside a model that stays as it is")
    recompute_of(config)
    precision_of(config)


def precision_of(config: Config) -> str | Precision | None:
    """The argument of `lamina.shard`."""
    shards = config.sharding
    if shards.halves is None or (shards.precision != "bf16" and not shards.halves):
        return "bf16" if shards.precision == "bf16" else None
    if shards.precision != "bf16":
        raise UsageError(
            f"sharding.halves=true and sharding.precision={shards.precision}: the upper half of an fp32 master is a "
            "bf16 weight. Type --precision bf16, or leave --halves out"
        )
    return Precision(compute=torch.bfloat16, halves=shards.halves)


def recompute_of(config: Config) -> str | int:
    """The argument of `lamina.shard`."""
    text = config.sharding.recompute
    if text in ("none", "full", "selective"):
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(f"sharding.recompute={text!r}: use none, full, selective, or a number n for every n-th block")
