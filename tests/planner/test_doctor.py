"""The doctor on the CPU: the same code as on GPUs, with small sizes; warnings and fits by hand."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from lamina.errors import LaunchError
from lamina.planner import doctor, doctor_load, doctor_measure
from lamina.planner.doctor_facts import DeviceFacts, Facts, collect_facts, warnings_of
from lamina.planner.doctor_load import Load, busy_ms
from lamina.planner.doctor_machine import LINKS, bus_bytes, fit_link, known_machine, machine_of, plain_rate
from lamina.planner.doctor_measure import CpuBench, Measured, Sizes, measure, try_transport
from lamina.planner.machine import CollectivePoint, Machine, MatrixPoint, load_machine

TINY = Sizes(((64, 32, 16),), (64, 32, 16), (1, 2, 16, 8), 1 << 12, (1 << 10, 1 << 16), 20, 1)
GPU = DeviceFacts("NVIDIA H100 80GB HBM3", 80 << 30, 79 << 30, (1,))
FINE = Facts(
    "3.12.1", "2.11.0+cu130", "13.0", "2.28", True, 32, 1 << 38, 16 << 30, (GPU, dataclasses.replace(GPU, reaches=(0,)))
)


class Filling(CpuBench):
    """A device that fills: libraries, then what collectives take, then two communicators of a small model's."""

    used = iter((100, 500, 514))

    def used_bytes(self) -> int:
        return next(self.used)


def measure_tiny() -> Measured:
    torch.set_num_threads(1)
    return measure(Filling(TINY))


@pytest.fixture(scope="module")
def measured() -> Measured:
    return run_ranks(2, measure_tiny)[0]


def test_two_ranks_measure_links_and_transports(measured: Measured) -> None:
    assert measured.ranks == 2 and "gloo" in measured.backend
    assert [(p.kind, p.size_bytes) for p in measured.collectives if p.kind == "all_gather"] == [
        ("all_gather", 1 << 10),
        ("all_gather", 1 << 16),
    ]
    assert {p.kind for p in measured.collectives} == {*LINKS, "copy"}
    assert measured.transports == {"c10d": "", "peer": ""}
    assert [p.dtype_bytes for p in measured.products] == [2, 4]
    assert all(p.ms > 0 for p in (*measured.products, *measured.collectives))
    assert (measured.fixed_bytes, measured.communicator_bytes) == (100, 7)


def dtypes_of_sums() -> set[torch.dtype]:
    seen: set[torch.dtype] = set()
    all_reduce = dist.all_reduce

    def noting(tensor: torch.Tensor) -> object:
        seen.add(tensor.dtype)
        return all_reduce(tensor)

    with mock.patch.object(dist, "all_reduce", noting):
        doctor_measure._collectives(CpuBench(TINY), 2)
    return seen


def test_sums_are_measured_as_gradients_are_summed() -> None:
    """Gloo converts 16-bit numbers one by one; lamina's sums are in fp32."""
    assert run_ranks(2, dtypes_of_sums) == [{torch.float32}] * 2


def unknown_transport() -> str:
    return try_transport("pigeon", torch.device("cpu"))


def test_a_transport_that_does_not_work_says_why() -> None:
    assert run_ranks(2, unknown_transport) == ["UsageError: transport='pigeon': use 'auto', 'c10d' or 'peer'"] * 2


def test_the_machine_file_marks_what_was_measured(measured: Measured) -> None:
    machine = machine_of(collect_facts(), measured)
    assert Machine.parse(machine.text()) == machine
    assert machine.gpus_per_node == 2 and machine.matrix_points == measured.products
    marks = {name: mark.mark for name, mark in machine.marks.items()}
    assert marks["memory_bytes_per_s"] == marks["gather_bytes_per_s"] == marks["copy_bytes_per_s"] == "measured"
    assert marks["network_bytes_per_s"] == "assumed"
    assert machine.interference == 1.0 and "threads" in machine.marks["interference"].source  # no device: same cores


