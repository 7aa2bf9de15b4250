"""C04, C05, C08, C09, C10, C12: scalers, tokens, odd shapes, deferred starts, checkpoints, modes and copies."""

from __future__ import annotations

import copy
import gc
import math
import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases_of_paths import WIDTH, data, linears, square, step_both, train, units_of
from ranks import Named
from systems import System, differences, make, twin
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

import lamina

# -- C04, C05


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))


def scaler(name: str, where: str) -> float:
    """One step with an infinity in rank 0's part of a gradient, and a clean one."""
    system = make(name)
    plain, model = twin(wide)
    model = system.shard(model, units_of(model))
    scalers = [torch.amp.GradScaler("cpu", init_scale=4) for _ in (0, 1)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(2):
        for rank in (0, 1):
            scalers[0].scale(square(plain, data(rank, step, torch.float32)) / 2).backward()
        scalers[1].scale(square(model, data(dist.get_rank(), step, torch.float32))).backward()
        if step == 0:
            plain.get_parameter(where).grad.view(-1)[0] = math.inf
            part = system.local(model.get_parameter(where).grad)
            if dist.get_rank() == 0:
                part.view(-1)[0] = math.inf
        for each, optimizer in zip(scalers, optimizers, strict=True):
            each.step(optimizer)
            each.update()
            optimizer.zero_grad()
        if scalers[1].get_scale() != 2.0:
            return math.inf
    return differences(system, model, plain)


def tokens(name: str, defer: bool) -> float:
    """Two ranks with 6 and 2 samples in micro-batches of unequal size; the mean over all of them."""
    system, rank = make(name), dist.get_rank()
    sizes = {0: (4, 2), 1: (1, 1)}
    plain, model = twin(linears)
    model = system.shard(model, units_of(model))
    batches = {(r, i): torch.cat([data(r, 7 * i), data(r, 7 * i + 1)])[: sizes[r][i]] for r in (0, 1) for i in (0, 1)}
    plain(torch.cat(list(batches.values()))).pow(2).sum(1).mean().backward()
    for micro in (0, 1):
        with system.micro_batch(model, micro == 1, defer):
            loss_sum = model(batches[rank, micro]).pow(2).sum()
            system.token_mean(loss_sum, sizes[rank][micro], 8).backward()
    return differences(system, model, plain)


# -- C08


def lone_linear(name: str, way: str) -> float:
    system = make(name)
    plain, model = twin(lambda: nn.Linear(WIDTH, 3).double())
    model = system.shard(model, [])
    options: dict[str, Any] = {"foreach": True} if way == "foreach" else {"fused": False, "foreach": False}
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01, eps=1e-3, **options) for each in (plain, model)]
    return train(system, plain, model, optimizers, 2)


def part_of_the_ranks(name: str) -> float:
    """Ranks 1 and 3 of four train; the others have ended, so a collective on the default group would hang."""
    system = make(name)
    mesh = DeviceMesh("cpu", torch.tensor([1, 3]), mesh_dim_names=("shard",))
    if dist.get_rank() not in (1, 3):
        return 0.0
    plain, model = twin(linears)
    model = system.shard(model, units_of(model), mesh)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01, eps=1e-3) for each in (plain, model)]
    worst = 0.0
    for step in range(2):
        for rank in (1, 3):
            (square(plain, data(rank, step)) / 2).backward()
        square(model, data(dist.get_rank(), step)).backward()
        for optimizer in optimizers:
            optimizer.step()
        worst = max(worst, differences(system, model, plain))
        for optimizer in optimizers:
            optimizer.zero_grad()
    return worst


# -- C09


class Scaled(nn.Module):
    """Owns a matrix with its own initialiser, and a layer that has one too."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.inner = nn.Parameter(torch.empty(400, 300)), nn.Linear(300, 7)
        self.started = 0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.started += 1
        nn.init.xavier_normal_(self.matrix)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x @ self.matrix)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(WIDTH, WIDTH))


def deferred(name: str) -> list[np.ndarray] | float:
    """Full values, to be compared over world sizes; not a number where the spread is off or a module began twice."""
    system = make(name)
    with torch.device("meta"):
        model = nn.Sequential(Scaled(), nn.Sequential(Scaled(), nn.Linear(WIDTH, WIDTH)))
    begun = [module.started for module in model.modules() if isinstance(module, Scaled)]
    model = system.start_from_meta(model, units_of(model, Scaled))
    again = [module.started for module in model.modules() if isinstance(module, Scaled)]
    found = [system.full(param.detach()).numpy().copy() for param in model.parameters()]
    spread = found[0].std().item() / math.sqrt(2 / 700)
    once = all(b - a == 1 for a, b in zip(begun, again, strict=True))
    return found if abs(spread - 1) < 0.01 and once else math.nan


def uninitialised(name: str) -> float:
    system = make(name)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Bare())
    system.start_from_meta(model, [model[0]])
    return math.nan  # nobody said that nothing fills `1.matrix`


# -- C10


def save(system: System, folder: str, model: nn.Module) -> None:
    if system.name == "FSDP2":
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    else:
        lamina.save(folder, model)


def load(system: System, folder: str, model: nn.Module) -> None:
    if system.name == "FSDP2":
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state["model"])
    else:
        lamina.load(folder, model)


def newest(system: System, folder: str) -> str:
    """DCP has no such question; its metadata is written last, so that is what a user would look for."""
    if system.name == "FSDP2":
        return max((path.parent.name for path in Path(folder).glob("*/.metadata")), default="")
    return Path(lamina.latest(folder) or "").name


def failed_save(name: str, folder: str) -> float:
    """The system refuses rank 1's writes in the middle of the second checkpoint."""
    system = make(name)
    _, model = twin(wide)
    model = system.shard(model, units_of(model))
    save(system, f"{folder}/step-1", model)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
        save(system, f"{folder}/step-2", model)
    except BaseException as error:  # DCP's is no Exception
        text = str(error).replace(f"{folder}/", "")
        if newest(system, folder) != "step-1":
            return math.inf
        if re.search(r"rank\w*\W+(dict_keys\W+)?1\b", text, re.IGNORECASE) is None:
            raise RuntimeError(f"does not name rank 1: {text}") from error
        raise Named(_first_and_last(error, text)) from error
    return math.nan


