"""Imports point down, plan modules stay pure, and lamina needs torch and numpy only.

Read from the source, not from `sys.modules`: torch itself imports `torch.distributed` and `torch.cuda`.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
# From the bottom up; a part may import the parts below it and itself.
LAYERS = (
    {"errors"},
    {"core"},
    {"transport"},
    {"runtime"},
    {"launch"},
    {"optim", "checkpoint", "planner"},
    {"trace"},
    {"train"},
    {"cli"},
    {"__main__"},
    {""},  # lamina/__init__.py
)
LAUNCH = {"launch", "launched", "ship"}  # one part in three files
PURE = ("core.layout", "core.arena", "core.program", "core.strategy", "runtime.units", "planner.memory", "planner.time")
IMPURE = ("torch.distributed", "torch.cuda")


def part_of(module: str) -> str:
    part = module.split(".")[1] if "." in module else ""
    return "launch" if part in LAUNCH else part


def height(part: str) -> int:
    for index, layer in enumerate(LAYERS):
        if part in layer:
            return index
    raise AssertionError(f"lamina.{part} has no place in LAYERS of {Path(__file__).name}: give it one")


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def imported(module: str, nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Full names of what is imported; `from a import b` gives `a.b`, which may be a module or a name in one."""
    is_package = MODULES[module].name == "__init__.py"
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")
            above = above[: len(above) - node.level + is_package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def module_of(name: str) -> str | None:
    """The lamina module that an imported name stands for or lies in."""
    while name.startswith("lamina"):
        if name in MODULES:
            return name
        name = name.rpartition(".")[0]
    return None


def at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements that run when the module is imported: not function bodies, not `if TYPE_CHECKING:`."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo.extend(node.orelse)
            continue
        yield node
        todo.extend(ast.iter_child_nodes(node))


def lamina_imports(module: str, *, everywhere: bool) -> set[str]:
    nodes = ast.walk(tree_of(module)) if everywhere else at_import(tree_of(module))
    found = {module_of(name) for name in imported(module, nodes)}
    return {name for name in found if name is not None and name != module}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    own = part_of(module)
    for other in lamina_imports(module, everywhere=True):
        part = part_of(other)
        assert part == own or height(part) < height(own), f"{module} imports {other}, which is not below it"


def test_no_cycles() -> None:
    graph = {module: lamina_imports(module, everywhere=False) for module in MODULES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"modules that import each other: {' -> '.join(reversed(error.args[1]))}")


def closure(module: str) -> set[str]:
    seen, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo.extend(lamina_imports(name, everywhere=True) - {"lamina"})
    return seen


@pytest.mark.parametrize("plan", [f"lamina.{name}" for name in PURE if f"lamina.{name}" in MODULES])
def test_plan_modules_are_pure(plan: str) -> None:
    """Neither they nor what they import name `torch.distributed` or `torch.cuda`, by import or by attribute."""
    for module in closure(plan):
        names = list(imported(module, ast.walk(tree_of(module))))
        names += [ast.unparse(node) for node in ast.walk(tree_of(module)) if isinstance(node, ast.Attribute)]
        bad = {name for name in names if name.startswith(IMPURE)}
        assert not bad, f"{plan} is a plan, but {module} uses {sorted(bad)}"


@pytest.mark.parametrize("module", [name for name in MODULES if part_of(name) != "train"])
def test_only_torch_and_numpy_are_needed(module: str) -> None:
    allowed = {"torch", "numpy", "lamina", *sys.stdlib_module_names}
    if module in (
        "lamina.runtime.piece_kernel",
        "lamina.runtime.summing_kernel",
        "lamina.optim.adamw_kernel",
    ):  # imported on a GPU only, where torch brings Triton along
        allowed.add("triton")
    if module == "lamina.checkpoint.checksums":  # which goes on without: test_checksums.py
        allowed.add("isal")
    others = {name.split(".")[0] for name in imported(module, at_import(tree_of(module)))} - allowed
    assert not others, f"{module} needs {sorted(others)}"


def test_the_reader_of_imports() -> None:
    """The rules above are only as good as what they read."""
    tree = ast.parse("import a.b\nfrom .errors import X\nfrom ..core import layout\ndef f():\n    import late\n")
    names = set(imported("lamina.runtime.units", ast.walk(tree)))
    assert names == {"a.b", "lamina.runtime.errors.X", "lamina.core.layout", "late"}
    assert "late" not in set(imported("lamina.errors", at_import(tree)))
    assert module_of("lamina.errors.UnitError") == "lamina.errors" and module_of("torch.nn") is None
