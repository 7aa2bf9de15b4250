"""From a model and its plans to units, arena and hooks.

Everything that can fail is done before the first parameter is touched; what follows is one pass over the units with one
unit's full values in memory at a time.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lamina.core.arena import Demand, Packing, pack
from lamina.core.control import Control
from lamina.core.lanes import Lanes, StreamLane
from lamina.core.layout import UnitLayout, lay_out, short_dtype
from lamina.core.mesh import DataMesh
from lamina.core.shard_tensor import check_unheld
from lamina.core.slots import DebugMode, Slot
from lamina.core.strategy import Factors, Level
from lamina.errors import UsageError
from lamina.runtime.agreement import broadcast_from_first
from lamina.runtime.engine import Engine
from lamina.runtime.gathering import Gatherer
from lamina.runtime.hooks import ModuleHooks
from lamina.runtime.materialise import InitRecord, materialise
from lamina.runtime.parts import PARTS
from lamina.runtime.precision import Precision, spec_of
from lamina.runtime.publishing import PeerGatherer, SymmetricGatherer
from lamina.runtime.reducing import Reducer
from lamina.runtime.unit import Unit
from lamina.runtime.units import UnitPlan
from lamina.runtime.windows import Entry, refresh_flat_weights, release_computed_weights
from lamina.transport.c10d import C10d, Transport
from lamina.transport.peer import Peers
from lamina.transport.pulled import Pulls
from lamina.transport.symmetric import Pushes, SymmetricPeers

DEFAULT_SLOTS = 3
LEAST_BUDGET_BYTES = 1024  # `slots=` at or above it is a budget in bytes
LEADING_SHARE = 1 / 8  # of all weights: what the first uses of a step need


@dataclass
class Runtime:
    """Everything that belongs to one sharded model on this rank."""

    model: weakref.ref[nn.Module]
    strategy: str
    mesh: DataMesh
    control: Control
    engine: Engine
    units: list[Unit]
    transport: str
    precision: Precision
    packing: Packing
    arena: Tensor  # uint8
    records: tuple[InitRecord, ...]
    hooks: weakref.WeakValueDictionary[str, ModuleHooks]  # by qualified module name; the modules hold them
    entry_points: tuple[str, ...]
    ignored: tuple[nn.Parameter, ...] = ()  # parameters that `shard()` was told to leave alone
    transport_note: str = ""  # why transport="auto" is not "peer"
    granted_bytes: float = math.inf  # of a GPU, that transport="auto" may spend on peers
    late_note: str = ""  # why it was not when the model was sharded, and may yet be: see late_peers.py
    adopted: tuple[Unit, ...] = ()  # units that `adopt()` has made: their slots lie in an arena of their own
    adopted_arena: Tensor | None = None  # uint8
    refusal: str = ""  # why the model is of no use any more: see half_changed.py

    @property
    def device(self) -> torch.device:
        return self.mesh.device


RUNTIMES: weakref.WeakKeyDictionary[nn.Module, Runtime] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Blueprint:
    """The decisions about one model, before anything is changed."""

    plans: tuple[UnitPlan, ...]
    layouts: tuple[UnitLayout, ...]
    meshes: tuple[DataMesh, ...]
    plain: tuple[bool, ...]
    encloses: tuple[bool, ...]
    packing: Packing

    def text(self) -> list[str]:
        """One line per decision, to compare over ranks."""
        lines = [f"slots {self.packing.slots}"]
        for plan, layout in zip(self.plans, self.layouts, strict=True):
            for spec in layout.params:
                kind = "trainable" if spec.trainable else "frozen"
                lines.append(
                    f"`{spec.name}` {spec.shape} {short_dtype(spec.compute)} {short_dtype(spec.master)} {kind} "
                    f"in unit `{plan.title}`"
                )
        return lines


def draw_blueprint(
    model: nn.Module, plans: Sequence[UnitPlan], mesh: DataMesh, precision: Precision, slots: int | None
) -> Blueprint:
    release_computed_weights(model)
    parameters = dict(model.named_parameters())
    replicated = replicate_mesh(mesh)
    layouts, meshes, plain = [], [], []
    for plan in plans:
        own = replicated if plan.replicated else mesh
        params = [parameters[name] for name in plan.parameters]
        _refuse_split(params, plan, own)
        specs = [spec_of(name, parameters[name], precision) for name in plan.parameters]
        if own.factors.uses_shards:
            for name, param in zip(plan.parameters, params, strict=True):
                check_unheld(param, name)
        layouts.append(lay_out(plan.name, specs, own.factors.optimizer))
        meshes.append(own)
        plain.append(not own.factors.uses_shards and all(s.compute is s.master for s in specs))
    encloses = tuple(encloses_another(plan, plans) for plan in plans)
    demands = [
        Demand(plan.title, layout.buffer_bytes, resident=e or not m.factors.shards_parameters)
        for plan, layout, m, e, is_plain in zip(plans, layouts, meshes, encloses, plain, strict=True)
        if not is_plain
    ]
    return Blueprint(tuple(plans), tuple(layouts), tuple(meshes), tuple(plain), encloses, _pack(demands, slots))


def _refuse_split(params: Sequence[nn.Parameter], plan: UnitPlan, mesh: DataMesh) -> None:
    """What others have split already; a part of a larger one must be a `Shard`, or torch clips it as a whole one."""
    for name, param in zip(plan.parameters, params, strict=True):
        if type(param).__name__ == "DTensor":
            raise UsageError(
                f"`{name}` is a DTensor, distributed by torch already: leave out fully_shard() or distribute_module(), "
                "or say which part of a tensor-parallel parameter this rank holds with lamina.split_parameter"
            )
        if is_traceable_wrapper_subclass(param):
            raise UsageError(
                f"`{name}` is of the class {type(param).__name__}, a tensor made of others (quantised, as a rule), and "
                f"would become plain values of {param.dtype}. Type lamina.shard(..., ignore=[{name!r}]), which leaves "
                "it whole on every rank, or give the module the tensors that it is made of as parameters"
            )
        if param in PARTS and mesh.factors.optimizer == 1 and mesh.world > 1:
            raise UsageError(
                f"`{name}` is a part of a larger parameter (lamina.split_parameter) and stays plain where optimizer "
                "state is not split, so that norms would count it as a whole: type strategy='zero1' or 'zero3'"
            )


def replicate_mesh(mesh: DataMesh) -> DataMesh:
    """The same ranks with nothing split: for `replicate=`."""
    if mesh.factors.optimizer == 1:
        return mesh
    trivial = replace(mesh.replicas, pg=None, size=1, place=0)
    factors = Factors(1, 1, 1, mesh.world)
    everyone = replace(mesh.replicas, pg=mesh.everyone, size=mesh.world, place=mesh.rank)
    assert Level(mesh.world, 1).place(mesh.rank) == mesh.rank
    return replace(
        mesh,
        factors=factors,
        gather=(trivial,) * 3,
        reduce=(trivial,) * 3,
        replicas=everyone,
        shard_group=trivial,
        shard_sums=trivial,
    )


def encloses_another(plan: UnitPlan, plans: Sequence[UnitPlan]) -> bool:
    """Whether its window holds another unit's: one of its modules is an ancestor of the other's."""
    others = [m for other in plans if other is not plan for m in other.modules]
    return any(name == "" or any(inner.startswith(name + ".") for inner in others) for name in (plan.modules or ("",)))


def _pack(demands: Sequence[Demand], slots: int | None) -> Packing:
    if slots is None:
        return pack(demands, DEFAULT_SLOTS)
    if not isinstance(slots, int) or isinstance(slots, bool) or slots < 1:
        raise UsageError(f"slots={slots!r}: a number of slots (3 is the default), or a budget in bytes")
    if slots < LEAST_BUDGET_BYTES:
        return pack(demands, slots)
    packings = [pack(demands, count) for count in range(1, len(demands) + 1)] or [pack(demands, 1)]
    fitting = [packing for packing in packings if packing.total_bytes <= slots]
    if not fitting:
        raise UsageError(
            f"slots={slots}: a budget of {slots} bytes holds not even one slot, which takes {packings[0].total_bytes} "
            f"bytes. Give at least that, or make units smaller"
        )
    return fitting[-1]


def build_units(
    model: nn.Module, blueprint: Blueprint, device: torch.device, seed: int, broadcast: bool
) -> tuple[list[Unit], tuple[InitRecord, ...]]:
    """Turn the user's parameters into shards, unit by unit."""
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    recurrent = _forget_flat_weights(modules)
    units: list[Unit] = []
    records: list[InitRecord] = []
    for index, (plan, layout) in enumerate(zip(blueprint.plans, blueprint.layouts, strict=True)):
        params = [parameters[spec.name] for spec in layout.params]
        position = {spec.name: i for i, spec in enumerate(layout.params)}
        entries = []
        for path, owner in plan.aliases:
            module_name, _, attribute = path.rpartition(".")
            entries.append(Entry(modules[module_name]._parameters, attribute, position[owner], path))
        unit = Unit(index, plan, layout, blueprint.meshes[index], params, entries, blueprint.plain[index])
        values, made = _values(model, layout, params, device, seed)
        records += made
        if broadcast:
            for value in values:
                broadcast_from_first(unit.mesh, value)
        with torch.no_grad():
            unit.adopt_values(values)
        del values  # one unit's values at a time
        owned = {id(entry.parameters) for entry in entries}
        unit.recurrent = [weakref.ref(module) for module in recurrent if id(module._parameters) in owned]
        units.append(unit)
    for module in recurrent:
        refresh_flat_weights(module)
    if device.type == "cuda" and any(record.source == "given" for record in records):
        # What the whole model lay in is scattered pieces of memory, and few of a step's tensors would fit into them.
        torch.cuda.empty_cache()
    return units, tuple(records)


