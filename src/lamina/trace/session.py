"""`lamina.trace(path)`: record what really happens in a few steps, to a file and a picture."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from lamina.errors import StateError, UsageError
from lamina.runtime.assemble import RUNTIMES, Runtime
from lamina.trace.recorder import Recorder
from lamina.trace.recording import Recording

_traced: set[int] = set()  # engines with a recorder on them, by id


class Trace:
    """What `with lamina.trace(...) as trace` gives; filled when the block ends. `str()` is a line for each step."""

    recording: Recording | None = None

    def __str__(self) -> str:
        return "this rank records nothing" if self.recording is None else str(self.recording)


@contextlib.contextmanager
def trace(path: str | os.PathLike[str], model: nn.Module | None = None, *, ranks: str = "first") -> Iterator[Trace]:
    """Record the steps inside the block: uses, gathers, reductions, waits, optimizer, memory. Local.

    `path`, such as `trace.json`, opens in https://ui.perfetto.dev; beside it a picture of the last step is written,
    `trace.png`. Run a step or two before it: the first step of a model agrees on its order and takes longer.
    Nothing is written if the block raises. Steps that `lamina.capture` replays show their optimizer only.

    Args:
        path: ends in `.json`. With `ranks="all"`, other ranks than the first write `trace.rank1.json`, ...
        model: sharded; None: the only one there is.
        ranks: "first" or "all": which ranks record.

    Raises:
        StateError: no model is sharded, or it is being traced already.
        UsageError: a path without a folder to lie in, an argument that means nothing, several models.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"lamina.trace() takes the name of a .json file, not a {type(path).__name__}")
    file = Path(path)
    if file.suffix != ".json" or not file.absolute().parent.is_dir():
        raise UsageError(f"lamina.trace({str(path)!r}): give the name of a .json file in a folder that exists")
    if ranks not in ("first", "all"):
        raise UsageError(f"lamina.trace(ranks={ranks!r}): use 'first' or 'all'")
    runtime, result = _runtime_of(model), Trace()
    rank = runtime.control.rank
    if rank and ranks == "first":
        yield result
        return
    if id(runtime.engine) in _traced:
        raise StateError("this model is being traced already: leave that lamina.trace() first")
    _traced.add(id(runtime.engine))
    recorder = Recorder(runtime)
    try:
        recorder.start()
        yield result
    finally:
        recorder.stop()
        _traced.discard(id(runtime.engine))
    result.recording = recorder.recording()
    result.recording.save(file if rank == 0 else file.with_suffix(f".rank{rank}.json"))


def _runtime_of(model: nn.Module | None) -> Runtime:
    if model is not None:
        if model not in RUNTIMES:
            raise StateError(f"lamina.trace: this {type(model).__name__} is not sharded; call lamina.shard() first")
        return RUNTIMES[model]
    found = list(RUNTIMES.values())
    if not found:
        raise StateError("lamina.trace: no model is sharded yet; call lamina.shard() first")
    if len(found) > 1:
        raise UsageError(f"lamina.trace: {len(found)} models are sharded; say which: lamina.trace(path, model)")
    return found[0]
