"""DeepSpeed ZeRO-3 folders as a source: flat partitions of every rank, read in place.

DeepSpeed's own `zero_to_fp32` joins all partitions in one process and drops the optimizer. But a parameter that was cut
into equal parts over ranks is a list of ranges like any other. The files are mapped into memory, and read without
DeepSpeed: its classes (loss scalers and the like) become stand-ins.

Note [partitions]   what `zero_to_fp32` knows, for W ranks
    A parameter of n elements is cut into W parts of ceil(n / W), the last ones padded. A rank's file holds its parts of
    all trainable parameters one after the other, in the order of `param_shapes`, in a few flat tensors.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lamina.checkpoint.foreign import ANY, TensorFile, whole
from lamina.checkpoint.manifest import GroupEntry, OptimizerEntry, StateEntry
from lamina.checkpoint.source import Source, Stored, StoredPiece
from lamina.checkpoint.values import dtype_name, encode
from lamina.errors import CheckpointError

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt$")
MASTER = "fp32"


def folder_of(where: Path) -> Path | None:
    """The folder with a job's files: `where`, or the one that its file `latest` names; None: there is none."""
    if not where.is_dir():
        return None
    tag = where / "latest"
    folder = where / tag.read_text().strip() if tag.is_file() else where
    return folder if any(_RANK.search(path.name) for path in folder.glob("*_states.pt")) else None


