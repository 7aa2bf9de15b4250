"""`lamina plan`: memory and time of a run, the simplest way to run it, and a configuration that `lamina train` runs."""

from __future__ import annotations

import argparse
import json
import sys
from argparse import BooleanOptionalAction
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from lamina.core import expandable
from lamina.core.options import Options, check_writable, write
from lamina.errors import LaminaError, UsageError
from lamina.planner.choose import check_gpus
from lamina.planner.machine import OWN, load_machine, shipped_names
from lamina.planner.machine import Machine as Rates
from lamina.planner.plan import Plan, plan
from lamina.train.compare import compare, config_of_pass, machine_for, open_run
from lamina.train.config import Config, StrategyName, read_toml, to_toml
from lamina.train.planned import Planned, open_planned
from lamina.train.resolve import Machine, precision_of, recompute_of, resolve

MACHINE = "h100"


def main(argv: Sequence[str]) -> int:
    """`lamina plan ...`; the exit code."""
    try:
        options = _parser().read(argv)
        with expandable.by_default():  # as `lamina train` does
            return _plan(options) if options.compare is None else _compare(options)
    except LaminaError as error:
        print(f"lamina plan: {error}", file=sys.stderr)
        return 1


def _parser() -> Options:
    parser = Options("lamina plan", "Memory and time of a run, before there is a GPU.")
    add = parser.add_argument
    add("model", nargs="?", help="a Hugging Face folder or config.json, the folder of a run, or module:function")
    add("--gpus", type=int, help="GPUs of the run (1)")
    add("--machine", help=f"{', '.join(shipped_names())}, a machine file, or here ({MACHINE})")
    add("--batch", type=int, help="sequences of a micro-batch on one GPU (4)")
    add("--seq", type=int, help="tokens of a sequence (2048)")
    add("--accumulate", type=int, help="micro-batches of a step (1)")
    add("--precision", choices=("bf16", "fp32"), help="of forward and backward (bf16)")
    add("--transport", choices=("auto", "c10d", "peer"), help="how bytes move, as in lamina.shard (auto)")
    add("--halves", action=BooleanOptionalAction, help="masters in halves, over peers (as lamina.shard chooses)")
    add("--compile", action="store_true", help="units are compiled: counts in the time, not in the memory")
    add("--budget", help="memory of one GPU instead of the machine's, such as 40GiB")
    add("--what-if", default="", metavar="gpus=64,machine=h200", help="the same with other GPUs, either or both")
    add("--config", type=Path, help="take model, batches, precision from this file of lamina train")
    add("--save", type=Path, help="write a configuration that lamina train runs")
    add("--compare", type=Path, metavar="RUN", help="beside what was traced: the folder of a run, or its trace.json")
    add("--picture", type=Path, help="with --compare: where both are drawn (compare.png beside the trace)")
    add("--json", action="store_true", help="plain values instead of a table")
    return parser


def _compare(options: argparse.Namespace) -> int:
    """What was forecast beside what was traced, in words, a table and a picture."""
    unused = {"MODEL": "model"} | {
        f"--{name}": name.replace("-", "_")
        for name in (
            *("gpus", "batch", "seq", "accumulate", "precision", "compile", "budget", "what-if", "save"),
            *("transport", "halves"),
        )
    }
    for word, name in unused.items():
        if getattr(options, name) or (name == "halves" and options.halves is not None):
            raise UsageError(f"--compare takes everything from the run that was traced: leave {word} out")
    recording, config = open_run(options.compare, options.config)
    machine = machine_for(recording, options.machine)
    config = config_of_pass(config, recording)
    opened = open_planned(config.model, config)
    made = compare(forecast(config, opened, recording.world, machine, config.sharding.strategy), recording)
    picture = options.picture
    if picture is None:
        picture = (options.compare if options.compare.is_dir() else options.compare.parent) / "compare.png"
    made.draw(picture)
    print(json.dumps(made.as_dict(), indent=1) if options.json else f"{made}\n\npicture: {picture}")
    return 0