def build_units_of_copy(model: nn.Module, old: Runtime) -> list[Unit]:
    """Units of a copied model around the values that were copied."""
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    units = []
    for unit in old.units:
        params = [
            copy.deepcopy(unit.params[i]) if i in unit.gone else parameters[spec.name]
            for i, spec in enumerate(unit.layout.params)
        ]
        entries = [
            Entry(modules[e.path.rpartition(".")[0]]._parameters, e.attribute, e.position, e.path) for e in unit.entries
        ]
        made = Unit(unit.index, unit.plan, unit.layout, unit.mesh, params, entries, unit.plain)
        made.gone = unit.gone
        made.adopt_shards()
        owned = {id(entry.parameters) for entry in entries}
        recurrent = [m for m in modules.values() if isinstance(m, nn.RNNBase) and id(m._parameters) in owned]
        made.recurrent = [weakref.ref(module) for module in recurrent]
        units.append(made)
    return units


def _values(
    model: nn.Module, layout: UnitLayout, params: Sequence[nn.Parameter], device: torch.device, seed: int
) -> tuple[list[Tensor], tuple[InitRecord, ...]]:
    """Full values of one unit on `device`, in layout order."""
    named = [(spec.name, param) for spec, param in zip(layout.params, params, strict=True)]
    missing = [(name, param) for name, param in named if param.is_meta]
    records = [InitRecord(name, "given") for name, param in named if not param.is_meta]
    made: dict[str, Tensor] = {}
    if missing:
        result = materialise(model, missing, device, seed)
        made = result.values
        records += result.records
    values = [made[name] if name in made else param.detach().to(device).contiguous() for name, param in named]
    return values, tuple(records)


