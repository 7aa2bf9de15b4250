"""Options and the life of the rank processes, for the whole test session."""

from __future__ import annotations

import fcntl
import gc
import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

import harness

gc.disable()  # until all is collected: what is imported until then stays
# before torch is imported: of several processes on two cores, those that wait for their threads take time from the rest
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lamina-debug", action="store_true", help="run the ranks with lamina's debug mode on")


def pytest_configure(config: pytest.Config) -> None:
    harness.configure(debug=config.getoption("--lamina-debug"))
    # else pytest-xdist sorts the files anew, by their number of tests, which says nothing of their time
    config.option.loadscopereorder = False
    server = getattr(config, "workerinput", {}).get("fork_server")
    if server is not None:
        harness.use_fork_server(server)


class OneServer:
    """The processes of pytest-xdist have their ranks forked by one server: it imports for ten seconds of CPU time."""

    def __init__(self) -> None:
        self._address: str | None = None

    def pytest_configure_node(self, node: Any) -> None:
        if self._address is None:
            self._address = harness.start_fork_server()
        node.workerinput["fork_server"] = self._address


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    if pluginmanager.hasplugin("xdist"):
        pluginmanager.register(OneServer())


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each process of pytest-xdist collects all files; one rewrites a file's assertions, the others read its bytecode.

    To rewrite them is two fifths of what collecting costs.
    """
    if not isinstance(collector, pytest.Module) or sys.dont_write_bytecode:
        return (yield)
    with collector.path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing it gives it back
        return (yield)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    harness.shutdown()


# Files are given to processes in this order: the longest first, so that no process is left alone at the end. Those with
# ranks that mostly wait stand between others, so that not all processes wait at once.
LONGEST = (
    "test_adopt_interrupted.py",
    "test_hangs.py",
    "test_matrix.py",
    "test_unregistered.py",
    "test_races.py",
    "test_silence.py",
    "test_plan_memory.py",
    "test_readme.py",
    "test_ends.py",
    "test_kept_graphs.py",
    "test_launch.py",
    "test_terminal.py",
    "test_start.py",
    "test_compile.py",
    "test_peer.py",
    "test_parameters.py",
    "test_freezing.py",
    "test_past_outputs.py",
    "test_halving.py",
    "test_changed_forms.py",
    "test_misuse.py",
    "test_overflow.py",
    "test_hooks_on_outputs.py",
    "test_runs.py",
    "test_structures.py",
    "test_harness.py",
    "test_joined.py",
    "test_pretrained.py",
    "test_scopes.py",
    "test_precision.py",
    "test_command.py",
    "test_numbers.py",
    "test_views_in_place.py",
    "test_paths.py",
    "test_examples.py",
    "test_meshes.py",
    "test_nested_on_some.py",
    "test_late_use.py",
    "test_failures.py",
    "test_fuzz.py",
    "test_calls.py",
    "test_access.py",
    "test_two_models.py",
    "test_layouts.py",
    "test_many_models.py",
    "test_round_trips.py",
    "test_code_style.py",
    "test_symmetric.py",
    "test_compiled_functions.py",
    "test_halves.py",
    "test_counters.py",
    "test_adopt.py",
    "test_transports.py",
    "test_kept_weights.py",
    "test_recording.py",
    "test_kept_views.py",
    "test_shard_optim.py",
    "test_out_of_memory.py",
    "test_plan.py",
    "test_clip.py",
    "test_noted_squares.py",
    "test_optimizers.py",
    "test_parity.py",
    "test_even.py",
    "test_outputs.py",
    "test_contents.py",
    "test_outside.py",
    "test_programs.py",
    "test_forked_programs.py",
    "test_notes.py",
    "test_shard_ops.py",
    "test_kills.py",
    "test_given_up.py",
    "test_gradient_memory.py",
    "test_local_edits.py",
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
