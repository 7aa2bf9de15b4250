"""What `lamina train` says when memory runs out: where, what the plan has there, and what to change.

torch names an allocation and its own settings. What helps is another way to run, and which one is enough can be
forecast: the settings of this run are changed one at a time, the smallest change first, and the first two that fit are
given as command lines. One that fits must leave a margin on the device, and take less than what has just failed, since
a forecast that called that possible was wrong, or somebody else is on the device.
"""

from __future__ import annotations

import contextlib
import shlex
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from lamina.checkpoint.api import latest
from lamina.errors import LaminaError, OutOfMemory
from lamina.launch import CPU_RANKS
from lamina.planner.machine import Machine, load_machine
from lamina.planner.memory import MARGIN, MemoryForecast
from lamina.runtime.access import runtime_of
from lamina.runtime.failing import Place, asked_bytes, place_of, ran_out
from lamina.runtime.report import readable_bytes
from lamina.train.config import Config, StrategyName
from lamina.train.folder import next_folder
from lamina.train.job import Job
from lamina.train.loop import Training
from lamina.train.plan_cli import forecast
from lamina.train.planned import open_planned

LESS = 0.95  # of the forecast of what failed: what a change must come down to
SHOWN = 2
LADDER: tuple[StrategyName, ...] = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Change:
    """Settings that differ from those of the run, and the flags that set them."""

    config: Config  # with the batch of one micro-batch on one rank
    flags: str


