"""`shard()`: the one line that a training script changes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from lamina.core import room
from lamina.core.control import Control
from lamina.core.mesh import DataMesh, build_mesh, find_data_ranks, resolve_on
from lamina.core.shard_tensor import register
from lamina.core.strategy import Strategy
from lamina.core.terminal import note_with
from lamina.errors import TransportError, UsageError
from lamina.runtime.agreement import check_same_text, check_start_weights, together
from lamina.runtime.arguments import check_entry_points, check_model, check_names, check_precision
from lamina.runtime.assemble import (
    RUNTIMES,
    Blueprint,
    Runtime,
    build_engine,
    build_units,
    draw_blueprint,
    place_slots,
    register_hooks,
)
from lamina.runtime.computed_weights import let_go_of_computed_weights
from lamina.runtime.copies import let_hooks_know, make_plain
from lamina.runtime.environment import initialise_distributed, local_cuda_device
from lamina.runtime.failing import note_of
from lamina.runtime.hooks import add_entry_point
from lamina.runtime.late_peers import wait_for_peers
from lamina.runtime.materialise import check_sources, materialise_buffers
from lamina.runtime.newcomers import parameters_beside
from lamina.runtime.overlaps import refuse_overlaps
from lamina.runtime.precision import (
    Precision,
    check_halves,
    is_kept,
    resolve_precision,
    wide_dtype,
    wrap_kept_module,
)
from lamina.runtime.publishing import grant, open_peers, reason_of, why_not_peers, would_come_late
from lamina.runtime.recompute import apply_recompute, check_recompute
from lamina.runtime.recorder import check_seed
from lamina.runtime.refused_modules import refuse_renorming, refuse_scripted
from lamina.runtime.unit import Unit
from lamina.runtime.units import plan_units
from lamina.transport.peer import Peers
from lamina.transport.symmetric import SymmetricPeers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Model = TypeVar("Model", bound=nn.Module)
STARTS = ("check", "broadcast", "trust")
_count = 0  # sharded models in this process: names their agreements


def shard(
    model: Model,
    strategy: str | Strategy = "zero3",
    mesh: DeviceMesh | None = None,
    units: str | Sequence[Any] = "auto",
    precision: str | Precision | None = None,
    recompute: str | int = "none",
    transport: str = "auto",
    slots: int | None = None,
    compile: bool = False,
    seed: int | None = None,
    start: str = "check",
    entry_points: Sequence[str] = (),
    replicate: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> Model:
    """Shard a model over the ranks, in place, and return it. Collective.

    Afterwards the model is used as before: forward, backward, a torch optimizer over `model.parameters()`. Each rank
    holds its share of parameters, gradients and optimizer state only.

    Args:
        model: on the CPU, a device or meta.
        strategy: "ddp", "zero1", "zero2", "zero3", "hsdp", or `Strategy(params=, grads=, optimizer=)`.
        mesh: a torch DeviceMesh with axes "replicate" and "shard"; further axes are left alone. None: all ranks.
        units: what is gathered together: "auto", or module classes, names, patterns, modules, lists of these.
        precision: "bf16", `Precision(...)`, or None: compute in the parameters' own dtype. Masters: at least float32.
        recompute: "none", "full", "selective", or n for every n-th block.
        transport: "auto", "c10d" or "peer"; `report` says what "auto" has chosen, and why.
        slots: units that have a place at the same time (3), or a budget for them in bytes.
        compile: compile each unit's forward.
        seed: for parameters on meta; None: rank 0's.
        start: "check" that all ranks hold the same weights, "broadcast" rank 0's, or "trust".
        entry_points: further methods of the model that run compute, such as ("encode", "generate").
        replicate: names or patterns of parameters that are averaged but not sharded.
        ignore: names or patterns of parameters that are left alone.

    Raises:
        UsageError, UnitError: an argument that cannot be meant; nothing has been changed.
        Disagreement: ranks with different models, arguments or start weights; nothing has been changed.
        InitialisationError: a parameter on meta that nothing initialises.
    """
    initialise_distributed()
    ranks = find_data_ranks(mesh)
    global _count
    _count += 1
    control = Control(ranks.control, ranks.rank, len(ranks.ranks), str(_count))
    if ranks.lease is not None:
        ranks.lease.groups.used_by.append(control.key)
    chosen = together(
        control,
        lambda: _check_arguments(
            model, recompute, transport, start, precision, seed, entry_points, replicate, ignore, compile
        ),
    )
    title = strategy if isinstance(strategy, str) else str(strategy)
    check_same_text(
        control, "arguments", [f"strategy={title}, recompute={recompute}, transport={transport}, start={start}"]
    )
    factors = together(control, lambda: resolve_on(strategy, ranks))
    together(control, lambda: check_halves(chosen, factors, transport))
    device = _device_of(model, mesh)
    data = build_mesh(factors, ranks, device, control)
    blueprint = together(control, lambda: _plan(model, data, units, chosen, slots, replicate, ignore, entry_points))
    check_same_text(control, "models", blueprint.text() + ([] if start != "check" else _whereabouts(model)))
    real = [(name, p) for name, p in model.named_parameters() if not p.is_meta]
    if start == "check" and data.world > 1:
        check_start_weights(control, [name for name, _ in real], [p for _, p in real])
    seed = control.exchange([torch.initial_seed() % 2**62 if seed is None else seed])[0][0]
    granted_bytes = grant(control, data) if transport == "auto" else math.inf
    peers, why_not = _connect("peer" if chosen.halves else transport, control, data, blueprint, chosen, granted_bytes)
    native = data.world == 1 and all(blueprint.plain)  # nothing to split, nothing to cast: torch's own autograd
    register()
    built, records = build_units(model, blueprint, device, seed, start == "broadcast" and data.world > 1)
    records += materialise_buffers(model, device, seed)
    move_buffers(model, device)
    arena = place_slots(built, blueprint.packing, device)
    engine = build_engine([] if native else built, data, control, blueprint.packing.slots, chosen, peers)
    engine.gradients.room_part = part = room.part(recompute, data.world, any(unit.halved for unit in built))
    if native:
        room.make_room(part, [sum(p.nbytes for p in unit.params if p.requires_grad) for unit in built], device)
    _wrap_forwards(model, built, chosen, recompute, compile)
    hooks = weakref.WeakValueDictionary() if native else register_hooks(model, built, engine, chosen)
    for name in entry_points if hooks else ():
        add_entry_point(hooks[""], model, name)
    RUNTIMES[model] = Runtime(
        weakref.ref(model),
        title,
        data,
        control,
        engine,
        built,
        "c10d" if peers is None else "peer",
        chosen,
        blueprint.packing,
        arena,
        records,
        hooks,
        tuple(entry_points),
        parameters_beside(model, built),
        transport_note=why_not,
        late_note=why_not
        if why_not and would_come_late(blueprint.layouts, blueprint.meshes, chosen, granted_bytes)
        else "",
        granted_bytes=granted_bytes,
    )
    let_hooks_know(RUNTIMES[model])
    wait_for_peers(RUNTIMES[model])
    note_with(note_of)
    return model


def _check_arguments(
    model: nn.Module,
    recompute: str | int,
    transport: str,
    start: str,
    precision: str | Precision | None,
    seed: int | None,
    entry_points: Sequence[str],
    replicate: Sequence[str],
    ignore: Sequence[str],
    compile: bool,
) -> Precision:
    check_model(model)
    check_precision(precision)
    for argument, names, example in (
        ("entry_points", entry_points, "generate"),
        ("replicate", replicate, "*.router"),
        ("ignore", ignore, "*.frozen"),
    ):
        check_names(argument, names, example)
    check_entry_points(model, entry_points)
    if not isinstance(compile, bool):
        raise UsageError(f"compile={compile!r}: use True or False")
    check_recompute(recompute)
    if transport not in ("auto", "c10d", "peer"):
        raise UsageError(f"transport={transport!r}: use 'auto', 'c10d' or 'peer'")
    if start not in STARTS:
        raise UsageError(f"start={start!r}: use 'check', 'broadcast' or 'trust'")
    if seed is not None:
        check_seed(seed, "lamina.shard")
    return resolve_precision(precision)


def _whereabouts(model: nn.Module) -> list[str]:
    return [f"`{name}` {'on meta' if p.is_meta else 'given'}" for name, p in model.named_parameters()]


def _connect(
    transport: str,
    control: Control,
    data: DataMesh,
    blueprint: Blueprint,
    precision: Precision,
    granted_bytes: float,
) -> tuple[Peers | SymmetricPeers | None, str]:
    """Memory that all ranks of a gather can read, and why "auto" has none; None: gathers are collectives."""
    if transport == "c10d" or data.world == 1:
        return None, ""
    layouts, meshes, is_auto = blueprint.layouts, blueprint.meshes, transport == "auto"
    if is_auto and (why_not := why_not_peers(layouts, meshes, precision, blueprint.packing.slots, granted_bytes)):
        return None, why_not
    try:
        return open_peers(control, data, layouts, meshes, precision.wire, is_auto), ""
    except TransportError as error:
        if not is_auto:
            raise
        return None, reason_of(error)


def _plan(
    model: nn.Module,
    data: DataMesh,
    units: str | Sequence[Any],
    precision: Precision,
    slots: int | None,
    replicate: Sequence[str],
    ignore: Sequence[str],
    entry_points: Sequence[str],
) -> Blueprint:
    refuse_scripted(model)
    plans = plan_units(model, units, ignore=ignore, replicate=replicate, entry_points=entry_points)  # type: ignore[arg-type]
    make_plain(model)
    let_go_of_computed_weights(model)
    check_sources(model, list(model.named_parameters()))
    blueprint = draw_blueprint(model, plans, data, precision, slots)
    refuse_overlaps(model)
    if data.world > 1:
        copies = zip(blueprint.layouts, blueprint.plain, strict=True)
        refuse_renorming(model, {spec.name for layout, is_plain in copies if is_plain for spec in layout.params})
    return blueprint


def _device_of(model: nn.Module, mesh: DeviceMesh | None) -> torch.device:
    """Where the shards live: the mesh's kind of device, else the model's, else this rank's GPU under a launcher."""
    devices = {p.device for p in model.parameters() if not p.is_meta}
    on_gpu = [d for d in devices if d.type != "cpu"]
    if on_gpu:
        return on_gpu[0]
    kind = mesh.device_type if mesh is not None else None
    launched = torch.distributed.is_initialized() and "nccl" in str(torch.distributed.get_backend())
    if torch.cuda.is_available() and (kind == "cuda" or (kind is None and launched)):
        if not torch.cuda.is_initialized():
            return local_cuda_device()
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def widen(modules: Iterable[tuple[str, nn.Module]], precision: Precision) -> None:
    """Let modules whose own parameters are all kept compute in a wide dtype."""
    for prefix, module in modules if precision.compute is not None else ():
        names = [f"{prefix}.{n}" if prefix else n for n in module._parameters if module._parameters[n] is not None]
        if names and all(is_kept(name, precision) for name in names):
            wrap_kept_module(module, wide_dtype(module, precision))


def _wrap_forwards(
    model: nn.Module, units: Sequence[Unit], precision: Precision, recompute: str | int, compile: bool
) -> None:
    """Innermost first: wide modules, compiled forwards, recomputation."""
    widen(model.named_modules(), precision)
    modules = dict(model.named_modules())
    blocks = [name for unit in units if unit.plan.is_block for name in unit.plan.modules]
    if compile:
        for unit in units:
            for name in unit.plan.modules:
                if name:
                    modules[name].forward = torch.compile(modules[name].forward)  # type: ignore[method-assign]
    apply_recompute(recompute, modules, blocks or [name for u in units for name in u.plan.modules if name])
