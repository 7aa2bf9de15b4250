"""What is new in a model since it was sharded, and which units take it: the plan behind `adopt()`.

`plan_units` deals a whole model out. Here most of it is dealt out already, its shards lie in optimizers and must stay
what they are; but the modules around them may have changed (an adapter wraps the layer it adapts, and the layer's
weight has another name). Nothing is changed here.

Note [Additions]
    1. A new parameter goes to a new unit that is opened by the modules which open the innermost old unit around it: one
       for each block that has new parameters, beside the block's own.
    2. A new part outside all blocks that is at least a quarter of the largest unit opens a unit of its own; what is
       smaller goes to one that the model's forward opens.
    3. A unit that was there keeps its parameters. Where they stand now is looked up anew, by identity; one whose
       parameters have all left the model is dropped. Where others stay, one that has left keeps its place in the
       layout, unused: other places would make the optimizer's states wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from lamina.core.layout import UnitLayout
from lamina.core.shard_tensor import Shard
from lamina.errors import StateError, UnitError, UsageError
from lamina.runtime.assemble import RUNTIMES, Blueprint, Runtime, draw_blueprint
from lamina.runtime.auto_units import ENOUGH
from lamina.runtime.copies import has_placeholders, make_plain
from lamina.runtime.materialise import check_sources
from lamina.runtime.module_graph import ModuleGraph, has_forward, within
from lamina.runtime.newcomers import module_expression
from lamina.runtime.unit import Unit
from lamina.runtime.units import Opening, UnitPlan, aliases_of, can_open, deal, inside_units, name_of
from lamina.runtime.weight_reads import VagueRead, add_source_edges
from lamina.runtime.windows import Entry

REPLACED = " (replaced)"


@dataclass(frozen=True)
class Standing:
    """A unit that was there, and where it stands in the model now."""

    unit: Unit
    plan: UnitPlan
    layout: UnitLayout
    entries: tuple[Entry, ...]
    gone: frozenset[int]  # positions of parameters that have left the model


@dataclass(frozen=True)
class Additions:
    """The decisions about the new parameters of one submodule."""

    submodule: str
    parameters: dict[str, nn.Parameter]  # the new ones, in registration order
    standing: tuple[Standing, ...]
    dropped: tuple[Unit, ...]
    blueprint: Blueprint  # of the new units
    order: dict[str, int]  # of all modules by name

    def text(self) -> list[str]:
        """One line per decision, to compare over ranks."""
        lines = [f"submodule `{self.submodule}`", *self.blueprint.text()]
        lines += [f"`{name}` {'on meta' if p.is_meta else 'given'}" for name, p in self.parameters.items()]
        lines += [f"`{old}` is `{new}` now" for old, new in self.renamed().items()]
        return lines + [f"unit `{unit.name}` has left the model" for unit in self.dropped]

    def renamed(self) -> dict[str, str]:
        """New names of parameters that were there, by the old ones."""
        pairs = (zip(s.unit.layout.params, s.layout.params, strict=True) for s in self.standing)
        return {old.name: new.name for each in pairs for old, new in each if old.name != new.name}


def plan_additions(runtime: Runtime, model: nn.Module, submodule: nn.Module) -> Additions:
    """Find what is new in `submodule` and deal it out.

    Raises:
        UsageError: no module of the model, or nothing is new in it.
        StateError: something new is a shard already; inside `lamina.gathered()`.
        UnitError: the model was changed in a way that leaves a parameter without the unit that gathers it.
    """
    graph = ModuleGraph.of(model)
    new = _new_parameters(runtime, graph, submodule)
    names = {id(param): name for name, param in graph.parameters.items()}
    standing, dropped = [], []
    for unit in runtime.units:
        found = _look_up(unit, graph, names, runtime)
        if found is None:
            dropped.append(unit)
        else:
            standing.append(found)
    plans = _deal_new(graph, list(new), standing, graph.names[id(submodule)], runtime.entry_points)
    check_sources(model, list(new.items()))
    blueprint = draw_blueprint(model, plans, runtime.mesh, runtime.precision, runtime.packing.slots)
    order = {name: number for number, name in enumerate(graph.modules)}
    return Additions(graph.names[id(submodule)], new, tuple(standing), tuple(dropped), blueprint, order)


def _new_parameters(runtime: Runtime, graph: ModuleGraph, submodule: nn.Module) -> dict[str, nn.Parameter]:
    title = type(submodule).__name__
    if not isinstance(submodule, nn.Module):
        raise UsageError(
            f"lamina.adopt() takes a module of the model, not a {title}: type lamina.adopt(model, model) for all that "
            "is new in it, or name a part, such as lamina.adopt(model, model.head)"
        )
    if id(submodule) not in graph.names:
        raise UsageError(
            f"lamina.adopt(): this {title} is no module of the model: register it first, such as `model.adapter = "
            "adapter`, and then adopt it"
        )
    make_plain(submodule)
    for name, param in graph.parameters.items():
        if not isinstance(param, nn.Parameter):
            raise StateError(f"lamina.adopt() inside lamina.gathered() (`{name}` is whole there): leave it first")
    owned = {id(param) for unit in runtime.units for param in unit.params}
    left_alone = {id(param) for param in runtime.ignored if not param.requires_grad}
    inside = graph.inside(graph.names[id(submodule)])
    mine = {n: p for n, p in graph.parameters.items() if n in inside and id(p) not in owned}
    new = {n: p for n, p in mine.items() if id(p) not in left_alone}
    where = graph.names[id(submodule)]
    if not new:
        beside = [n for n, p in graph.parameters.items() if id(p) not in owned | left_alone]
        more = f"; `{beside[0]}` is: type lamina.adopt(model, model)" if beside else ""
        raise UsageError(
            f"lamina.adopt(model, {module_expression(where)}): none of the {len(inside)} parameters of this {title} is "
            f"new, all were there when the model was sharded or have been adopted since{more}"
        )
    _refuse_sharded(runtime, submodule, new)
    return new


def _refuse_sharded(runtime: Runtime, submodule: nn.Module, new: dict[str, nn.Parameter]) -> None:
    """New parts that come out of a sharded model."""
    cure = "build the module anew, and copy whole values into it (`p.full()`, `lamina.gathered`)"
    for inner in submodule.modules():
        if inner in RUNTIMES and RUNTIMES[inner] is not runtime:
            raise StateError(f"lamina.adopt(): a {type(inner).__name__} in it is sharded by itself: {cure}")
        if has_placeholders(inner):
            raise StateError(
                f"lamina.adopt(): a {type(inner).__name__} in it was copied out of a sharded model, and is not whole "
                f"without it: {cure}"
            )
    for name, param in new.items():
        if isinstance(param, Shard):
            raise StateError(f"`{name}` is a shard of another model already, or of a copied part of one: {cure}")


# ---- units that were there -----------------------------------------------------------------------------------------


def _look_up(unit: Unit, graph: ModuleGraph, names: dict[int, str], runtime: Runtime) -> Standing | None:
    """Where a unit's parameters stand now; None if none is left."""
    now = [names.get(id(param)) for param in unit.params]
    mine = [name for name in now if name is not None]
    if not mine:
        return None
    modules = tuple(_openers(unit, graph, runtime))
    if not modules:
        raise UnitError(
            f"`{mine[0]}` stands in another module now, and `{unit.plan.modules[0]}`, whose forward gathered it, is "
            "not in the model any more: keep the old module inside the new one (`self.base = old`) and call it there"
        )
    owned = set(mine)
    before = {(id(entry.parameters), entry.attribute) for entry in unit.entries}
    entries = []
    for slot, owner in aliases_of(graph, owned):
        where, _, attribute = slot.rpartition(".")
        parameters = graph.modules[where]._parameters
        is_new = (id(parameters), attribute) not in before
        if is_new and not any(where == opener or within(where, opener) for opener in modules):
            raise UnitError(
                f"`{slot}` is the sharded parameter `{owner}` of unit `{unit.name}`, which is not gathered while "
                f"`{where or 'the model'}` runs: a tie to a sharded parameter must be there when lamina.shard() is "
                "called"
            )
        entries.append(Entry(parameters, attribute, now.index(owner), slot))
    base, ordered = name_of(unit.plan.modules), tuple(name for name in graph.parameters if name in owned)
    title = name_of(modules) + unit.plan.name.removeprefix(base) if unit.plan.name.startswith(base) else unit.plan.name
    plan = replace(unit.plan, name=title, modules=modules, parameters=ordered, aliases=aliases_of(graph, owned))
    called = [
        name or spec.name.removesuffix(REPLACED) + REPLACED for name, spec in zip(now, unit.layout.params, strict=True)
    ]
    gone = frozenset(i for i, name in enumerate(now) if name is None)
    return Standing(unit, plan, _renamed(unit.layout, title, called), tuple(entries), gone)


