"""What a planner must know about a machine: one device, the links of its node, the network between nodes.

Planners of other systems carry such figures as constants in their code, where nobody sees which were measured. Here
they are a TOML file: `lamina doctor` writes one for the machine it runs on, files for known machines ship in
machines/, and every value says whether it was published, measured or assumed, and where it comes from.

    [values]
    memory_bytes_per_s = { value = 3.35e12, mark = "published", source = "data sheet" }

Pure: no communication, no device.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lamina.errors import UsageError

SHIPPED = Path(__file__).parent / "machines"
OWN = Path("~/.cache/lamina/machine.toml")  # what `lamina doctor` wrote last; its name is "here"
MARKS = ("published", "measured", "assumed")


@dataclass(frozen=True)
class Mark:
    """Where a value comes from."""

    mark: str  # one of MARKS
    source: str


@dataclass(frozen=True)
class MatrixPoint:
    """Measured time of one product, (m, k) by (k, n)."""

    m: int
    n: int
    k: int
    ms: float
    dtype_bytes: int = 2


@dataclass(frozen=True)
class CollectivePoint:
    """Measured time of one collective over `size_bytes` in all (the whole buffer, not a rank's part)."""

    kind: str  # "all_gather" | "reduce_scatter" | "all_to_all" | "all_reduce" | "copy"
    ranks: int
    size_bytes: int
    ms: float


@dataclass(frozen=True)
class Machine:
    """Rates of one kind of machine; all are of one device, except those of the network, which are of one node.

    Link rates are bus rates: bytes that leave one rank in a second while a collective runs.
    """

    name: str
    device: str
    gpus_per_node: int
    memory_bytes: float  # what a process can have of one device
    fixed_bytes: float  # gone before the first tensor: context, libraries
    communicator_bytes: float  # that one of lamina's communicators takes of a device, behind a process's first
    matrix_flops_per_s: float  # large 16-bit products
    matrix_fp32_flops_per_s: float
    attention_forward_flops_per_s: float  # long sequences; a causal mask halves the operations, not the rate
    attention_backward_flops_per_s: float
    memory_bytes_per_s: float
    launch_us: float  # host time of one kernel from eager Python
    kernel_us: float  # device time of a kernel that does nothing, behind another: what each costs beside its work
    gather_bytes_per_s: float
    gather_latency_us: float
    reduce_bytes_per_s: float  # reduce-scatter
    reduce_latency_us: float
    exchange_bytes_per_s: float  # all-to-all
    exchange_latency_us: float
    sum_bytes_per_s: float  # all-reduce: there and back
    sum_latency_us: float
    copy_bytes_per_s: float  # one device reads another's memory
    network_bytes_per_s: float  # of a node, all its cards together; 0: no network
    network_latency_us: float
    interference: float  # ms that compute takes longer for each ms of a collective beside it
    matrix_points: tuple[MatrixPoint, ...] = ()
    collective_points: tuple[CollectivePoint, ...] = ()
    marks: Mapping[str, Mark] = field(default_factory=dict)

    def text(self) -> str:
        """The machine file; `parse` reads it back."""
        lines = [f"name = {json.dumps(self.name)}", f"device = {json.dumps(self.device)}"]
        lines += [f"gpus_per_node = {self.gpus_per_node}", "", "[values]"]
        for name in VALUES:
            mark = self.marks.get(name, Mark("assumed", "nobody said"))
            entry = f"mark = {json.dumps(mark.mark)}, source = {json.dumps(mark.source, ensure_ascii=False)}"
            lines.append(f"{name} = {{ value = {float(getattr(self, name))!r}, {entry} }}")
        for table in POINTS:
            for point in getattr(self, table):
                entries = [f"{f.name} = {json.dumps(getattr(point, f.name))}" for f in fields(point)]
                lines += ["", f"[[{table}]]", *entries]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str, origin: str = "machine file") -> Machine:
        """Read a machine file; `origin` is what messages call it."""
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as problem:
            raise UsageError(f"{origin} is not TOML: {problem}. `lamina doctor` writes such a file") from None
        values, marks = _values(data, origin)
        gpus = data.get("gpus_per_node")
        if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1:
            raise UsageError(f"{origin}: gpus_per_node must be a number of devices, at least 1; got {gpus!r}")
        given: dict[str, Any] = {key: data.get(key, "unnamed") for key in ("name", "device")}
        for key, word in given.items():
            if not isinstance(word, str):
                raise UsageError(f"{origin}: {key} is a word in quotes; got {word!r}")
        given |= {table: _points(data, table, kind, origin) for table, kind in POINTS.items()} | values
        return cls(gpus_per_node=gpus, marks=marks, **given)

    @property
    def is_cpu(self) -> bool:
        return self.device.startswith("CPU")

    def nodes(self, ranks: int) -> int:
        """Nodes that `ranks` ranks fill."""
        return -(-ranks // self.gpus_per_node)


POINTS: dict[str, Any] = {"matrix_points": MatrixPoint, "collective_points": CollectivePoint}
VALUES = tuple(f.name for f in fields(Machine) if f.type == "float")
MOST = 1e20  # of any value: no unit here needs more
MAY_BE_ZERO = (
    "network_bytes_per_s",
    "network_latency_us",
    "fixed_bytes",
    "communicator_bytes",
    "interference",
    "kernel_us",
)
LATER = {
    "kernel_us": (1.0, Mark("assumed", "as on H200: this file is older than the value"))
}  # values that files may lack


def _values(data: Mapping[str, Any], origin: str) -> tuple[dict[str, float], dict[str, Mark]]:
    table = data.get("values")
    if not isinstance(table, dict):
        raise UsageError(f"{origin} has no [values]; `lamina doctor` writes a complete file")
    unknown = sorted(set(table) - set(VALUES))
    if unknown:
        near = difflib.get_close_matches(unknown[0], VALUES, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(VALUES)}"
        raise UsageError(f"{origin}: unknown value {unknown[0]}{hint}")
    values, marks = {}, {}
    for name in VALUES:
        entry = table.get(name)
        if entry is None and name in LATER:
            values[name], marks[name] = LATER[name]
            continue
        given = entry.get("value") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or not isinstance(given, (int, float)) or isinstance(given, bool):
            raise UsageError(
                f'{origin}: {name} is missing; type {name} = {{ value = 1.0, mark = "assumed", source = ""}}'
            )
        value, mark = float(entry["value"]), entry.get("mark")
        if not 0 <= value <= MOST or (value == 0 and name not in MAY_BE_ZERO):
            raise UsageError(f"{origin}: {name} must be positive and below {MOST:.0e}, got {value}")
        if mark not in MARKS:
            raise UsageError(f"{origin}: {name} must be marked as one of {', '.join(MARKS)}; got {mark!r}")
        values[name], marks[name] = value, Mark(mark, str(entry.get("source", "")))
    return values, marks


def _points(data: Mapping[str, Any], table: str, kind: Any, origin: str) -> tuple[Any, ...]:
    rows = data.get(table, [])
    if not isinstance(rows, list):
        raise UsageError(f"{origin}: {table} is a list of tables, each begun by [[{table}]]; got {rows!r}")
    found = []
    for row in rows:
        try:
            point = kind(**row)
        except TypeError as problem:
            raise UsageError(f"{origin}: a row of {table} is wrong: {problem}") from None
        for f in fields(point):
            value, kinds = getattr(point, f.name), {"int": (int,), "float": (int, float), "str": (str,)}[str(f.type)]
            if type(value) not in kinds or (str not in kinds and not 0 < value <= MOST):
                wanted = (
                    "a word" if str in kinds else "a positive number" if float in kinds else "a whole number above 0"
                )
                said = f"{f.name} = {value!r}, wanted {wanted}. `lamina doctor` writes such rows"
                raise UsageError(f"{origin}: a row of {table} is wrong: {said}")
        found.append(point)
    return tuple(found)


def shipped_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.toml")))


def load_machine(name_or_path: str | Path) -> Machine:
    """A machine by the name of a shipped file, by path, or "here": what `lamina doctor` found on this machine.

    Raises `UsageError` for what is neither, with the nearest name.
    """
    text = str(name_or_path)
    if text == "here":
        path = OWN.expanduser()
        if not path.is_file():
            raise UsageError(f"no machine file of this machine at {OWN}; `lamina doctor` writes it")
    elif text.lower() in shipped_names():
        path = SHIPPED / f"{text.lower()}.toml"
    else:
        path = Path(text)
        if not path.is_file():
            raise UsageError(_unknown(text))
    try:
        written = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"machine file {path} cannot be read: {problem}. `lamina doctor` writes one") from None
    return Machine.parse(written, str(path) if path.parent != SHIPPED else text)


def _unknown(text: str) -> str:
    names = shipped_names()
    word = "".join(c for c in text.lower() if c.isalnum())
    plain = {"".join(c for c in name if c.isalnum()): name for name in names}
    near = [plain[key] for key in difflib.get_close_matches(word, plain, n=1, cutoff=0.3)]
    hint = f"; the nearest is {near[0]!r}" if near else ""
    return (
        f"unknown machine {text!r}{hint}. Known are {', '.join(names)}; a path of a machine file, "
        "or 'here' after `lamina doctor`, works too"
    )
