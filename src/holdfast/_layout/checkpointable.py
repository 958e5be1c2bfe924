"""Plain tensors that say by attributes which boxes of a larger tensor they hold.

A program that splits its tensors itself need not wrap them in a class: a local tensor with the four fields of
``CheckpointableTensor`` is saved and loaded as parts of the tensor that ``global_shape`` describes. Several parts may
are in one local tensor, with padding between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeGuard, cast, runtime_checkable

import torch

from holdfast._formats.dcp.metadata import ChunkStorageMetadata, MetadataIndex
from holdfast._layout.tensor_kinds import is_dtensor, is_sharded_tensor

FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


@runtime_checkable
class CheckpointableTensor(Protocol):
    """What a local tensor says about the parts of a larger tensor that it holds. The i-th part is

    - the box of ``local_sizes[i]`` elements at ``global_offsets[i]`` of a tensor of ``global_shape``,
    - and is at ``local_offsets[i]`` of the local tensor.
    """

    global_shape: tuple[int, ...]
    global_offsets: tuple[tuple[int, ...], ...]
    local_offsets: tuple[tuple[int, ...], ...]
    local_sizes: tuple[tuple[int, ...], ...]


def is_checkpointable(obj: object) -> TypeGuard[CheckpointableTensor]:
    """Whether an object is a tensor with the fields. Other kinds that know their layout go by what they know."""
    # Most have not even the first field, and to look for that is much faster than checking a protocol.
    if not isinstance(obj, torch.Tensor) or not all(hasattr(obj, name) for name in FIELDS):
        return False
    return not (is_sharded_tensor(obj) or is_dtensor(obj))


def copy_fields(src: CheckpointableTensor, dst: torch.Tensor) -> None:
    """Let ``dst`` say of itself what ``src`` does."""
    for name in FIELDS:
        setattr(dst, name, getattr(src, name))


def chunks_of(tensor: CheckpointableTensor) -> list[ChunkStorageMetadata]:
    """The boxes of the larger tensor, in the order of the fields."""
    refuse_contradictions(tensor)
    return [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in zip(tensor.global_offsets, tensor.local_sizes, strict=True)
    ]


def shard_of(tensor: CheckpointableTensor, index: MetadataIndex) -> torch.Tensor:
    """The memory of the part that ``index`` names: a view of the local tensor."""
    refuse_contradictions(tensor)
    position = _position(tensor, index)
    part = cast(torch.Tensor, tensor)
    for dim, start in enumerate(tensor.local_offsets[position]):
        part = part.narrow(dim, start, tensor.local_sizes[position][dim])
    return part


def _position(tensor: CheckpointableTensor, index: MetadataIndex) -> int:
    held = [tuple(offsets) for offsets in tensor.global_offsets]
    if index.offset is None:
        if len(held) != 1:
            raise ValueError(
                f"Cannot lookup {index.fqn}: the tensor has multiple checkpointable shards, at offsets {held}, and no "
                "offset was provided"
            )
        return 0
    wanted = tuple(index.offset)
    if index.index is not None and index.index < len(held) and held[index.index] == wanted:
        return index.index
    if wanted not in held:
        raise ValueError(
            f"Could not find checkpointable tensor shard at '{index.offset}' for FQN: '{index.fqn}'; "
            f"this rank has shards at offsets {held}"
        )
    return held.index(wanted)


def refuse_contradictions(tensor: CheckpointableTensor) -> None:
    """Raise if the fields do not describe boxes of both tensors."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a CheckpointableTensor must also be a torch.Tensor, and this is a {type(tensor).__name__}")
    count = len(tensor.global_offsets)
    for name in ("local_offsets", "local_sizes"):
        found = len(getattr(tensor, name))
        if found != count:
            raise ValueError(f"global_offsets and {name} must have the same length; they have {count} and {found}")
    for position in range(count):
        sizes = tensor.local_sizes[position]
        _refuse_wrong_dimensions(f"local_sizes[{position}]", sizes, tensor.global_shape, tensor.shape)
        for name, shape, where in (
            ("global", tensor.global_shape, "global_shape"),
            ("local", tuple(tensor.shape), "tensor shape"),
        ):
            offsets = getattr(tensor, f"{name}_offsets")[position]
            _refuse_wrong_dimensions(f"{name}_offsets[{position}]", offsets, shape)
            for dim, (start, length, size) in enumerate(zip(offsets, sizes, shape, strict=True)):
                if start < 0 or length < 0 or start + length > size:
                    raise ValueError(
                        f"{name} shard {position} dimension {dim} is outside {where}: {length} element(s) at {start} "
                        f"of {list(shape)}"
                    )


def _refuse_wrong_dimensions(name: str, given: Sequence[int], *shapes: Sequence[int]) -> None:
    for shape in shapes:
        if len(given) != len(shape):
            raise ValueError(f"{name} must have {len(shape)} dimensions, as {list(shape)} has; it has {len(given)}")
