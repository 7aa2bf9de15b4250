"""`load()`: a checkpoint of any layout into this one.

torch's way is a state dict of the right shapes, a load into it, and a second call that gives it to model and optimizer;
keys that do not fit are found on some ranks, or while values are being overwritten. Here:

    open      find out what wrote the folder
    match     names and shapes, with what the model and the optimizer have
    verify    read what this rank needs, and compare checksums
    transfer  read it again, into masters, buffers and optimizer states

After each, the ranks agree. Until `transfer` nothing has been changed. What is read twice comes from the page cache the
second time, as far as that holds it; a copy of a rank's part in memory is never made. States of an optimizer that has
none yet, two thirds of a restart, are read once: nobody has their memory before `transfer`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lamina.checkpoint import folders
from lamina.checkpoint.agreed import attempt, begin_alike, together, warn_once
from lamina.checkpoint.background import BACKGROUND
from lamina.checkpoint.contents import Held, Whole, held_by, ties_of, whole_tensors
from lamina.checkpoint.datafile import STAGING_BYTES
from lamina.checkpoint.foreign import Hints
from lamina.checkpoint.huggingface import HuggingFaceSource
from lamina.checkpoint.matching import Differences, Matched, check_copies, match
from lamina.checkpoint.opening import open_source
from lamina.checkpoint.optimizer_load import OptimizerPlan, plan_optimizer
from lamina.checkpoint.optimizer_state import check_optimizer
from lamina.checkpoint.snapshot import restore_random_states
from lamina.checkpoint.source import Source
from lamina.errors import CheckpointError
from lamina.runtime.access import runtime_of
from lamina.runtime.agreement import agreeing
from lamina.runtime.assemble import Runtime


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
) -> Any:
    """Read a checkpoint into a sharded model, whatever layout it was saved in; returns its `extra`. Collective.

    Each rank reads only the ranges that it needs. Nothing is changed before names, shapes and checksums have been
    compared on all ranks. Where as many ranks saved, random states of Python, numpy and torch are restored.

    Args:
        path: a folder that `lamina.save` wrote, or a Hugging Face folder (safetensors): parameters and buffers only.
        model: a model that was given to `lamina.shard()`.
        optimizer: of the model's parameters; its groups are matched by parameter name. It needs no state yet.
        strict: names, shapes and groups must be the same. False: what does not fit is skipped and listed in a warning.

    Raises:
        CheckpointError: no checkpoint, a damaged or incomplete one (with the file's name), or one that does not fit;
            the same on every rank. Nothing has been changed, except where reading fails after it has succeeded once.
    """
    path, runtime = folders.given(path, "load(path, model)"), runtime_of(model)
    control, what = runtime.control, f"loading {path}"
    # what is made in inference mode can never be trained
    with agreeing(control, "load", path), torch.inference_mode(False), torch.no_grad():
        BACKGROUND.finish(model)
        loading, error = attempt(lambda: Loading(path, runtime, model, optimizer, strict))
        arguments = [f"load({os.path.abspath(path)!r}, strict={bool(strict)}, optimizer={optimizer is not None})"]
        begin_alike(control, error, what, {"arguments to load": arguments})()
        assert loading is not None  # else all ranks have raised
        beside = together(control, loading.verify, what)
        together(control, lambda: loading.transfer(beside), f"{what} (the model is loaded in part)")
        if not strict and loading.skipped:
            warn_once(control, f"lamina.load({path!r}, strict=False) skipped: {'; '.join(loading.skipped)}")
    return beside["extra"]


@dataclass
class Wanted:
    """What a model has that can be loaded."""

    held: list[Held]
    ties: dict[str, str]
    wholes: list[Whole]

    @staticmethod
    def of(runtime: Runtime, model: nn.Module) -> Wanted:
        held = held_by(runtime)
        return Wanted(held, ties_of(runtime), whole_tensors(model, held))

    def hints(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Hints:
        names, groups = self.names(model), [] if optimizer is None else optimizer.param_groups
        members = (tuple(names.get(id(p), "") for p in group["params"]) for group in groups)
        return Hints(frozenset((*names.values(), *(w.name for w in self.wholes))), tuple(members))

    def names(self, model: nn.Module) -> dict[int, str]:
        """Of all parameters, by id."""
        found = {id(h.param): h.name for h in self.held}
        return found | {id(param): name for name, param in model.named_parameters() if id(param) not in found}


class Loading:
    """One rank's part of a load; the steps are called in order, with an agreement after each."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        runtime: Runtime,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        strict: bool,
    ) -> None:
        check_optimizer(optimizer, "load(path, model, optimizer)")
        self.runtime, self.model = runtime, model
        self.rank, self.world = runtime.mesh.rank, runtime.mesh.world
        self.staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=runtime.device.type == "cuda")
        self.skipped: list[str] = []
        wanted = Wanted.of(runtime, model)
        self.source: Source = open_source(Path(path), self.rank, self.world, wanted.hints(model, optimizer))
        self.matched: Matched = match(self.source, wanted.held, wanted.ties, wanted.wholes)
        self._settle(f"{self.source.where} does not fit the model", self.matched.differences, strict)
        self.plan: OptimizerPlan | None = None
        if optimizer is not None:
            by_name = {h.name: h for h in wanted.held}
            stored_names = self.matched.stored_names
            self.plan = plan_optimizer(self.source, optimizer, wanted.names(model), by_name, stored_names)
            self._settle_optimizer(optimizer, strict)

    def _settle(self, what: str, differences: Differences, strict: bool, whose: str = "") -> None:
        if strict:
            cure = "lamina.load(..., strict=False) takes what fits and lists the rest"
            differences.raise_if_any(what, _cure_of_names(self.source, self.model) or cure)
        elif differences:
            self.skipped.append(f"{whose}{differences}")

    def _settle_optimizer(self, optimizer: torch.optim.Optimizer, strict: bool) -> None:
        if self.plan is not None:
            what = f"the optimizer state in {self.source.where} does not fit the optimizer"
            self._settle(what, self.plan.differences, strict, "of the optimizer, ")
            return
        saved = "no optimizer state" if self.source.optimizer is None else f"state of {self.source.optimizer.kind}"
        text = f"{self.source.where} holds {saved}, and the optimizer is {type(optimizer).__name__}"
        if strict:
            raise CheckpointError(
                f"{text}. Load without optimizer, or with strict=False to keep the optimizer as it is"
            )
        self.skipped.append(text)

    def verify(self) -> dict[str, Any]:
        """Everything that can be found wrong is found here; returns what was saved beside the model.

        Optimizer states that are made anew are read on the way.
        """
        transfers = self.matched.transfers + [copy for _, _, copy in self.matched.copies]
        states, fresh = ([], []) if self.plan is None else (self.plan.transfers, self.plan.fresh)
        strided = self.matched.strided
        self.source.verify(transfers + states, self.staging, fresh + [s.transfer for s in strided])
        for each in strided:
            each.check()
        check_copies(self.source, self.matched, self.staging)
        return self.source.beside(self.rank, self.world, self.staging)

    def transfer(self, beside: dict[str, Any]) -> None:
        """Change the model."""
        states = [] if self.plan is None else self.plan.transfers
        self.source.transfer(self.matched.transfers + states, self.staging)
        for each in self.matched.strided:
            each.copy()
        # their memory was written, which autograd has not seen
        torch.autograd.graph.increment_version([into for _, _, into in self.matched.transfers])
        for unit in self.runtime.units:
            unit.dirty.mark()  # every copy of a master is made anew before it is next read
        if self.plan is not None:
            self.plan.hand_over()
        for name, module in self.model.named_modules():
            if name in beside["modules"]:
                module.set_extra_state(beside["modules"][name])
        if "random" in beside:
            restore_random_states(beside["random"], self.runtime.device)


def _cure_of_names(source: Source, model: nn.Module) -> str:
    """For folders of a library that gives tensors other names, or other shapes, as it reads them; "": it is none."""
    if not isinstance(source, HuggingFaceSource) or not hasattr(model, "from_pretrained"):
        return ""
    title = type(model).__name__
    return (
        f"if these are names of the hub, which transformers changes as it reads, type "
        f"`model = {title}.from_pretrained({str(source.where)!r})` and then lamina.shard(model); else "
        "lamina.load(..., strict=False) takes what fits and lists the rest"
    )
