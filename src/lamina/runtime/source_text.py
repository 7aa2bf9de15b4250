"""The syntax tree of a Python function, found through its code object.

`inspect.getsource` searches a file again for every class and trips over decorators; here every file is parsed once and
its functions are found by the line at which their code begins. Functions without a file (typed at a prompt, compiled
extensions) have no tree, and the caller has to be careful instead.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, eq=False)
class Binding:
    """`names` become `value`, or its elements."""

    names: tuple[str, ...]
    value: ast.expr
    elements: bool


@dataclass(frozen=True, eq=False)
class Body:
    """One function, ready to be walked."""

    arguments: tuple[str, ...]
    nodes: tuple[ast.AST, ...]
    parents: dict[ast.AST, ast.AST]
    bindings: tuple[Binding, ...]
    returns: tuple[ast.expr, ...]


def function_body(function: FunctionType) -> Body | None:
    """The parsed function, or None where no source is known."""
    return _body(function.__code__)


@cache
def _body(code: CodeType) -> Body | None:
    node = _functions_of(code.co_filename).get((code.co_firstlineno, code.co_name))
    if node is None:
        return None
    nodes = tuple(inner for statement in node.body for inner in ast.walk(statement))
    everything = {child: parent for parent in (node, *nodes) for child in ast.iter_child_nodes(parent)}
    returns = tuple(inner.value for inner in nodes if isinstance(inner, ast.Return) and inner.value is not None)
    arguments = tuple(argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
    return Body(arguments, nodes, everything, tuple(_bindings(nodes)), returns)


@cache
def _functions_of(filename: str) -> dict[tuple[int, str], FunctionNode]:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[tuple[int, str], FunctionNode] = {}
    for node in ast.walk(tree):
        if isinstance(node, FunctionNode):
            first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[first_line, node.name] = node
    return found


def _bindings(nodes: tuple[ast.AST, ...]) -> list[Binding]:
    found = []
    for node in nodes:
        if isinstance(node, ast.Assign):
            found.append(Binding(_names(*node.targets), node.value, False))
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            found.append(Binding(_names(node.target), node.value, False))
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            found.append(Binding(_names(node.target), node.iter, True))
    return [binding for binding in found if binding.names]


def _names(*targets: ast.expr) -> tuple[str, ...]:
    """Plain names that are assigned; attributes and items are left out."""
    names: list[str] = []
    for target in targets:
        if isinstance(target, ast.Name):
            names.append(target.id)
        elif isinstance(target, ast.Tuple | ast.List):
            names.extend(_names(*target.elts))
        elif isinstance(target, ast.Starred):
            names.extend(_names(target.value))
    return tuple(names)


def plain_function(value: Any) -> FunctionType | None:
    """The Python function behind a method, a decorated or a partial one; None for anything else."""
    value = getattr(value, "__func__", value)
    if not callable(value):
        return None
    value = inspect.unwrap(value)
    return value if isinstance(value, FunctionType) else None


def static_value(expression: ast.expr, function: FunctionType) -> Any:
    """What a dotted name means at module level, in the closure or among the builtins; None where that is unknown."""
    if isinstance(expression, ast.Name):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name == expression.id:
                try:
                    return cell.cell_contents
                except ValueError:  # not filled yet
                    return None
        return function.__globals__.get(expression.id, getattr(builtins, expression.id, None))
    if isinstance(expression, ast.Attribute):
        owner = static_value(expression.value, function)
        return getattr(owner, expression.attr, None) if isinstance(owner, ModuleType) else None
    return None
