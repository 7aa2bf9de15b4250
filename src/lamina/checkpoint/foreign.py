"""Checkpoints of torch itself as sources: files of one process (`torch.save`) and torch.distributed.checkpoint folders.

A file of one process is mapped into memory, so a rank touches only the pages of its ranges. A folder of
torch.distributed.checkpoint is read by that package, rank by rank without talking to others: a range that a rank wants
is a `Shard` of the stored tensor, and DCP knows what a `Shard` holds.

Both number or nest optimizer states in their own ways; here they become the same entries as lamina's own.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.checkpoint.manifest import GroupEntry, OptimizerEntry, StateEntry, WholeEntry
from lamina.checkpoint.optimizer_state import SCALARS
from lamina.checkpoint.source import Source, Stored, StoredPiece, Transfer
from lamina.checkpoint.values import dtype_name, encode
from lamina.core.shard_spec import ShardSpec
from lamina.core.shard_tensor import Shard
from lamina.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

EXTRA_STATE = "_extra_state"  # the last part of its key in torch's state dicts
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict")
ANY = ""  # the class of an optimizer that a foreign checkpoint does not name


@dataclass(frozen=True)
class Hints:
    """What the model and the optimizer are like that are to be loaded."""

    names: frozenset[str] = frozenset()
    groups: tuple[tuple[str, ...], ...] = ()  # the optimizer's parameters by name


class TensorFile:
    """Tensors in (mapped) memory, read by ranges."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._flat = {key: _flat(tensor) for key, tensor in tensors.items()}

    def position(self, key: str, start: int) -> int:
        return 0  # in memory, where the order does not matter

    def check(self, key: str, start: int, stop: int, staging: Tensor) -> None:
        if stop > self._flat[key].numel():
            raise CheckpointError(f"`{key}` has {self._flat[key].numel()} elements, and {stop} are wanted")

    def read(self, key: str, start: int, into: Tensor, staging: Tensor) -> None:
        into.copy_(self._flat[key][start : start + into.numel()])


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def whole(tensor: Tensor, key: str, file: int = 0) -> Stored:
    """A tensor that lies in a file in one piece."""
    pieces = (StoredPiece(file, key, 0, tensor.numel()),) if tensor.numel() else ()
    return Stored(tuple(tensor.shape), tensor.dtype, pieces)


# -- one process