class DeepSpeedSource(Source):
    """Files 0 to W-1 are the ranks' optimizer files, W to 2W-1 their model files."""

    def __init__(self, where: Path) -> None:
        self.where, self._files, self.ties, self.tensors = where, {}, {}, {}
        paths = _paths(where)
        self._optim = [_read(paths["optim", rank])["optimizer_state_dict"] for rank in range(len(paths) // 2)]
        self._model = [_read(paths["model", rank]) for rank in range(len(paths) // 2)]
        stage = self._optim[0].get("zero_stage")
        if int(stage or 0) != 3 or int(self._optim[0].get("partition_count", len(self._optim))) != len(self._optim):
            raise CheckpointError(
                f"{where} is of ZeRO stage {stage} with {len(self._optim)} files: only whole folders of stage 3 are "
                "read. Run DeepSpeed's zero_to_fp32 and load the Hugging Face folder that it writes"
            )
        self._lengths = [flat.numel() for flat in self._optim[0]["fp32_flat_groups"]]
        self._spans: dict[str, tuple[tuple[int, ...], int]] = {}  # parameter -> shape, where its parts begin
        self._place_parameters()
        self._add_others()
        self.optimizer = self._read_optimizer()

    def _place_parameters(self) -> None:
        at = 0
        for shapes in self._model[0]["param_shapes"]:
            for name, shape in shapes.items():
                self._spans[name] = (tuple(shape), at)
                self.tensors[name] = self._cut(name, MASTER, torch.float32)
                at += -(-torch.Size(shape).numel() // len(self._optim))
        if at != sum(self._lengths):
            raise CheckpointError(f"{self.where}: partitions hold {sum(self._lengths)} elements a rank, not {at}")

    def _cut(self, name: str, what: str, dtype: torch.dtype) -> Stored:
        """Note [partitions]."""
        shape, begin = self._spans[name]
        numel = torch.Size(shape).numel()
        part = -(-numel // len(self._optim))
        pieces = []
        for rank in range(len(self._optim)):
            at = rank * part
            for group, skip, length in self._within_groups(begin, max(0, min(part, numel - at))):
                pieces.append(StoredPiece(rank, f"{what} {group}", at, at + length, skip))
                at += length
        return Stored(shape, dtype, tuple(pieces))

    def _within_groups(self, begin: int, length: int) -> Iterator[tuple[int, int, int]]:
        """[begin, begin + length) of the joined flat tensors: number of the tensor, element in it, how many."""
        first = 0
        for group, group_length in enumerate(self._lengths):
            start, stop = max(begin, first), min(begin + length, first + group_length)
            if start < stop:
                yield group, start - first, stop - start
            first += group_length

    def _add_others(self) -> None:
        """Buffers of rank 0, frozen parameters in fragments, further names."""
        first, world = self._model[0], len(self._optim)
        for name in first.get("buffer_names") or ():
            value = first["module"][name]
            self.tensors[name] = whole(value, name, file=world)
        for name, shape in (first.get("frozen_param_shapes") or {}).items():
            numel, fragment = torch.Size(shape).numel(), first["frozen_param_fragments"][name]
            part = -(-numel // world)
            cuts = [(r, r * part, min((r + 1) * part, numel)) for r in range(world) if r * part < numel]
            pieces = tuple(StoredPiece(world + rank, name, start, stop) for rank, start, stop in cuts)
            self.tensors[name] = Stored(tuple(shape), fragment.dtype, pieces)
        for other, name in dict(first.get("shared_params") or {}).items():
            if other not in self.tensors:
                self.ties[other] = name

    def open_file(self, number: int) -> TensorFile:
        world = len(self._optim)
        if number >= world:
            model = self._model[number - world]
            held = {name: model["module"][name] for name in model.get("buffer_names") or ()}
            return TensorFile({**held, **(model.get("frozen_param_fragments") or {})})
        saved = self._optim[number]
        tensors = {f"{MASTER} {group}": flat for group, flat in enumerate(saved["fp32_flat_groups"])}
        for group, state in _states(saved).items():
            tensors |= {f"{key} {group}": value for key, value in state.items() if isinstance(value, Tensor)}
        return TensorFile(tensors)

    # -- optimizer

    def _read_optimizer(self) -> OptimizerEntry | None:
        states = _states(self._optim[0])
        if sorted(states) != list(range(len(self._lengths))):
            return None  # the optimizer kept its state in another way
        options = self._optim[0]["optimizer_state_dict"].get("param_groups", [])
        groups = []
        for number, shapes in enumerate(self._model[0]["param_shapes"]):
            own = options[number] if number < len(options) else {}
            kept = {k: v for k, v in own.items() if k not in ("params", "param_names")}
            encoded = {k: encode(v, k, inline_tensors=True).json for k, v in kept.items()}
            groups.append(GroupEntry(tuple(shapes), encoded))
        entries = {}
        for name, (_, begin) in self._spans.items():
            group = next((g for g, _, _ in self._within_groups(begin, 1)), 0)
            entry = entries[name] = StateEntry()
            for key, value in states[group].items():
                if isinstance(value, Tensor) and value.numel() == self._lengths[group] and value.dim():
                    entry.split[key] = dtype_name(value.dtype)
                else:
                    count = value if isinstance(value, Tensor) else torch.tensor(float(value))
                    entry.values[key] = encode(count, key, inline_tensors=True).json
        return OptimizerEntry(ANY, tuple(groups), entries)

    def state(self, name: str, key: str) -> Stored:
        assert self.optimizer is not None
        return self._cut(name, key, getattr(torch, self.optimizer.states[name].split[key]))


def _states(saved: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    inner = saved.get("optimizer_state_dict")
    return dict(inner["state"]) if isinstance(inner, Mapping) and isinstance(inner.get("state"), Mapping) else {}


def _paths(where: Path) -> dict[tuple[str, int], Path]:
    """Files by kind and rank; refuses what is cut in further ways."""
    found: dict[tuple[str, int], Path] = {}
    for path in sorted(where.glob("*_states.pt")):
        match = _RANK.search(path.name)
        if match is None:
            continue
        if int(match[2]):
            raise CheckpointError(f"{path} belongs to a tensor-parallel job, whose parts lamina does not join")
        found[match[3], int(match[1])] = path
    ranks = sorted(rank for _, rank in found)
    missing = [
        f"{kind} of rank {r}" for r in range(ranks[-1] + 1) for kind in ("model", "optim") if (kind, r) not in found
    ]
    if missing:
        raise CheckpointError(f"{where} is not whole: there is no file with the {', '.join(missing)}")
    return found


class _StandIn:
    """An object of a class that is not installed; what it held is of no use to us."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    """Runs nothing but what tensors and containers need."""

    _KNOWN = ("torch", "collections", "numpy", "_codecs")
    _BUILTINS = frozenset(
        {"set", "frozenset", "dict", "list", "tuple", "int", "float", "bool", "complex", "bytearray", "slice"}
    )

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in self._KNOWN or (module == "builtins" and name in self._BUILTINS):
            return super().find_class(module, name)
        return _StandIn


def _read(path: Path) -> dict[str, Any]:
    try:
        module = SimpleNamespace(Unpickler=_Unpickler, __name__="pickle")
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=module)
    except Exception as error:  # zip, pickle, RuntimeError: whatever the file is not
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
