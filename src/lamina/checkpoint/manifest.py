"""The manifest: what a checkpoint holds and in which file each range lies, as frozen data and as JSON.

torch.distributed.checkpoint keeps this in a pickle that only torch reads, made from plans that all ranks send to one.
Here the pieces follow from the layout, so one rank writes the manifest alone, as text that anybody can read:
docs/checkpoint-format.md describes every field.

Pure: no communication, no device, no tensors.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lamina.errors import CheckpointError

FORMAT = "lamina checkpoint"
VERSION = 1
MANIFEST_NAME = "manifest.json"


class Piece(NamedTuple):
    """Elements [start, stop) of a tensor, and the number of the file that holds them."""

    file: int
    start: int
    stop: int


@dataclass(frozen=True)
class FileEntry:
    """One data file. `header_crc32` covers everything before the data; the header holds the checksums of the data."""

    name: str
    size_bytes: int
    header_crc32: str  # 8 hexadecimal digits


@dataclass(frozen=True)
class ParameterEntry:
    shape: tuple[int, ...]
    dtype: str  # torch's name, without "torch."
    trainable: bool
    pieces: tuple[Piece, ...]  # in order, cover [0, numel) once

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class WholeEntry:
    """A tensor that is not split: in one file, or (None) in every rank's, each rank's own values."""

    shape: tuple[int, ...]
    dtype: str
    file: int | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class StateEntry:
    """Optimizer state of one parameter, by key."""

    split: dict[str, str] = field(default_factory=dict)  # key -> dtype; cut in the pieces of the parameter
    whole: dict[str, WholeEntry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # numbers and 0-dim tensors, encoded (values.py)


@dataclass(frozen=True)
class GroupEntry:
    parameters: tuple[str, ...]
    options: dict[str, Any]  # encoded


@dataclass(frozen=True)
class OptimizerEntry:
    kind: str  # class name
    groups: tuple[GroupEntry, ...]
    states: dict[str, StateEntry]  # by parameter; one that was never stepped has none
    more: dict[str, Any] = field(default_factory=dict)  # encoded: "state" of no parameter, "entries" of `state_dict()`


class Moments:
    """When this process makes checkpoints: later than all that it has made or read, wherever the clock is.

    Clocks are set back, and a job that starts anew may find itself on another machine. What it saves then must not look
    older than what it has gone on from: `latest()` would not find it, and `keep_last()` would delete it.
    """

    newest_ns = 0

    @classmethod
    def next_ns(cls) -> int:
        cls.newest_ns = max(time.time_ns(), cls.newest_ns + 1)
        return cls.newest_ns

    @classmethod
    def note(cls, created_ns: int) -> None:
        cls.newest_ns = max(cls.newest_ns, created_ns)


@dataclass(frozen=True)
class Manifest:
    world: int
    strategy: str
    created_ns: int  # nanoseconds since 1970, when the manifest was written; see Moments
    writer: dict[str, str]  # versions of lamina and torch
    files: tuple[FileEntry, ...]
    parameters: dict[str, ParameterEntry]
    ties: dict[str, str]  # further names of a parameter -> the name under which it is stored
    buffers: dict[str, WholeEntry]
    optimizer: OptimizerEntry | None
    extra: str  # "none" | "shared": in file 0 | "per rank": in every file
    random: bool  # random states, in every file
    pickled: tuple[str, ...] = ()  # parts of `extra` that needed pickle

    def check(self) -> None:
        """The law of a manifest; CheckpointError names what is broken."""
        self._check_kinds()
        count = len(self.files)
        for name, entry in self.parameters.items():
            at = 0
            for piece in entry.pieces:
                if piece.start != at or piece.stop <= at or not 0 <= piece.file < count:
                    raise CheckpointError(f"the manifest places `{name}` wrongly, at element {at}: {piece}")
                at = piece.stop
            if at != entry.numel:
                raise CheckpointError(f"the manifest places {at} of the {entry.numel} elements of `{name}`")
        for other, name in self.ties.items():
            if name not in self.parameters or other in self.parameters:
                raise CheckpointError(f"the manifest ties `{other}` to `{name}`, which it does not hold")
        for name, whole in self._wholes().items():
            if whole.file is not None and not 0 <= whole.file < count:
                raise CheckpointError(f"the manifest places `{name}` in file {whole.file} of {count}")
        for name in self.optimizer.states if self.optimizer is not None else ():
            if name not in self.parameters:
                raise CheckpointError(f"the manifest holds optimizer state of `{name}`, and no such parameter")

    def _wholes(self) -> dict[str, WholeEntry]:
        states = {} if self.optimizer is None else self.optimizer.states
        found = {state_key(key, name): whole for name, s in states.items() for key, whole in s.whole.items()}
        return self.buffers | found

    def _check_kinds(self) -> None:
        """ValueError where JSON has something else than this class says; paths out of the folder are no names."""
        wholes = list(self._wholes().values())
        shaped: list[ParameterEntry | WholeEntry] = [*self.parameters.values(), *wholes]
        states = {} if self.optimizer is None else self.optimizer.states
        groups = () if self.optimizer is None else self.optimizer.groups
        counts = [self.created_ns, *(file.size_bytes for file in self.files)]
        counts += [size for entry in shaped for size in entry.shape]
        counts += [number for entry in self.parameters.values() for piece in entry.pieces for number in piece]
        counts += [whole.file for whole in wholes if whole.file is not None]
        texts = [self.strategy, *self.ties.values(), *self.writer.values(), *self.pickled]
        texts += [text for file in self.files for text in (file.name, file.header_crc32)]
        texts += [entry.dtype for entry in shaped]
        texts += [dtype for state in states.values() for dtype in state.split.values()]
        texts += [name for group in groups for name in group.parameters]
        records = [*(group.options for group in groups), *(state.values for state in states.values())]
        records += [] if self.optimizer is None else [self.optimizer.more]
        for wrong in (
            [number for number in (self.world, *counts) if type(number) is not int or not 0 <= number < 2**63],
            [text for text in texts if type(text) is not str],
            [record for record in records if type(record) is not dict],
            [file.name for file in self.files if file.name in ("", ".", "..") or "/" in file.name],
            [] if len(self.files) == self.world else [self.world],
            [] if self.extra in ("none", "shared", "per rank") else [self.extra],
        ):
            if wrong:
                raise ValueError(f"{wrong[0]!r} is something else than belongs there")


def parameter_key(name: str) -> str:
    """The key of a parameter's piece in a data file."""
    return f"model/{name}"