def truncated(name: str, folder: str) -> float:
    system = make(name)
    _, model = twin(wide)
    model = system.shard(model, units_of(model))
    save(system, f"{folder}/a", model)
    files = sorted((path for path in Path(f"{folder}/a").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    dist.barrier()
    if dist.get_rank() == 0:
        os.truncate(files[-1], files[-1].stat().st_size // 2)
    dist.barrier()
    try:
        load(system, f"{folder}/a", model)
    except BaseException as error:  # DCP's is no Exception
        text = str(error).replace(f"{folder}/", "")
        if files[-1].name not in text:
            raise RuntimeError(f"does not name the file: {_first_and_last(error, text)}") from error
        raise Named(_first_and_last(error, text)) from error
    return math.nan


def _first_and_last(error: BaseException, text: str) -> str:
    lines = text.strip().removeprefix(type(error).__name__).strip().splitlines()
    return f"{type(error).__name__}: " + "; ".join(dict.fromkeys((lines[0], lines[-1])))


def adapters(name: str, folder: str) -> float:
    """Each of four ranks fills its part of the adapter with its number; the file has all four."""
    system, rank = make(name), dist.get_rank()
    model = nn.Sequential(nn.Linear(40, 40, bias=False).requires_grad_(False), nn.Linear(40, 40, bias=False))
    model = system.shard(model, [])
    with torch.no_grad():
        system.local(model[1].weight).fill_(rank)
    if system.name == "FSDP2":
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        held = get_model_state_dict(model, options=options)
        if rank != 0:
            return 0.0
    else:
        lamina.export(f"{folder}/adapters", model, parameters=("1.*",))
        from safetensors.torch import load_file

        held = load_file(f"{folder}/adapters/model.safetensors")
    good = list(held) == ["1.weight"] and held["1.weight"].unique_consecutive().tolist() == [0, 1, 2, 3]
    return 0.0 if good else math.inf


def full_state_dicts(name: str) -> float:
    system = make(name)
    plain, model = twin(linears)
    model = system.shard(model, units_of(model))

    def take() -> dict[str, Tensor]:
        if system.name == "FSDP2":
            return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        with lamina.gathered(model):
            return {key: value.clone() for key, value in model.state_dict().items()}

    def live() -> int:
        gc.collect()
        return sum(isinstance(each, Tensor) for each in gc.get_objects())

    held = take()
    worst = max(((value - plain.state_dict()[key]).abs().max().item() for key, value in held.items()), default=0.0)
    before = live()
    for _ in range(20):
        take()
    return worst if live() <= before else math.inf


# -- C12


def modes(name: str) -> float:
    system = make(name)
    plain, model = twin(linears)
    model = system.shard(model, units_of(model))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    worst = 0.0
    for step in range(2):
        with torch.inference_mode():
            worst = max(worst, (model(data(0, step)) - plain(data(0, step))).abs().max().item())
        worst = max(worst, train(system, plain, model, optimizers, 1))
    return worst


def copied(name: str) -> float:
    system = make(name)
    plain, model = twin(linears)
    model = system.shard(model, units_of(model))
    step_both(system, plain, model, 0)
    pairs = [(plain, model), (copy.deepcopy(plain), copy.deepcopy(model))]
    for number, pair in enumerate(pairs):
        for each in pair:
            each.zero_grad()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1 * (1 + number)) for each in pair]
        step_both(system, *pair, 1 + number)
        for optimizer in optimizers:
            optimizer.step()
    return max(differences(system, ours, reference) for reference, ours in pairs)


def edited_weight(name: str) -> float:
    """One weight edited among full parameters on all ranks; the next forward uses it."""
    system = make(name)
    plain, model = twin(linears)
    model = system.shard(model, units_of(model))
    model(data(0))
    with torch.no_grad():
        plain[2].weight[1, 2] = 3.0
        with system.edit(model[2]):
            model[2].weight[1, 2] = 3.0
        return (model(data(0)) - plain(data(0))).abs().max().item()


def loaded_between(name: str) -> float:
    """load_state_dict between forward and backward: what is loaded is used from the next forward on."""
    system = make(name)
    plain, model = twin(linears)
    model = system.shard(model, units_of(model))
    halves = {key: value * 0.5 for key, value in model.state_dict().items()}
    loss = square(model, data(dist.get_rank()))
    model.load_state_dict(halves)
    loss.backward()
    for rank in (0, 1):
        (square(plain, data(rank)) / 2).backward()
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(0.5)
    return differences(system, model, plain)