def _plan(options: argparse.Namespace) -> int:
    if options.picture is not None:
        raise UsageError("--picture draws a comparison: type --compare RUN too")
    for name in ("batch", "seq", "accumulate"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UsageError(f"--{name} {value}: a positive number is wanted")
    options.gpus, options.machine = (
        1 if options.gpus is None else options.gpus,
        (MACHINE if options.machine is None else options.machine),
    )
    config = Config() if options.config is None else read_toml(options.config)
    check_gpus(options.gpus)
    if options.save is not None:
        check_writable("--save", options.save, "run.toml")
    others = _what_if(options.what_if, options.gpus, options.machine)
    for machine in (options.machine, *(machine for _, machine in others)):
        load_machine(machine)  # what is wrong is said before a model is built
    config = _complete(config, options)
    opened = open_planned(config.model if options.model is None else options.model, config)
    made = forecast(config, opened, options.gpus, options.machine, budget=options.budget)
    also = [forecast(config, opened, gpus, machine, budget=options.budget) for gpus, machine in others]
    if options.json:
        values = made.as_dict() | ({"what_if": [other.as_dict() for other in also]} if also else {})
        print(json.dumps(values, indent=1))
    else:
        print(made)
        for other in also:
            print(f"\nwhat if {options.what_if}: {_compared(made, other)}\n\n{other}")
    if options.save is not None:
        write("--save", options.save, config_text(config, opened, made))
        if not options.json:
            print(f"\nwritten: {options.save}; on {options.gpus} GPUs, `lamina train {options.save}` runs it")
    return 0


def forecast(
    config: Config,
    opened: Planned,
    gpus: int,
    machine: str | Rates,
    strategy: str | None = None,
    budget: str | None = None,
) -> Plan:
    """The plan of a configuration whose batch is that of one micro-batch on one GPU; `strategy` None: the ladder."""
    batches = config.batches
    assert batches.batch is not None and batches.length is not None
    return plan(
        opened.model,
        gpus,
        batch=batches.batch,
        seq=batches.length,
        machine=machine,
        budget=budget,
        strategy=strategy,
        recompute=recompute_of(config),
        precision=precision_of(config),
        slots=config.sharding.slots or 3,
        accumulation=batches.accumulate,
        compile=config.sharding.compile,
        transport=config.sharding.transport,
        loss=opened.loss,
        name=opened.name,
    )


def dry_run(config: Config, ranks: int, on_gpu: bool) -> str:
    """The forecast of a run of `lamina train` with these settings, on what `lamina doctor` knows of this machine."""
    machine = "here" if OWN.expanduser().is_file() else MACHINE
    batches = config.batches
    assert batches.batch is not None
    pass_batch = batches.batch // (ranks * batches.accumulate)
    config = replace(config, batches=replace(batches, batch=pass_batch))
    chosen = config.sharding.strategy
    opened = open_planned(config.model, config)
    made = forecast(config, opened, ranks, machine, None if chosen == "auto" else chosen)
    if machine == "here" and on_gpu:
        return str(made)
    return f"{made}\n(on {made.machine.name}; `lamina doctor` measures this machine, `lamina plan` takes others)"


def _complete(config: Config, options: argparse.Namespace) -> Config:
    """What is asked for, else what the file says, else the command's own; `batch` becomes that of one micro-batch."""
    batches = config.batches
    accumulate = options.accumulate or batches.accumulate
    per_pass = options.gpus * accumulate
    batch = options.batch
    if batch is None:
        batch, rest = (4, 0) if batches.batch is None else divmod(batches.batch, per_pass)
        if rest or not batch:
            raise UsageError(
                f"batches.batch={batches.batch} of {options.config} cannot be dealt to {options.gpus} GPUs in "
                f"{accumulate} passes: type --gpus that divide it, or --batch, the sequences of a micro-batch on a GPU"
            )
    seq = options.seq if options.seq is not None else batches.length or 2048
    batches = replace(batches, batch=batch, length=seq, accumulate=accumulate)
    precision = options.precision or config.sharding.precision or "bf16"
    sharding = replace(
        config.sharding,
        precision=precision,
        compile=options.compile or config.sharding.compile,
        transport=options.transport or config.sharding.transport,
        halves=config.sharding.halves if options.halves is None else options.halves,
    )
    config = replace(config, batches=batches, sharding=sharding)
    if options.model is None and config.model is None:
        unit = max(1, per_pass)
        whole = replace(config, batches=replace(batches, batch=batch * unit))
        config = replace(resolve(whole, Machine(max(1, options.gpus), True)), batches=batches)
    return config


def config_text(config: Config, opened: Planned, made: Plan) -> str:
    """A configuration of `lamina train` that runs what was planned."""
    if opened.for_config is None and opened.loss is None:
        raise UsageError(
            f"{opened.name} is no model that `lamina train` opens; give {made.arguments} to lamina.shard()"
        )
    taken, batches = made.taken.choice, config.batches
    assert batches.batch is not None
    strategy, precision = cast(StrategyName, taken.strategy), made.arguments.get("precision")
    sharding = replace(
        config.sharding,
        strategy=strategy,
        recompute=str(taken.recompute),
        slots=taken.slots,
        halves=config.sharding.halves if precision is None else precision.halves,
    )
    whole = replace(batches, batch=batches.batch * taken.world * batches.accumulate)
    return to_toml(replace(config, model=opened.for_config, batches=whole, sharding=sharding))


def _what_if(text: str, gpus: int, machine: str) -> list[tuple[int, str]]:
    seen: set[str] = set()
    for part in text.split(",") if text else ():
        key, _, value = part.strip().partition("=")
        if key in seen:
            raise UsageError(f"--what-if {text}: {key} is given twice; type one of them, and the command once for each")
        seen.add(key)
        if key == "gpus" and value.isdecimal():
            gpus = int(value)
        elif key == "machine" and value:
            machine = value
        else:
            raise UsageError(f"--what-if {text}: type gpus=64 or machine=h200, or both with a comma between them")
    check_gpus(gpus)
    return [(gpus, machine)] if text else []


def _compared(made: Plan, other: Plan) -> str:
    before, after = made.taken, other.taken
    times = after.time.tokens_per_s / before.time.tokens_per_s
    memory = f"{before.memory.used_bytes / 2**30:.1f} -> {after.memory.used_bytes / 2**30:.1f} GiB a GPU"
    return f"{times:.2f} times the tokens a second, {memory}, {after.title} instead of {before.title}"
