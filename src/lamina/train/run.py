"""One run on one rank, from its request to the last line that it prints."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from lamina.checkpoint.api import latest
from lamina.checkpoint.exporting import export
from lamina.core.strategy import resolve as resolve_factors
from lamina.errors import LaminaError, UsageError
from lamina.runtime.agreement import together
from lamina.runtime.environment import initialise_distributed
from lamina.runtime.report import readable_bytes, report
from lamina.runtime.scopes import keep
from lamina.train.agreed import on_rank_0
from lamina.train.config import Config, to_toml
from lamina.train.export import (
    adapter_state,
    hugging_face_state,
    whole_state,
    write_gpt,
    write_hugging_face,
    write_lora,
)
from lamina.train.folder import RunFolder
from lamina.train.gpt import GPT
from lamina.train.job import Job, build_job
from lamina.train.loggers import Opener, find_logger
from lamina.train.loop import Training
from lamina.train.lora import read_rank
from lamina.train.memory import device_memory_bytes, memory_table
from lamina.train.out_of_memory import explained
from lamina.train.pretrained import Pretrained
from lamina.train.resolve import Machine
from lamina.train.sampling import sample
from lamina.train.view import Relay, Silent, View, open_view

SAMPLE_TOKENS = {"bytes": 240, "words": 60}
KEEP_PART = 4  # a quarter of the memory may hold the whole model for a moment


@dataclass(frozen=True)
class Request:
    """What every rank is told."""

    config: Config  # resolved, with its output
    resume: bool = False
    relayed: bool = False  # rank 0 writes for the launching process


def run(request: Request) -> str:
    """Train on this rank, with all others; the run's folder. Collective."""
    rank, world = _start()
    view: View = Silent() if rank else (Relay() if request.relayed else open_view(sys.stdout))
    try:
        return _run(request, view, Machine(world, torch.cuda.is_available()))
    except OSError as problem:
        raise _named(problem) from problem
    finally:
        view.close()


def _start() -> tuple[int, int]:
    """The process group, if a launcher wants one: this rank, and how many there are."""
    try:
        initialise_distributed()
    except dist.DistNetworkError as problem:
        raise UsageError(
            f"the ranks cannot meet: {str(problem).splitlines()[0]} Give torchrun another --master-port, or leave the "
            "launching to lamina"
        ) from None
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _named(problem: OSError) -> LaminaError:
    return UsageError(f"{problem.filename or ''}: {problem.strerror or problem}".lstrip(": "))


def _run(request: Request, view: View, machine: Machine) -> str:
    job = build_job(request.config)
    control, folder = job.control, RunFolder(Path(request.config.output or ""))
    openers: list[Opener] = []
    on_rank_0(control, lambda: openers.append(find_logger(job.config.watching.log)))
    found = None
    if request.resume:
        found = together(control, lambda: _last_checkpoint(folder))
        on_rank_0(control, lambda: folder.write("run.toml", to_toml(job.config)))
    else:
        on_rank_0(control, lambda: folder.create(to_toml(job.config)))
    log = openers[0](folder.path, dataclasses.asdict(job.config)) if openers else lambda row: None
    training = Training(job, folder, view, log)
    _show_start(job, machine, view)
    if found is not None:
        training.resume(Path(found))
        view.say(f"going on behind step {training.step}, from {found}")
        if training.step >= (job.config.optimisation.steps or 0):
            raise UsageError(
                f"--resume {folder.path}: it has ended, with step {training.step}. Give it more: --steps "
                f"{training.step * 2}"
            )
    before = "" if found is not None else _sample(job)
    with explained(training, request.relayed):
        finished = training.run()
    view.close()
    training.draw()
    if not finished:
        name = training.stopping.asked or "another rank"
        view.say(f"stopped by {name} behind step {training.step}; go on with: lamina train --resume {folder.path}")
        return str(folder.path)
    result = _write_result(job, folder)
    _show_end(job, folder, result, training, (before, _sample(job)), view)
    return str(folder.path)


def _last_checkpoint(folder: RunFolder) -> str:
    found = latest(str(folder.checkpoints)) if folder.checkpoints.is_dir() else None
    if found is None:
        raise UsageError(f"--resume {folder.path}: no complete checkpoint in {folder.checkpoints}")
    return found


def _sample(job: Job) -> str:
    asked = job.config.watching.sample_tokens
    count = asked if asked is not None else SAMPLE_TOKENS["bytes" if job.opened is None else "words"]
    if not count:
        return ""
    with keep(job.model) if _fits_whole(job) else nullcontext():
        return sample(job.objective, job.codec, job.prompt, count, job.config.batches.length or 1, job.device)


def _fits_whole(job: Job) -> bool:
    """Whether the model may stay gathered while it writes; otherwise every token gathers it once more. Collective."""
    whole_bytes = job.sizes.numel * job.sizes.compute_bytes
    here = device_memory_bytes(job.device, job.control.world) // KEEP_PART
    return all(row[0] > whole_bytes for row in job.control.exchange([here]))


