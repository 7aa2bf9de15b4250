"""Two parameters in the same memory: one of them, in torch; two, once each has a place of its own.

Ties are one `nn.Parameter` under several names, and stay one. `nn.Parameter(other.data.t())` is another object over the
same bytes: an optimizer that updates one updates both, and a shard of either knows nothing of the other.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lamina.errors import UsageError


class _Span(NamedTuple):
    start: int  # in bytes of the storage
    stop: int
    name: str
    tensor: Tensor


def refuse_overlaps(model: nn.Module) -> None:
    """Raise where a trainable parameter shares an element with another parameter or a buffer.

    Raises:
        UsageError: with both names.
    """
    by_storage: dict[int, list[_Span]] = defaultdict(list)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.layout is torch.strided and type(tensor) in (nn.Parameter, Tensor) and tensor.numel():
            address = tensor.untyped_storage().data_ptr()
            if address:  # neither on meta nor deferred
                by_storage[address].append(_span(name, tensor))
    for spans in by_storage.values():
        spans.sort(key=lambda span: span[:3])
        for number, one in enumerate(spans):
            for other in spans[number + 1 :]:
                if other.start >= one.stop:
                    break
                moves = one.tensor.requires_grad or other.tensor.requires_grad
                if moves and _share_an_element(one, other):
                    raise UsageError(
                        f"`{one.name}` and `{other.name}` lie in the same memory without being one parameter, so that "
                        "they would part: tie them (`b.weight = a.weight`), or give one its own memory "
                        "(`nn.Parameter(a.weight.detach().clone())`)"
                    )


def _span(name: str, tensor: Tensor) -> _Span:
    size = tensor.element_size()
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * size
    return _Span(start, start + (reach + 1) * size, name, tensor)


def _share_an_element(one: _Span, other: _Span) -> bool:
    """Exactly: columns of one packed matrix reach over each other and share nothing."""
    if one.tensor.dtype != other.tensor.dtype:
        return True
    size = one.tensor.element_size()
    first = min(one.start, other.start) // size
    marks = torch.zeros((max(one.stop, other.stop)) // size - first, dtype=torch.bool)
    for span in (one, other):
        view = marks.as_strided(span.tensor.shape, span.tensor.stride(), span.start // size - first)
        if span is other and bool(view.any()):
            return True
        view.fill_(True)
    return False