def _forget_flat_weights(modules: dict[str, nn.Module]) -> list[nn.RNNBase]:
    """Recurrent modules hold weak references to their weights, which forbid turning them into something else."""
    found = [module for module in modules.values() if isinstance(module, nn.RNNBase)]
    for module in found:
        module._flat_weight_refs = [None] * len(module._flat_weights_names)
        module._flat_weights = []
    return found


def place_slots(units: Sequence[Unit], packing: Packing, device: torch.device) -> Tensor:
    """The arena, and every unit's home in it; in debug mode what shares bytes by plan has bytes of its own."""
    places = packing.apart() if DebugMode.enabled else packing
    arena = torch.zeros(places.total_bytes, dtype=torch.uint8, device=device)
    placed = [unit for unit in units if not unit.plain]
    for unit, offset in zip(placed, places.offsets_bytes, strict=True):
        unit.slot = Slot(unit.layout, arena[offset : offset + unit.layout.buffer_bytes])
    busy: dict[Slot, None] = {}
    for number, unit in enumerate(placed):
        assert unit.slot is not None
        unit.slot.shares = frozenset(s for c in packing.conflicts(number) if (s := placed[c].slot) is not None)
        if unit.slot.shares:
            unit.slot.busy = busy
            busy[unit.slot] = None  # debug mode has written to it
    return arena


def build_engine(
    units: Sequence[Unit],
    mesh: DataMesh,
    control: Control,
    slots: int,
    precision: Precision,
    peers: Peers | SymmetricPeers | None,
) -> Engine:
    """The engine over these units; `peers` makes gathers one-sided."""
    lanes = Lanes(mesh.device)
    _let_lead(units, lanes)
    transport: Transport = C10d(mesh.device)
    if peers is None:
        gatherer = Gatherer(transport, control, lanes)
    elif isinstance(peers, SymmetricPeers):
        transport = Pushes(mesh.device, peers)
        gatherer = SymmetricGatherer(peers, units, transport, control, lanes, precision.halves)
    else:
        transport = Pulls(mesh.device, peers, mesh.reduce[0])
        gatherer = PeerGatherer(peers, units, transport, control, lanes, precision.halves)
    reducer = Reducer(transport, control, lanes, slots > 1 and mesh.device.type == "cpu", precision.wire)
    one_sided = peers is not None and all(unit.sharded or unit.plain for unit in units)
    return Engine(units, control, lanes, gatherer, reducer, max(1, slots - 2), one_sided)


def _let_lead(units: Sequence[Unit], lanes: Lanes) -> None:
    """Choose the units that the optimizer writes first and the next step gathers first; on GPUs, for it is a launch."""
    left_bytes = LEADING_SHARE * sum(unit.layout.buffer_bytes for unit in units if not unit.plain)
    for unit in units:
        unit.lanes, unit.leads = lanes, isinstance(lanes.compute, StreamLane) and not unit.plain and left_bytes > 0
        if unit.leads:
            left_bytes -= unit.layout.buffer_bytes


def register_hooks(
    model: nn.Module, units: Sequence[Unit], engine: Engine, precision: Precision
) -> weakref.WeakValueDictionary[str, ModuleHooks]:
    """One pair of hooks for each module that opens a window; the model always has one, the root forward."""
    modules = dict(model.named_modules())
    opened: dict[str, list[Unit]] = {"": []}
    for unit in units:
        for name in unit.plan.modules or ("",):
            opened.setdefault(name, []).append(unit)
    hooks: weakref.WeakValueDictionary[str, ModuleHooks] = weakref.WeakValueDictionary()
    for name, members in opened.items():
        hooks[name] = ModuleHooks(engine, modules[name], members, precision.compute)
    hooks[""].output = precision.output
    return hooks