@contextlib.contextmanager
def explained(training: Training, launched: bool) -> Iterator[None]:
    """Turn torch's error into one that says what would fit. `launched`: by `lamina train` itself. Local."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, LaminaError) or not ran_out(error):
            raise
        place = place_of(error, training.job.model)
        traceback.clear_frames(error.__traceback__)  # their tensors go: the forecast needs a little memory itself
        raise OutOfMemory(message(training, place, asked_bytes(error), launched)) from error


def message(training: Training, place: Place, asked: int | None, launched: bool) -> str:
    """The same on every rank that ran out at the same place."""
    job = training.job
    world, device = job.control.world, job.device
    wanted = "" if asked is None else f"; torch asked for {readable_bytes(asked)} more"
    lines = [f"out of memory in step {training.step + 1}, {place}{wanted}"]
    if device.type == "cuda":
        lines[0] += f", of {readable_bytes(torch.cuda.get_device_properties(device).total_memory)} on the device"
    try:
        model = job.config.model if job.opened is None else str(job.opened.folder)
        found = _Forecasts(_as_it_ran(job, world), model, world, _machine(device))
        failed = found.of(found.config)
        lines += [_moment(failed, place), *_cures(found, failed, _command(training, launched))]
    except (LaminaError, RuntimeError, MemoryError) as problem:
        first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        more = ", --strategy zero3" if world > 1 else ""
        lines.append(f"No forecast of it: {first} Less memory take --recompute selective, --accumulate 2{more}")
    return "\n".join(lines)


def _moment(failed: MemoryForecast, place: Place) -> str:
    """What the plan holds where it failed."""
    known = {moment.place: moment for moment in sorted(failed.moments, key=lambda m: m.total_bytes)}
    moment = next((known[name] for name in place.moments if name in known), failed.peak)
    state = failed.state
    parts = {
        "weights": state.masters,
        "optimizer": state.optimizer,
        "gradients": moment.gradient_bytes,
        "slots": state.slots + state.published,
        "reduction": state.reduction + state.accumulated,
        "activations": moment.activation_bytes,
    }
    named = ", ".join(f"{name} {readable_bytes(size)}" for name, size in parts.items() if size)
    peak = (
        ""
        if moment is failed.peak
        else f"; its peak is {readable_bytes(failed.peak.total_bytes)} at {failed.peak.place}"
    )
    return f"the plan has {readable_bytes(moment.total_bytes)} there ({named}){peak}"


# ---- what would fit ------------------------------------------------------------------------------------------------


class _Forecasts:
    """Memory of this run under other settings."""

    def __init__(self, config: Config, model: str | None, world: int, machine: Machine) -> None:
        self.config, self.model, self.world, self.machine = config, model, world, machine
        self.known: dict[Config, MemoryForecast] = {}

    def of(self, config: Config) -> MemoryForecast:
        if config not in self.known:
            opened = open_planned(self.model, config)
            strategy = config.sharding.strategy
            assert strategy is not None
            made = forecast(config, opened, self.world, self.machine, strategy)
            self.known[config] = made.taken.memory
        return self.known[config]

    def fits(self, config: Config) -> bool:
        now, then = self.of(self.config), self.of(config)
        return then.used_bytes <= min(MARGIN * now.device_bytes, LESS * now.used_bytes)


def _cures(found: _Forecasts, failed: MemoryForecast, command: str) -> list[str]:
    """The first two changes that fit, as command lines; else what comes nearest."""
    tried, fitting = [], list[Change]()
    for change in changes(found.config, found.world):
        tried.append(change)
        if found.fits(change.config):
            fitting.append(change)
        if len(fitting) == SHOWN:
            break
    lines = [f"  {command} {c.flags}    # {readable_bytes(found.of(c.config).used_bytes)}" for c in fitting]
    if lines:
        return [f"it needs {readable_bytes(failed.used_bytes)} in all; the smallest changes that fit:", *lines]
    if not tried:
        return ["nothing is left to change but the model, a smaller --batch or --length, or more ranks"]
    least = min(tried, key=lambda change: found.of(change.config).used_bytes)
    return [
        f"it needs {readable_bytes(failed.used_bytes)} in all, and no change of these settings fits: {least.flags} "
        f"takes {readable_bytes(found.of(least.config).used_bytes)}. Give it more ranks, or a smaller --length"
    ]


def changes(config: Config, world: int) -> Iterator[Change]:
    """Other ways to run the same step, the smallest change first; no other result is computed by any of them."""
    strategies = _below(config.sharding.strategy) if world > 1 else ()
    singles = [
        *_unpublished(config, world),
        *_recomputed(config, "selective"),
        *_accumulated(config, 2),
        *(Change(_with(config, strategy=name), f"--strategy {name}") for name in strategies),
        *_recomputed(config, "full"),
        *(change for times in (4, 8, 16) for change in _accumulated(config, times)),
    ]
    yield from singles
    last = strategies[-1] if strategies else None
    for times in (1, 2, 4, 8, 16):  # together
        for change in _accumulated(config, times) if times > 1 else [Change(config, "")]:
            for again in _recomputed(change.config, "full") or [Change(change.config, "")]:
                flags = [f"--strategy {last}" if last else "", again.flags, change.flags]
                whole = again.config if last is None else _with(again.config, strategy=last)
                if sum(map(bool, flags)) > 1:
                    yield Change(whole, " ".join(filter(None, flags)))


def _below(strategy: str | None) -> tuple[StrategyName, ...]:
    return LADDER[LADDER.index(strategy) + 1 :] if strategy in LADDER else ()


def _with(config: Config, strategy: StrategyName) -> Config:
    return replace(config, sharding=replace(config.sharding, strategy=strategy))


def _unpublished(config: Config, world: int) -> list[Change]:
    """By collectives, which need no published weights; nothing where they are half of the masters anyway."""
    shards = config.sharding
    if world == 1 or shards.transport != "peer" or shards.halves or shards.strategy not in ("zero3", "hsdp"):
        return []
    return [Change(replace(config, sharding=replace(shards, transport="c10d")), "--transport c10d")]


def _recomputed(config: Config, how: str) -> list[Change]:
    """Nothing where as much is recomputed already."""
    order = ("none", "selective", "full")
    now = config.sharding.recompute
    if now in order and order.index(now) >= order.index(how):
        return []
    return [Change(replace(config, sharding=replace(config.sharding, recompute=how)), f"--recompute {how}")]


def _accumulated(config: Config, times: int) -> list[Change]:
    """The same sequences in more passes; nothing where they cannot be divided."""
    batches = config.batches
    assert batches.batch is not None
    if batches.batch % times:
        return []
    count = batches.accumulate * times
    changed = replace(batches, batch=batches.batch // times, accumulate=count)
    return [Change(replace(config, batches=changed), f"--accumulate {count}")]


# ---- of this run ---------------------------------------------------------------------------------------------------


def _as_it_ran(job: Job, world: int) -> Config:
    """As forecasts take it: the batch is that of one micro-batch on one rank, and what was left open is chosen."""
    batches, shards, runtime = job.config.batches, job.config.sharding, runtime_of(job.model)
    assert batches.batch is not None
    transport: Literal["c10d", "peer"] = "peer" if runtime.transport == "peer" else "c10d"
    halves = True if any(unit.halved for unit in runtime.units) else shards.halves
    batches = replace(batches, batch=batches.batch // (world * batches.accumulate))
    return replace(job.config, batches=batches, sharding=replace(shards, transport=transport, halves=halves))


def _machine(device: torch.device) -> Machine:
    """Of memory only this device's size counts, so any file of its kind will do; the size is known exactly."""
    known = load_machine("h100")
    if device.type == "cuda":
        size = torch.cuda.get_device_properties(device).total_memory
        return replace(known, device=torch.cuda.get_device_name(device), memory_bytes=float(size))
    return replace(known, device="CPU", memory_bytes=float(1 << 62))  # what failed says more than what is free now


def _command(training: Training, launched: bool) -> str:
    """What goes on with this run, from its last checkpoint if it has one, else from its settings."""
    folder, world = training.folder, training.job.control.world
    usual = torch.cuda.device_count() or CPU_RANKS
    ranks = f" --nprocs {world}" if launched and world != usual else ""
    if folder.checkpoints.is_dir() and latest(str(folder.checkpoints)) is not None:
        return f"lamina train --resume {shlex.quote(str(folder.path))}{ranks}"
    free: Path = next_folder(folder.path.parent)
    return f"lamina train {shlex.quote(str(folder.path / 'run.toml'))} --output {shlex.quote(str(free))}{ranks}"