class TorchSource(Source):
    """What `torch.save` wrote: a state dict, or a dict of the model's and the optimizer's."""

    def __init__(self, where: Path, hints: Hints) -> None:
        self.where, self._files, self.ties = where, {}, {}
        try:
            saved = torch.load(where, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # zip, pickle, RuntimeError: whatever the file is not
            said = (str(error).splitlines() or [type(error).__name__])[0]
            if said.startswith("Weights only load failed"):
                said = "there are other objects than tensors in it, such as a whole module: save its `state_dict()`"
            raise CheckpointError(f"{where} cannot be read as a file of torch.save: {said}") from error
        if not isinstance(saved, Mapping):
            raise CheckpointError(f"{where} holds a {type(saved).__name__}, and a state dict is wanted")
        model = next((saved[key] for key in MODEL_KEYS if isinstance(saved.get(key), Mapping)), saved)
        optimizer = next((saved[key] for key in OPTIMIZER_KEYS if isinstance(saved.get(key), Mapping)), None)
        found = {name: value for name, value in model.items() if isinstance(value, Tensor)}
        self._modules = {name: value for name, value in model.items() if name.split(".")[-1] == EXTRA_STATE}
        found = {name: value for name, value in found.items() if name not in self._modules}
        self._tie(found)
        self.tensors = {name: whole(value, name) for name, value in found.items()}
        self._flat: dict[str, Tensor] = dict(found)
        self._extra = saved.get("extra") if model is not saved else None
        if optimizer is not None:
            self.optimizer = self._read_optimizer(optimizer, hints)

    def _tie(self, found: dict[str, Tensor]) -> None:
        """A state dict holds tied parameters under each name."""
        first: dict[tuple[int, torch.Size], str] = {}
        for name, value in list(found.items()):
            owner = first.setdefault((value.data_ptr(), value.shape), name) if value.numel() else name
            if owner != name:
                self.ties[name] = owner
                del found[name]

    def _read_optimizer(self, saved: Mapping[str, Any], hints: Hints) -> OptimizerEntry:
        groups: list[GroupEntry] = []
        names: dict[int, str] = {}
        for number, group in enumerate(saved["param_groups"]):
            members = group.get("param_names") or (hints.groups[number] if number < len(hints.groups) else ())
            if len(members) != len(group["params"]):
                raise CheckpointError(
                    f"group {number} of the optimizer in {self.where} has {len(group['params'])} parameters without "
                    f"names, and the optimizer's has {len(members)}: build the groups as they were"
                )
            members = tuple(self.ties.get(name, name) for name in members)
            names.update(zip(group["params"], members, strict=True))
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            groups.append(GroupEntry(members, {k: encode(v, k, inline_tensors=True).json for k, v in options.items()}))
        states = {names[at]: self._state(names[at], state) for at, state in saved["state"].items() if at in names}
        others = {key: value for key, value in saved["state"].items() if key not in names and type(key) is not int}
        entries = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
        more = {"state": _small(others), "entries": _small(entries)}
        return OptimizerEntry(ANY, tuple(groups), states, {what: json for what, json in more.items() if json})

    def _state(self, name: str, state: Mapping[str, Any]) -> StateEntry:
        entry, shape = StateEntry(), self.tensors[name].shape
        for key, value in state.items():
            _enter(entry, key, value, shape)
            if isinstance(value, Tensor):
                self._flat[f"{key} of {name}"] = value
        return entry

    def open_file(self, number: int) -> TensorFile:
        return TensorFile(self._flat)

    def beside(self, rank: int, world: int, staging: Tensor) -> dict[str, Any]:
        modules = {name.rpartition(".")[0]: value for name, value in self._modules.items()}
        return {"extra": self._extra, "modules": modules}

    def state(self, name: str, key: str) -> Stored:
        return whole(self._flat[f"{key} of {name}"], f"{key} of {name}")


def _small(kept: Mapping[Any, Any]) -> Any:
    """What an optimizer keeps beside its parameters' states, encoded; without what holds large tensors."""
    small = {key: value for key, value in kept.items() if not encode(value, "", inline_tensors=True).tensors}
    return encode(small, "", inline_tensors=True).json


def _enter(entry: StateEntry, key: str, value: Any, shape: tuple[int, ...]) -> None:
    """Put one optimizer state where a manifest would have it."""
    if not isinstance(value, Tensor) or (value.dim() == 0 and (shape != () or key in SCALARS)):
        entry.values[key] = encode(value, key, inline_tensors=True).json
    elif tuple(value.shape) == shape:
        entry.split[key] = dtype_name(value.dtype)
    else:
        entry.whole[key] = WholeEntry(tuple(value.shape), dtype_name(value.dtype), 0)


# -- torch.distributed.checkpoint


@dataclass
class _Paths:
    """Stored keys by what they are."""

    model: dict[str, str] = field(default_factory=dict)  # name -> key
    states: dict[str, dict[str, str]] = field(default_factory=dict)  # parameter -> state -> key
    groups: dict[int, dict[str, str]] = field(default_factory=dict)  # number -> option -> key


class DcpSource(Source):
    """A folder of torch.distributed.checkpoint, such as an FSDP2 job's."""

    def __init__(self, where: Path, hints: Hints) -> None:
        from torch.distributed.checkpoint import FileSystemReader

        self.where, self._files, self.ties = where, {}, {}
        try:
            self._metadata = FileSystemReader(where).read_metadata()
        except Exception as error:  # a pickle of any version
            raise CheckpointError(f"{where / '.metadata'} cannot be read: {type(error).__name__}: {error}") from error
        self._paths = self._sort(hints)
        self._check_files()
        self.tensors = {name: self._stored(key) for name, key in self._paths.model.items()}
        if self._paths.states:
            self.optimizer = self._read_optimizer(hints)

    def _sort(self, hints: Hints) -> _Paths:
        """DCP flattens nested dicts and remembers the way; the model is where most of the wanted names are."""
        ways: Mapping[str, Sequence[Any]] = self._metadata.planner_data or {}
        paths, by_parent = _Paths(), dict[tuple[Any, ...], dict[str, str]]()
        for key in self._metadata.state_dict_metadata:
            way = tuple(ways.get(key, (key,)))
            if len(way) >= 3 and way[-3] == "state":
                paths.states.setdefault(str(way[-2]), {})[str(way[-1])] = key
            elif len(way) >= 3 and way[-3] == "param_groups":
                paths.groups.setdefault(int(way[-2]), {})[str(way[-1])] = key
            else:
                by_parent.setdefault(way[:-1], {})[str(way[-1])] = key
        candidates = sorted(by_parent.values(), key=lambda held: -len(hints.names & held.keys()))
        paths.model = candidates[0] if candidates else {}
        return paths

    def _check_files(self) -> None:
        """There are no checksums; at least everything is there in full length."""
        for info in (self._metadata.storage_data or {}).values():
            file = self.where / info.relative_path
            size = file.stat().st_size if file.exists() else -1
            if size < info.offset + info.length:
                raise CheckpointError(f"{file} is missing or cut off: it has {max(size, 0)} bytes")

    def _stored(self, key: str) -> Stored:
        entry = self._tensor_entry(key)
        if entry is None:
            raise CheckpointError(f"`{key}` in {self.where} is no tensor")
        numel = entry.size.numel()
        pieces = (StoredPiece(0, key, 0, numel),) if numel else ()
        return Stored(tuple(entry.size), entry.properties.dtype, pieces)

    def _tensor_entry(self, key: str) -> TensorStorageMetadata | None:
        """What DCP says of a tensor; None: the key is another object."""
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        entry = self._metadata.state_dict_metadata[key]
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def state(self, name: str, key: str) -> Stored:
        return self._stored(self._paths.states[name][key])

    def _read_optimizer(self, hints: Hints) -> OptimizerEntry:
        groups = self._groups(list(self._paths.states), hints)
        states = {}
        for name, keys in self._paths.states.items():
            shape, entry = self.tensors[name].shape if name in self.tensors else (), StateEntry()
            for key, stored_key in keys.items():
                described = self._tensor_entry(stored_key)
                if described is None or not described.size:  # a 0-dim tensor is read at once
                    _enter(entry, key, self._read_one(stored_key), shape)
                else:
                    stand_in = torch.empty(described.size, dtype=described.properties.dtype, device="meta")
                    _enter(entry, key, stand_in, shape)
            states[name] = entry
        return OptimizerEntry(ANY, groups, states)

    def _named(self, number: int, members: tuple[Any, ...], hints: Hints) -> tuple[str, ...]:
        """Names of a group's parameters; an optimizer's own `state_dict()` has numbers, which stand for its order."""
        if not any(isinstance(member, int) for member in members):
            return members
        names = hints.groups[number] if number < len(hints.groups) else ()
        if len(names) != len(members):
            raise CheckpointError(
                f"group {number} of the optimizer in {self.where} has {len(members)} parameters without names, and the "
                f"optimizer's has {len(names)}: build the groups as they were, or save with "
                "torch.distributed.checkpoint.state_dict.get_state_dict, which names them"
            )
        for member, name in zip(members, names, strict=True):
            if str(member) in self._paths.states:
                self._paths.states[name] = self._paths.states.pop(str(member))
        return tuple(names)

    def _groups(self, names: list[str], hints: Hints) -> tuple[GroupEntry, ...]:
        if not self._paths.groups:
            return (GroupEntry(tuple(names), {}),)
        groups = []
        for number, keys in sorted(self._paths.groups.items()):
            group = {option: self._read_one(key) for option, key in keys.items()}
            members = self._named(number, tuple(group.pop("params")), hints)
            group.pop("param_names", None)
            groups.append(GroupEntry(members, {k: encode(v, k, inline_tensors=True).json for k, v in group.items()}))
        return tuple(groups)

    def _read_one(self, key: str) -> Any:
        entry = self._tensor_entry(key)
        empty = io.BytesIO() if entry is None else torch.empty(entry.size, dtype=entry.properties.dtype)
        made: dict[str, Any] = {key: empty}
        self._load(made)
        return made[key]

    def _load(self, state: dict[str, Any]) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)  # keys as they are stored
        dcp.load(state, checkpoint_id=str(self.where), planner=planner, no_dist=True)

    def verify(self, transfers: Sequence[Transfer], staging: Tensor, fresh: Sequence[Transfer] = ()) -> None:
        """Nothing more than `_check_files` can be known."""
        self.transfer(fresh, staging)

    def transfer(self, transfers: Sequence[Transfer], staging: Tensor) -> None:
        """All ranges in one load; one with a key that was there already in a further one."""
        rest: list[Transfer] = []
        state: dict[str, Tensor] = {}
        for transfer in transfers:
            stored, start, into = transfer
            if into.numel() == 0:
                continue
            key, numel = stored.pieces[0].key, stored.pieces[0].stop
            if key in state:
                rest.append(transfer)
                continue
            ranges = ((0, start), (start, start + into.numel()), (start + into.numel(), numel))
            state[key] = Shard(into, ShardSpec(key, torch.Size(stored.shape), ranges, 1, None))
        if state:
            self._load(state)
        if rest:
            self.transfer(rest, staging)
