"""`Shard`: the tensor type of a parameter outside compute.

torch has two ways to leave a parameter sharded between steps: a plain 1-D tensor under the parameter's name (wrong
shape, wrong norm, wrong checkpoint, no error), or DTensor (dim-0 cuts, padding, 4.8 ms of host time for an AdamW step
over 300 parameters where plain tensors take 1.1). A `Shard` shows the full shape and holds one flat range: elementwise
work happens on the range, reductions add one all-reduce, and everything else raises with the parameter's name.

This file holds the type and the in-place conversion; `shard_ops` and its neighbours hold what each operation does.

Note [no storage]. torch sees a wrapper without memory: `data_ptr()` is 0 (checkpointing needs it not to raise) and
`untyped_storage()` is a null storage of the full size. Methods that reach for that memory in C++ without passing the
dispatcher are overridden below; each would otherwise crash or return garbage.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch

from lamina.core import shard_aliases, shard_checkpoint
from lamina.core.shard_aliases import Reach, Shared
from lamina.core.shard_collectives import gather_flat
from lamina.core.shard_spec import GlobalSpec, ShardSpec
from lamina.core.uncompiled import refuse_traced_loss, uncompiled, untraced
from lamina.errors import ShardOpError, StateError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from lamina.core.shard_spec import Notes

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[Any, Handler] = {}  # filled as operations are met; `shard_ops.resolve` finds the handler
OWN_ATTRIBUTES = frozenset(  # the others are the user's
    {"_local", "spec", "geometry", "_is_param", "_reach", "_mixed", "_aliases"}
)

# Outside this scope torch looks for `__torch_function__` whenever an attribute of a Shard is read: six times the cost.
AS_PLAIN = torch._C.DisableTorchFunctionSubclass


_INSTEAD = "Use `p.full()` (collective) for the whole tensor or `p.local` for this rank's elements."
_INTO_FILES = "Into files: `lamina.export(path, model)`, or from one rank inside `with lamina.gathered(model):`."


def _refusing(what: str, instead: str = _INSTEAD) -> Any:
    def refuse(self: Shard, *args: Any, **kwargs: Any) -> NoReturn:
        why = f"has no meaning on the sharded {self.spec.describe()}: its memory is spread over ranks"
        raise ShardOpError(f"`{what}` {why}. {instead}")

    return refuse


class Shard(Tensor):
    """This rank's flat range of a parameter, a gradient or an optimizer state. Final: not to be subclassed.

    Shows `.shape`, `.dtype`, `.numel()` of the full tensor. `.local` is the range itself.
    """

    # No __slots__: exchanging a Parameter and a Shard in place needs equal slot sets.
    _local: Tensor  # 1D, spec.local_numel elements, contiguous, needs no gradient
    _reach: Reach | None = None  # opened by whoever asks for `.local`, as every operation does
    _mixed: int = 0  # checksum of what went into it beside Shards, where it is part of a loss
    _aliases: Shared | None = None  # by which others reach its memory
    spec: ShardSpec
    geometry: tuple[Any, ...]  # spec.geometry, kept here because lists of Shards are compared by it every step

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[Shard], local: Tensor, spec: ShardSpec, requires_grad: bool = False) -> Shard:
        made = Tensor._make_wrapper_subclass(
            cls, spec.shape, spec.strides, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        made._local = local
        made.spec = spec
        made.geometry = spec.geometry  # type: ignore[assignment]
        return made

    @classmethod
    @uncompiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.is_grad_enabled():
            _listen(args)
        handler = HANDLERS.get(func)
        if handler is None:
            handler = HANDLERS[func] = _resolve(func)
        try:
            return handler(func, args, kwargs or {})
        except ShardOpError as error:
            raise untraced(error)  # noqa: B904  # it is the same error as a rule

    @property
    def local(self) -> Tensor:
        """This rank's range: 1D, contiguous, needs no gradient."""
        return self._local if self._reach is None else self._reach.open(self._local)

    @local.setter
    def local(self, local: Tensor) -> None:
        self._local = local

    def alias(self, spec: ShardSpec) -> Shard:
        """Another Shard of the same memory."""
        return shard_aliases.alias_of(self, spec)

    @property
    def start(self) -> int:
        return self.spec.start

    @property
    def stop(self) -> int:
        return self.spec.stop

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.spec.name

    def full(self) -> Tensor:
        """The whole tensor, plain and detached, equal on all ranks of the group. Collective."""
        return gather_flat(self.local, self.spec).view(self.spec.shape)

    def __repr__(self) -> str:  # type: ignore[override]  # local: printing must never wait for other ranks
        spec = self.spec
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"Shard({spec.name!r}, shape={tuple(spec.shape)}, {self.dtype}, {self.device}, rank {spec.index} of "
            f"{len(spec.ranges)} holds [{spec.start}, {spec.stop}) of {spec.numel}{grad})"
        )

    # -- what C++ would do wrongly on a tensor without storage; see Note [no storage]

    @property
    def data(self) -> Shard:  # type: ignore[override]
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise ShardOpError(
                f"`{self.name}.data = ...` got {tuple(value.shape)} {value.dtype}, wanted {tuple(self.shape)} "
                f"{self.dtype}: a sharded parameter keeps its shape and dtype. Give the full tensor in that dtype, or "
                "choose the dtype with `lamina.shard(..., precision=...)`."
            )
        with torch.no_grad():
            shard_aliases.move_out(self, value)
            self.detach().copy_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Shard:  # type: ignore[override]
        self.requires_grad = requires_grad
        return self

    share_memory_ = _refusing("share_memory_()")
    numpy = _refusing("numpy()")
    apply_ = _refusing("apply_()")
    map_ = _refusing("map_()")
    __dlpack__ = _refusing("__dlpack__()")
    storage = _refusing("storage()", _INTO_FILES)  # safetensors and `save_pretrained` ask which tensors share memory

    def tolist(self) -> Any:
        return self.item() if self.dim() == 0 else _refusing("tolist()")(self)

    def item(self) -> Any:
        """The value of a tensor with one element, equal on all ranks. Collective."""
        return self.full().item() if self.numel() == 1 else _refusing("item()")(self)

    # -- copies, files, compilation

    def __deepcopy__(self, memo: dict[int, Any]) -> Shard:
        if id(self) in memo:
            return memo[id(self)]
        if self.grad_fn is not None:
            raise ShardOpError(
                f"deepcopy of a result computed from `{self.name}`: only leaves can be copied; detach it"
            )
        made = Shard(self.local.clone(), self.spec.derived, self.requires_grad)
        memo[id(self)] = made
        for key, value in self.__dict__.items():
            if key not in OWN_ATTRIBUTES:
                setattr(made, key, copy.deepcopy(value, memo))
        if getattr(self, "_is_param", False):
            made._is_param = True  # type: ignore[attr-defined]
        elif self.grad is not None:  # as torch: a copied tensor brings its gradient, a copied Parameter does not
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        spec, larger = self.spec, None
        shard_checkpoint.warn_of_a_part(spec)
        extra = {key: value for key, value in self.__dict__.items() if key not in OWN_ATTRIBUTES}
        if spec.global_spec is not None:
            larger = (tuple(spec.global_spec.shape), spec.global_spec.dim, spec.global_spec.start)
        where = (spec.name, tuple(spec.shape), spec.ranges, spec.index, larger)
        # a clone: the range is usually a view of one large buffer, all of which would go into the file
        is_param = getattr(self, "_is_param", False)
        return rebuild_shard, (self.local.detach().clone(), where, self.requires_grad, is_param, extra)

    def __tensor_flatten__(self) -> tuple[list[str], ShardSpec]:
        return ["local"], self.spec

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], spec: ShardSpec, size: Any, stride: Any) -> Shard:
        return Shard(inner["local"], spec)

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        return shard_checkpoint.write_items(fqn, self.local, self.spec)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return shard_checkpoint.chunk_list(self.spec)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return shard_checkpoint.tensor_of(index, self.local, self.spec)


