"""From measurements to a machine file: latencies and rates by fit, what cannot be measured here from a known machine.

A node cannot see the network, nor one GPU its links. Such values come from the shipped file of the same device, or,
for a device that nobody knows, from stated assumptions; the marks say which.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import numpy as np

from lamina.planner.doctor_facts import Facts
from lamina.planner.doctor_measure import Measured
from lamina.planner.machine import CollectivePoint, Machine, Mark, MatrixPoint, load_machine, shipped_names

# Of a machine that nobody knows, in the order of size that current ones have.
ASSUMED = {
    "gather_bytes_per_s": 20e9,
    "gather_latency_us": 30.0,
    "reduce_bytes_per_s": 20e9,
    "reduce_latency_us": 30.0,
    "exchange_bytes_per_s": 20e9,
    "exchange_latency_us": 30.0,
    "sum_bytes_per_s": 20e9,
    "sum_latency_us": 40.0,
    "copy_bytes_per_s": 20e9,
    "network_bytes_per_s": 0.0,
    "network_latency_us": 0.0,
    "interference": 0.2,
    "fixed_bytes": 0.0,
    "communicator_bytes": 0.0,
}
SAME_CORES = Mark("assumed", "lanes of a CPU are threads of the cores that compute")
LINKS = {"all_gather": "gather", "reduce_scatter": "reduce", "all_to_all": "exchange", "all_reduce": "sum"}


def machine_of(facts: Facts, measured: Measured) -> Machine:
    """The machine file of what was found."""
    name = facts.devices[0].name if facts.devices else f"CPU, {facts.cpus} cores"
    source = f"lamina doctor, {_today()}, {max(measured.ranks, 1)} x {name}, torch {facts.torch}"
    source += f", at {measured.clock} as in a step" if measured.clock else ""
    values = _measured_values(facts, measured)
    marks = {key: Mark("measured", source) for key in values}
    known = known_machine(name)
    for key, assumed in ASSUMED.items():
        if key in values:
            continue
        if known is not None:
            values[key], marks[key] = getattr(known, key), known.marks[key]
        elif key == "interference" and not facts.devices:
            values[key], marks[key] = 1.0, SAME_CORES
        else:
            values[key], marks[key] = assumed, Mark("assumed", "not measured here; change it if you know better")
    return Machine(
        name="here",
        device=name,
        gpus_per_node=max(len(facts.devices), measured.ranks),
        matrix_points=measured.products,
        collective_points=measured.collectives,
        marks=marks,
        **values,  # type: ignore[arg-type]  # names of float fields
    )


def known_machine(device: str) -> Machine | None:
    """The shipped file of the same device."""
    for name in shipped_names():
        machine = load_machine(name)
        if machine.device == device:
            return machine
    return None


def _today() -> str:
    return datetime.date.today().isoformat()


def _measured_values(facts: Facts, measured: Measured) -> dict[str, float]:
    if facts.devices:
        memory_bytes = min(device.memory_bytes for device in facts.devices)
    else:
        memory_bytes = facts.memory_bytes // max(measured.ranks, 1)
    rate = measured.memory_bytes_per_s
    values: dict[str, float] = {
        "memory_bytes": memory_bytes,
        "matrix_flops_per_s": plain_rate([p for p in measured.products if p.dtype_bytes == 2], rate),
        "matrix_fp32_flops_per_s": plain_rate([p for p in measured.products if p.dtype_bytes == 4], rate),
        "attention_forward_flops_per_s": measured.attention_forward_flops_per_s,
        "attention_backward_flops_per_s": measured.attention_backward_flops_per_s,
        "memory_bytes_per_s": rate,
        "launch_us": measured.launch_us,
        "kernel_us": measured.kernel_us,
    }
    if measured.fixed_bytes:
        values["fixed_bytes"] = measured.fixed_bytes
    if measured.communicator_bytes:
        values["communicator_bytes"] = measured.communicator_bytes
    for kind, word in LINKS.items():
        points = [p for p in measured.collectives if p.kind == kind]
        if points:
            values[f"{word}_latency_us"], values[f"{word}_bytes_per_s"] = fit_link(points)
    copies = [p for p in measured.collectives if p.kind == "copy"]
    if copies:
        values["copy_bytes_per_s"] = max(p.size_bytes / p.ms * 1e3 for p in copies)
    if measured.interference:
        values["interference"] = measured.interference
    return values


def plain_rate(points: Sequence[MatrixPoint], memory_bytes_per_s: float) -> float:
    """Operations per second of the best product, once its traffic is taken off its time."""
    rates = []
    for point in points:
        traffic = point.dtype_bytes * (point.m * point.k + point.k * point.n + point.m * point.n)
        compute_s = max(point.ms / 1e3 - traffic / memory_bytes_per_s, 0.2 * point.ms / 1e3)
        rates.append(2.0 * point.m * point.n * point.k / compute_s)
    return max(rates)


def fit_link(points: Sequence[CollectivePoint]) -> tuple[float, float]:
    """Latency in us and bus rate in bytes/s: the line through the times that errs least in proportion."""
    sent = np.array([bus_bytes(p) for p in points])
    seconds = np.array([p.ms / 1e3 for p in points])
    columns = np.stack([np.ones_like(sent), sent], axis=1) / seconds[:, None]
    latency_s, per_byte_s = np.linalg.lstsq(columns, np.ones_like(sent), rcond=None)[0]
    if latency_s <= 0 or per_byte_s <= 0:  # noise on small sizes: the smallest and the largest decide
        latency_s = seconds.min()
        per_byte_s = max(seconds[-1] - latency_s, 0.1 * seconds[-1]) / sent[-1]
    return float(latency_s * 1e6), float(1 / per_byte_s)


def bus_bytes(point: CollectivePoint) -> float:
    """Bytes that leave one rank."""
    if point.kind == "copy":
        return point.size_bytes
    passes = 2 if point.kind == "all_reduce" else 1
    return passes * point.size_bytes * (point.ranks - 1) / point.ranks