# -- what is shown


def _show_start(job: Job, machine: Machine, view: View) -> None:
    config, layout = job.config, report(job.model)
    batches, opt = config.batches, config.optimisation
    what = config.model or "a small GPT over bytes"
    data = config.data or "the sources of Python's standard library"
    view.say(
        f"{what}: {job.sizes.numel:,} parameters ({job.sizes.trainable_numel:,} trained), {config.sharding.precision}"
    )
    view.say(
        f"{data}: {len(job.rows):,} sequences of {batches.length} tokens to train on, {len(job.held_out):,} held out"
    )
    view.say(f"{machine.text}; {opt.steps} steps of {batches.batch} sequences, learning rate {opt.lr:g} {opt.schedule}")
    view.say(f"strategy {layout.strategy}: {job.why}")
    factors = resolve_factors(config.sharding.strategy or "zero3", machine.ranks)
    view.table("memory of each rank, before activations", memory_table(job.sizes, factors, layout))
    if job.opened is not None and job.opened.files is None:
        view.say("its files are written otherwise than it lies in memory: every rank has read all of them")
    if job.opened is not None and (names := job.opened.left_out):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        view.say(f"in its files, but not in the model, and so in no result: {', '.join(names[:3])}{more}")
    view.say(f"folder: {config.output}")


def _show_end(
    job: Job, folder: RunFolder, result: Path, training: Training, texts: tuple[str, str], view: View
) -> None:
    before, after = texts
    held_out = training.curve.held_out
    best = training.curve.best or (0, 0.0)
    beside = "" if job.bigram is None else f" (bigram table: {job.bigram:.3f})"
    view.say("")
    view.say(f"held-out loss {held_out[-1][1]:.3f}{beside}, {held_out[0][1]:.3f} before")
    if best[1] < held_out[-1][1]:
        view.say(f"best: {best[1]:.3f} behind step {best[0]}")
    if before:
        view.say(f"\n--- before\n{_one_screen(before)}")
    if after:
        view.say(f"\n--- after\n{_one_screen(after)}\n---\n")
    view.say(f"curve: {folder.path / 'curve.png'}   metrics: {folder.path / 'metrics.jsonl'}")
    size_bytes = sum(f.stat().st_size for f in result.rglob("*")) if job.control.rank == 0 else 0
    view.say(f"result: {result} ({readable_bytes(size_bytes)})\n")
    name = shlex.quote(str(folder.path))
    view.say(f"train on:       lamina train --resume {name} --steps {2 * (job.config.optimisation.steps or 0)}")
    line = next(iter(job.prompt.strip().splitlines()), "") or "Hello"
    view.say(f"let it write:   lamina sample {name} --prompt {shlex.quote(line[:12])}")
    if job.config.lora is None:
        view.say(f"teach it yours: lamina train --model {name} --data your.txt")


def _one_screen(text: str) -> str:
    """What a terminal can show of it."""
    shown = "".join(c if c.isprintable() or c == "\n" else "·" for c in text)
    return "\n".join(shown.splitlines()[:12])


# -- the result


def _write_result(job: Job, folder: RunFolder) -> Path:
    """Into the run's folder. Collective."""
    if job.opened is not None and job.config.lora is None and job.opened.files is not None:
        return _export(job, job.opened, folder)
    name, fill = _whole_result(job)

    def write() -> None:
        from safetensors import SafetensorError

        try:
            folder.write_folder(name, fill)
        except SafetensorError as problem:  # for a full disk, say
            raise UsageError(f"{folder.path / name} cannot be written: {problem}") from None

    on_rank_0(job.control, write)
    return folder.path / name


def _export(job: Job, opened: Pretrained, folder: RunFolder) -> Path:
    """Where the names in files are those in memory: every rank writes its ranges, and none holds the whole model."""
    place = folder.part("model")
    on_rank_0(job.control, lambda: folder.clear("model"))
    export(str(place), job.model, dtype=opened.dtype)
    on_rank_0(job.control, lambda: opened.tokenizer.save_pretrained(place))
    on_rank_0(job.control, lambda: folder.settle("model"))
    return folder.path / "model"


def _whole_result(job: Job) -> tuple[str, Callable[[Path], None]]:
    """The name of the result, and what writes it on rank 0, which holds all of it. Collective."""
    rank, opened, lora = job.control.rank, job.opened, job.config.lora
    if opened is None:
        state = whole_state(job.model.named_parameters(), rank, None)
        assert isinstance(job.model, GPT)
        shape = job.model.shape
        return "model", lambda place: write_gpt(place, state, shape)
    if lora is not None:
        adapter = adapter_state(job.model, rank)
        return "adapter", lambda place: write_lora(place, opened, adapter, read_rank(lora))
    whole = hugging_face_state(opened, job.model, rank)
    return "model", lambda place: write_hugging_face(place, opened, whole)
