"""`export()`: a folder that Hugging Face's libraries read, written by all ranks at once and without a gather.

`save_pretrained` wants the whole model in one process. But a flat range of a parameter is one run of bytes of the
safetensors file that will hold the whole parameter, and where it begins follows from the shapes: so every rank writes
its ranges in their places, through a small buffer. What was written is read again before the folder gets its name.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lamina.checkpoint import folders
from lamina.checkpoint.agreed import together
from lamina.checkpoint.background import BACKGROUND
from lamina.checkpoint.checksums import crc32
from lamina.checkpoint.contents import held_by, spread, ties_of, whole_tensors
from lamina.checkpoint.datafile import (
    STAGING_BYTES,
    DataFile,
    Placed,
    as_bytes,
    header_bytes,
    storable,
    view_of,
    write_at,
)
from lamina.errors import CheckpointError, UsageError
from lamina.runtime.access import runtime_of
from lamina.runtime.agreement import agreeing, check_same_text
from lamina.runtime.assemble import Runtime

SINGLE, MANY = "model.safetensors", "model-{:05d}-of-{:05d}.safetensors"
INDEX = "model.safetensors.index.json"
_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, eq=False)
class Exported:
    """One tensor of the folder, and the part of it that this rank writes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # in the file
    start: int
    part: Tensor  # 1-D; empty where this rank writes nothing

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class ExportedFile:
    name: str
    tensors: tuple[Exported, ...]
    placed: dict[str, Placed]
    header: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.header) + sum(place.stop_byte - place.start_byte for place in self.placed.values())


def export(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    parameters: Sequence[str] = ("*",),
    dtype: torch.dtype | str | None = None,
    file_bytes: int = 5_000_000_000,
) -> None:
    """Write a Hugging Face folder: safetensors files with full tensors, an index where there are several, and the
    model's `config` and `generation_config` if it has them. Collective.

    Names are those of `model.state_dict()`; tied parameters are written once, under the first name. The folder is read
    again and compared before it appears at `path`.

    Args:
        path: a new folder on a file system that all ranks share.
        parameters: names or patterns of parameters and buffers, such as `("*lora*",)` for adapters only.
        dtype: of floating tensors in the files ("bf16", torch.bfloat16, ...); None: that of the masters.
        file_bytes: files are split so that none is larger, except for one that holds a single tensor.

    Raises:
        CheckpointError: a rank could not write, or what is read back differs.
        UsageError: `path` is taken, a pattern matches nothing, a dtype that files cannot hold.
    """
    path, runtime = folders.given(path, "export(path, model)"), runtime_of(model)
    control, what = runtime.control, f"exporting to {path}"
    with agreeing(control, "export", path), torch.inference_mode(False), torch.no_grad():
        BACKGROUND.finish(model)
        target = Path(os.path.realpath(path))
        lines = [
            f"{target} {list(parameters)} {dtype} {file_bytes}",
            f"after {runtime.mesh.share.steps} optimizer steps",
        ]
        check_same_text(control, "arguments to export", lines)
        files = together(control, lambda: _plan(target, runtime, model, parameters, dtype, file_bytes), what)
        first = control.rank == 0
        try:
            together(control, lambda: _begin(target, files) if first else None, what)
            sums = together(control, lambda: _write(target, files), what)
            together(control, lambda: _read_back(target, files, sums), what)
            together(control, lambda: _publish(target, files, model, dtype) if first else None, what)
        except BaseException:
            if first:
                folders.abandon(target)
            raise


def _plan(
    target: Path,
    runtime: Runtime,
    model: nn.Module,
    parameters: Sequence[str],
    dtype: torch.dtype | str | None,
    file_bytes: int,
) -> list[ExportedFile]:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists: export() writes a folder of its own, give another path or delete it")
    return lay_out_files(list(_tensors(runtime, model, target_dtype(dtype))), parameters, file_bytes)