_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality  # type: ignore[attr-defined]


class _Listening:
    is_asking = False  # for a node, by an operation that comes by here too


def _listen(args: Iterable[Any]) -> None:
    """Parameters become part of a loss: have their owner told of the gradient that the loss sends them.

    The node that accumulates it lives as long as somebody's graph; holding it would forbid torch to swap tensors.
    """
    for arg in args:
        if isinstance(arg, list | tuple):
            _listen(arg)
        elif type(arg) is Shard and arg.spec.receive is not None and arg.requires_grad and arg.is_leaf:
            if _Listening.is_asking:
                return
            refuse_traced_loss(arg.spec.name)
            node = _accumulation_node(arg)
            if node is not None and _Listening not in node.metadata:
                node.metadata[_Listening] = True
                node.register_prehook(functools.partial(_hand_over, arg.spec.receive))


def _accumulation_node(param: Shard) -> Any:
    """Where autograd brings a parameter's gradient; None inside operations that record nothing, such as `full_like`."""
    with enable_reentrant_dispatch():
        if torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD):
            return None
        _Listening.is_asking = True
        try:
            return torch.autograd.graph.get_gradient_edge(param).node
        finally:
            _Listening.is_asking = False


class Parts:
    """Gradients that arrive are noted here while there is a list."""

    noted: list[tuple[Callable[[Tensor], None], Tensor]] | None = None


@uncompiled
def _hand_over(receive: Callable[[Tensor], None], grads: tuple[Tensor | None, ...]) -> tuple[None]:
    if grads[0] is not None:
        if Parts.noted is not None:
            Parts.noted.append((receive, grads[0].detach()))
        else:
            receive(grads[0])
    return (None,)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.true_divide,
    "pow": torch.pow,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "matmul": torch.matmul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}


def _let_operators_raise() -> None:
    """Call the function instead of the operator where both sides are tensors.

    torch turns a TypeError inside an operator into NotImplemented. Our error is one, so `p * q` would lose its message,
    and `p == q` would not raise at all: Python then answers by identity, False.
    """

    def forward(inherited: Any, function: Any) -> Any:
        return lambda self, other: function(self, other) if isinstance(other, Tensor) else inherited(self, other)

    def reflected(inherited: Any, function: Any) -> Any:
        return lambda self, other: function(other, self) if isinstance(other, Tensor) else inherited(self, other)

    for name, function in _OPERATORS.items():
        setattr(Shard, f"__{name}__", forward(getattr(Tensor, f"__{name}__"), function))
        inherited = getattr(Tensor, f"__r{name}__", None)
        if inherited is not None:
            setattr(Shard, f"__r{name}__", reflected(inherited, function))


