"""DeepSpeed ZeRO folders as a source: flat partitions of every rank, read in place.

DeepSpeed's own `zero_to_fp32` joins all partitions in one process and drops the optimizer. But a parameter that was cut
into parts over ranks is a list of ranges like any other. The files are mapped into memory, and read without DeepSpeed:
its classes (loss scalers and the like) become stand-ins.

Note [partitions]   for W ranks
    stage 3     A parameter of n elements is cut into W parts of ceil(n / W), the last ones padded. A rank's file holds
                its parts of all trainable parameters one after the other, in the order of `param_shapes`, in a few flat
                tensors. Its model file holds its parts of frozen parameters.
    stage 1, 2  The parameters of a group lie one after the other, each followed by its alignment padding; this is cut
                into W ranges. One model file holds everything that is not trained whole.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamina.checkpoint.foreign import ANY, TensorFile, whole
from lamina.checkpoint.manifest import GroupEntry, OptimizerEntry, StateEntry
from lamina.checkpoint.source import Source, Stored, StoredPiece
from lamina.checkpoint.values import dtype_name, encode
from lamina.errors import CheckpointError

_NAME = re.compile(r"(?:(?:bf16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt")
MASTER = "fp32"
_MASTERS = {3: "fp32_flat_groups", 2: "single_partition_of_fp32_groups", 1: "single_partition_of_fp32_groups"}
_STATES = {3: "optimizer_state_dict", 2: "base_optimizer_state", 1: "base_optimizer_state"}
# of a model file; the rest is the user's own, or says how far the job was
_NOT_EXTRA = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "ds_config",
        "ds_version",
        "checkpoint_parallel_dimensions",
    }
)


def folder_of(where: Path) -> Path | None:
    """The folder with a job's files: `where`, or the one that its file `latest` names; None: there is none."""
    if not where.is_dir():
        return None
    tag = where / "latest"
    folder = where / tag.read_text().strip() if tag.is_file() else where
    return folder if any(_NAME.fullmatch(path.name) for path in folder.glob("*_states.pt")) else None


class Run(NamedTuple):
    """Elements of a parameter that lie together: in flat tensor `group` of a rank, from element `at` on."""

    rank: int
    group: int
    at: int
    numel: int


