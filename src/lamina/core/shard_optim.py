"""What torch's optimizers and autograd have to be told once about `Shard`.

torch decides by exact type which tensors its foreach and fused paths take; states and gradients of a Shard may reach a
step as plain full tensors (Adagrad makes its state in the constructor, a warm optimizer brings it along, a loaded state
dict holds it, a regulariser outside the forward gives a plain gradient); and `torch.autograd.grad` answers None for a
parameter whose forward ran on the gathered tensor, and tells nobody when a backward fails. `register` closes these
four, and nothing else is patched.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.optim.optimizer as torch_optimizer  # by import: the attribute path is shadowed by torch.optim's names
import torch.utils._foreach_utils as foreach_support
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from lamina.core.shard_losses import Captures, watch_waiting
from lamina.core.shard_ops import slice_of
from lamina.core.shard_spec import DirtyFlag
from lamina.core.shard_tensor import AS_PLAIN, Shard, rebuild_shard
from lamina.core.uncompiled import uncompiled
from lamina.errors import LaminaError, ShardOpError, StateError

_WHOLE_MATRIX = "it works on whole matrices, which no rank holds"
_UNSUPPORTED = {  # class name in torch.optim -> why, what to use
    "Adafactor": (_WHOLE_MATRIX, "torch.optim.AdamW"),
    "Muon": (_WHOLE_MATRIX, "torch.optim.AdamW"),
    "LBFGS": ("it joins all parameters into one vector and decides on every rank by its own part", "torch.optim.AdamW"),
    "SparseAdam": ("gradients of sharded parameters are dense", "torch.optim.Adam"),
}
_SCALAR_STATES = frozenset({"step", "eta", "mu", "mu_product"})  # 0-dim states that are not cut, of any parameter
_dirty, _grad_of = attrgetter("spec.dirty"), attrgetter("grad")
_SHARDS = {Shard}
_CUT = {Shard, type(None)}  # types of gradients that need nothing

_SETTINGS = ("lr", "weight_decay")
SHARES: WeakIdKeyDictionary = WeakIdKeyDictionary()  # plain parameter of a sharded model -> the model's `Share`
COPIED: WeakIdKeyDictionary = WeakIdKeyDictionary()  # plain parameter -> flag of the copies made of it
BEFORE_BACKWARDS: list[Callable[[list[Any]], None]] = []  # called with its roots when the outermost backward begins,
BEFORE_INNER_BACKWARDS: list[Callable[[list[Any]], None]] = []  # or one inside another,
AFTER_BACKWARDS: list[Callable[[], None]] = []  # when it has ended well,
AFTER_INNER_BACKWARDS: list[Callable[[], None]] = []  # when one inside another has,
AFTER_FAILED_BACKWARDS: list[Callable[[], None]] = []  # and when an error has ended it
EXPLANATIONS: list[Callable[[BaseException], LaminaError | None]] = []  # of such errors, to be raised in their place
_threads_in_backward: set[int] = set()

_registered = False
_NEW, _AS_MEANT = -1, -2  # in the place of a number: all of them are to be looked at | none is
_states_seen: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()  # number of states looked at


class _Outermost:
    accumulates = False  # whether the backward that is under way, around all others, brings parameters their gradients


def register() -> None:
    """Append the type to torch's lists, hook optimizer steps, guard autograd's `inputs=`. Idempotent."""
    global _registered
    if _registered:
        return
    _registered = True
    for supported in (torch_optimizer._foreach_supported_types, foreach_support._foreach_supported_types):
        if Shard not in supported:
            supported.append(Shard)  # type: ignore[arg-type]
    torch.serialization.add_safe_globals([rebuild_shard])  # torch.load(weights_only=True)
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    torch.autograd.grad = _guarded(torch.autograd.grad, inputs_at=1, accumulates=False)
    torch.autograd.backward = _guarded(torch.autograd.backward, inputs_at=5, accumulates=True)


# -- around optimizer.step()


@uncompiled
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Cut gradients and states that are still plain and full.

    Runs every step. Gradients are looked at each time, states only where they can be new: before the first step, when
    something else than a step has changed their number, and after `load_state_dict`. A full state put in by hand later
    is refused by the operations.
    """
    params = [param for group in optimizer.param_groups for param in group["params"] if type(param) is Shard]
    _note_step(optimizer, params)
    if not params:
        return
    with AS_PLAIN():
        grads = list(map(_grad_of, params))
    if not set(map(type, grads)) <= _CUT:
        for param, grad in zip(params, grads, strict=True):
            if grad is not None and type(grad) is not Shard:
                param.grad = cut(grad, param)
    seen = _states_seen.get(optimizer)
    if seen != len(optimizer.state):
        _refuse_unsupported(optimizer, params[0])
        for param in params if seen != _AS_MEANT else ():
            _cut_states(optimizer.state.get(param, {}), param)
        _note_states(optimizer, len(optimizer.state))


