"""A seeded fault in a process that has imported the package already."""

from __future__ import annotations

import contextlib
import importlib
import re
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

from mutants.run import apply


@contextlib.contextmanager
def faulty(patch: Path) -> Iterator[None]:
    """Functions and methods of the patched files run as the patch would have them; it may change their code only."""
    names = re.findall(r"^\+\+\+ b/src/(\S+)\.py", patch.read_text(), re.MULTILINE)
    assert names, f"{patch}: it changes nothing"
    before: list[tuple[types.FunctionType, types.CodeType]] = []
    with tempfile.TemporaryDirectory() as folder:
        apply(patch, Path(folder))
        for name in names:
            module = importlib.import_module(name.replace("/", "."))
            assert module.__file__ is not None
            patched = types.ModuleType(module.__name__)
            text = Path(folder, "src", name).with_suffix(".py").read_text()
            exec(compile(text, module.__file__, "exec"), vars(patched))
            before += _exchange(vars(module), vars(patched), module.__name__)
    try:
        yield
    finally:
        for ours, code in before:
            ours.__code__ = code


def _exchange(
    ours: dict[str, object], theirs: dict[str, object], module: str
) -> list[tuple[types.FunctionType, types.CodeType]]:
    """Give functions that are ours the code of theirs; what they had."""
    before = []
    for name, thing in theirs.items():
        if getattr(thing, "__module__", "") != module:
            continue
        if isinstance(thing, type):
            before += _exchange(dict(vars(ours[name])), dict(vars(thing)), module)
        elif isinstance(thing, types.FunctionType) and not thing.__closure__:
            own = ours[name]
            assert isinstance(own, types.FunctionType)
            before.append((own, own.__code__))
            own.__code__ = thing.__code__
    return before
