"""Uses whose backward reads no weights: lookups in an embedding.

Elsewhere every unit is gathered again for its backward. The backward of `weight[indices]` adds rows to a gradient: it
needs the indices and the weight's shape. So the largest unit of many models need not travel a second time.

Note [Lookups]
    1. Wrong must not happen, so a use is a lookup only where nothing else can be: the module runs torch's own
       `nn.Embedding.forward`, autograd recorded that one operation on the gathered weight itself, nobody has hung a
       hook on the weight or on what came out, and no hook of the module's has seen the weight: there is none before
       the forward but ours, and none behind it before ours. Anything else reads weights.
    2. It is looked at anew in each forward. A use that reads weights although the program holds no gather for it is a
       use like any other that needs more than the program holds: it is gathered, late, as ranks agree.
    3. A lookup's backward opens no window: code that asks its module for the weight finds a `Shard`, which refuses to
       be computed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lamina.core.slots import Slot
from lamina.runtime.escapes import HEARD_EVERYWHERE


def is_lookup(module: nn.Module) -> bool:
    """Whether a module's forward is a lookup and nothing else."""
    return isinstance(module, nn.Embedding) and _forward_of(module) is nn.Embedding.forward


def reads_weights(module: nn.Module, hook: object, slot: Slot, nodes: Sequence[Any], outputs: Sequence[Tensor]) -> bool:
    """Whether the backward of a forward that has ended reads the weights in `slot`. See Note [Lookups] 1.

    Args:
        hook: ours, that is called after the module's forward.
        nodes: autograd's, of the outputs.
        outputs: every tensor in what the module has returned.
    """
    if not is_lookup(module) or len(nodes) != 1 or nodes[0].name() != "EmbeddingBackward0":
        return True
    if next(iter(module._forward_hooks.values())) != hook or len(module._forward_pre_hooks) > 1:
        return True
    if any(HEARD_EVERYWHERE):
        return True
    weight: Any = getattr(nodes[0].next_functions[0][0], "variable", None)
    if all(weight is not full for full in slot.fulls):
        return True
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks) or any(t._backward_hooks for t in outputs)


def _forward_of(module: nn.Module) -> object:
    return vars(module).get("forward", type(module).forward)