def target_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that floating tensors are cast to."""
    cast = _SHORT.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(cast, torch.dtype) and cast.is_floating_point):
        raise UsageError(f"dtype={dtype!r}: give one of {', '.join(map(repr, _SHORT))}, or a floating torch.dtype")
    return cast


def _tensors(runtime: Runtime, model: nn.Module, cast: torch.dtype | None) -> Iterator[Exported]:
    """In the order of the model; the same on all ranks but for the parts."""
    held = held_by(runtime)
    wholes = whole_tensors(model, held)
    found: dict[str, Exported] = {}
    for h in held:
        dtype = _in_file(h.param.dtype, cast, h.name)
        found[h.name] = Exported(h.name, tuple(h.spec.shape), dtype, h.written[0], h.part(h.local))
    writers = spread([w.values.numel() for w in wholes], runtime.mesh.world)
    for w, writer in zip(wholes, writers, strict=True):
        part = w.values.reshape(-1) if writer == runtime.mesh.rank else w.values.reshape(-1)[:0]
        found[w.name] = Exported(w.name, tuple(w.values.shape), _in_file(part.dtype, cast, w.name), 0, part)
    ties = ties_of(runtime)
    order = [ties.get(name, name) for name, _ in model.named_parameters()] + [w.name for w in wholes]
    for name in dict.fromkeys(order):
        yield found.pop(name)
    assert not found, f"not in the model's order: {list(found)}"


def _in_file(dtype: torch.dtype, cast: torch.dtype | None, name: str) -> torch.dtype:
    dtype = cast if cast is not None and dtype.is_floating_point else dtype
    if storable(dtype, name) is not dtype:
        raise UsageError(f"`{name}` is {dtype}, which Hugging Face folders do not hold: leave it out (parameters=)")
    return dtype


def lay_out_files(everything: Sequence[Exported], parameters: Sequence[str], file_bytes: int) -> list[ExportedFile]:
    """The tensors that the patterns choose, in files of at most `file_bytes`."""
    if file_bytes < 1:
        raise UsageError(f"file_bytes={file_bytes!r}: give the bytes of the largest file, at least 1")
    patterns = [parameters] if isinstance(parameters, str) else list(parameters)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(t.name, pattern) for t in everything):
            raise UsageError(f"parameters={pattern!r} matches no parameter or buffer of the model")
    tensors = [t for t in everything if any(fnmatch.fnmatchcase(t.name, pattern) for pattern in patterns)]
    groups: list[list[Exported]] = [[]]
    filled_bytes = 0
    for tensor in tensors:
        if groups[-1] and filled_bytes + tensor.size_bytes > file_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1].append(tensor)
        filled_bytes += tensor.size_bytes
    files = []
    for number, group in enumerate(groups):
        placed, end = {}, 0
        for tensor in sorted(group, key=lambda t: -t.dtype.itemsize):  # stable
            placed[tensor.name] = Placed(tensor.dtype, tensor.shape, end, end + tensor.size_bytes)
            end += tensor.size_bytes
        name = SINGLE if len(groups) == 1 else MANY.format(number + 1, len(groups))
        files.append(ExportedFile(name, tuple(group), placed, header_bytes(placed, {"format": "pt"})))
    return files


def index_of(files: Sequence[ExportedFile]) -> dict[str, Any]:
    """What stands beside several files: which holds what."""
    return {
        "metadata": {"total_size": sum(t.size_bytes for file in files for t in file.tensors)},
        "weight_map": {tensor.name: file.name for file in files for tensor in file.tensors},
    }


# -- the four steps


def _begin(target: Path, files: Sequence[ExportedFile]) -> None:
    """The files in full length, with their headers."""
    folder = folders.prepare(target)
    for file in files:
        with open(folder / file.name, "xb") as opened:
            opened.write(file.header)
            opened.truncate(file.size_bytes)


def _write(target: Path, files: Sequence[ExportedFile]) -> dict[str, int]:
    """This rank's parts in their places; the checksum of each, by name."""
    staging = torch.empty(STAGING_BYTES, dtype=torch.uint8)
    sums = {}
    for file in files:
        descriptor = os.open(folders.partial(target) / file.name, os.O_WRONLY)
        try:
            for tensor in file.tensors:
                at = len(file.header) + file.placed[tensor.name].start_byte + tensor.start * tensor.dtype.itemsize
                sums[tensor.name] = crc = 0
                for chunk in _chunks(tensor, staging):
                    write_at(descriptor, chunk, at)
                    at, crc = at + len(chunk), crc32(chunk, crc)
                sums[tensor.name] = crc
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return sums


def _chunks(tensor: Exported, staging: Tensor) -> Iterator[memoryview]:
    """A part in the dtype of the file, through the buffer."""
    room_numel = staging.numel() // tensor.dtype.itemsize
    for start in range(0, tensor.part.numel(), room_numel):
        source = tensor.part[start : start + room_numel]
        data = staging[: source.numel() * tensor.dtype.itemsize]
        data.view(tensor.dtype).copy_(source)
        yield view_of(as_bytes(data))


def _read_back(target: Path, files: Sequence[ExportedFile], sums: dict[str, int]) -> None:
    """Every rank compares what it wrote; names, shapes and dtypes are compared as safetensors' own reader sees them."""
    from safetensors import safe_open

    staging = torch.empty(STAGING_BYTES, dtype=torch.uint8)
    for file in files:
        path = folders.partial(target) / file.name
        opened = DataFile(path, file.size_bytes)
        if opened.placed != file.placed:
            raise CheckpointError(f"{path} has other entries than were written")
        with safe_open(path, framework="pt") as theirs:
            if set(theirs.keys()) != set(file.placed):
                raise CheckpointError(f"{path}: safetensors finds other names in it than were written")
        for tensor in file.tensors:
            item_bytes, crc = tensor.dtype.itemsize, 0
            begin = file.placed[tensor.name].start_byte + tensor.start * item_bytes
            end = begin + tensor.part.numel() * item_bytes
            for at in range(begin, end, STAGING_BYTES):
                data = view_of(staging)[: min(STAGING_BYTES, end - at)]
                opened.read_bytes(at, data)
                crc = crc32(data, crc)
            if crc != sums[tensor.name]:
                raise CheckpointError(f"{path}: `{tensor.name}` reads back otherwise than it was written")


def _publish(target: Path, files: Sequence[ExportedFile], model: nn.Module, dtype: torch.dtype | str | None) -> None:
    folder = folders.partial(target)
    if len(files) > 1:
        (folder / INDEX).write_text(json.dumps(index_of(files), indent=2))
    for attribute in ("config", "generation_config"):
        _save_config(getattr(model, attribute, None), folder, model, files)
    folders.give_name(target)


def _save_config(config: Any, folder: Path, model: nn.Module, files: Sequence[ExportedFile]) -> None:
    """A transformers config, as `save_pretrained` of the model would leave it."""
    if not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)
    if hasattr(config, "architectures"):
        config.architectures = [type(model).__name__]
        floating = [t.dtype for file in files for t in file.tensors if t.dtype.is_floating_point]
        if floating:
            config.dtype = max(set(floating), key=floating.count)
    config.save_pretrained(folder)