def _note_step(optimizer: torch.optim.Optimizer, params: list[Shard]) -> None:
    """Ranks compare what steps they have made; see alike.py."""
    if params:
        share = params[0].spec.share
    elif SHARES:
        share = next((SHARES[p] for group in optimizer.param_groups for p in group["params"][:1] if p in SHARES), None)
    else:
        return
    if share is not None and share.group is not None:
        settings = [(key, group[key]) for group in optimizer.param_groups for key in _SETTINGS if key in group]
        share.note_step(", ".join(f"{key}={value!r}" for key, value in settings if type(value) in (float, int)))


def note_whole(param: Tensor, share: Any, copies: DirtyFlag | None) -> None:
    """A plain parameter of a sharded model; `copies`: the flag of those that are made of it."""
    SHARES[param] = share
    if copies is not None:
        COPIED[param] = copies


def leave_states(optimizer: torch.optim.Optimizer) -> None:
    """Cut none of the states that there are now: what is plain beside a Shard is meant to be, whatever its shape."""
    if "_optimizer_load_state_dict_post_hooks" in vars(optimizer):  # not a wrapper, around one that steps
        _note_states(optimizer, _AS_MEANT)


def _forget_states(optimizer: torch.optim.Optimizer) -> None:
    _note_states(optimizer, _NEW)


def _note_states(optimizer: torch.optim.Optimizer, seen: int) -> None:
    if optimizer not in _states_seen:
        optimizer.register_load_state_dict_post_hook(_forget_states)
    _states_seen[optimizer] = seen


def _cut_states(state: dict[str, Any], param: Shard) -> None:
    for key, value in state.items():
        if type(value) is Shard:
            if value.geometry is not param.geometry:
                state[key] = _adopted(value, param, key)
        elif isinstance(value, Tensor) and value.shape == param.shape and (value.dim() or key not in _SCALAR_STATES):
            state[key] = cut(value, param)


def cut(full: Tensor, param: Shard) -> Shard:
    """This rank's part of a plain full tensor, as a Shard beside `param`; the full one may then be freed."""
    if full.is_sparse:
        full = full.to_dense()
    part = slice_of(full.detach(), param.spec, torch.ops.aten.copy_.default)
    return Shard(part.to(device=param.device, copy=True), param.spec.derived)


def _adopted(value: Shard, param: Shard, key: str) -> Shard:
    """A state that came from a file has no group; give it the parameter's."""
    if value.shape != param.shape:
        return value  # of another meaning, such as a buffer of the optimizer's own
    if not value.spec.same(param.spec):
        raise StateError(
            f"optimizer state `{key}` of {param.spec.describe()} holds elements [{value.start}, {value.stop}), saved "
            f"by rank {value.spec.index} of {len(value.spec.ranges)}. Load it with `lamina.load`, which cuts anew."
        )
    return Shard(value.local, param.spec.derived)


def _refuse_unsupported(optimizer: torch.optim.Optimizer, param: Shard) -> None:
    for base in type(optimizer).__mro__:
        if base.__name__ in _UNSUPPORTED and base.__module__.startswith("torch.optim"):
            why, instead = _UNSUPPORTED[base.__name__]
            whole = "" if base.__name__ == "SparseAdam" else ', or keep parameters whole with `strategy="ddp"`'
            raise ShardOpError(
                f"torch.optim.{base.__name__} cannot step the sharded {param.spec.describe()}: {why}. Use "
                f"`{instead}` or `lamina.optim.AdamW`{whole}."
            )


