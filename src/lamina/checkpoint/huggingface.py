"""Hugging Face folders as a source: each rank reads its ranges of the full tensors straight into its shards."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from lamina.checkpoint.datafile import DataFile
from lamina.checkpoint.exporting import INDEX
from lamina.checkpoint.source import Source, Stored, StoredPiece
from lamina.errors import CheckpointError


class HuggingFaceSource(Source):
    """Safetensors files with full tensors; with an index, those that it names. They have no checksums: lengths only."""

    def __init__(self, where: Path) -> None:
        self.where, self._files, self.ties, self.tensors = where, {}, {}, {}
        self._names = _files_of(where)
        for number, name in enumerate(self._names):
            file = DataFile(where / name)
            self._files[number] = file
            for key, place in file.placed.items():
                if key in self.tensors:
                    raise CheckpointError(f"`{key}` is in two files of {where}: delete the one that does not belong")
                numel = torch.Size(place.shape).numel()
                pieces = (StoredPiece(number, key, 0, numel),) if numel else ()
                self.tensors[key] = Stored(place.shape, place.dtype, pieces)

    def open_file(self, number: int) -> DataFile:
        return DataFile(self.where / self._names[number])


def _files_of(where: Path) -> list[str]:
    index = where / INDEX
    if not index.is_file():
        return sorted(path.name for path in where.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is damaged: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} is damaged: {name!r} is no name of a file of this folder")
    return names
