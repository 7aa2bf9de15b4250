"""What one rank has to save, before and after the ranks have compared it.

A checkpoint of torch.distributed.checkpoint is planned: every rank sends a list of what it has to rank 0, which answers
with who writes what. Here the division follows from the layout. What ranks must compare is whether values that should
be equal are (a few numbers each), since values that differ are written by every rank, each its own.
"""

from __future__ import annotations

import json
import random
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import nn

from lamina.checkpoint.contents import (
    Held,
    Whole,
    crc_of,
    held_by,
    module_states,
    spread,
    ties_of,
    whole_tensors,
)
from lamina.checkpoint.datafile import Draft, Item, lay_out
from lamina.checkpoint.manifest import (
    FileEntry,
    Manifest,
    Moments,
    OptimizerEntry,
    ParameterEntry,
    StateEntry,
    WholeEntry,
    buffer_key,
    parameter_key,
    state_key,
)
from lamina.checkpoint.optimizer_state import States, take_apart
from lamina.checkpoint.values import Encoded, dtype_name, encode
from lamina.runtime.assemble import Runtime
from lamina.runtime.unit_gradients import local_of


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Local: nothing of it is copied, and no other rank is asked."""

    runtime: Runtime
    held: list[Held]
    ties: dict[str, str]
    wholes: list[Whole]
    states: States | None
    beside: dict[str, Encoded]  # "extra": the user's; "modules": of modules with `get_extra_state`
    random: dict[str, Any]  # copies; encoded by `divide`

    @property
    def state_wholes(self) -> list[Whole]:
        return [] if self.states is None else [w for by_key in self.states.whole.values() for w in by_key.values()]

    def lines(self) -> list[str]:
        """What must be the same on all ranks, as text."""
        made = [f"`{h.name}` {h.spec.shape} {dtype_name(h.param.dtype)}" for h in self.held]
        made += [f"{w.name} {tuple(w.values.shape)} {dtype_name(w.values.dtype)}" for w in self.wholes]
        if self.states is not None:
            groups = json.dumps([[group.parameters, group.options] for group in self.states.groups])
            made.append(f"optimizer {self.states.kind}, groups {groups}, {json.dumps(self.states.more)}")
            for name, split in self.states.split.items():
                values = json.dumps(self.states.values[name])
                made.append(f"state of `{name}`: {sorted(split)} {sorted(self.states.whole[name])} {values}")
        return made

    def sums(self) -> list[int]:
        """A checksum of everything that may be equal on all ranks: each whole tensor, then what is kept beside."""
        beside = 0
        for encoded in self.beside.values():
            beside = zlib.crc32(json.dumps(encoded.json).encode(), beside)
            for tensor in encoded.tensors:
                beside = zlib.crc32(crc_of(tensor).to_bytes(4, "little"), beside)
        return [crc_of(whole.values) for whole in self.wholes + self.state_wholes] + [beside]

    def own_items(self) -> list[Item]:
        """This rank's parts of parameters and of the states that are split like them: nobody has to be asked.

        The parameters come first, in one run: a model is loaded without its optimizer more often than the other way.
        """
        written = [h for h in self.held if h.written[0] < h.written[1]]
        items = [Item(parameter_key(h.name), h.part(local_of(h.param))) for h in written]
        split = {} if self.states is None else self.states.split
        for h in written:
            items += [Item(state_key(key, h.name), h.part(values)) for key, values in split.get(h.name, {}).items()]
        return items

    def named_wholes(self) -> list[Whole]:
        """What every rank holds whole, under its keys of data files; `sums` has one number for each, in this order."""
        return [Whole(buffer_key(w.name), w.values) for w in self.wholes] + self.state_wholes

    def writers(self, same: Sequence[bool]) -> dict[str, int | None]:
        """Whole tensor -> the rank that writes it; None: every rank, its own. `same` answers `sums`."""
        named, world = self.named_wholes(), self.runtime.mesh.world
        # what differs over ranks may differ in length, too: the choice must follow from what all of them have
        sizes = [w.values.numel() * w.values.element_size() if e else 0 for w, e in zip(named, same[:-1], strict=True)]
        chosen = spread(sizes, world)
        return {w.name: rank if equal else None for w, rank, equal in zip(named, chosen, same[:-1], strict=True)}

    def kept_beside(self, same: Sequence[bool]) -> dict[str, Encoded]:
        """What of `beside` this rank writes."""
        return self.beside if self.runtime.mesh.rank == 0 or not same[-1] else {}

    def common_items(self, same: Sequence[bool]) -> list[Item]:
        """What else this rank writes: which of it, the ranks have agreed on."""
        writers, mine = self.writers(same), (self.runtime.mesh.rank, None)
        written = [w for w in self.named_wholes() if writers[w.name] in mine]
        items = [Item(w.name, w.values.contiguous(), flat=False) for w in written]
        for what, encoded in self.kept_beside(same).items():
            items += tensors_of(what, encoded)
        return items


@dataclass(frozen=True, eq=False)
class Division:
    """Who writes what: this rank's file, and what the manifest says of all files."""

    snapshot: Snapshot
    draft: Draft
    files: dict[str, int | None]  # whole tensor -> its file; None: every rank's
    extra: str


