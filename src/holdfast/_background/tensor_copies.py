"""Private host copies of tensors of every kind, in memory that somebody else hands out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from holdfast._base.box_bytes import span_of
from holdfast._compat.dtensors import AsyncCollectiveTensor
from holdfast._compat.sharded_tensors import LocalShardOfTensor as Shard
from holdfast._compat.sharded_tensors import ShardedTensor, ShardedTensorBase, group_of_sharded
from holdfast._compat.tensors import is_wrapper_subclass
from holdfast._formats.tensor_bytes import copyable

# Copies of memory that several tensors are views of, so that they are views of one memory in the copy too.
#
# What is copied of a storage is the stretch from the first to the last byte that one of the tensors uses.


_ALIGNMENT = 16
"""Of the largest element. A stretch starts at a multiple of it, so that the elements in it are aligned."""


class StorageRange(NamedTuple):
    """Bytes of a storage, the last one excluded."""

    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """How many they are."""
        return self.last - self.first


Storage = tuple[torch.device, int]
"""Identifies the storage of a live tensor."""


def storage_of(tensor: torch.Tensor) -> Storage | None:
    """The memory that a tensor is a view of. None if its elements are not simply its content."""
    if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
        return None
    try:
        address = tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a tensor without memory of its own
        return None
    inside = _used(tensor).last <= tensor.untyped_storage().nbytes()
    return (tensor.device, address) if address and inside else None


def storage_ranges(parts: Iterable[torch.Tensor]) -> dict[Storage, StorageRange]:
    """What of each storage is used by any of these tensors."""
    found: dict[Storage, StorageRange] = {}
    for part in parts:
        storage = storage_of(part)
        if storage is not None:
            used = _used(part)
            known = found.get(storage, used)
            first = min(known.first, used.first)
            found[storage] = StorageRange(first - first % _ALIGNMENT, max(known.last, used.last))
    return found


def bytes_in(tensor: torch.Tensor, stretch: StorageRange) -> torch.Tensor:
    """A stretch of the storage that ``tensor`` is a view of."""
    elements = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return elements.set_(tensor.untyped_storage(), stretch.first, (stretch.nbytes,), (1,))


def view_like(tensor: torch.Tensor, copied: torch.Tensor, stretch: StorageRange) -> torch.Tensor:
    """The view of the ``copied`` stretch that ``tensor`` is of the original one, strides included."""
    used = _used(tensor)
    elements: Any = copied[used.first - stretch.first : used.last - stretch.first].view(tensor.dtype)
    view: torch.Tensor = elements.as_strided(tensor.size(), tensor.stride())
    return view


def _used(tensor: torch.Tensor) -> StorageRange:
    first = int(tensor.storage_offset()) * tensor.itemsize
    return StorageRange(first, first + int(span_of(tensor.shape, tensor.stride(), 1)) * tensor.itemsize)


# A tensor with other tensors inside (a ``DTensor``, a ``ShardedTensor``, any wrapper) is rebuilt around copies of
# these; what describes the layout is shared, for it never changes.


CopyPlain = Callable[[torch.Tensor], torch.Tensor]


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The ordinary tensors that ``tensor`` consists of."""
    if isinstance(tensor, AsyncCollectiveTensor):
        yield from plain_parts(tensor.wait())
    elif isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            yield from plain_parts(shard.tensor)
    elif is_wrapper(tensor):
        for part in take_apart(tensor)[0].values():
            if isinstance(part, torch.Tensor):
                yield from plain_parts(part)
    elif has_ordinary_memory(tensor):
        yield tensor


def copy_with(tensor: torch.Tensor, copy_plain: CopyPlain) -> torch.Tensor:
    """A tensor like this one, with ``copy_plain`` of each of its plain parts in their place."""
    if isinstance(tensor, AsyncCollectiveTensor):
        return copy_with(tensor.wait(), copy_plain)
    if isinstance(tensor, ShardedTensor):
        shards = [Shard(copy_with(shard.tensor, copy_plain), shard.metadata) for shard in tensor.local_shards()]
        return sharded_like(tensor, shards)
    if is_wrapper(tensor):
        parts, context = take_apart(tensor)
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                parts[name] = copy_with(part, copy_plain)
        rebuilt = put_together(type(tensor), parts, context, tensor.size(), tensor.stride())
        return _of_same_class(tensor, rebuilt)
    if tensor.is_meta:
        return tensor  # there is nothing that could change
    if has_ordinary_memory(tensor):
        return _of_same_class(tensor, copy_plain(tensor))
    if tensor.layout is torch.strided and type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return copy.deepcopy(tensor)  # a subclass whose memory we know nothing about
    return tensor.detach().to("cpu", copy=True)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be taken apart into other tensors, and put together again."""
    return is_wrapper_subclass(tensor)


def take_apart(tensor: Any) -> tuple[dict[str, Any], Any]:
    """The parts of a wrapper by name, and what else its class needs to put it together."""
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def put_together(cls: Any, parts: dict[str, Any], context: Any, size: Any, stride: Any) -> torch.Tensor:
    """A wrapper of class ``cls`` around ``parts``."""
    made: torch.Tensor = cls.__tensor_unflatten__(parts, context, size, stride)
    return made


def has_ordinary_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements are in memory at strides, so that a copy needs nothing but memory."""
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)


def bytes_of(tensor: torch.Tensor) -> int:
    """How much memory a copy of a plain part takes."""
    return tensor.nbytes


def twin_over(elements: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like ``tensor`` over these bytes. Dense layouts such as channels-last are kept."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return elements.view(tensor.dtype).as_strided(tensor.size(), strides)


def transfer(source: torch.Tensor, twin: torch.Tensor, *, non_blocking: bool) -> None:
    """Copy the elements. Works on what torch has no copy for (elements of fewer than 8 bits), too."""
    with torch.no_grad():
        copyable(twin).copy_(copyable(source.detach()), non_blocking=non_blocking)


def fingerprint_of_memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same elements: tied weights are copied once, and stay tied."""
    where = (tensor.device, tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype)
    return (*where, tensor.is_conj(), tensor.is_neg(), tensor.requires_grad, type(tensor))


def sharded_like(tensor: ShardedTensor, shards: list[Shard]) -> ShardedTensor:
    """A ``ShardedTensor`` of the same layout around other local shards. Takes no communication."""
    return make_sharded(shards, tensor.metadata(), tensor.sharding_spec(), group_of_sharded(tensor))


def make_sharded(shards: list[Shard], metadata: Any, spec: Any, group: Any = None) -> ShardedTensor:
    """A ``ShardedTensor`` from its parts. Its constructors would ask the other ranks, of which there may be none."""
    properties = metadata.tensor_properties
    made: Any = ShardedTensorBase.__new__(
        ShardedTensor,
        spec,
        *metadata.size,
        dtype=properties.dtype,
        layout=properties.layout,
        pin_memory=properties.pin_memory,
        requires_grad=properties.requires_grad,
    )
    made._metadata = metadata
    made._local_shards = shards
    made._process_group = group
    made._init_rrefs = False
    made._sharded_tensor_id = None
    made._remote_shards = {}
    result: ShardedTensor = made
    return result


def _of_same_class(tensor: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    kind = type(tensor)
    if kind is not type(plain) and not is_wrapper(tensor):
        plain = plain.as_subclass(kind)
        plain.__dict__.update(tensor.__dict__)
    if tensor.requires_grad and plain.is_leaf:
        plain.requires_grad_()
    return plain
