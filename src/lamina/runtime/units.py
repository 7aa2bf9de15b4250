"""Units: which parameters are gathered together, and whose forward opens the window in which they are full.

torch leaves this choice to the caller (one `fully_shard` per block, by hand) or to a class name. The first is work, the
second fits one family of models, and neither notices a weight that is read outside its own module.

`plan_units` turns the user's words, or "auto", into frozen data. Notes that hold for every plan (`check_units`):
1. every parameter that is not ignored belongs to exactly one unit, under its first qualified name;
2. every slot (module attribute) that holds a parameter is swapped by that parameter's unit, ties included;
3. a unit is open whenever any of its parameters is used, as far as registration, ties and the source can tell.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from lamina.errors import UnitError
from lamina.runtime.auto_units import choose_units
from lamina.runtime.joining import join_small
from lamina.runtime.module_graph import ModuleGraph, has_forward, is_atom, within
from lamina.runtime.weight_reads import add_source_edges

_NUMBER = re.compile(r"\d+$")
UnitItem = type | str | nn.Module | Sequence[Any]


@dataclass(frozen=True)
class UnitPlan:
    """One unit: its parameters and the modules that use them, by qualified name."""

    name: str  # "layers.3"; "norm+head", "layers.0-3" for several modules; "" for the rest of the model
    modules: tuple[str, ...]  # their forward opens the window; the model itself is ""
    parameters: tuple[str, ...]  # first names, in registration order
    aliases: tuple[tuple[str, str], ...]  # (slot, parameter) of every slot to swap, tied ones included
    is_block: bool  # one of a repeated family; recomputation applies to these
    replicated: bool = False  # averaged over the ranks, not sharded: always full

    @property
    def title(self) -> str:
        """The name as messages and reports show it."""
        return self.name or "root"


@dataclass(frozen=True)
class Opening:
    """Modules that open one unit's window, before parameters are dealt out."""

    modules: tuple[str, ...]
    is_block: bool


def plan_units(
    model: nn.Module,
    units: Literal["auto"] | Sequence[UnitItem] = "auto",
    *,
    ignore: Sequence[str] = (),
    replicate: Sequence[str] = (),
    entry_points: Sequence[str] = (),
) -> tuple[UnitPlan, ...]:
    """Deal the parameters of `model` out to units.

    Args:
        model: any module, on any device; nothing of it is changed.
        units: "auto", or a list of module classes, names, patterns (fnmatch; of nested matches the outermost), modules,
            and lists of these (one unit each).
        ignore: names or patterns of parameters or modules that stay out; they must not require gradients.
        replicate: names or patterns of parameters or modules that are averaged but not sharded.
        entry_points: further methods of the model that run compute, as given to `lamina.shard`.

    Returns:
        The plans in registration order. The rest of the model, named "", comes first if anything is left for it;
        the replicated parameters, if any, come last as one plan with `replicated=True`.

    Raises:
        UnitError: a word that matches nothing, a unit without parameters, a module in two units, an ignored
            parameter that needs gradients, a model without parameters.
    """
    graph = ModuleGraph.of(model)
    if not graph.parameters:
        raise UnitError(f"{type(model).__name__} has no parameters; there is nothing to shard{_unseen_in(model)}")
    ignored = _select_parameters(graph, ignore, "ignore")
    replicated = _select_parameters(graph, replicate, "replicate") - ignored
    for name in graph.parameters:
        if name in ignored and graph.parameters[name].requires_grad:
            raise UnitError(
                f"`{name}` is in ignore= and requires gradients, which nothing would average; "
                f"use replicate=[{name!r}], or call requires_grad_(False) on it"
            )
    dealt = [name for name in graph.parameters if name not in ignored and name not in replicated]
    if isinstance(units, str):
        if units != "auto":
            raise UnitError(f"units={units!r}: got a string, wanted 'auto' or a list; type units=[{units!r}]")
        choices = choose_units(graph, dealt, entry_points)
        groups = join_small(graph, choices, {name: graph.parameters[name].numel() for name in dealt})
        openings = [Opening(tuple(c.module for c in group), group[0].is_block) for group in groups]
    else:
        if isinstance(units, (type, bytes)) or not isinstance(units, Iterable):
            raise UnitError(
                f"units={units!r}: got a {type(units).__name__}, wanted 'auto' or a list; type for example "
                "units=['layers.*'], or units=[Block]"
            )
        openings = _explicit(graph, units, set(dealt))
        add_source_edges(graph, inside_units(graph, openings), entry_points)
    return deal(graph, openings, dealt, replicated)


