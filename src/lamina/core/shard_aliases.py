"""Other Shards of one memory (`p.data`, `p.detach()`, views), and what `p.data = value` leaves them.

torch gives `p` other memory there, so who has kept `before = p.data` keeps the values from before: averages of weights
put them aside so while they evaluate. A Shard's memory is its place in a unit's buffer and stays its own. What others
hold of it moves out instead, before it is written: they reach it through one object, which is told so. (Weak references
to them would do, but torch does not swap tensors that have any.)
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from lamina.core.shard_spec import ShardSpec
    from lamina.core.shard_tensor import Shard

_OWN_REFERENCES = 2  # to what nobody else holds: a variable, an argument


class Reach:
    """Whether anybody can have got hold of the memory of some Shards, and may write there unseen at any time."""

    __slots__ = ("is_open",)
    passes_on = False  # to aliases of the Shard; else these are made of the memory that it opens

    def __init__(self) -> None:
        self.is_open = False

    def open(self, local: Tensor) -> Tensor:
        """What is handed out for the `_local` of a Shard."""
        self.is_open = True
        return local


class Shared(Reach):
    """How aliases reach their memory, until it is another one."""

    __slots__ = ("inner", "values")
    passes_on = True

    def __init__(self, inner: Reach | None) -> None:
        super().__init__()
        self.inner = inner  # of the Shard that they are aliases of
        self.values: Tensor | None = None  # 1D, once they have moved out

    def open(self, local: Tensor) -> Tensor:
        if self.values is not None:
            return self.values
        return local if self.inner is None else self.inner.open(local)


def alias_of(source: Shard, spec: ShardSpec) -> Shard:
    """Another Shard of the same memory."""
    reach = _settled(source)
    if type(reach) is Shared:  # an alias itself
        made = type(source)(source._local, spec)
        made._reach = reach
        return made
    inner = reach if reach is not None and reach.passes_on else None
    shared = source._aliases
    if shared is None or shared.inner is not inner:
        shared = source._aliases = Shared(inner)
    made = type(source)(source._local if inner is not None else source.local, spec)
    made._reach = shared
    return made


def _settled(source: Shard) -> Reach | None:
    """Its reach. `Module.to()` and the like put an alias in the place of a parameter, which is none."""
    if type(source._reach) is Shared and getattr(source, "_is_param", False):
        source._reach = source._reach.inner
    return source._reach


def move_out(shard: Shard, value: object) -> None:
    """Give all aliases of a Shard a copy of what lies there, which they go on sharing, before it takes `value`."""
    _settled(shard)
    if value is shard or (shard._aliases is not None and getattr(value, "_reach", None) is shard._aliases):
        return  # its own
    shared, shard._aliases = shard._aliases, None
    if shared is not None and sys.getrefcount(shared) > _OWN_REFERENCES:
        shared.values = shard.local.detach().clone()
