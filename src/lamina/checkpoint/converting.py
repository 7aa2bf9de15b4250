"""From any format that can be read to any that can be written, in one process, without a model.

torch's `dcp_to_torch_save` and DeepSpeed's `zero_to_fp32` each turn one format into one other and drop the optimizer or
`extra`. Here a source gives named tensors, states and groups, and a writer for each format takes them. Everything is
held in memory, except on the way to a Hugging Face folder, which takes one tensor at a time.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lamina.checkpoint import folders
from lamina.checkpoint.datafile import (
    STAGING_BYTES,
    DataFile,
    Item,
    as_bytes,
    lay_out,
    stream,
    view_of,
    write_file,
)
from lamina.checkpoint.exporting import INDEX, Exported, index_of, lay_out_files, target_dtype
from lamina.checkpoint.foreign import EXTRA_STATE
from lamina.checkpoint.manifest import (
    FileEntry,
    Manifest,
    Moments,
    OptimizerEntry,
    ParameterEntry,
    Piece,
    StateEntry,
    WholeEntry,
    parameter_key,
    state_key,
)
from lamina.checkpoint.snapshot import file_name, versions
from lamina.checkpoint.source import LaminaSource, Source, Stored, Transfer
from lamina.checkpoint.values import decode, dtype_name, encode
from lamina.errors import CheckpointError, UsageError

FORMATS = ("lamina", "torch", "dcp", "hf")


@dataclass
class Everything:
    """A checkpoint in memory."""

    tensors: dict[str, Tensor]
    ties: dict[str, str]
    optimizer: OptimizerEntry | None
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # parameter -> key
    extra: Any = None
    modules: dict[str, Any] = field(default_factory=dict)  # what `get_extra_state()` gave, by module


def convert(source: Source, target: Path, kind: str) -> None:
    """Write everything that `source` holds at `target` (which must not be there yet) in another format.

    Raises:
        UsageError: an unknown format, or a target that exists.
        CheckpointError: a damaged source.
    """
    if kind not in FORMATS:
        raise UsageError(f"to={kind!r}: give one of {', '.join(map(repr, FORMATS))}")
    check_absent(target)
    if kind == "hf":
        write_hf(source, target)
        return
    write = {"lamina": write_lamina, "torch": write_torch, "dcp": write_dcp}[kind]
    write(read_everything(source), target)


def check_absent(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists: give another path or delete it")


def read_everything(source: Source) -> Everything:
    """Verified, then read."""
    staging = torch.empty(STAGING_BYTES, dtype=torch.uint8)
    found = Everything({}, dict(source.ties), source.optimizer)
    transfers = [_transfer(found.tensors, name, stored) for name, stored in source.tensors.items()]
    for name, entry in source.optimizer.states.items() if source.optimizer is not None else ():
        into = found.states.setdefault(name, {})
        own = [key for key, whole in entry.whole.items() if whole.file is None]
        if own:
            raise CheckpointError(
                f"state {own[0]!r} of `{name}` in {source.where} is each rank's own, such as of its part of the "
                "parameter: it fits only the number of ranks and the strategy that it was saved in. `lamina checkpoint "
                "export` writes the model alone"
            )
        transfers += [_transfer(into, key, source.state(name, key)) for key in (*entry.split, *entry.whole)]
    source.verify((), staging, transfers)
    beside = source.beside(0, 0, staging)
    found.extra, found.modules = beside["extra"], beside["modules"]
    return found


def _transfer(into: dict[str, Tensor], key: str, stored: Stored) -> Transfer:
    into[key] = torch.empty(stored.shape, dtype=stored.dtype)
    return Transfer(stored, 0, into[key].view(-1))


# -- writers


def write_lamina(found: Everything, target: Path) -> None:
    """One file. Every tensor stands among the parameters: loading looks for names, not for kinds."""
    items = [Item(parameter_key(name), value) for name, value in found.tensors.items()]
    items += [Item(state_key(k, name), v) for name, held in found.states.items() for k, v in held.items()]
    extra = encode(found.extra, "extra")
    items += [Item(f"extra/{i}", tensor, flat=False) for i, tensor in enumerate(extra.tensors)]
    modules = encode(found.modules, "get_extra_state()")
    items += [Item(f"modules/{i}", tensor, flat=False) for i, tensor in enumerate(modules.tensors)]
    draft = lay_out(items, {"extra": json.dumps(extra.json), "modules": json.dumps(modules.json)})
    folder = folders.prepare(target)
    staging = torch.empty(STAGING_BYTES, dtype=torch.uint8)
    written = write_file(folder / file_name(0), draft, stream(draft.items, staging))
    manifest = Manifest(
        world=1,
        strategy="converted",
        created_ns=Moments.next_ns(),
        writer=versions(),
        files=(FileEntry(file_name(0), written.size_bytes, f"{written.header_crc32:08x}"),),
        parameters={
            name: ParameterEntry(
                tuple(value.shape),
                dtype_name(value.dtype),
                True,
                (Piece(0, 0, value.numel()),) if value.numel() else (),
            )
            for name, value in found.tensors.items()
        },
        ties=found.ties,
        buffers={},
        optimizer=None if found.optimizer is None else _in_one_file(found.optimizer),
        extra="shared",
        random=False,
        pickled=(*extra.pickled, *modules.pickled),
    )
    folders.publish(target, manifest)


def _in_one_piece(value: Tensor) -> ParameterEntry:
    pieces = (Piece(0, 0, value.numel()),) if value.numel() else ()
    return ParameterEntry(tuple(value.shape), dtype_name(value.dtype), True, pieces)


def _in_one_file(entry: OptimizerEntry) -> OptimizerEntry:
    states = {
        name: StateEntry(
            state.split, {k: WholeEntry(w.shape, w.dtype, 0) for k, w in state.whole.items()}, state.values
        )
        for name, state in entry.states.items()
    }
    return OptimizerEntry(entry.kind, entry.groups, states, entry.more)


def write_torch(found: Everything, target: Path) -> None:
    """`torch.save` of what one process's `state_dict()`s would be: tied names each, parameters numbered by group."""
    modules = {f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE: state for name, state in found.modules.items()}
    saved: dict[str, Any] = {"model": {**_model_state(found), **modules}, "extra": found.extra}
    if found.optimizer is not None:
        numbers: dict[str, int] = {}
        groups = []
        for group in found.optimizer.groups:
            members = [numbers.setdefault(name, len(numbers)) for name in group.parameters]
            groups.append({**decode(group.options), "params": members, "param_names": list(group.parameters)})
        states = {numbers[name]: _state(found, name) for name in found.optimizer.states if name in numbers}
        more = {what: decode(value) for what, value in found.optimizer.more.items()}
        states = {**more.get("state", {}), **states}
        saved["optimizer"] = {**more.get("entries", {}), "state": states, "param_groups": groups}
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.parent / f".{target.name}.partial"
    torch.save(saved, beside)
    beside.rename(target)