def check_units(model: nn.Module, plans: Sequence[UnitPlan], ignore: Sequence[str] = ()) -> None:
    """Assert notes 1 and 2 of this module."""
    graph = ModuleGraph.of(model)
    ignored = _select_parameters(graph, ignore, "ignore")
    owned = [name for plan in plans for name in plan.parameters]
    assert len(owned) == len(set(owned)), "a parameter in two units"
    assert set(owned) == set(graph.parameters) - ignored, "a parameter in no unit"
    aliases = [alias for plan in plans for alias in plan.aliases]
    assert sorted(aliases) == sorted(item for item in graph.slots.items() if item[1] not in ignored)
    for plan in plans:
        assert {owner for _, owner in plan.aliases} == set(plan.parameters)
        assert plan.replicated or all(has_forward(graph.modules[name]) or name == "" for name in plan.modules)


def deal(
    graph: ModuleGraph, openings: Sequence[Opening], dealt: Sequence[str], replicated: Set[str] = frozenset()
) -> tuple[UnitPlan, ...]:
    """Give every parameter to the innermost unit that is open at all its uses."""
    order = {name: index for index, name in enumerate(graph.modules)}
    ordered = sorted(openings, key=lambda opening: order[opening.modules[0]])
    if not any("" in opening.modules for opening in ordered):
        ordered.insert(0, Opening(("",), False))
    opens = {name: number for number, opening in enumerate(ordered) for name in opening.modules}
    owner_of = graph.owners(opens)
    plans = []
    for number, opening in enumerate(ordered):
        mine = tuple(name for name in dealt if owner_of[name] == number)
        if mine:
            name = name_of(opening.modules)
            plans.append(UnitPlan(name, opening.modules, mine, aliases_of(graph, mine), opening.is_block))
    if replicated:
        mine = tuple(name for name in graph.parameters if name in replicated)
        plans.append(UnitPlan("replicated", ("",), mine, aliases_of(graph, mine), False, replicated=True))
    return tuple(plans)


def name_of(modules: Sequence[str]) -> str:
    """What a unit of these modules is called: "norm+head", and neighbours by number as "layers.0-3"."""
    rows: list[list[str]] = []
    for module in modules:
        if rows and _NUMBER.sub(lambda found: str(int(found[0]) + 1), rows[-1][-1]) == module != rows[-1][-1]:
            rows[-1].append(module)
        else:
            rows.append([module])
    return "+".join(row[0] if len(row) == 1 else f"{row[0]}-{row[-1].rpartition('.')[2]}" for row in rows)


def aliases_of(graph: ModuleGraph, parameters: Iterable[str]) -> tuple[tuple[str, str], ...]:
    mine = set(parameters)
    return tuple((slot, owner) for slot, owner in graph.slots.items() if owner in mine)


def _unseen_in(model: nn.Module) -> str:
    """Modules in a plain list or dict, which torch does not look into."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            if not name.startswith("_") and any(isinstance(each, nn.Module) for each in inside):
                kind = "ModuleDict" if isinstance(value, dict) else "ModuleList"
                where = f"{path}.{name}" if path else name
                return (
                    f". Its `{where}` is a plain {type(value).__name__}, into which torch does not look: make it an "
                    f"nn.{kind}, or shard each module in it"
                )
    return ""


def _select_parameters(graph: ModuleGraph, words: Sequence[str], argument: str) -> set[str]:
    """First names of the parameters that the words name, by themselves or through a module."""
    if isinstance(words, str):
        raise UnitError(f"{argument}={words!r}: got a string, wanted a list; type {argument}=[{words!r}]")
    chosen: set[str] = set()
    for word in words:
        found = {owner for slot, owner in graph.slots.items() if fnmatchcase(slot, word)}
        modules = [name for name in graph.modules if name and fnmatchcase(name, word)]
        for name in modules:
            found.update(graph.inside(name))
        if not found and not modules:
            raise UnitError(f"{argument}={word!r} matches no parameter and no module{_nearest(word, graph)}")
        chosen |= found
    return chosen


def _nearest(word: str, graph: ModuleGraph) -> str:
    names = [*graph.modules, *graph.slots]
    close = difflib.get_close_matches(word.replace("*", "0"), names, n=3, cutoff=0.4)
    return f"; nearest names: {', '.join(repr(name) for name in close)}" if close else ""


def _explicit(graph: ModuleGraph, items: Sequence[UnitItem], dealt: set[str]) -> list[Opening]:
    """Openings from the user's list, each item checked."""
    counts = Counter(type(module) for module in graph.modules.values())
    openings: list[Opening] = []
    taken: dict[str, Any] = {}
    for item in items:
        if isinstance(item, (list, tuple)):
            if not item:
                raise UnitError("units: an empty list stands in it; remove it")
            groups = [tuple(dict.fromkeys(name for part in item for name in _matches(graph, part, dealt)))]
        else:
            groups = [(name,) for name in _matches(graph, item, dealt)]
        for group in groups:
            for name in group:
                if name in taken:
                    raise UnitError(
                        f"module `{name}` is in two units, by {_show(taken[name])} and by {_show(item)}; "
                        "remove one of them from units="
                    )
                taken[name] = item
            openings.append(Opening(group, all(counts[type(graph.modules[name])] > 1 for name in group)))
    _refuse_emptied(graph, openings, dealt)
    return openings


