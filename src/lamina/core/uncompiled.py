"""Keeps `torch.compile` out of the runtime.

A function that the user compiles calls lamina inside: hooks of modules, of autograd's nodes and of optimizers, and
operations on shards. The compiler would follow them into bookkeeping that it cannot run twice alike, and a collective
among the operations that it traces would be dropped: nothing seems to read what it writes. So what torch calls here is
not compiled, nor anything below it, and an operation that waits for other ranks ends what is compiled before it.

`torch.compiler.disable` would import the compiler, which takes seconds; custom operators of torch have no word for an
operation of a tensor type.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Variable

from lamina.errors import LaminaError, ShardOpError

F = TypeVar("F")
REASON = (
    "lamina gathers, reduces and notes things there, which is not compiled. Leave out fullgraph=True, or compile the "
    "blocks of the model: lamina.shard(..., compile=True)"
)


def uncompiled(function: F) -> F:
    """Neither the function, called by torch or inside what is compiled, nor any below it is compiled.

    Where torch has other private names, the compiler is imported.
    """
    plain: Any = function
    try:
        compiler = torch._C._dynamo.eval_frame
        skip = compiler._FrameAction.SKIP
        compiler.set_code_exec_strategy(plain.__code__, compiler._FrameExecStrategy(skip, skip))
    except (AttributeError, TypeError):
        return torch.compiler.disable(plain, reason=REASON)  # type: ignore[no-any-return]
    plain._torchdynamo_disable = True
    plain._torchdynamo_disable_msg = REASON
    return function


def interpreted(function: F) -> F:
    """The function is not compiled by itself; a caller that is compiled may take it in.

    So `torch.compiler.is_compiling()` in it tells the two apart. Where torch has other private names, it is never.
    """
    plain: Any = function
    try:
        compiler = torch._C._dynamo.eval_frame
        action = compiler._FrameAction
        compiler.set_code_exec_strategy(plain.__code__, compiler._FrameExecStrategy(action.SKIP, action.DEFAULT))
    except (AttributeError, TypeError):
        return uncompiled(function)
    return function


class _Guards:
    are_set = False


def guard_hooks() -> None:
    """Have the compiler, if there is one, ask whether hooks have come or gone.

    It takes a layer's hooks for those that it saw when it compiled the first of several equal blocks: a hook on a layer
    of another one is passed over without a word, or called there too.
    """
    if not _Guards.are_set and (config := sys.modules.get("torch._dynamo.config")) is not None:
        _Guards.are_set = True
        if hasattr(config, "skip_nnmodule_hook_guards"):
            config.skip_nnmodule_hook_guards = False  # type: ignore[attr-defined]


@uncompiled
def _call(act: Callable[[int], None], task: int) -> None:
    act(task)


def at_the_end_of_backward(act: Callable[[int], None], task: int) -> None:
    """Have autograd call `act` when the graph task that is under way has ended."""
    Variable._execution_engine.queue_callback(functools.partial(_call, act, task))


class Traced(LaminaError, NotImplementedError):
    """The compiler takes the second kind for an operation that it has to leave to the interpreter.

    It is no TypeError, which operators of tensors take for "try the other operand".
    """


def untraced(error: ShardOpError) -> LaminaError:
    """The error of an operation; while it is only traced, one that lets the interpreter say it."""
    return error if torch._guards.detect_fake_mode() is None else Traced(str(error))


def refuse_traced(value: Tensor, name: str) -> None:
    """Raise if a collective over the pieces of parameter `name` is being traced: `value` is not there, then."""
    if type(value) is not Tensor and isinstance(value, torch._subclasses.FakeTensor):
        raise Traced(
            f"an operation on the sharded `{name}` waits for other ranks, and cannot be part of what is compiled: put "
            "it behind the compiled function, or leave out fullgraph=True"
        )


def refuse_traced_loss(name: str) -> None:
    """Raise if a loss over parameter `name` is being traced: its gradient would not find the way to the parameter."""
    if torch._guards.detect_fake_mode() is not None:
        if torch.compiler.is_exporting():
            raise Traced(
                f"torch.export met the sharded `{name}`: export the model before lamina.shard(), or another one that "
                "has loaded this one's checkpoint"
            )
        raise Traced(
            f"a loss over the sharded `{name}` cannot be part of what is compiled: put it outside the compiled "
            "function, or leave out fullgraph=True"
        )
