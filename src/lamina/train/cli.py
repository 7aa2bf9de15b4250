"""`lamina train` and `lamina sample`: flags or a TOML file in, a run on every device out.

A launcher and a script are two commands, two places of configuration, and the ranks' output mixed on one screen. Here
the command starts its own ranks (lamina.launch) unless it is under torchrun already, and draws what rank 0 reports.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import torch
import tyro

from lamina.checkpoint.api import latest
from lamina.core import expandable
from lamina.errors import LaminaError, LaunchError, UsageError
from lamina.launch import CPU_RANKS, launch
from lamina.train.config import ELSEWHERE, Config, read_toml, to_toml
from lamina.train.documents import read_documents
from lamina.train.export import find_gpt
from lamina.train.folder import claimed_folder, next_folder
from lamina.train.plan_cli import dry_run
from lamina.train.pretrained import open_folder
from lamina.train.resolve import Machine, resolve
from lamina.train.run import Request, run
from lamina.train.view import RelayReader, open_view

RUNS = Path("runs")
STOP_S = 300.0  # from Ctrl-C to the end of the ranks: two steps and a checkpoint, of a large model on a slow disk
STOPPING = b"\nlamina train: stopping behind this step, with a checkpoint (Ctrl-C again: at once, without)\n"


@dataclass(frozen=True)
class Command:
    """Train a small GPT from nothing, or fine-tune a pretrained model, on every device of this machine.

    Without arguments: the small GPT, on the sources of Python's standard library, in about two minutes.
    """

    config: tyro.conf.OmitArgPrefixes[Config]
    resume: Annotated[str | None, tyro.conf.arg(help="go on with the run in this folder, from its last checkpoint")] = (
        None
    )
    nprocs: Annotated[int | None, tyro.conf.arg(help="number of ranks (None: every GPU, or 2 CPU processes)")] = None
    dry_run: Annotated[bool, tyro.conf.arg(help="forecast memory and time of this run (lamina plan), and end")] = False
    print_config: Annotated[bool, tyro.conf.arg(help="print the settings of this run as TOML, and end")] = False


def main(argv: Sequence[str]) -> int:
    """`lamina train ...`; the exit code."""
    try:
        return _train(list(argv))
    except LaunchError as error:
        return _failed(_in_short(str(error)))
    except UsageError as error:
        return _failed(str(error), once=True)
    except LaminaError as error:
        return _failed(str(error))


def _failed(message: str, once: bool = False) -> int:
    """`once`: every rank knows it, so under torchrun rank 0 says it for all."""
    if not once or os.environ.get("RANK", "0") == "0":
        print(f"lamina train: {message}", file=sys.stderr)
    return 1


def _in_short(text: str) -> str:
    """A mistake of the user needs no traceback; anything else keeps it."""
    head, _, _ = text.partition("\n\n")
    return head.split(": ", 2)[-1] if "lamina.errors." in head else text


def _train(argv: list[str]) -> int:
    file = argv.pop(0) if argv and not argv[0].startswith("-") else None
    command = _parse(_with_values(argv), file)
    config, machine = command.config, _machine(command)
    if command.resume is not None:
        config = replace(config, output=command.resume)
    config = resolve(config, machine)
    if command.print_config:
        print(to_toml(config), end="")
        return 0
    if command.dry_run:
        with _expandable_segments():
            print(dry_run(config, machine.ranks, machine.on_gpu))
        return 0
    if config.data is not None:
        read_documents(config.data)  # what is wrong with it is said before anything is started
    if config.model is not None and find_gpt(Path(config.model).expanduser()) is None:
        open_folder(config.model)  # and the hub is asked once
    if config.sharding.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for torch, in the ranks
    with _expandable_segments() if machine.on_gpu else nullcontext():
        if _under_launcher():
            run(Request(replace(config, output=config.output or str(next_folder(RUNS))), command.resume is not None))
            return 0
        with nullcontext(config.output) if config.output else claimed_folder(RUNS) as output:
            request = Request(replace(config, output=output), command.resume is not None, relayed=True)
            return _launch(request, machine.ranks)


def _expandable_segments() -> AbstractContextManager[None]:
    """They are asked for, unless a GPU here has none."""
    return expandable.by_default() if expandable.is_supported() else nullcontext()


def _parse(argv: list[str], file: str | None) -> Command:
    for word in argv:
        name = word.partition("=")[0].lstrip("-").replace("-", "_")
        if word.startswith("--") and name in ELSEWHERE:
            raise UsageError(f"{word}: here it is called --{ELSEWHERE[name].replace('_', '-')}")
    default = Command(Config() if file is None else read_toml(Path(file)))
    command = tyro.cli(Command, args=argv, default=default, prog="lamina train", description=_described(Command))
    if command.resume is None:
        return command
    if file is not None:
        raise UsageError(f"--resume {command.resume} takes its settings from there; leave {file} out")
    stored = Path(command.resume) / "run.toml"
    if not stored.is_file():
        raise UsageError(f"--resume {command.resume}: {stored} does not exist, so this is no folder of a run")
    return tyro.cli(Command, args=argv, default=Command(read_toml(stored)), prog="lamina train")


def _with_values(argv: Sequence[str]) -> list[str]:
    """`--halves` and `--no-halves` as tyro takes an option that may be left open: with a value."""
    words: list[str] = []
    for word, after in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if word == "--no-halves":
            words += ["--halves", "False"]
        elif word == "--halves" and after not in ("True", "False", "None"):
            words += ["--halves", "True"]
        else:
            words.append(word)
    return words


def _described(kind: type) -> str:
    """The help's first words."""
    file = "A TOML file may stand before the flags: lamina train run.toml --lr 1e-3"
    return f"{inspect.cleandoc(kind.__doc__ or '')}\n\n{file}"


