"""Weights that are used, and modules that are called, where registration does not show it: found in the source.

A parameter is full only while its unit's window is open, and a forward opens that window; a parent that says
`F.linear(x, self.emb.weight)` opens none. Others leave this to the user, who finds out from an error in step 1.

Here the source of every forward outside blocks is followed, methods and plain helper functions included, with `self`
standing for the real module, so that `self.decoder.embed.weight` is looked up rather than guessed. What is found
becomes edges of the `ModuleGraph`. What cannot be followed (no source, a module handed to foreign code, `.weight` of an
unknown object) is returned as a vague read: the leaves it may concern get no unit of their own. That costs a little
memory; the opposite mistake would cost an error.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType

from torch import nn

from lamina.runtime.module_graph import CONTAINERS, ModuleGraph, qualified
from lamina.runtime.source_text import Body, function_body, plain_function, static_value

Scope = dict[str, list[nn.Module]]  # local name -> modules it may stand for

# Reading these of a parameter needs no values: they are right on a sharded parameter too.
_METADATA = {"dtype", "device", "shape", "size", "ndim", "dim", "numel", "requires_grad", "is_cuda", "is_meta"}
_CHILDREN = {"children", "named_children", "values", "items", "modules", "named_modules"}
_PASS_ON = {"enumerate", "zip", "reversed", "list", "tuple", "iter", "next", "sorted"}
_ACCESSORS = {"get_input_embeddings", "get_output_embeddings", "get_encoder", "get_decoder"}
_DEEPEST = 12  # calls followed from one forward


@dataclass(frozen=True)
class VagueRead:
    """`reader` may read a parameter called `attribute` ("*": any) of some leaf inside it."""

    reader: str
    attribute: str


def add_source_edges(
    graph: ModuleGraph, inside_blocks: set[str], entry_points: Sequence[str] = ()
) -> frozenset[VagueRead]:
    """Add to `graph` what the sources show, and return what they leave open.

    `inside_blocks` are modules strictly inside blocks: nothing opens there, so only those that hold a reference to a
    module elsewhere are read.
    """
    reader = _Reader(graph)
    for name, module in graph.modules.items():
        if name in inside_blocks and not _refers_elsewhere(module):
            continue
        starts = ["forward", *(entry_points if name == "" else ())]
        for start in starts:
            reader.start(name, getattr(module, start, None))
    return frozenset(reader.vague)


def _refers_elsewhere(module: nn.Module) -> bool:
    return any(_held(value) for key, value in vars(module).items() if key != "_modules")


def _held(value: object) -> list[nn.Module]:
    """Modules in an attribute that is not registered: bare, or in a list, tuple or dict."""
    if isinstance(value, nn.Module):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [item for item in value if isinstance(item, nn.Module)] if isinstance(value, list | tuple) else []


@dataclass(eq=False)
class _Reader:
    graph: ModuleGraph
    vague: set[VagueRead] = field(default_factory=set)
    done: set[tuple[object, ...]] = field(default_factory=set)
    depth: int = 0

    def __post_init__(self) -> None:
        self.parameter_names = {slot.rpartition(".")[2] for slot in self.graph.slots}

    def start(self, opener: str, method: object) -> None:
        """Follow one method of a module whose own window is open while it runs."""
        function = plain_function(method)
        if function is None:  # a compiled or patched forward: what the class says is still what runs
            function = plain_function(type(self.graph.modules[opener]).forward)
        if function is not None:
            self.visit(opener, function, {0: [self.graph.modules[opener]]})

    def visit(self, opener: str, function: FunctionType, given: dict[int | str, list[nn.Module]]) -> None:
        """Follow a function whose arguments (by position or name) are known modules."""
        if function.__module__ is not None and function.__module__.split(".")[0] == "torch":
            # torch's own modules call their children, but for the atoms of module_graph; a method of one that somebody
            # else runs (`head.forward(x)`) reads weights with no window open.
            for module in (module for module in given.get(0, []) if self.graph.names.get(id(module)) != opener):
                for inner in module.modules():
                    self.read_all(opener, inner)
            return
        bound = tuple(sorted((str(key), *map(id, modules)) for key, modules in given.items()))
        if (opener, function.__code__, bound) in self.done or self.depth > _DEEPEST:
            return
        self.done.add((opener, function.__code__, bound))
        body = function_body(function)
        if body is None:
            for module in (module for modules in given.values() for module in modules):
                self.escape(opener, module)
            return
        self.depth += 1
        _Walk(self, opener, function, body, _scope(body, given)).run()
        self.depth -= 1

    def call(self, opener: str, module: nn.Module) -> None:
        name = self.graph.names.get(id(module))
        if name is not None and name != opener:
            self.graph.callers[name].add(opener)

    def read(self, opener: str, module: nn.Module, attribute: str) -> None:
        name = self.graph.names.get(id(module))
        if name is not None:
            self.graph.readers[self.graph.slots[qualified(name, attribute)]].add(opener)

    def read_all(self, opener: str, module: nn.Module) -> None:
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                self.read(opener, module, attribute)

    def escape(self, opener: str, module: nn.Module) -> None:
        """The module goes where we cannot follow: it may be called there, and its own weights read."""
        name = self.graph.names.get(id(module))
        if name is None:
            return
        self.call(opener, module)
        self.read_all(opener, module)
        if module._modules:
            self.vague.add(VagueRead(name, "*"))


def _scope(body: Body, given: dict[int | str, list[nn.Module]]) -> Scope:
    scope: Scope = {}
    for key, modules in given.items():
        name = body.arguments[key] if isinstance(key, int) and key < len(body.arguments) else key
        if isinstance(name, str):
            scope[name] = list(modules)
    return scope


@dataclass(eq=False)
class _Walk:
    """One function, walked with what its names stand for."""

    reader: _Reader
    opener: str
    function: FunctionType
    body: Body
    scope: Scope

    def run(self) -> None:
        self.bind()
        for node in self.body.nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                self.attribute(node)
            elif isinstance(node, ast.Call):
                self.call(node)

    def bind(self) -> None:
        """Let local names stand for modules; without regard to order, so a name may stand for several."""
        for _ in range(2):
            for binding in self.body.bindings:
                found = self.elements(binding.value) if binding.elements else self.resolve(binding.value)
                for name in binding.names if found else ():
                    self.scope[name] = _distinct([*self.scope.get(name, []), *found])

    def attribute(self, node: ast.Attribute) -> None:
        modules = self.resolve(node.value)
        if not modules and node.attr in self.reader.parameter_names and not self.only_metadata(node):
            unknown_name = isinstance(node.value, ast.Name) and node.value.id in self.body.arguments
            if unknown_name or isinstance(node.value, ast.Call | ast.Subscript):
                self.reader.vague.add(VagueRead(self.opener, node.attr))
        parent = self.body.parents.get(node)
        called = isinstance(parent, ast.Call) and parent.func is node
        for module in modules:
            if module._parameters.get(node.attr) is not None:
                if not self.only_metadata(node):
                    self.reader.read(self.opener, module, node.attr)
                continue
            if node.attr in module._modules or node.attr in vars(nn.Module):
                continue
            value = inspect.getattr_static(type(module), node.attr, None)
            if isinstance(value, property):
                self.property(module, node, value.fget)
            elif not called and (function := plain_function(value)) is not None:
                self.reader.visit(self.opener, function, {0: [module]})

    def property(self, module: nn.Module, node: ast.Attribute, getter: Callable[..., object] | None) -> None:
        parametrized = module._modules.get("parametrizations")
        family = parametrized._modules.get(node.attr) if parametrized is not None else None
        if family is not None:
            for inner in family.modules() if not self.only_metadata(node) else ():
                self.reader.read_all(self.opener, inner)
        elif (function := plain_function(getter)) is not None:
            self.reader.visit(self.opener, function, {0: [module]})

    def only_metadata(self, node: ast.expr) -> bool:
        """Whether the surrounding expression looks at the parameter's type or presence, not at its values."""
        parent = self.body.parents.get(node)
        if isinstance(parent, ast.Attribute):
            return parent.attr in _METADATA
        if isinstance(parent, ast.Compare):
            return all(isinstance(operator, ast.Is | ast.IsNot) for operator in parent.ops)
        return isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id == "isinstance"

    def call(self, node: ast.Call) -> None:
        for module in self.resolve(node.func):
            self.reader.call(self.opener, module)
        given: dict[int | str, list[nn.Module]] = {}
        for position, argument in enumerate(node.args):
            given[position] = self.resolve(argument.value if isinstance(argument, ast.Starred) else argument)
        for keyword in node.keywords:
            given[keyword.arg or "**"] = self.resolve(keyword.value)
        given = {key: modules for key, modules in given.items() if modules}
        if isinstance(node.func, ast.Attribute) and (owners := self.resolve(node.func.value)):
            if node.func.attr == "__call__":
                for owner in owners:
                    self.reader.call(self.opener, owner)
            if node.func.attr == "__call__" or self.method_calls(node.func.attr, owners, given):
                return
        self.plain_call(node, given)

    def method_calls(self, name: str, owners: list[nn.Module], given: dict[int | str, list[nn.Module]]) -> bool:
        """Follow `owner.name(...)`; False if the owners have no such method and the arguments escape."""
        shifted = {key + 1 if isinstance(key, int) else key: modules for key, modules in given.items()}
        found = False
        for owner in owners:
            value = inspect.getattr_static(type(owner), name, None)
            if name in vars(nn.Module) and getattr(nn.Module, name) is getattr(type(owner), name, None):
                found = True
            elif isinstance(value, FunctionType) and (function := plain_function(value)) is not None:
                self.reader.visit(self.opener, function, {0: [owner], **shifted})
                found = True
        return found

    def plain_call(self, node: ast.Call, given: dict[int | str, list[nn.Module]]) -> None:
        if not given:
            return
        target = static_value(node.func, self.function)
        function = plain_function(target) if not isinstance(target, type) else None
        foreign = function is None or (function.__module__ or "").split(".")[0] == "torch"
        if isinstance(target, BuiltinFunctionType) or (isinstance(target, type) and target.__module__ == "builtins"):
            return
        if not foreign and function is not None:
            self.reader.visit(self.opener, function, given)
            return
        runs_it = "checkpoint" in ast.unparse(node.func) or (function is not None and foreign)
        for module in (module for modules in given.values() for module in modules):
            if runs_it:
                self.reader.call(self.opener, module)
            else:
                self.reader.escape(self.opener, module)

    def resolve(self, node: ast.expr | None) -> list[nn.Module]:
        """Modules that an expression may stand for."""
        match node:
            case ast.Name():
                return self.scope.get(node.id, [])
            case ast.Attribute():
                return _distinct(held for module in self.resolve(node.value) for held in _get(module, node.attr))
            case ast.Subscript(slice=ast.Slice()):
                return self.resolve(node.value)
            case ast.Subscript():
                return _distinct(item for module in self.resolve(node.value) for item in _items(module, node.slice))
            case ast.IfExp():
                return _distinct([*self.resolve(node.body), *self.resolve(node.orelse)])
            case ast.BoolOp():
                return _distinct(module for value in node.values for module in self.resolve(value))
            case ast.Tuple() | ast.List() | ast.Set():
                return _distinct(module for value in node.elts for module in self.resolve(value))
            case ast.Dict():
                return _distinct(module for value in node.values for module in self.resolve(value))
            case ast.Call():
                return self.returned(node)
        return []

    def returned(self, node: ast.Call) -> list[nn.Module]:
        """Modules that a call may return: getattr, list(...), accessors, and own methods that return modules."""
        if isinstance(node.func, ast.Name):
            if node.func.id == "getattr" and len(node.args) >= 2:
                owners, key = self.resolve(node.args[0]), node.args[1]
                if isinstance(key, ast.Constant):
                    return _distinct(held for owner in owners for held in _get(owner, str(key.value)))
                return _distinct(child for owner in owners for child in owner.children())
            if node.func.id in _PASS_ON:
                return _distinct(module for argument in node.args for module in self.resolve(argument))
        if not isinstance(node.func, ast.Attribute) or node.func.attr in vars(nn.Module):
            return []
        found: list[nn.Module] = []
        for owner in self.resolve(node.func.value):
            found.extend(self.returned_by(owner, node.func.attr, bool(node.args or node.keywords)))
        return _distinct(found)

    def returned_by(self, owner: nn.Module, name: str, has_arguments: bool) -> list[nn.Module]:
        if name in _ACCESSORS and not has_arguments:  # Hugging Face looks these up by strings in its configuration
            try:
                result = getattr(owner, name)()
            except (AttributeError, NotImplementedError, TypeError):
                return []
            return [result] if isinstance(result, nn.Module) else []
        function = plain_function(inspect.getattr_static(type(owner), name, None))
        body = function_body(function) if function is not None else None
        if function is None or body is None or not body.returns or self.reader.depth > _DEEPEST:
            return []
        walk = _Walk(self.reader, self.opener, function, body, _scope(body, {0: [owner]}))
        self.reader.depth += 1
        walk.bind()
        found = [module for value in body.returns for module in walk.resolve(value)]
        self.reader.depth -= 1
        return found

    def elements(self, node: ast.expr) -> list[nn.Module]:
        """Modules that a loop over an expression may yield."""
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return self.resolve(node)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in _PASS_ON:
                return _distinct(module for argument in node.args for module in self.elements(argument))
            if isinstance(node.func, ast.Attribute) and node.func.attr in _CHILDREN:
                return _distinct(child for owner in self.resolve(node.func.value) for child in owner.children())
        found: list[nn.Module] = []
        for module in self.resolve(node):
            iterable = isinstance(module, CONTAINERS) or hasattr(type(module), "__iter__")
            found.extend(module.children() if iterable else [module])
            if isinstance(node, ast.Name):  # a name may also stand for a list of modules
                found.append(module)
        return _distinct(found)


def _get(module: nn.Module, attribute: str) -> list[nn.Module]:
    child = module._modules.get(attribute)
    return [child] if child is not None else _held(vars(module).get(attribute))


def _items(module: nn.Module, key: ast.expr) -> list[nn.Module]:
    """What `module[key]` may be: one element for a constant key, else any."""
    if isinstance(key, ast.Constant) and str(key.value) in module._modules:
        child = module._modules[str(key.value)]
        return [child] if child is not None else []
    if isinstance(module, CONTAINERS) or hasattr(type(module), "__getitem__"):
        return list(module.children())
    return [module]  # an item of a plain list of modules


def _distinct(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list({id(module): module for module in modules}.values())
