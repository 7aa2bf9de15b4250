"""Gradients that do not come through a forward of the model: of regularisers, temperatures, heads used by the loss.

A full parameter's gradient is collected where its unit's use ends. What reads the user's own parameter between
forwards (`(model.head.weight ** 2).sum()`, `logits * model.scale.exp()`) sends its gradient there past all of that,
whenever autograd comes to it. Runtimes that hook modules leave it as it is: each rank trains its own.

Note [Outside]
    1. A `Shard`'s gradient is complete on its rank (see shard_losses.py). It is taken off autograd's hands when it
       arrives, and joins `p.grad` when the backward ends, as a reduction may be writing there meanwhile.
    2. A whole parameter's gradient is this rank's own. It is part of what its unit reduces. Where the unit has a copy
       for compute it is taken off autograd's hands, too, and added to the copy's.
    3. A plain unit's parameters are what its forward uses, so nothing tells one gradient from another. What
       was there is set aside before every backward, and what is there afterwards is reduced, a forward or none.
    4. A backward that reaches parameters alone is a backward of the model: ranks agree on its reductions. So is one
       that reaches gathered ones without passing any unit's outputs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.core import shard_losses
from lamina.core.control import name_ranks
from lamina.core.shard_optim import (
    AFTER_BACKWARDS,
    AFTER_INNER_BACKWARDS,
    BEFORE_BACKWARDS,
    nodes_behind,
    others_run_backward,
)
from lamina.core.slots import outlived
from lamina.core.uncompiled import uncompiled
from lamina.errors import Disagreement, StateError
from lamina.runtime.failed_backward import ENGINES

if TYPE_CHECKING:
    from lamina.runtime.engine import Engine
    from lamina.runtime.unit import Unit


TOKEN_MEAN = "lamina.token_mean"  # in the metadata of the node
_OPERATIONS = 32  # on a loss, one after the other


def listen(unit: Unit) -> None:
    """Take gradients that arrive at whole parameters beside a unit's copies; `Shard`s bring theirs themselves."""
    if unit.plain or unit.communicates:
        return
    for position, param in enumerate(unit.params):
        node = unit.ears.get(position)
        if not param.requires_grad:
            unit.ears.pop(position, None)
        elif param.is_leaf and (node is None or node.variable is not param):
            with torch.inference_mode(False), torch.enable_grad():  # an evaluation may come first
                node = unit.ears[position] = torch.autograd.graph.get_gradient_edge(param).node
            node.register_prehook(functools.partial(_take, weakref.ref(unit), position))


def receive(reference: weakref.ref[Unit], position: int, grad: Tensor) -> None:
    """A `Shard` of the unit's brings its gradient."""
    unit = reference()
    if unit is None:
        raise outlived("a parameter, in a loss outside forwards,")
    unit.gradients.arrive(position, grad)


@uncompiled
def _take(reference: weakref.ref[Unit], position: int, grads: tuple[Tensor | None, ...]) -> Any:
    unit = reference()
    if unit is None or grads[0] is None:
        return None
    unit.gradients.arrive(position, grads[0])
    return (None,)


def before_backward(roots: list[Any]) -> None:
    """The outermost backward of this process begins."""
    if others_run_backward():
        _refuse_second(roots)
        return
    for engine in list(ENGINES):
        if engine.gradients.tokens.are_counted:
            engine.gradients.tokens.begin_backward(all(map(is_token_mean, roots)))
        if engine.is_stale():
            engine.close_failed()
        if engine.phase is None:
            engine.gradients.begin()


def _refuse_second(roots: list[Any]) -> None:
    """A backward beside that of another thread must not lead through a sharded model."""
    if any(engine.reference in node.metadata for node in nodes_behind(roots) for engine in ENGINES):
        raise StateError(
            "a backward of a sharded model begins while another thread is in a backward: let one thread at a time "
            "train sharded models, on every rank in the same order"
        )


def is_token_mean(root: Any) -> bool:
    """Whether a loss is made of nothing but results of `token_mean`: multiples and sums of them."""
    return _leads_to_means(getattr(root, "grad_fn", None), _OPERATIONS)


def _leads_to_means(node: Any, operations: int) -> bool:
    if node is None or TOKEN_MEAN in node.metadata:
        return node is not None
    following = [each for each, _ in node.next_functions if each is not None]
    return bool(following) and operations > 0 and all(_leads_to_means(each, operations - 1) for each in following)


def after_backward() -> None:
    """It has ended without an error."""
    if others_run_backward():
        return
    for engine in sorted(ENGINES, key=lambda each: each.control.name):
        gradients = engine.gradients
        if engine.phase is not None:
            continue  # a backward inside a forward
        if not engine.units and gradients.tokens.are_counted:
            gradients.tokens.settle_alone(gradients.last_micro_batch)
        if gradients.are_aside and any(not unit.kept and gradients.any_of(unit) for unit in engine.units):
            engine.begin_backward(-1)
            engine.end_backward(engine.current())
        gradients.end()
        gradients.take_in()
        _compare(engine)


def after_inner_backward() -> None:
    """One inside another has ended, and may have been all of a model's: what autograd adds from here on is new."""
    for engine in list(ENGINES):
        if engine.phase is None:
            engine.gradients.begin()


def _compare(engine: Engine) -> None:
    """What was mixed into losses over Shards is the same on all ranks; only looked at in the first backwards."""
    share = engine.units[0].mesh.share if engine.units else None
    if share is None or not share.mixed:
        return
    mixed, share.mixed, share.left = share.mixed, [], share.left - 1
    total = sum((number + 1) * each.checksum for number, each in enumerate(mixed)) % 2**62
    rows = engine.control.exchange([len(mixed), total], "loss over parameters")
    if all(row == rows[0] for row in rows):
        return
    said = [line.split("\t") for line in engine.control.exchange_text(_as_line(mixed))]
    for entries in zip(*said, strict=False):
        if len(set(entries)) > 1:
            name, operation, _ = entries[0].split(" ")
            others = [rank for rank, entry in enumerate(entries) if entry != entries[0]]
            raise Disagreement(
                f"`{operation}` over the sharded `{name}`, in a loss outside the model's forward, takes in other "
                f"numbers on {name_ranks(others)} than on rank 0, and each rank computes with its own elements only. "
                f"Use the same numbers on all ranks; a rank's own go behind it: `mine * {operation}(...)`. Or compute "
                "this loss in the model's forward"
            )
    raise Disagreement("ranks compute different losses over sharded parameters: compute the same ones on all ranks")


def _as_line(mixed: Iterable[shard_losses.Mixed]) -> str:
    return "\t".join(f"{each.name} {each.operation} {each.checksum}" for each in mixed)


BEFORE_BACKWARDS.append(before_backward)
AFTER_BACKWARDS.append(after_backward)
AFTER_INNER_BACKWARDS.append(after_inner_backward)