def buffer_key(name: str) -> str:
    return f"buffer/{name}"


def state_key(key: str, name: str) -> str:
    return f"optimizer/{key}/{name}"


# -- JSON


def to_json(manifest: Manifest) -> str:
    """The text of manifest.json, with a checksum of itself at the end."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "world": manifest.world,
        "strategy": manifest.strategy,
        "created_ns": manifest.created_ns,
        "writer": manifest.writer,
        "files": [{"name": f.name, "bytes": f.size_bytes, "header_crc32": f.header_crc32} for f in manifest.files],
        "parameters": {
            name: {"shape": p.shape, "dtype": p.dtype, "trainable": p.trainable, "pieces": p.pieces}
            for name, p in manifest.parameters.items()
        },
        "ties": manifest.ties,
        "buffers": {name: _whole_to_json(b) for name, b in manifest.buffers.items()},
        "optimizer": None if manifest.optimizer is None else _optimizer_to_json(manifest.optimizer),
        "extra": manifest.extra,
        "random": manifest.random,
        "pickled": manifest.pickled,
    }
    return _lines({**body, "crc32": _own_crc(body)}, depth=3)


def _lines(value: Any, depth: int, indent: str = "") -> str:
    """JSON with one entry a line down to a depth: a parameter on a line of its own can be found by eye and by grep."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    if depth == 0 or not any(isinstance(child, (dict, list, tuple)) for child in children):
        return json.dumps(value)
    inner = indent + " "
    if isinstance(value, dict):
        rows = [f"{inner}{json.dumps(key)}: {_lines(child, depth - 1, inner)}" for key, child in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _lines(child, depth - 1, inner) for child in value) + f"\n{indent}]"


def from_json(text: str, where: str) -> Manifest:
    """Read and check the text of a manifest; `where` is its path, for messages."""
    try:
        body = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{where} is damaged: {error}. {_TAKE_ANOTHER}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{where} is no manifest of a lamina checkpoint")
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"{where} has version {body.get('version')!r}; this lamina reads version {VERSION}: use the lamina that "
            f"wrote it ({body.get('writer')}), or a newer one"
        )
    stated = body.pop("crc32", None)
    if stated != _own_crc(body):
        raise CheckpointError(f"{where} is damaged: its checksum is {_own_crc(body)}, not {stated}. {_TAKE_ANOTHER}")
    try:
        manifest = _from_body(body)
        manifest.check()
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{where} is damaged: {type(error).__name__} {error}. {_TAKE_ANOTHER}") from error
    Moments.note(manifest.created_ns)
    return manifest


_TAKE_ANOTHER = "Load another checkpoint: `lamina checkpoint verify FOLDER` says which are whole"


def _own_crc(body: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def _whole_to_json(entry: WholeEntry) -> dict[str, Any]:
    return {"shape": entry.shape, "dtype": entry.dtype, "file": entry.file}


def _whole_from_json(body: dict[str, Any]) -> WholeEntry:
    return WholeEntry(tuple(body["shape"]), body["dtype"], body["file"])


def _optimizer_to_json(entry: OptimizerEntry) -> dict[str, Any]:
    more = {"more": entry.more} if entry.more else {}
    return {
        "class": entry.kind,
        **more,
        "groups": [{"parameters": g.parameters, "options": g.options} for g in entry.groups],
        "states": {
            name: {
                "split": state.split,
                "whole": {key: _whole_to_json(whole) for key, whole in state.whole.items()},
                "values": state.values,
            }
            for name, state in entry.states.items()
        },
    }


def _optimizer_from_json(body: dict[str, Any]) -> OptimizerEntry:
    groups = tuple(GroupEntry(tuple(g["parameters"]), g["options"]) for g in body["groups"])
    states = {
        name: StateEntry(s["split"], {k: _whole_from_json(w) for k, w in s["whole"].items()}, s["values"])
        for name, s in body["states"].items()
    }
    return OptimizerEntry(body["class"], groups, states, body.get("more", {}))


def _from_body(body: dict[str, Any]) -> Manifest:
    return Manifest(
        world=body["world"],
        strategy=body["strategy"],
        created_ns=body["created_ns"],
        writer=body["writer"],
        files=tuple(FileEntry(f["name"], f["bytes"], f["header_crc32"]) for f in body["files"]),
        parameters={
            name: ParameterEntry(
                tuple(p["shape"]), p["dtype"], p["trainable"], tuple(Piece(*piece) for piece in p["pieces"])
            )
            for name, p in body["parameters"].items()
        },
        ties=body["ties"],
        buffers={name: _whole_from_json(b) for name, b in body["buffers"].items()},
        optimizer=None if body["optimizer"] is None else _optimizer_from_json(body["optimizer"]),
        extra=body["extra"],
        random=body["random"],
        pickled=tuple(body["pickled"]),
    )
