"""`adopt()`: parameters that were added to a model after `shard()` become part of it.

Rebuilding the model and sharding it anew would lose optimizer states and hooks, and `shard()` refuses a second call.
Here the new parameters get units, masters and slots of their own (additions.py says which), and what is made from all
units is made anew: the engine with its programs, counters of the control group going on, and what peers read. The old
units' parameters, masters, gradients and slots stay the objects that they are, and so do the hooks.

Note [Adoption]
    1. It happens between steps: no use is open, no graph alive, no sum unfinished: nothing points into the old
       engine.
    2. Everything that can be refused is refused, on all ranks alike, before the first object is changed. What an error
       ends after that is refused from then on: half_changed.py.
    3. All units that were ever adopted share one arena beside the first one, packed by the same rules.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import torch
from torch import nn

from lamina.core.arena import Demand, pack
from lamina.core.layout import SEGMENT_ALIGNMENT_BYTES, round_up
from lamina.core.uncompiled import uncompiled
from lamina.errors import StateError, UsageError
from lamina.runtime.access import runtime_of
from lamina.runtime.additions import Additions, plan_additions
from lamina.runtime.agreement import agreeing, check_same_text, check_start_weights, together
from lamina.runtime.api import STARTS, move_buffers, widen
from lamina.runtime.assemble import Runtime, build_units, encloses_another, place_slots
from lamina.runtime.copies import let_hooks_know
from lamina.runtime.half_changed import changing
from lamina.runtime.hooks import ModuleHooks, add_entry_point
from lamina.runtime.materialise import InitRecord, check_sources, materialise, materialise_buffers
from lamina.runtime.precision import computes_wide
from lamina.runtime.publishing import open_peers
from lamina.runtime.succession import put_to_rest, succeed
from lamina.runtime.unit import Unit
from lamina.runtime.windows import give_memory
from lamina.transport.peer import Peers
from lamina.transport.symmetric import SymmetricPeers


@uncompiled
def adopt(model: nn.Module, submodule: nn.Module, start: str = "check") -> list[nn.Parameter]:
    """Take parameters that were added after `shard()` into the sharded model: adapters, heads, layers. Collective.

    The parameters stay the same objects, and become shards. An optimizer that was built without them is told:
    `optimizer.add_param_group({"params": lamina.adopt(model, model.adapter)})`.

    Args:
        model: what `shard()` returned.
        submodule: a module of it; every parameter in it that is new is taken. `model` itself: all that is new.
        start: "check" that all ranks hold the same new values, "broadcast" rank 0's, or "trust".

    Returns:
        The parameters that were taken, in registration order.

    Raises:
        UsageError: no module of the model; nothing in it is new.
        StateError: between a forward and its backward, or inside a scope (accumulate, keep, gathered, trace).
        UnitError: a sharded parameter was taken away from the module whose forward gathers it.
        Disagreement: ranks add different parameters, or other values. Nothing has been changed in any of these cases.
        StateError: memory ran out in the middle, say. The model is then of no use any more, and says so, on all ranks.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"lamina.adopt() takes a sharded model and a module of it, not a {type(model).__name__}")
    runtime = runtime_of(model)
    control, mesh = runtime.control, runtime.mesh
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)  # once the ranks have met, none reads what another is about to replace
    with agreeing(control, "adopt", type(submodule).__name__), torch.inference_mode(False):
        additions = together(control, lambda: _plan(runtime, model, submodule, start))
        check_same_text(control, "parameters to adopt", [f"start={start}", *additions.text()])
        real = {name: p for name, p in additions.parameters.items() if not p.is_meta}
        if start == "check" and mesh.world > 1:
            check_start_weights(control, list(real), list(real.values()), "lamina.adopt")
        seed = control.exchange([torch.initial_seed() % 2**62])[0][0]
        records = together(control, lambda: _materialise(model, additions, mesh.device, seed))
        peers, names = _open_peers(runtime, additions), additions.renamed()
        with changing(runtime, "lamina.adopt()"):
            taken = _take_in(runtime, model, additions, peers, seed, start == "broadcast" and mesh.world > 1)
        records += tuple(record for record in taken if record.name not in {each.name for each in records})
        kept = (replace(record, name=names.get(record.name, record.name)) for record in runtime.records)
        runtime.records = (*kept, *records)
    return list(additions.parameters.values())


