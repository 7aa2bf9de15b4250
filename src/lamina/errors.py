"""Every error that lamina raises, drawn as one tree.

    LaminaError
    ├── UsageError          (ValueError)           an argument that cannot mean anything
    ├── UnitError           (ValueError)           units that match nothing, overlap or hold nothing
    ├── ShardOpError        (TypeError)            an operation that a sharded parameter cannot do
    ├── ParameterChanged    (RuntimeError)         a parameter was replaced, moved or cast behind our back
    ├── InitialisationError (RuntimeError)         a parameter that nothing initialises
    ├── StateError          (RuntimeError)         a call at a moment at which it has no meaning
    ├── Disagreement        (RuntimeError)         ranks that ask for different things
    ├── TransportError      (RuntimeError)         bytes that cannot be moved here
    ├── CheckpointError     (RuntimeError)         a checkpoint that cannot be written, is damaged, or does not fit
    ├── OutOfMemory         (RuntimeError)         memory ran out in a step, and what would fit
    └── LaunchError         (RuntimeError)         a launched rank that failed

A message names the parameter, the ranks, what was got and what was wanted, and what to type.
"""

from __future__ import annotations


class LaminaError(Exception):
    """Base of all errors that lamina raises on purpose."""

    code = "LAM-E"  # what the terminal shows beside the message, and docs/errors.md explains
    cause = ""  # "left 1": rank 1 says itself what went wrong, and this error follows from it


class UsageError(LaminaError, ValueError):
    """An argument that cannot mean anything."""

    code = "LAM-U"


class UnitError(LaminaError, ValueError):
    """Units that match nothing, overlap, or hold no parameter."""

    code = "LAM-N"


class ShardOpError(LaminaError, TypeError):
    """An operation that has no meaning on this rank's part of a parameter."""

    code = "LAM-S"


class ParameterChanged(LaminaError, RuntimeError):
    """A parameter was replaced, moved or cast after `shard()`."""

    code = "LAM-P"


class InitialisationError(LaminaError, RuntimeError):
    """A parameter or buffer on meta that nothing initialises."""

    code = "LAM-I"


class StateError(LaminaError, RuntimeError):
    """A call at a moment at which it has no meaning."""

    code = "LAM-T"


class Disagreement(LaminaError, RuntimeError):
    """Ranks that ask for different things, with the position of each."""

    code = "LAM-D"


class TransportError(LaminaError, RuntimeError):
    """Bytes that cannot be moved the way that was asked for."""

    code = "LAM-B"


class CheckpointError(LaminaError, RuntimeError):
    """A checkpoint that cannot be written, is damaged or incomplete, or does not fit the model."""


class OutOfMemory(LaminaError, RuntimeError):
    """Memory ran out in a step of `lamina train`; the message says where, and which changes fit."""

    code = "LAM-M"


class LaunchError(LaminaError, RuntimeError):
    """A rank started by `launch` failed; the message holds that rank's error once."""

    code = "LAM-L"

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the rank's frames are in the message, and the launcher's are nobody's business."""
        return [f"{type(self).__name__}: {self}"]
