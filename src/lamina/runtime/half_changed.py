"""A sharded model that an error has left half changed: it says so wherever it is used, on every rank.

Parameters become shards in place, units get other places, hooks another engine. To undo that, new parameters' full
values would have to be kept beside it, and masters that lay elsewhere. It is rare: what can be refused is refused
before. But what is computed with such a model would be wrong, or end in an error that names something else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lamina.errors import StateError
from lamina.runtime.assemble import Runtime
from lamina.runtime.newcomers import Newcomers


@contextlib.contextmanager
def changing(runtime: Runtime, call: str) -> Iterator[None]:
    """What is done inside is done on all ranks, or the model is of no use any more on any. Collective at its end.

    Args:
        call: what the user has typed.

    Raises:
        StateError: an error on any rank, on all.
    """
    error: Exception | None = None
    try:
        try:
            yield
        except Exception as caught:
            error = caught
        said = runtime.control.agree_on_error(None if error is None else f"{type(error).__name__}: {error}")
    except BaseException as interrupt:  # this rank's alone, or a rank that is gone
        _close(runtime, call, f"{type(interrupt).__name__}: {interrupt}")
        raise
    if said is not None:
        raise StateError(_close(runtime, call, said)) from error


def _close(runtime: Runtime, call: str, said: str) -> str:
    """Nothing is computed with the model from here on; why."""
    runtime.refusal = (
        f"{call} ended in the middle of its change, and the model is neither what it was nor what it was to be: "
        f"{said.rstrip('.')}. Build it anew with its new parameters, call lamina.shard(), and load the last "
        "checkpoint: lamina.load(path, model, strict=False). What parameters from before hold can still be read, with "
        "`p.full()` on all ranks"
    )
    model = runtime.model()
    for engine in {runtime.engine, *(hooks.engine for hooks in runtime.hooks.values())}:
        engine.gatherer.late_peers = None
        if model is not None:
            engine.newcomers = Newcomers(model, runtime.units, runtime.refusal)
    return runtime.refusal