# ---- before anything is changed ------------------------------------------------------------------------------------


def _plan(runtime: Runtime, model: nn.Module, submodule: nn.Module, start: str) -> Additions:
    if start not in STARTS:
        raise UsageError(f"start={start!r}: use 'check', 'broadcast' or 'trust'")
    _refuse_moment(runtime)
    return plan_additions(runtime, model, submodule)


def _refuse_moment(runtime: Runtime) -> None:
    """Note [Adoption] 1."""
    engine = runtime.engine
    gradients = engine.gradients
    if engine.phase is not None and not engine.is_stale():
        raise StateError("lamina.adopt() inside a forward or backward: call it between steps")
    if any(unit.kept for unit in runtime.units):
        raise StateError("lamina.adopt() inside lamina.keep(): leave it first")
    if gradients.accumulating or engine.reducer.partials:
        raise StateError(
            "lamina.adopt() between micro-batches (lamina.accumulate): call it after the last one, outside the block"
        )
    if "enter" in vars(engine):  # its methods are tapped
        raise StateError("lamina.adopt() inside lamina.trace(): leave it first, and trace the steps that follow")
    engine.close_failed()
    if any(unit.visits.alive for unit in runtime.units):
        gc.collect()  # the frames of an error that was caught may hold a graph in a circle
    alive = next((unit for unit in runtime.units if unit.visits.alive), None)
    if alive is not None:
        raise StateError(
            f"lamina.adopt() between a forward and its backward: a graph through `{alive.name}` is still alive, whose "
            "weights could not be gathered any more. Call loss.backward() first, or drop what came out of the forward "
            "(`del output, loss`; use torch.no_grad() where there is no backward)"
        )


def _materialise(model: nn.Module, additions: Additions, device: torch.device, seed: int) -> tuple[InitRecord, ...]:
    """Give what is new on meta its values, as whole tensors; the only change that a refusal may follow."""
    missing = [(name, param) for name, param in additions.parameters.items() if param.is_meta]
    records: tuple[InitRecord, ...] = ()
    if missing:
        check_sources(model, missing)
        made = materialise(model, missing, device, seed)
        for name, param in missing:
            give_memory(param, made.values[name].contiguous())
        records = made.records
    return records + materialise_buffers(model, device, seed)


def _open_peers(runtime: Runtime, additions: Additions) -> Peers | SymmetricPeers | None:
    """Memory for all units, new and old; see `open_peers`."""
    if runtime.transport != "peer":
        return None
    blueprint = additions.blueprint
    layouts = [*(s.layout for s in additions.standing), *blueprint.layouts]
    meshes = [*(s.unit.mesh for s in additions.standing), *blueprint.meshes]
    return open_peers(runtime.control, runtime.mesh, layouts, meshes, runtime.precision.wire)


# ---- the change ----------------------------------------------------------------------------------------------------


def _take_in(
    runtime: Runtime,
    model: nn.Module,
    additions: Additions,
    peers: Peers | SymmetricPeers | None,
    seed: int,
    broadcast: bool,
) -> tuple[InitRecord, ...]:
    put_to_rest(runtime)
    places = _places(runtime)
    made, records = build_units(model, additions.blueprint, runtime.device, seed, broadcast)
    _wrap_new_modules(runtime, model, additions)
    move_buffers(model, runtime.device)
    for each in additions.standing:
        each.unit.stand_at(each.plan, each.layout, each.entries, each.gone)
    left = [param for unit in additions.dropped for param in unit.params]
    left += [each.unit.params[position] for each in additions.standing for position in each.gone]
    for param in left:
        param.grad = None  # an optimizer that still has it leaves it alone
    units = [each.unit for each in additions.standing] + made
    units.sort(key=lambda unit: (unit.plan.replicated, min(additions.order[m] for m in unit.plan.modules or ("",))))
    for index, unit in enumerate(units):
        unit.index = index
    hooks = _hooks_now(runtime, model)
    runtime.units = units
    runtime.adopted = tuple(u for u in units if u in runtime.adopted or u in made)
    _place(runtime, places)
    native = runtime.mesh.world == 1 and all(unit.plain for unit in units)
    succeed(runtime, [] if native else units, peers)
    if not native:
        _hook(runtime, model, hooks)
    let_hooks_know(runtime)
    return records