def test_a_known_gpu_brings_its_network(measured: Measured) -> None:
    machine, known = machine_of(FINE, measured), load_machine("h100")
    assert known_machine(GPU.name) == known
    assert machine.network_bytes_per_s == known.network_bytes_per_s
    assert machine.marks["network_bytes_per_s"].mark == "published"
    assert machine.memory_bytes == 80 << 30
    assert (machine.fixed_bytes, machine.communicator_bytes) == (100, 7)


def test_one_rank_has_no_links() -> None:
    alone = measure(CpuBench(TINY))
    assert alone.ranks == 1 and alone.collectives == () and alone.transports == {}
    assert "nothing to measure" in "\n".join(doctor._link_lines(diagnosis_of(alone)))


def diagnosis_of(measured: Measured, facts: Facts | None = None) -> doctor.Diagnosis:
    facts = facts or collect_facts()
    return doctor.Diagnosis(facts, warnings_of(facts), measured, machine_of(facts, measured), 1.0)


def test_a_line_is_fitted_through_link_times() -> None:
    points = [
        CollectivePoint("all_gather", 4, size, 0.05 + size * 0.75 / 100e9 * 1e3) for size in (1 << 12, 1 << 20, 1 << 28)
    ]
    latency_us, rate = fit_link(points)
    assert latency_us == pytest.approx(50) and rate == pytest.approx(100e9)


def test_what_leaves_a_rank() -> None:
    sent = {kind: bus_bytes(CollectivePoint(kind, 4, 400, 1.0)) for kind in (*LINKS, "copy")}
    assert sent == {"all_gather": 300, "reduce_scatter": 300, "all_to_all": 300, "all_reduce": 600, "copy": 400}


def test_noise_never_gives_a_negative_latency() -> None:
    points = [CollectivePoint("all_gather", 2, size, ms) for size, ms in ((1000, 0.5), (2000, 0.1), (1 << 20, 2.0))]
    latency_us, rate = fit_link(points)
    assert latency_us > 0 and rate > 0


def test_the_plain_rate_leaves_out_the_traffic() -> None:
    traffic_ms = 2 * 3 * 1024**2 / 1e12 * 1e3
    point = MatrixPoint(1024, 1024, 1024, 2 * 1024**3 / 100e12 * 1e3 + traffic_ms)
    assert plain_rate([point], 1e12) == pytest.approx(100e12)


@pytest.mark.parametrize(
    "change, words, cure",
    [
        ({"torch": "2.9.1+cu126"}, "older", "pip install"),
        ({"nccl": ""}, "no NCCL", "CUDA build"),
        ({"shm_bytes": 64 << 20}, "/dev/shm is 64 MiB", "--shm-size"),
        ({"shm_bytes": 0}, "/dev/shm is missing", "--shm-size"),
        ({"cpus": 2}, "2 CPU cores for 2 GPUs", "2 cores a GPU"),
        (
            {"devices": (GPU, dataclasses.replace(GPU, name="NVIDIA H200", reaches=(0,)))},
            "different kinds",
            "CUDA_VISIBLE",
        ),
        (
            {"devices": (GPU, dataclasses.replace(GPU, reaches=()))},
            "GPU 1 cannot read the memory of GPU 0",
            "nvidia-smi topo",
        ),
        ({"devices": (dataclasses.replace(GPU, free_bytes=30 << 30, reaches=()),)}, "50.0 GiB of GPU 0", "nvidia-smi"),
        ({"devices": (), "gloo": False}, "no Gloo", "pip install"),
    ],
)
def test_warnings_have_cures(change: dict, words: str, cure: str) -> None:
    (warning,) = warnings_of(dataclasses.replace(FINE, **change))
    assert words in warning.what and cure in warning.cure


def test_a_healthy_machine_has_no_warnings() -> None:
    assert warnings_of(FINE) == ()


@pytest.mark.parametrize(
    "words, said",
    [
        (["--ranks", "two"], "--ranks: invalid int value: 'two'"),
        (["--ranks", "0"], "--ranks 0: at least one rank"),
        (["--rank", "2"], "unknown --rank; did you mean --ranks?"),
        (["--save", "/"], "--save /: give the name of a file"),
        (["--save", "/proc/version/machine.toml"], "--save /proc/version/machine.toml: "),
    ],
)
def test_the_command_refuses_before_it_measures(words: list[str], said: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "examine", lambda ranks: pytest.fail("it measured"))
    assert doctor.main(words) == 1
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


