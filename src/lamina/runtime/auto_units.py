"""The choice of units for a model nobody described to us.

Wrapping policies elsewhere need a class name or a size threshold from the user. The structure says more: a model is
repeated blocks, a few other parts of about that size (embedding, output), and a small rest.

1. Blocks: what ModuleLists, ModuleDicts, Sequentials and numbered attributes (layer1, layer2) hold, outermost first.
   Containers in containers are looked through (the stages of a ResNet); experts inside a block stay in it. A family
   that is tiny beside the largest block is left alone.
2. Other parts with at least a quarter of the largest block's elements: whole modules up to its size (the middle of a
   UNet, a projector), else their leaves. Smaller ones gain nothing: the largest unit sets the memory, the number of
   units the time lost on latency.
3. The rest belongs to the model itself and is gathered for the whole forward.

Which unit a parameter lands in is not decided here but by `ModuleGraph.owners`; a chosen module that turns out to own
too little (its weight is tied, or read by its parent) is dropped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from lamina.runtime.module_graph import CONTAINERS, ModuleGraph, has_forward, is_atom, within
from lamina.runtime.weight_reads import VagueRead, add_source_edges

ENOUGH = 4  # a part needs 1/4 of the largest block, a family as a whole too
FEW_BLOCKS = 4  # families this short may be models side by side (two towers, three stages) ...
DEEPER = 3  # ... if what is inside them repeats this many times as often
SHORT_FAMILY = 2  # a part that holds no longer family than this may be one unit
_NUMBERED = re.compile(r"(.*?)_?(\d+)$")


@dataclass(frozen=True)
class Choice:
    """One module that opens a unit."""

    module: str
    is_block: bool


@dataclass
class _Parts:
    """What a walk over the model finds outside blocks, by qualified name."""

    families: list[tuple[str, ...]] = field(default_factory=list)
    composites: list[str] = field(default_factory=list)  # outermost first
    leaves: list[str] = field(default_factory=list)


def choose_units(graph: ModuleGraph, dealt: Sequence[str], entry_points: Sequence[str]) -> list[Choice]:
    """Modules that should open a unit each. Adds to `graph` the edges that the sources show."""
    if is_atom(graph.modules[""]):
        return []
    outline = _Outline(graph, dealt)
    parts = outline.parts()
    members = {member for family in parts.families for member in family}
    inside = {name for name in graph.modules if any(above in members for above in _above(name))}
    vague = add_source_edges(graph, inside, entry_points)
    while True:
        chosen = _by_size(outline, parts, vague)
        kept = _owning(outline, chosen)
        # A Sequential whose elements the parent runs by hand opens nothing: look through it and choose again.
        bypassed = {
            choice.module
            for choice in chosen
            if choice not in kept and isinstance(graph.modules[choice.module], nn.Sequential)
        }
        if not bypassed - outline.transparent:
            return kept
        outline.transparent |= bypassed
        parts = outline.parts()


def _by_size(outline: _Outline, parts: _Parts, vague: frozenset[VagueRead]) -> list[Choice]:
    """The parts that are neither tiny nor everything."""
    size = outline.size
    largest_block = max((size[name] for family in parts.families for name in family), default=0)
    in_blocks = sum(size[name] for family in parts.families for name in family)
    largest_leaf = max((size[name] for name in parts.leaves), default=0)
    # Where blocks are a detail of the model (three adapters beside huge matrices) they are no measure for it.
    scale = largest_block if ENOUGH * in_blocks >= size[""] else max(largest_block, largest_leaf)

    families = [family for family in parts.families if ENOUGH * sum(size[name] for name in family) >= scale]
    wholes: list[str] = []
    for name in parts.composites:
        held = [family for family in families if any(within(member, name) for member in family)]
        if (
            scale <= ENOUGH * size[name] <= ENOUGH * scale
            and largest_block
            and all(len(family) <= SHORT_FAMILY and all(within(m, name) for m in family) for family in held)
            and not any(within(name, whole) for whole in wholes)
            and not outline.vaguely_read(name, vague)
        ):
            wholes.append(name)
    choices = [Choice(name, any(within(m, name) for f in families for m in f)) for name in wholes]
    choices += [Choice(name, True) for family in families for name in family]
    choices += [
        Choice(name, False)
        for name in parts.leaves
        if ENOUGH * size[name] >= scale and not outline.vaguely_read(name, vague)
    ]
    return [choice for choice in choices if not any(within(choice.module, whole) for whole in wholes)]


def _owning(outline: _Outline, chosen: list[Choice]) -> list[Choice]:
    """The chosen modules that own enough once ties and direct reads have taken their part."""
    opens = {"": 0} | {choice.module: number for number, choice in enumerate(chosen, 1)}
    owned: Counter[str] = Counter()
    names = list(opens)
    for parameter, number in outline.graph.owners(opens).items():
        owned[names[number]] += outline.numel.get(parameter, 0)
    largest = max((owned[choice.module] for choice in chosen), default=0)
    largest_block = max((owned[choice.module] for choice in chosen if choice.is_block), default=largest)
    return [
        choice
        for choice in chosen
        if owned[choice.module] > 0 and (choice.is_block or ENOUGH * owned[choice.module] >= largest_block)
    ]


class _Outline:
    """The model's structure with sizes: what is a block, a part, a leaf."""

    def __init__(self, graph: ModuleGraph, dealt: Sequence[str]) -> None:
        self.graph = graph
        self.numel = {name: graph.parameters[name].numel() for name in dealt}
        self.size = {name: sum(self.numel.get(p, 0) for p in graph.inside(name)) for name in graph.modules}
        self.transparent: set[str] = set()  # Sequentials whose forward does not run

    def parts(self) -> _Parts:
        parts = _Parts()
        self._walk("", parts, set())
        # A module that is registered twice (PEFT's prompts hold the embedding beside the model) is met twice.
        parts.composites, parts.leaves = list(dict.fromkeys(parts.composites)), list(dict.fromkeys(parts.leaves))
        self._add_lone_blocks(parts)
        return parts

    def _add_lone_blocks(self, parts: _Parts) -> None:
        """A module of the class of the blocks is one as well, wherever it stands (the middle of a UNet)."""
        kinds = {type(self.graph.modules[member]) for family in parts.families for member in family}
        kinds -= set(CONTAINERS)
        for name in list(parts.composites):
            if type(self.graph.modules[name]) in kinds and name in parts.composites:
                parts.families = [f for f in parts.families if not any(within(member, name) for member in f)]
                parts.families.append((name,))
                parts.composites = [c for c in parts.composites if c != name and not within(c, name)]
                parts.leaves = [leaf for leaf in parts.leaves if not within(leaf, name)]

    def vaguely_read(self, name: str, vague: frozenset[VagueRead]) -> bool:
        """Whether something above the module may read a weight in it without calling its owner."""
        held = {slot.rpartition(".")[2] for slot in self.graph.slots if slot.startswith(name + ".")}
        return any(
            (within(name, read.reader) or (name == read.reader and not self._children(name)))
            and (read.attribute == "*" or read.attribute in held)
            for read in vague
        )

    def _walk(self, name: str, parts: _Parts, taken: set[str]) -> None:
        """Collect what lies below a module that is not itself a block."""
        for family in self._families(name):
            if not self._side_by_side(family) and not taken.intersection(family):
                parts.families.append(family)
                taken.update(family)
        for child in self._children(name):
            module = self.graph.modules[child]
            if child in taken:
                continue
            if self._children(child) and not is_atom(module):
                if has_forward(module) and child not in self.transparent:
                    parts.composites.append(child)
                self._walk(child, parts, taken)
            elif has_forward(module):
                parts.leaves.append(child)

    def _families(self, name: str) -> list[tuple[str, ...]]:
        """Families just below a module: block-like members only, one class at least twice."""
        module = self.graph.modules[name]
        groups: list[list[str]] = []
        if isinstance(module, CONTAINERS):
            groups = [self._children(name)]
        else:
            numbered: dict[tuple[str, type], list[str]] = {}
            for child in self._children(name):
                if match := _NUMBERED.match(child.rpartition(".")[2]):
                    numbered.setdefault((match[1], type(self.graph.modules[child])), []).append(child)
            groups = list(numbered.values())
        families = []
        for group in groups:
            members = [m for child in group for m in self._looked_through(child) if not self._is_plain(m)]
            kinds = Counter(type(self.graph.modules[member]) for member in members)
            only_layer = isinstance(module, nn.ModuleList) and len(members) == 1
            if members and (only_layer or max(kinds.values()) > 1):
                # A lone model among blocks (a text tower beside a vision tower) is not a block, but has some.
                families.append(tuple(m for m in members if only_layer or not self._is_lone_model(m, kinds)))
        return families

    def _is_lone_model(self, name: str, kinds: Counter[type]) -> bool:
        return kinds[type(self.graph.modules[name])] == 1 and self._longest_family(name) > SHORT_FAMILY

    def _looked_through(self, name: str) -> list[str]:
        """The module, or its children if it is only a box around blocks."""
        module = self.graph.modules[name]
        is_box = not has_forward(module) or name in self.transparent
        is_stage = isinstance(module, nn.Sequential) and any(not self._is_plain(c) for c in self._children(name))
        if is_box or is_stage:
            return [member for child in self._children(name) for member in self._looked_through(child)]
        return [name]

    def _side_by_side(self, family: tuple[str, ...]) -> bool:
        """Whether the members are whole models (two towers, uneven stages) whose own blocks make the better units."""
        if len(family) > FEW_BLOCKS:
            return False
        longest = max((self._longest_family(member) for member in family), default=0)
        uneven = len(family) > 1 and 2 * max(self.size[member] for member in family) > self.size[""]
        return longest >= DEEPER * len(family) or (uneven and longest > 1)

    def _longest_family(self, name: str) -> int:
        if "expert" in name.lower():
            return 0
        here = max((len(family) for family in self._families(name)), default=0)
        below = [self._longest_family(child) for child in self._children(name) if not self._is_plain(child)]
        return max([here, *below])

    def _is_plain(self, name: str) -> bool:
        """A single layer of torch (Linear, Embedding, attention): recomputing it alone saves nothing, so no block."""
        module = self.graph.modules[name]
        if is_atom(module):
            return not isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase))
        return not self._children(name) and type(module).__module__.startswith("torch.nn.")

    def _children(self, name: str) -> list[str]:
        """Direct children with parameters to deal out, each under its first name."""
        module = self.graph.modules[name]
        names = [self.graph.names[id(child)] for child in module._modules.values() if child is not None]
        return [child for child in dict.fromkeys(names) if self.size[child] > 0 and child != name]


def _above(name: str) -> list[str]:
    """Qualified names of the modules strictly above, without the model."""
    pieces = name.split(".")
    return [".".join(pieces[:end]) for end in range(1, len(pieces))]
