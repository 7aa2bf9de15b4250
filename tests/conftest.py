"""Options and the life of the rank processes, for the whole test session."""

from __future__ import annotations

import pytest

import harness


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lamina-debug", action="store_true", help="run the ranks with lamina's debug mode on")


def pytest_configure(config: pytest.Config) -> None:
    harness.configure(debug=config.getoption("--lamina-debug"))


def pytest_sessionfinish() -> None:
    harness.shutdown()


# Files are given to processes in the order of collection: the longest first, so that none is left alone at the end.
LONGEST = (
    "test_launch.py",
    "test_readme.py",
    "test_matrix.py",
    "test_terminal.py",
    "test_command.py",
    "test_examples.py",
    "test_shard_tensor.py",
    "test_meshes.py",
    "test_plan.py",
    "test_fuzz.py",
    "test_recording.py",
    "test_plan_memory.py",
    "test_hangs.py",
    "test_late_use.py",
    "test_code_style.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of GPUs are left out, and counted as deselected, on a machine without one."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch  # here: a run without GPU tests does not wait for torch at collection

    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]
