"""`deferred`: build a model without holding it, and remember how it would have been initialised.

`torch.device("meta")` builds without memory, but what constructors write is lost: a zero-initialised output layer, a
padding row, a rotary table. `FakeTensor` and tracers record functions, not the history of storages.

Inside `with deferred(seed):` everything that is not a parameter is real, so buffers, tables, `.item()` and control flow
are right by construction. A tensor that becomes an `nn.Parameter` moves to meta at that moment, and from then on
operations on it or its views are recorded (`init_program`). A reader of a parameter's values gets them, computed
for the occasion. Random numbers are drawn when the eager program would draw them, and the generator's state is kept
with each draw: the values are those of `torch.manual_seed(seed); Model()`, bit for bit, in any order of replay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.overrides import TorchFunctionMode

from lamina.errors import StateError
from lamina.runtime.recorder import Recorder, aside, check_seed


class _Front(TorchFunctionMode):
    """What torch answers above the dispatcher: where a deferred parameter is, `.data = `, and reads into Python."""

    _READERS = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__repr__})

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        subject = args[0] if args else None
        if not isinstance(subject, torch.Tensor):
            return func(*args, **kwargs)
        with aside():
            if func == _SET_DATA:
                return func(subject, self._fitting(subject, args[1]))
            home = self._recorder.home(subject) if self._recorder.is_deferred(subject) else None
        if home is None:
            return func(*args, **kwargs)
        if func in _ANSWERS:
            return _ANSWERS[func](home)
        if func in self._READERS:
            # A copy, and not writable: what is written to it would be lost.
            with aside():
                result = func(self._recorder.compute(subject).clone(), *args[1:], **kwargs)
            if hasattr(result, "setflags"):
                result.setflags(write=False)
            return result
        if func in (torch.Tensor.to, torch.Tensor.cpu):
            # "Where it is already" must give the tensor itself, as it does for a real one.
            if func is torch.Tensor.cpu and home.type == "cpu":
                return subject
            args = (subject, *("meta" if _names(a, home) else a for a in args[1:]))
            kwargs = {key: "meta" if key == "device" and _names(a, home) else a for key, a in kwargs.items()}
        return func(*args, **kwargs)

    def _fitting(self, target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if target.is_meta and self._recorder.is_deferred(target):
            return self._recorder.defer(value)
        return self._recorder.compute(value).clone() if self._recorder.is_deferred(value) else value


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_ANSWERS: dict[Any, Callable[[torch.device], Any]] = {
    torch.Tensor.device.__get__: lambda home: home,  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__: lambda home: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda home: home.type == "cpu",  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: lambda home: home.type == "cuda",  # type: ignore[attr-defined]
}


def _names(argument: Any, device: torch.device) -> bool:
    if not isinstance(argument, (str, torch.device)):
        return False
    named = torch.device(argument)
    return named.type == device.type and named.index in (None, device.index)


_BUILDING = threading.Lock()
_owner: int | None = None  # thread that is inside `deferred`


@contextmanager
def _parameters_deferred(recorder: Recorder) -> Iterator[None]:
    """While open, this thread's new parameters hold meta tensors and its buffers hold real ones.

    torch has a hook for registering parameters but none for making them; by the time one is registered it may have been
    initialised, tied or copied (`copy.deepcopy` never registers), and replacing it then would break its identity.
    """
    thread = threading.get_ident()
    make = nn.Parameter.__dict__["__new__"]

    def new(cls: type[nn.Parameter], data: Any = None, requires_grad: bool = True) -> nn.Parameter:
        mine = threading.get_ident() == thread
        if mine and isinstance(data, torch.Tensor):
            with aside():
                data = recorder.defer(data)
        parameter = make.__func__(cls, data, requires_grad)
        if mine:
            recorder.adopt(parameter)
        return parameter

    def real_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:
        if threading.get_ident() != thread or buffer is None:
            return None
        with aside():
            return recorder.compute(buffer).clone() if recorder.is_deferred(buffer) else None

    hook = register_module_buffer_registration_hook(real_buffer)  # type: ignore[arg-type]
    nn.Parameter.__new__ = staticmethod(new)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Parameter.__new__ = make  # type: ignore[method-assign]
        hook.remove()


@contextmanager
def deferred(seed: int = 0) -> Iterator[None]:
    """Build a model with its parameters on meta, initialised later exactly as `torch.manual_seed(seed)` would have.

    Buffers and all other tensors are real. The random streams outside are left as they were. Peak memory is that of the
    largest parameter. Raises `StateError` when nested, `InitialisationError` for an operation that cannot be recorded.
    One thread at a time builds so; another one waits.
    """
    global _owner
    if _owner == threading.get_ident():
        raise StateError("`lamina.deferred()` is already open here; build the whole model in one block")
    check_seed(seed, "lamina.deferred")
    with _BUILDING:
        _owner = threading.get_ident()
        recorder = Recorder(seed)
        try:
            recorder.seed_generator(torch.device("cpu"))
            with _parameters_deferred(recorder), _Front(recorder), recorder:
                yield
        finally:
            recorder.close()
            _owner = None