_Places = dict[Unit, tuple[Demand, int]]


def _places(runtime: Runtime) -> _Places:
    """Demand and offset in bytes of each unit that lies in the first arena."""
    placed = [unit for unit in runtime.units if not unit.plain]
    packing = runtime.packing
    found = zip(placed, packing.demands, packing.offsets_bytes, strict=True)
    return {unit: (demand, offset) for unit, demand, offset in found if unit not in runtime.adopted}


def _place(runtime: Runtime, places: _Places) -> None:
    """Note [Adoption] 3; and one packing for both arenas, the second behind the first."""
    adopted = [unit for unit in runtime.adopted if not unit.plain]
    plans = [unit.plan for unit in adopted]
    demands = [
        Demand(
            unit.plan.title,
            unit.layout.buffer_bytes,
            resident=encloses_another(unit.plan, plans) or not unit.sharded,
        )
        for unit in adopted
    ]
    for unit in adopted:
        unit.leave_slots()
    packing = pack(demands, runtime.packing.slots)
    runtime.adopted_arena = place_slots(adopted, packing, runtime.device)
    begin = round_up(runtime.arena.nbytes, SEGMENT_ALIGNMENT_BYTES)
    places |= {
        unit: (demand, begin + offset)
        for unit, demand, offset in zip(adopted, demands, packing.offsets_bytes, strict=True)
    }
    placed = [unit for unit in runtime.units if not unit.plain]
    runtime.packing = replace(
        runtime.packing,
        demands=tuple(replace(places[unit][0], name=unit.plan.title) for unit in placed),
        offsets_bytes=tuple(places[unit][1] for unit in placed),
        total_bytes=begin + packing.total_bytes,
    )


def _wrap_new_modules(runtime: Runtime, model: nn.Module, additions: Additions) -> None:
    """Modules with a new parameter compute wide where all of theirs are kept."""
    owners = {name.rpartition(".")[0] for name in additions.parameters}
    fresh = [(name, model.get_submodule(name)) for name in sorted(owners)]
    widen([(n, m) for n, m in fresh if not computes_wide(m)], runtime.precision)


def _hooks_now(runtime: Runtime, model: nn.Module) -> dict[str, ModuleHooks]:
    """The hooks that there are, by the present name of their module; those of modules that have left open nothing."""
    names = {id(module): name for name, module in model.named_modules()}
    found = {}
    for hooks in runtime.hooks.values():
        module = hooks.module()
        hooks.units = []
        if module is not None and id(module) in names:
            found[names[id(module)]] = hooks
    return found


def _hook(runtime: Runtime, model: nn.Module, hooks: dict[str, ModuleHooks]) -> None:
    """Every unit is opened by its modules; hooks that exist keep their place among the user's."""
    modules = dict(model.named_modules())
    opened: dict[str, list[Unit]] = {"": []}
    for unit in runtime.units:
        for name in unit.plan.modules or ("",):
            opened.setdefault(name, []).append(unit)
    is_first = not hooks
    for name, members in opened.items():
        if name in hooks:
            hooks[name].units = members
        else:
            hooks[name] = ModuleHooks(runtime.engine, modules[name], members, runtime.precision.compute)
    hooks[""].output = runtime.precision.output
    runtime.hooks = weakref.WeakValueDictionary(hooks)
    for name in runtime.entry_points if is_first else ():
        add_entry_point(hooks[""], model, name)