def _openers(unit: Unit, graph: ModuleGraph, runtime: Runtime) -> Iterator[str]:
    """The modules whose forward opens a unit, by the names that they have now."""
    for name in unit.plan.modules or ("",):
        hooks = runtime.hooks.get(name)
        module = graph.modules.get(name) if hooks is None else hooks.module()
        if module is not None and id(module) in graph.names:
            yield graph.names[id(module)]
        elif not runtime.hooks:  # torch's own autograd: nothing is gathered
            yield ""


def _renamed(layout: UnitLayout, title: str, names: Sequence[str]) -> UnitLayout:
    """The same places under other names, given in layout order."""
    following = iter(names)
    segments = []
    for segment in layout.segments:
        segments.append(replace(segment, params=tuple(replace(spec, name=next(following)) for spec in segment.params)))
    return replace(layout, name=title, segments=tuple(segments))


# ---- new units -----------------------------------------------------------------------------------------------------


def _deal_new(
    graph: ModuleGraph, new: Sequence[str], standing: Sequence[Standing], submodule: str, entry_points: Sequence[str]
) -> list[UnitPlan]:
    openings = {
        s.plan.modules: Opening(s.plan.modules, False)
        for s in standing
        if not s.plan.replicated and any(s.plan.modules)
    }
    opened = {module for modules in openings for module in modules}
    vague = add_source_edges(graph, inside_units(graph, list(openings.values())), entry_points)
    largest_numel = max((s.layout.numel for s in standing), default=0)
    for name in _parts(graph, submodule, set(new), opened):
        numel = sum(graph.parameters[inner].numel() for inner in graph.inside(name))
        if ENOUGH * numel >= largest_numel and not _is_read_vaguely(graph, name, vague):
            openings[name,] = Opening((name,), False)
    taken = {s.plan.name for s in standing}
    plans = []
    for plan in deal(graph, list(openings.values()), new):
        title = plan.name if plan.modules[0] and not opened.intersection(plan.modules) else ""
        if not title or title in taken:
            title = _fresh(plan.title, taken)
        taken.add(title)
        plans.append(replace(plan, name=title))
    return plans


def _parts(graph: ModuleGraph, name: str, new: set[str], opened: set[str]) -> Iterator[str]:
    """The outermost modules below `name` that are new as a whole and could open a unit; none inside an old unit."""
    if any(name == other or within(name, other) for other in opened):
        return
    held = graph.inside(name)
    if not held & new:
        return
    if name and held <= new and has_forward(graph.modules[name]) and can_open(graph, name):
        yield name
        return
    for child in dict.fromkeys(graph.names[id(c)] for c in graph.modules[name].children()):
        yield from _parts(graph, child, new, opened)


def _is_read_vaguely(graph: ModuleGraph, name: str, vague: frozenset[VagueRead]) -> bool:
    """Whether something above may read a weight in it without calling its module."""
    attributes = {slot.rpartition(".")[2] for slot in graph.slots if slot.startswith(name + ".")}
    return any(within(name, read.reader) and read.attribute in {"*", *attributes} for read in vague)


def _fresh(base: str, taken: set[str]) -> str:
    title, number = f"{base}+added", 1
    while title in taken:
        number += 1
        title = f"{base}+added{number}"
    return title
