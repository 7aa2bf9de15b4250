"""`lamina doctor`: what this machine has, how fast it is, what is wrong with it.

Starts one rank a GPU (two on a CPU) for a few seconds, prints what it found, and writes the machine file from which
`lamina plan` forecasts. Measuring is doctor_measure.py, reading and warnings are doctor_facts.py, the file is
doctor_machine.py; this one is the command and its report.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lamina.core.options import Options, check_writable, write
from lamina.errors import LaminaError, LaunchError, UsageError
from lamina.launch import CPU_RANKS, launch
from lamina.planner.doctor_facts import Facts, Finding, collect_facts, warnings_of
from lamina.planner.doctor_machine import LINKS, bus_bytes, machine_of
from lamina.planner.doctor_measure import Measured, bench_of, measure
from lamina.planner.machine import OWN, Machine


@dataclass(frozen=True)
class Diagnosis:
    facts: Facts
    warnings: tuple[Finding, ...]
    measured: Measured
    machine: Machine
    seconds: float


def examine(ranks: int | None = None) -> Diagnosis:
    """Facts, measurements by `ranks` ranks (one a GPU, or two on the CPU), and what follows from them."""
    begin = time.perf_counter()
    facts = collect_facts()
    warnings = list(warnings_of(facts))
    count = ranks or len(facts.devices) or CPU_RANKS
    if facts.devices and not facts.nccl:
        count = 1  # one GPU can be measured without its links
    try:
        measured = launch(work, nprocs=count, args=(facts.kind, facts.cpus))
    except LaunchError as error:
        if count == 1:
            raise
        what = f"{count} ranks did not run together: {str(error).strip().splitlines()[-1]}"
        warnings.append(Finding(what, "links were not measured; run with --ranks 1 to see whether a rank runs alone"))
        measured = launch(work, nprocs=1, args=(facts.kind, facts.cpus))
    for name, reason in measured.transports.items():
        if reason:
            warnings.append(Finding(f"transport {name} does not work", reason))
    machine = machine_of(facts, measured)
    return Diagnosis(facts, tuple(warnings), measured, machine, time.perf_counter() - begin)


def work(kind: str, cpus: int) -> Measured:
    """What each rank does."""
    import torch
    import torch.distributed as dist

    from lamina.runtime.environment import initialise_distributed

    initialise_distributed()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if kind == "cpu":
        torch.set_num_threads(max(1, cpus // world))
    found = measure(bench_of(kind))
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def report_text(diagnosis: Diagnosis) -> str:
    """What a person reads."""
    facts, machine = diagnosis.facts, diagnosis.machine
    versions = [f"Python {facts.python}", f"torch {facts.torch}"]
    versions += [f"CUDA {facts.cuda}"] if facts.cuda else []
    versions += [f"NCCL {facts.nccl}"] if facts.nccl else []
    lines = [", ".join(versions), f"{facts.cpus} CPU cores, /dev/shm {facts.shm_bytes / 2**30:.1f} GiB", ""]
    lines += ["Devices"]
    for index, device in enumerate(facts.devices):
        reach = f"reads the memory of {', '.join(map(str, device.reaches))}" if device.reaches else "alone"
        lines.append(f"  {index}  {device.name}, {device.memory_bytes / 2**30:.1f} GiB, {reach}")
    if not facts.devices:
        lines.append(f"  no GPU: {machine.device}, {facts.memory_bytes / 2**30:.1f} GiB")
    lines += ["", *_rate_lines(diagnosis), "", *_link_lines(diagnosis)]
    lines += ["", "Warnings" if diagnosis.warnings else "No warnings."]
    for warning in diagnosis.warnings:
        lines += [f"  ! {warning.what}", f"    cure: {warning.cure}"]
    return "\n".join(lines)


def _rate_lines(diagnosis: Diagnosis) -> list[str]:
    machine = diagnosis.machine
    lines = ["Rates, one device", "  product (m, n, k)        bits       ms   TFLOP/s"]
    for p in machine.matrix_points:
        shape = f"{p.m} x {p.n} x {p.k}"
        rate = 2e-9 * p.m * p.n * p.k / p.ms
        lines.append(f"  {shape:<24} {8 * p.dtype_bytes:4} {p.ms:8.3f} {rate:9.3g}")
    lines += [
        f"  attention, causal        forward {machine.attention_forward_flops_per_s / 1e12:.3g} TFLOP/s, "
        f"backward {machine.attention_backward_flops_per_s / 1e12:.3g}",
        f"  memory                   {machine.memory_bytes_per_s / 1e9:.0f} GB/s",
        f"  host time of a launch    {machine.launch_us:.1f} us; an empty kernel on the device {machine.kernel_us:.2f}",
        *([f"  while busy as in a step  {diagnosis.measured.clock}"] if diagnosis.measured.clock else []),
    ]
    return lines


def _link_lines(diagnosis: Diagnosis) -> list[str]:
    measured, machine = diagnosis.measured, diagnosis.machine
    if measured.ranks == 1:
        return ["Links: one rank, nothing to measure"]
    lines = [f"Links, {measured.ranks} ranks ({measured.backend})", "  collective        MiB         ms    bus GB/s"]
    for p in measured.collectives:
        bus = bus_bytes(p) / p.ms / 1e6
        lines.append(f"  {p.kind:<14} {p.size_bytes / 2**20:8.2f} {p.ms:10.3f} {bus:11.2f}")
    for kind, word in LINKS.items():
        latency_us, rate = getattr(machine, f"{word}_latency_us"), getattr(machine, f"{word}_bytes_per_s")
        lines.append(f"  fit of {kind}: {latency_us:.0f} us + bytes on the bus / {rate / 1e9:.3g} GB/s")
    if measured.interference:
        lines.append(f"  a gather beside products delays them by {measured.interference:.2f} of its own time")
    for name, reason in measured.transports.items():
        lines.append(f"  transport {name:<5} {'works' if not reason else 'does not: ' + reason}")
    return lines


def main(argv: Sequence[str]) -> int:
    """The command; the exit code."""
    try:
        return _examine_and_print(argv)
    except LaminaError as error:
        print(f"lamina doctor: {error}", file=sys.stderr)
        return 1


def _examine_and_print(argv: Sequence[str]) -> int:
    parser = Options("lamina doctor", "What this machine has and how fast it is.")
    parser.add_argument("--ranks", type=int, default=None, help="ranks to measure with; default: one a GPU, or 2")
    parser.add_argument("--save", type=Path, default=None, help=f"the machine file to write; default: {OWN}")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    options = parser.read(argv)
    if options.ranks is not None and options.ranks < 1:
        raise UsageError(f"--ranks {options.ranks}: at least one rank is needed")
    path = options.save or OWN.expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UsageError(f"--save {path}: {problem.strerror}") from None
    check_writable("--save", path, "machine.toml")
    diagnosis = examine(options.ranks)
    write("--save", path, diagnosis.machine.text())
    if options.json:
        print(json.dumps(asdict(diagnosis), indent=1))
    else:
        name = "here" if options.save is None else path
        print(report_text(diagnosis))
        print(f"\n{diagnosis.seconds:.1f} s; machine file {path}: lamina plan --machine {name}")
    return 0