@uncompiled
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Mark what our handlers do not see: what a compiled step wrote, and plain parameters that copies are made of.

    States that the step has made are as the optimizer wants them: a flat one of a rank's elements is no full state,
    even where the rank holds all of a parameter.
    """
    if optimizer in _states_seen:
        _states_seen[optimizer] = len(optimizer.state)
    if getattr(optimizer, "marks_what_it_writes", False):
        return
    for group in optimizer.param_groups:
        for flag in written_flags(group["params"]):
            flag.mark()


def written_flags(params: Iterable[Tensor]) -> list[DirtyFlag]:
    """What is to be marked when these parameters are written to."""
    params = list(params)
    is_all_shards = _SHARDS.issuperset(map(type, params))
    flags = set(map(_dirty, params if is_all_shards else (param for param in params if type(param) is Shard)))
    if COPIED:
        flags.update(COPIED.get(param) for param in params)
    return [flag for flag in flags if flag is not None]


# -- autograd


def others_run_backward() -> bool:
    """Whether a thread other than this one is in `torch.autograd.backward` or `grad`."""
    return bool(_threads_in_backward - {threading.get_ident()})


def _guarded(function: Any, inputs_at: int, accumulates: bool) -> Any:
    """`torch.autograd.grad` or `backward`, with an error where a Shard in `inputs` would silently get nothing.

    Inside its module's forward a parameter is the gathered tensor, so the graph of a loss does not lead to the Shard.
    """

    @uncompiled
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        inputs = kwargs.get("inputs", args[inputs_at] if len(args) > inputs_at else None)
        if inputs is not None:
            outputs = args[0] if args else kwargs.get("outputs", kwargs.get("tensors"))
            _refuse_unreached(function.__name__, outputs, inputs)
        is_first = torch._C._current_graph_task_id() == -1
        watch_waiting()
        captures, Captures.now = Captures.now, not accumulates
        if is_first:
            _threads_in_backward.add(threading.get_ident())
            _Outermost.accumulates = accumulates
        before = BEFORE_BACKWARDS if is_first else BEFORE_INNER_BACKWARDS
        after = AFTER_BACKWARDS if is_first else AFTER_INNER_BACKWARDS
        try:
            for begin in before if accumulates else ():
                begin(_several(args[0] if args else kwargs["tensors"]))
            found = function(*args, **kwargs)
            for end in after if _Outermost.accumulates else ():
                end()
            return found
        except BaseException as error:
            explained = next(filter(None, (explain(error) for explain in EXPLANATIONS)), None)
            if torch._C._current_graph_task_id() == -1:
                for clean in AFTER_FAILED_BACKWARDS:
                    clean()
            if explained is None:
                raise
            raise explained from error
        finally:
            Captures.now = captures
            if is_first:
                _threads_in_backward.discard(threading.get_ident())

    return guarded


def _several(tensors: Any) -> list[Any]:
    if isinstance(tensors, dict):
        return list(tensors.values())
    if isinstance(tensors, Tensor | torch.autograd.graph.GradientEdge):
        return [tensors]
    return list(tensors)


def _refuse_unreached(function_name: str, outputs: Any, inputs: Any) -> None:
    inputs = _several(inputs)
    shards = [value for value in inputs if type(value) is Shard and value.requires_grad]
    if not shards:
        return
    reached = nodes_behind(_several(outputs))
    for shard in shards:
        if torch.autograd.graph.get_gradient_edge(shard).node not in reached:
            raise ShardOpError(
                f"torch.autograd.{function_name} was asked for the gradient of the sharded {shard.spec.describe()}, "
                "but the forward ran on the gathered tensor, so this graph does not lead to the Shard. Use "
                "`loss.backward()` and `p.grad`."
            )


def nodes_behind(outputs: Iterable[Any]) -> set[Any]:
    """All nodes of the graph of `outputs`. Kept in a set while compared: a node's Python object is its identity."""
    waiting = []
    for output in outputs:
        if isinstance(output, torch.autograd.graph.GradientEdge):
            waiting.append(output.node)
        elif output.requires_grad:
            waiting.append(torch.autograd.graph.get_gradient_edge(output).node)
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions if following is not None)
    return seen