def _under_launcher() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _machine(command: Command) -> Machine:
    wanted, gpus = command.config.sharding.device, torch.cuda.device_count()
    if wanted == "cuda" and not gpus:
        raise UsageError("--device cuda: torch finds no GPU here. Leave --device out, or install a torch with CUDA")
    on_gpu = gpus > 0 and wanted != "cpu"
    if _under_launcher():
        return Machine(int(os.environ["WORLD_SIZE"]), on_gpu)
    count = command.nprocs if command.nprocs is not None else gpus if on_gpu else CPU_RANKS
    if count < 1 or (on_gpu and count > gpus):
        raise UsageError(f"--nprocs {count}: type a number from 1{f' to {gpus}, the GPUs here' if on_gpu else ''}")
    return Machine(count, on_gpu)


def _launch(request: Request, ranks: int) -> int:
    view = open_view(sys.stdout)
    reader = RelayReader(view)
    try:
        with _signals_as_interrupts(), contextlib.redirect_stdout(reader):  # type: ignore[type-var]
            launch(run, nprocs=ranks, args=(request,), grace_s=STOP_S)
    except KeyboardInterrupt:
        if not reader.said.startswith("stopped by"):
            print(f"lamina train: {_cut_short(Path(request.config.output or ''))}", file=sys.stderr)
        return 130
    except OSError as error:
        saved = _cut_short(Path(request.config.output or ""))
        return _failed(f"standard output cannot be written ({error}), so the run was {saved}")
    finally:
        with contextlib.suppress(OSError, ValueError):
            view.close()
    return 0


def _cut_short(folder: Path) -> str:
    """What is left of a run whose ranks were ended before they had saved."""
    checkpoints = folder / "checkpoints"
    found = latest(str(checkpoints)) if checkpoints.is_dir() else None
    if found is None:
        return "ended without a checkpoint"
    return f"ended; its last whole checkpoint is {Path(found).name}: lamina train --resume {folder}"


@contextlib.contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """Ctrl-C and SIGTERM mean: let the ranks end their step and save."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        os.write(2, STOPPING)  # no print: this may have interrupted one
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