def take(runtime: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any) -> Snapshot:
    """Look at everything that is to be saved."""
    held = held_by(runtime)
    wholes = whole_tensors(model, held)
    states = None
    if optimizer is not None:
        names = {id(h.param): h.name for h in held}
        names |= {id(param): name for name, param in model.named_parameters() if id(param) not in names}
        states = take_apart(optimizer, names, {h.name: h for h in held})
    beside = {"extra": encode(extra, "extra"), "modules": encode(module_states(model), "get_extra_state()")}
    return Snapshot(runtime, held, ties_of(runtime), wholes, states, beside, random_states(runtime))


def divide(snapshot: Snapshot, same: Sequence[bool], items: Sequence[Item]) -> Division:
    """Lay out this rank's file. Local; reads nothing that training changes, so that it may be done beside it.

    Args:
        same: answers `snapshot.sums()`.
        items: `snapshot.own_items()` and `snapshot.common_items(same)`, or copies of them.
    """
    drawn = encode(random_values(snapshot.random), "random states")
    texts = {what: json.dumps(encoded.json) for what, encoded in snapshot.kept_beside(same).items()}
    draft = lay_out((*items, *tensors_of("random", drawn)), {**texts, "random": json.dumps(drawn.json)})
    return Division(snapshot, draft, snapshot.writers(same), "shared" if same[-1] else "per rank")


def tensors_of(what: str, encoded: Encoded) -> list[Item]:
    """The tensors of a text, under the text's name."""
    return [Item(f"{what}/{i}", t.detach().contiguous(), flat=False) for i, t in enumerate(encoded.tensors)]


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _own_version() -> str:
    try:
        return version("lamina")
    except PackageNotFoundError:  # its sources lie on the path, it was not installed
        return str(sys.modules["lamina"].__version__)  # type: ignore[attr-defined]


def versions() -> dict[str, str]:
    return {"lamina": _own_version(), "torch": torch.__version__}


def describe(division: Division, written: Sequence[FileEntry]) -> Manifest:
    """The manifest; one rank makes it for all."""
    snapshot, files = division.snapshot, division.files

    def entry(whole: Whole, key: str) -> WholeEntry:
        return WholeEntry(tuple(whole.values.shape), dtype_name(whole.values.dtype), files[key])

    return Manifest(
        world=snapshot.runtime.mesh.world,
        strategy=snapshot.runtime.strategy,
        created_ns=Moments.next_ns(),
        writer=versions(),
        files=tuple(written),
        parameters={
            h.name: ParameterEntry(h.spec.shape, dtype_name(h.param.dtype), h.spec.trainable, h.pieces)
            for h in snapshot.held
        },
        ties=snapshot.ties,
        buffers={w.name: entry(w, buffer_key(w.name)) for w in snapshot.wholes},
        optimizer=None if snapshot.states is None else _describe_optimizer(snapshot.states, entry),
        extra=division.extra,
        random=True,
        pickled=tuple(where for encoded in snapshot.beside.values() for where in encoded.pickled),
    )


def _describe_optimizer(states: States, entry: Any) -> OptimizerEntry:
    return OptimizerEntry(
        states.kind,
        tuple(states.groups),
        {
            name: StateEntry(
                {key: dtype_name(values.dtype) for key, values in split.items()},
                {key: entry(whole, whole.name) for key, whole in states.whole[name].items()},
                states.values[name],
            )
            for name, split in states.split.items()
        },
        states.more,
    )


# -- random states


def random_states(runtime: Runtime) -> dict[str, Any]:
    """Of Python, numpy and torch on this rank: copies."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False), "torch": torch.get_rng_state()}
    if runtime.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(runtime.device)
    return states


def random_values(states: dict[str, Any]) -> dict[str, Any]:
    """As they are saved: Python's numbers as an array."""
    version_number, words, gauss = states["python"]
    return {**states, "python": (version_number, np.array(words, dtype=np.int64), gauss)}


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    version_number, words, gauss = states["python"]
    random.setstate((version_number, tuple(map(int, words)), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