_let_operators_raise()


def _tell_notes() -> None:
    """Let the owner of a parameter know of hooks on it, and when it is frozen, so that no step has to look for them.

    Whatever hangs the first hook on a tensor gives it a dict for them.
    """

    def telling(name: str, tell: Callable[[Notes], None]) -> property:
        inherited = vars(torch._C.TensorBase)[name]

        def write(self: Shard, value: Any) -> None:
            inherited.__set__(self, value)
            if self.spec.notes is not None:
                tell(self.spec.notes)

        return property(inherited.__get__, write)

    def note_hooks(notes: Notes) -> None:
        notes.are_hooked = True

    def note_freeze(notes: Notes) -> None:
        notes.freezes += 1

    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(Shard, name, telling(name, note_hooks))
    Shard.requires_grad = telling("requires_grad", note_freeze)  # type: ignore[assignment, method-assign]


_tell_notes()


def rebuild_shard(
    local: Tensor, where: tuple[Any, ...], requires_grad: bool, is_param: bool, extra: dict[str, Any]
) -> Shard:
    """What pickle calls. The result has no process group; copy it into a live parameter to reach the other ranks."""
    name, shape, ranges, index, larger = where
    global_spec = None if larger is None else GlobalSpec(torch.Size(larger[0]), larger[1], larger[2])
    spec = ShardSpec(name, torch.Size(shape), tuple(map(tuple, ranges)), index, None, (), global_spec)
    made = Shard(local, spec, requires_grad)
    made.__dict__.update(extra)
    if is_param:
        made._is_param = True  # type: ignore[attr-defined]
    return made


def _resolve(func: Any) -> Handler:
    from lamina.core import shard_ops  # the operations are built on Shard, so they come after it

    return shard_ops.resolve(func)


def convert_(param: nn.Parameter, local: Tensor, spec: ShardSpec) -> None:
    """Turn `param` into the Shard of `local` in place: same object, same attributes, another content.

    Optimizers, parameter lists and tied modules that hold the object go on holding the parameter. A gradient that is
    already there is cut to its part. `local` may have another dtype or device than `param` (a master, or meta).

    Raises StateError while something else holds the parameter's content: a view, or a graph that saved it.
    """
    assert local.dim() == 1 and local.numel() == spec.local_numel and local.is_contiguous(), spec.describe()
    assert not local.requires_grad and param.shape == spec.shape and type(param) is not Shard, spec.describe()
    old_grad = param.grad
    attributes = dict(param.__dict__)
    shard = Shard(local, spec, param.requires_grad)
    shard._is_param = True  # type: ignore[attr-defined]  # isinstance(p, nn.Parameter) reads this
    _poison(check_unheld(param, spec.name), spec.name)
    # torch.utils.swap_tensors does these three steps too, but refuses when anybody holds a weak reference (as RNNs do)
    param.__class__, shard.__class__ = shard.__class__, param.__class__  # type: ignore[assignment]
    param.__dict__, shard.__dict__ = shard.__dict__, param.__dict__
    torch._C._swap_tensor_impl(param, shard)
    param.__dict__.update(attributes)
    if old_grad is not None:
        if old_grad.is_sparse:
            old_grad = old_grad.to_dense()
        part = old_grad.detach().reshape(-1)[spec.start : spec.stop].to(local.device, local.dtype, copy=True)
        param.grad = Shard(part, spec.derived)


def check_unheld(param: nn.Parameter, name: str) -> Any:
    """Raise if anything but an accumulation node holds the parameter's content; that node, or None."""
    held = param._use_count()  # type: ignore[attr-defined]
    if held == 1:
        return None
    node = None
    if held == 2 and param.requires_grad and param.is_leaf:
        with torch.enable_grad():
            node = torch.autograd.graph.get_gradient_edge(param).node
    if node is None or param._use_count() != 2:  # type: ignore[attr-defined]  # asking for the node made one: something else was the holder
        raise StateError(
            f"`{name}` cannot be sharded while other tensors share its memory. Drop views of `{name}` first "
            "(such as `p.view(-1)`), and the outputs of forwards that ran before `lamina.shard(...)`."
        )
    return node


def _poison(node: Any, name: str) -> None:
    """Make an accumulation node from before raise if it is ever run."""
    if node is None:
        return

    @uncompiled
    def poisoned(grad_outputs: Any) -> NoReturn:
        raise StateError(
            f"backward through a graph that was recorded before `{name}` was sharded; its gradient would be lost. Run "
            "the forward again after `lamina.shard(...)`."
        )

    node.register_prehook(poisoned)


def register() -> None:
    """Make torch's optimizers, checkpoint loader and autograd know the type. Idempotent."""
    from lamina.core import shard_optim

    shard_optim.register()