class DeepSpeedSource(Source):
    """Files 0 to W-1 are the ranks' optimizer files, from W on their model files (one, at stages 1 and 2)."""

    def __init__(self, where: Path) -> None:
        self.where, self._files, self.ties, self.tensors = where, {}, {}, {}
        optim_paths, model_paths = _paths(where)
        self._optim = [_read(path)["optimizer_state_dict"] for path in optim_paths]
        self._model = [_read(path) for path in model_paths]
        self._stage = _number(self._optim[0].get("zero_stage"))
        self._check_whole()
        self._masters: list[list[Tensor]] = [list(saved[_MASTERS[self._stage]]) for saved in self._optim]
        self._spans: dict[str, tuple[tuple[int, ...], list[Run]]] = {}
        place = self._place_stage_3 if self._stage == 3 else self._place_ranges
        place([{name: tuple(shape) for name, shape in shapes.items()} for shapes in self._model[0]["param_shapes"]])
        self.tensors = {name: self._cut(name, MASTER, torch.float32) for name in self._spans}
        self._add_others()
        self.optimizer = self._read_optimizer()

    def _check_whole(self) -> None:
        count = self._optim[0].get("partition_count", len(self._optim))
        counts = set(count) if isinstance(count, (list, tuple)) else {count}  # one for each group
        if self._stage not in _MASTERS or counts != {len(self._optim)}:
            parts = ", ".join(map(str, sorted(counts)))
            raise CheckpointError(
                f"{self.where} is of ZeRO stage {self._stage} in {parts} parts, with {len(self._optim)} optimizer "
                "files: only whole folders of stages 1 to 3 are read. Run DeepSpeed's zero_to_fp32 and load the "
                "Hugging Face folder that it writes"
            )

    # -- Note [partitions]

    def _place_stage_3(self, groups: list[dict[str, tuple[int, ...]]]) -> None:
        lengths, begin = [flat.numel() for flat in self._masters[0]], 0
        for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
            numel = torch.Size(shape).numel()
            part = -(-numel // len(self._optim))
            runs = []
            for rank in range(len(self._optim)):
                held = max(0, min(part, numel - rank * part))
                runs += [Run(rank, *found) for found in _within(lengths, begin, held)]
            self._spans[name] = (shape, runs)
            begin += part
        if begin != sum(lengths):
            raise CheckpointError(f"{self.where}: partitions hold {sum(lengths)} elements a rank, not {begin}")

    def _place_ranges(self, groups: list[dict[str, tuple[int, ...]]]) -> None:
        paddings = self._optim[0].get("param_alignment_paddings")
        for group, shapes in enumerate(groups):
            lengths, begin = [flats[group].numel() for flats in self._masters], 0
            for number, (name, shape) in enumerate(shapes.items()):
                numel = torch.Size(shape).numel()
                runs = [Run(rank, group, at, held) for rank, at, held in _within(lengths, begin, numel)]
                self._spans[name] = (shape, runs)
                begin += numel
                if begin > sum(lengths):
                    raise CheckpointError(f"{self.where}: `{name}` ends at {begin} of {sum(lengths)} elements")
                begin += paddings[group][number] if paddings else 0

    def _cut(self, name: str, what: str, dtype: torch.dtype) -> Stored:
        shape, runs = self._spans[name]
        pieces, start = [], 0
        for run in runs:
            pieces.append(StoredPiece(run.rank, f"{what} {run.group}", start, start + run.numel, run.at))
            start += run.numel
        return Stored(shape, dtype, tuple(pieces))

    def _add_others(self) -> None:
        """Buffers of rank 0, frozen parameters, further names."""
        first, world = self._model[0], len(self._optim)
        self.ties = dict(first.get("shared_params") or {})
        if self._stage < 3:
            for name, value in first["module"].items():
                if isinstance(value, Tensor) and name not in self._spans and name not in self.ties:
                    self.tensors[name] = whole(value, name, file=world)
            return
        for name in first.get("buffer_names") or ():
            self.tensors[name] = whole(first["module"][name], name, file=world)
        for name, shape in (first.get("frozen_param_shapes") or {}).items():
            numel, fragment = torch.Size(shape).numel(), first["frozen_param_fragments"][name]
            part = -(-numel // world)
            cuts = [(r, r * part, min((r + 1) * part, numel)) for r in range(world) if r * part < numel]
            pieces = tuple(StoredPiece(world + rank, name, start, stop) for rank, start, stop in cuts)
            self.tensors[name] = Stored(tuple(shape), fragment.dtype, pieces)
        self.ties = {other: name for other, name in self.ties.items() if other not in self.tensors}

    def open_file(self, number: int) -> TensorFile:
        world = len(self._optim)
        if number >= world:
            model = self._model[number - world]
            if self._stage < 3:
                return TensorFile({name: v for name, v in model["module"].items() if isinstance(v, Tensor)})
            held = {name: model["module"][name] for name in model.get("buffer_names") or ()}
            return TensorFile({**held, **(model.get("frozen_param_fragments") or {})})
        tensors = {f"{MASTER} {group}": flat for group, flat in enumerate(self._masters[number])}
        for group, state in self._states(number).items():
            tensors |= {f"{key} {group}": value for key, value in state.items() if isinstance(value, Tensor)}
        return TensorFile(tensors)

    def beside(self, rank: int, world: int, staging: Tensor) -> dict[str, Any]:
        """The job's `client_state`, its scheduler and its counts; without what only DeepSpeed's classes can hold."""
        kept = {}
        for key, value in self._model[0].items():
            if key not in _NOT_EXTRA and not encode(value, key).pickled:
                kept[key] = value
        return {"extra": kept, "modules": {}}

    # -- optimizer

    def _states(self, rank: int) -> dict[int, dict[str, Any]]:
        """By number of the flat tensor; empty where the optimizer kept its state in another way."""
        inner = self._optim[rank].get(_STATES[self._stage])
        if isinstance(inner, (list, tuple)):  # what DeepSpeed calls elastic: states without groups
            return dict(enumerate(inner))
        return dict(inner["state"]) if isinstance(inner, Mapping) and isinstance(inner.get("state"), Mapping) else {}

    def _read_optimizer(self) -> OptimizerEntry | None:
        states = self._states(0)
        if sorted(states) != list(range(len(self._masters[0]))):
            return None
        inner = self._optim[0][_STATES[self._stage]]
        options = inner.get("param_groups", []) if isinstance(inner, Mapping) else [{"params": [n]} for n in states]
        members = {name: runs[0].group if runs else 0 for name, (_, runs) in self._spans.items()}
        groups = []
        for own in options:  # a group has a flat tensor, or several of limited length
            kept = {k: v for k, v in own.items() if k not in ("params", "param_names")}
            encoded = {k: encode(v, k, inline_tensors=True).json for k, v in kept.items()}
            groups.append(GroupEntry(tuple(n for n, group in members.items() if group in own["params"]), encoded))
        entries = {}
        for name, group in members.items():
            entry = entries[name] = StateEntry()
            for key, value in states[group].items():
                if isinstance(value, Tensor) and value.dim() and value.numel() in self._lengths_of(group):
                    entry.split[key] = dtype_name(value.dtype)
                elif isinstance(value, (Tensor, int, float)):
                    count = value if isinstance(value, Tensor) else torch.tensor(float(value))
                    entry.values[key] = encode(count, key, inline_tensors=True).json
        return OptimizerEntry(ANY, tuple(groups), entries)

    def _lengths_of(self, group: int) -> tuple[int, int]:
        """Of a state that lies as its parameters do, on rank 0: masters are saved without the padding at their end."""
        numel, paddings = self._masters[0][group].numel(), self._optim[0].get("group_paddings")
        return numel, numel + (paddings[group] if paddings else 0)

    def state(self, name: str, key: str) -> Stored:
        assert self.optimizer is not None
        return self._cut(name, key, getattr(torch, self.optimizer.states[name].split[key]))


def _within(lengths: list[int], begin: int, numel: int) -> Iterator[tuple[int, int, int]]:
    """[begin, begin + numel) of joined tensors: number of the tensor, element in it, how many."""
    first = 0
    for number, length in enumerate(lengths):
        start, stop = max(begin, first), min(begin + numel, first + length)
        if start < stop:
            yield number, start - first, stop - start
        first += length


def _paths(where: Path) -> tuple[list[Path], list[Path]]:
    """Optimizer files by rank, and model files; refuses what is cut in further ways."""
    found: dict[tuple[str, int], Path] = {}
    for path in sorted(where.glob("*_states.pt")):
        match = _NAME.fullmatch(path.name)
        if match is None or int(match[2]):
            raise CheckpointError(
                f"{path} belongs to a tensor-, pipeline- or expert-parallel job, whose parts lamina does not join"
            )
        found[match[3], -1 if match[1] is None else int(match[1])] = path
    is_one = ("model", -1) in found  # stages 1 and 2
    if is_one and len(found) == 1:
        raise CheckpointError(f"{where} is of a job without ZeRO: load the file {found['model', -1]}")
    world = max(rank for _, rank in found) + 1
    wanted = [("optim", rank) for rank in range(world)]
    wanted += [("model", -1)] if is_one else [("model", rank) for rank in range(world)]
    missing = [f"{kind} of rank {rank}" for kind, rank in wanted if (kind, rank) not in found]
    if missing:
        raise CheckpointError(f"{where} is not whole: there is no file with the {', '.join(missing)}")
    return [found[key] for key in wanted if key[0] == "optim"], [found[key] for key in wanted if key[0] == "model"]


class _StandIn:
    """An object of a class that is not installed. What it held is of no use to us, but for the number of an enum."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        pass


def _number(value: Any) -> Any:
    """The number that an enum's member, whose class is not there, was made of."""
    return value.args[0] if isinstance(value, _StandIn) and value.args else value


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
