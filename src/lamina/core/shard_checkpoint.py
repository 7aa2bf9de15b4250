"""How a `Shard` speaks to `torch.distributed.checkpoint`: through that package's tensor protocol.

DCP knows DTensor and plain tensors; any other type may say which boxes of the full tensor it holds. A flat range is a
handful of boxes, each contiguous in flat order, so each is a view of the local range: written and read without a copy.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.core.shard_spec import Box, ShardSpec
from lamina.errors import StateError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def warn_of_a_part(spec: ShardSpec) -> None:
    """`if rank == 0: torch.save(model.state_dict(), ...)` is what everybody types for DDP."""
    if spec.index == 0 and len(spec.ranges) > 1 and not spec.detached:
        warnings.warn(
            "rank 0's parts of sharded tensors are being pickled, not the tensors. If this is `torch.save(model."
            "state_dict(), ...)` on one rank, the file will not hold the model: call lamina.save(...) on every rank, "
            "or lamina.export(...) for whole weights. Files of which each rank writes its own are fine",
            stacklevel=3,
        )


def _global_offset(spec: ShardSpec, box: Box) -> torch.Size:
    return torch.Size(box.offset if spec.global_spec is None else spec.global_spec.offset_of(box.offset))


def _boxes(spec: ShardSpec) -> list[Box]:
    if spec.numel == 0 and spec.index == 0:  # nobody holds an element, and yet the key must be in the checkpoint
        return [Box((0,) * len(spec.shape), tuple(spec.shape))]
    return spec.boxes()


def write_items(name: str, local: Tensor, spec: ShardSpec) -> list[WriteItem]:
    """One item per box."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    whole = spec.shape if spec.global_spec is None else spec.global_spec.shape
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk, properties=TensorProperties(dtype=local.dtype), size=torch.Size(whole)
            ),
        )
        for chunk in chunk_list(spec)
    ]


def chunk_list(spec: ShardSpec) -> list[ChunkStorageMetadata]:
    """The boxes of the full (or larger) tensor that lie here."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(_global_offset(spec, box), torch.Size(box.sizes)) for box in _boxes(spec)]


def tensor_of(index: MetadataIndex, local: Tensor, spec: ShardSpec) -> Tensor:
    """The view of `local` that is the box at `index.offset`."""
    at = spec.start
    for box in _boxes(spec):
        here = at - spec.start
        box_numel = torch.Size(box.sizes).numel()
        if index.offset is None or torch.Size(index.offset) == _global_offset(spec, box):
            return local.detach()[here : here + box_numel].view(box.sizes)
        at += box_numel
    raise StateError(
        f"the checkpoint asked for the piece of {spec.describe()} at offset {tuple(index.offset or ())}, which does "
        "not lie here. Save and load with the model sharded as it was when the state dict was made."
    )
