"""The seeded faults still fit the sources, and the random jobs still find faults."""

from __future__ import annotations

import importlib
import subprocess
import tempfile
import types
from pathlib import Path

from fuzz.play import Outcome, play_all
from harness import run_ranks
from mutants.run import PATCHES, apply


def test_there_are_enough_and_each_says_what_it_breaks() -> None:
    assert len(PATCHES) >= 30
    for patch in PATCHES:
        first, blank, *_ = patch.read_text().splitlines()
        assert first and not first.startswith("---") and not blank, patch.name


def test_all_patches_fit(tmp_path: Path) -> None:
    apply(PATCHES[0], tmp_path)
    subprocess.run(["git", "apply", "-R", str(PATCHES[0])], cwd=tmp_path, check=True)
    for patch in PATCHES:
        done = subprocess.run(["git", "apply", "--check", str(patch)], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{patch.name}: the sources have moved on, draw it anew: {done.stderr}"


def play_with_fault(name: str, module_name: str, seed: int) -> tuple[Outcome, Outcome]:
    """The same job with the fault and without, in a process that has imported the package already."""
    module, before = importlib.import_module(module_name), {}
    assert module.__file__ is not None
    with tempfile.TemporaryDirectory() as folder:
        apply(PATCHES[0].with_name(f"{name}.patch"), Path(folder))
        patched = types.ModuleType(module_name)
        text = Path(folder, "src", *module_name.split(".")).with_suffix(".py").read_text()
        exec(compile(text, module.__file__, "exec"), vars(patched))
    for kind in [kind for kind in vars(patched).values() if getattr(kind, "__module__", "") == module_name]:
        for attribute, function in vars(kind).items():
            if isinstance(function, types.FunctionType) and not function.__closure__:
                ours = vars(getattr(module, kind.__name__))[attribute]
                before[ours], ours.__code__ = ours.__code__, function.__code__
    try:
        (wrong,) = play_all([seed])
    finally:
        for ours, code in before.items():
            ours.__code__ = code
    (right,) = play_all([seed])
    return wrong, right


def test_a_fault_is_found() -> None:
    ((wrong, right),) = run_ranks(1, play_with_fault, "missed-accumulation", "lamina.runtime.unit_gradients", 8)
    assert right.is_right, right.where
    assert not wrong.is_right and wrong.worst > 1e-3, wrong.where