def _matches(graph: ModuleGraph, item: UnitItem, dealt: set[str]) -> list[str]:
    """Modules that one item names, in registration order; never empty."""
    if isinstance(item, nn.Module):
        if id(item) not in graph.names:
            raise UnitError(f"units: a {type(item).__name__} was given that is not a module of the model")
        return [_opener(graph, graph.names[id(item)], dealt)]
    if isinstance(item, str):
        exact = [name for name in graph.modules if name == item]
        if exact:
            return [_opener(graph, item, dealt)]
        found = [name for name in graph.modules if name and fnmatchcase(name, item)]
    elif isinstance(item, type):
        found = [name for name, module in graph.modules.items() if isinstance(module, item)]
    else:
        raise UnitError(
            f"units: got {item!r} of type {type(item).__name__}, wanted a module class, a name or pattern, a module, "
            "or a list of these; type for example units=['layers.*']"
        )
    usable = [name for name in found if can_open(graph, name) and dealt.intersection(graph.inside(name))]
    if isinstance(item, str):
        usable = [name for name in usable if not any(within(name, other) for other in usable)]
    if usable:
        return usable
    if found:
        raise UnitError(
            f"units: {_show(item)} matches only modules that cannot form a unit ({', '.join(found[:3])}): "
            "a unit needs parameters and a forward of its own"
        )
    raise UnitError(f"units: {_show(item)} matches no module{_nearest(_show(item).strip(chr(39)), graph)}")


def _opener(graph: ModuleGraph, name: str, dealt: set[str]) -> str:
    """The name of a module that was named outright, or why it cannot open a unit."""
    module = graph.modules[name]
    shown = name or "the model itself"
    if name and not has_forward(module):
        raise UnitError(
            f"units: `{shown}` is a {type(module).__name__} without a forward, so nothing would open its unit; "
            f"name what it holds: units=['{name}.*']"
        )
    if name and not can_open(graph, name):
        raise UnitError(
            f"units: `{shown}` lies inside a module that reads its weights without calling it; name that module instead"
        )
    if not dealt.intersection(graph.inside(name)):
        raise UnitError(f"units: `{shown}` has no parameters to shard; remove it from units=")
    return name


def can_open(graph: ModuleGraph, name: str) -> bool:
    """Whether the module's forward runs whenever its weights are used."""
    above = name.split(".")[:-1]
    inside_atom = any(is_atom(graph.modules[".".join(above[:end])]) for end in range(1, len(above) + 1))
    return has_forward(graph.modules[name]) and not inside_atom and not (name and is_atom(graph.modules[""]))


def inside_units(graph: ModuleGraph, openings: Sequence[Opening]) -> set[str]:
    """Modules strictly inside a unit that holds no other unit: what they read is open by then."""
    opening_names = [name for opening in openings for name in opening.modules]
    innermost = {name for name in opening_names if not any(within(other, name) for other in opening_names)}
    above = {name: [".".join(name.split(".")[:end]) for end in range(name.count(".") + 1)] for name in graph.modules}
    return {name for name in graph.modules if name and innermost.intersection(above[name])}


def _refuse_emptied(graph: ModuleGraph, openings: Sequence[Opening], dealt: set[str]) -> None:
    """A unit all of whose parameters lie in other units, nested in it, is a mistake in the list."""
    all_names = [name for opening in openings for name in opening.modules]
    for opening in openings:
        rest = {parameter for name in opening.modules if name for parameter in graph.inside(name)} & dealt
        nested = [
            name for name in all_names if name not in opening.modules and any(within(name, m) for m in opening.modules)
        ]
        if not nested or "" in opening.modules:
            continue
        if not rest.difference(*(graph.inside(name) for name in nested)):
            raise UnitError(
                f"unit `{'+'.join(opening.modules)}` is left without parameters: all of them lie in the units "
                f"{', '.join(repr(name) for name in nested[:3])} inside it; remove one or the other from units="
            )


def _show(item: UnitItem) -> str:
    if isinstance(item, type):
        return item.__name__
    return f"{type(item).__name__} instance" if isinstance(item, nn.Module) else repr(item)