def test_the_command_prints_and_saves(measured: Measured, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "launch", lambda fn, nprocs, args: measured)
    path = tmp_path / "deep" / "machine.toml"
    assert doctor.main(["--save", str(path)]) == 0
    text = capsys.readouterr().out
    assert "transport peer  works" in text and "64 x 32 x 16" in text and f"--machine {path}" in text
    assert load_machine(path).matrix_points == measured.products
    assert doctor.main(["--save", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["ranks"] == 2


def test_ranks_that_do_not_run_together_leave_one(measured: Measured, monkeypatch) -> None:
    asked = []

    def launch(fn, nprocs, args):
        asked.append(nprocs)
        if nprocs > 1:
            raise LaunchError("rank 1 failed\nNCCL says no")
        return dataclasses.replace(measured, ranks=1, collectives=(), transports={})

    monkeypatch.setattr(doctor, "launch", launch)
    diagnosis = doctor.examine(3)
    assert asked == [3, 1]
    assert any("NCCL says no" in warning.what for warning in diagnosis.warnings)


class HostEvent:
    """An event of a stream that does everything at once."""

    def __init__(self, enable_timing: bool) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return (end.at_s - self.at_s) * 1e3


class Busy(CpuBench):
    """Products and attention behind a load, as a GPU measures them."""

    def __init__(self, load: Load) -> None:
        super().__init__(TINY)
        self.load, self.calls = load, 0

    def busy_ms(self, call, repeats):
        self.calls += 1
        return busy_ms(self.load, call, repeats, 3)

    def clock(self) -> str:
        return "1590 MHz and 691 W"

    def kernel_us(self) -> float:
        return 1.5


def test_products_and_attention_are_timed_behind_a_load(monkeypatch) -> None:
    """The same code as on a GPU, with events of the host: under no_grad as well, and what was held is written down."""
    for name, value in (("TOKENS", 64), ("LENGTH", 16), ("DIM", 16), ("HIDDEN", 8), ("HEADS", 2), ("HEAT_S", 0.02)):
        monkeypatch.setattr(doctor_load, name, value)
    monkeypatch.setattr(doctor_load, "BETWEEN_MS", 2.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    bench = Busy(Load(torch.device("cpu")))
    found = measure(bench)
    assert bench.calls == 4  # two products, attention alone and with its backward
    assert all(point.ms > 0 for point in found.products) and found.attention_backward_flops_per_s > 0
    machine = machine_of(collect_facts(), found)
    assert (
        machine.kernel_us == 1.5 and "at 1590 MHz and 691 W as in a step" in machine.marks["matrix_flops_per_s"].source
    )
    assert "1590 MHz" in doctor.report_text(diagnosis_of(found))


@pytest.mark.parametrize("answer, found", [("1590, 691.2", "1590 MHz and 691 W"), ("[N/A], [N/A]", ""), ("wait", "")])
def test_the_card_is_busy_until_its_clock_is_read(monkeypatch, tmp_path: Path, answer: str, found: str) -> None:
    """nvidia-smi takes longer to begin than any load that is queued at once; one that hangs is given up."""
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{'exec sleep 60' if answer == 'wait' else f'sleep 0.2; echo {answer!r}'}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: time.sleep(0.01))
    monkeypatch.setattr(doctor_load, "READ_S", 1.0)
    queued: list[float] = []
    load = SimpleNamespace(device=torch.device("cpu"), queue=lambda ms: queued.append(time.monotonic()))
    begin = time.monotonic()
    assert doctor_load.clock_of(load) == found
    end = time.monotonic()
    assert end - begin < 5 and queued[-1] - begin > 0.15


def test_the_launched_work_runs_here() -> None:
    """What each rank does, in this process: a world of one."""
    assert doctor.work("cpu", 1).ranks == 1
