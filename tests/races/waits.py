"""Every line of the runtime that makes a lane wait, ranks meet on one, or memory stay for one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from races.streams import ROOT
from races.trace import Place

LANES = ("lane", "compute", "gather", "reduce")
OTHERS = {"join": ("lanes",), "meet": ("peers",), "record_stream": ("whole",), "wait_event": ("stream",)}
SKIPPED = ("core/lanes.py",)  # what the lines above are made of


class Wait(NamedTuple):
    """A line that waits, by what stays when lines above it move."""

    file: str  # in src/lamina
    function: str
    text: str
    nth: int = 1  # of the same text in that function

    def __str__(self) -> str:
        return f"{self.file} {self.function}: {self.text}{f' ({self.nth})' if self.nth > 1 else ''}"


def waits_in_source() -> dict[Wait, int]:
    """The line of each."""
    found: dict[Wait, int] = {}
    source = ROOT / "src/lamina"
    for path in sorted(source.rglob("*.py")):
        file = str(path.relative_to(source))
        if file not in SKIPPED:
            for function, call in _calls(ast.parse(path.read_text()), ""):
                if _waits(call):
                    wait = Wait(file, function, ast.unparse(call))
                    while wait in found:
                        wait = wait._replace(nth=wait.nth + 1)
                    found[wait] = call.lineno
    return found


def wait_at(place: Place, lines: dict[Wait, int]) -> Wait:
    """Which of `waits_in_source()` is at a place of a trace."""
    return next(w for w, line in lines.items() if place.file == f"src/lamina/{w.file}" and place.line == line)


def _calls(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            inner = f"{function}.{child.name}" if function else child.name
        if isinstance(child, ast.Call):
            yield function, child
        yield from _calls(child, inner)


def _waits(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    receiver, name = ast.unparse(call.func.value).rpartition(".")[2], call.func.attr
    return receiver in (LANES if name == "wait" else OTHERS.get(name, ()))