def write_dcp(found: Everything, target: Path) -> None:
    """As a job with FSDP2 would save `{"model": ..., "optimizer": ...}` with names, by torch's own package."""
    import torch.distributed.checkpoint as dcp

    if found.modules:
        names = ", ".join(map(repr, found.modules))
        warnings.warn(f"what get_extra_state() of {names} gave is not written in this format", stacklevel=3)
    saved: dict[str, Any] = {"model": _model_state(found), "extra": found.extra}
    if found.optimizer is not None:
        groups = [{**decode(g.options), "params": list(g.parameters)} for g in found.optimizer.groups]
        saved["optimizer"] = {
            "state": {name: _state(found, name) for name in found.optimizer.states},
            "param_groups": groups,
        }
    folder = folders.prepare(target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process only, which is meant
        dcp.save(saved, checkpoint_id=str(folder), no_dist=True)
    folders.give_name(target)


def _model_state(found: Everything) -> dict[str, Tensor]:
    return {**found.tensors, **{other: found.tensors[name] for other, name in found.ties.items()}}


def _state(found: Everything, name: str) -> dict[str, Any]:
    assert found.optimizer is not None
    return {**found.states[name], **{k: decode(v) for k, v in found.optimizer.states[name].values.items()}}


def write_hf(
    source: Source,
    target: Path,
    *,
    dtype: torch.dtype | str | None = None,
    file_bytes: int = 5_000_000_000,
    parameters: Sequence[str] = ("*",),
) -> None:
    """A Hugging Face folder (without a config), one tensor at a time."""
    check_absent(target)
    cast, none = target_dtype(dtype), torch.empty(0)
    wanted = [
        Exported(name, s.shape, cast if cast is not None and s.dtype.is_floating_point else s.dtype, 0, none)
        for name, s in source.tensors.items()
    ]
    files = lay_out_files(wanted, parameters, file_bytes)
    staging = torch.empty(STAGING_BYTES, dtype=torch.uint8)
    folder = folders.prepare(target)
    for file in files:
        with open(folder / file.name, "xb") as opened:
            opened.write(file.header)
            for name in file.placed:
                held: dict[str, Tensor] = {}
                transfer = _transfer(held, name, source.tensors[name])
                source.verify((), staging, [transfer])
                opened.write(view_of(as_bytes(held[name].to(file.placed[name].dtype))))
        if DataFile(folder / file.name, file.size_bytes).placed != file.placed:
            raise AssertionError(f"{file.name} reads back otherwise than it was written")
    if len(files) > 1:
        (folder / INDEX).write_text(json.dumps(index_of(files), indent=2))
    folders.give_name(target)


def verify_all(source: LaminaSource) -> int:
    """Compare every checksum of a checkpoint; returns the bytes that were read."""
    staging, total_bytes = torch.empty(STAGING_BYTES, dtype=torch.uint8), 0
    for number in range(len(source.manifest.files)):
        file = source.open_file(number)
        total_bytes += file.verify_all(staging)
    return total_bytes
