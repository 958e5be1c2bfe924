"""What one rank holds of the tensors that are to be saved: descriptions that travel, and the data that stays.

What is needed only for tensors that are spread over ranks is imported where one of them is met: it takes a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import xxhash

from holdfast._base.boxes import Box, contains, place_of
from holdfast._base.divisions import Division
from holdfast._compat.tensors import local_part
from holdfast._formats.dcp.metadata import MetadataIndex
from holdfast._formats.native.dtypes import dtype_named, name_of
from holdfast._formats.native.members import CannotStore
from holdfast._formats.native.stored_files import MOST_DIMENSIONS
from holdfast._formats.native.torch_elements import dtype_of
from holdfast._formats.native.values import stored_numpy_dtype
from holdfast._formats.tensor_bytes import array_pieces, digest_of_small, has_its_memory, tensor_pieces
from holdfast._layout.tensor_kinds import is_dtensor, is_partitioned, is_sharded_tensor, refused
from holdfast.errors import UnsupportedTensorError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class TensorDescription(NamedTuple):
    """What a rank has of one tensor."""

    key: str
    dtype: str
    """As which it is stored."""
    shape: tuple[int, ...]
    kind: str
    boxes: tuple[Box, ...]
    rank: int | None = None
    """Whose it is, if every rank has one of its own."""
    numpy: Any = None
    tied_to: str | None = None
    """A key before this one under which this rank holds the very same memory."""
    from_first_rank: bool = False
    """The copy of the first rank counts, whatever the others have."""
    digests: tuple[bytes, ...] = ()
    """Of the boxes, if other ranks may hold the same ones and are to be compared."""
    division: Division | None = None
    """Which rank has which box, if a rule says so for all of them."""


class SavingRanks(NamedTuple):
    """The ranks that save together."""

    world_size: int = 1
    members: tuple[int, ...] | None = None
    """As the whole job counts them, if these are not all."""

    @classmethod
    def of(cls, members: tuple[int, ...]) -> SavingRanks:
        """Those ranks of the job.

        >>> SavingRanks.of((0, 1)), SavingRanks.of((2, 3))
        (SavingRanks(world_size=2, members=None), SavingRanks(world_size=2, members=(2, 3)))
        """
        return cls(len(members), None if members == tuple(range(len(members))) else members)

    @property
    def everywhere(self) -> Division:
        """The rule for what each of them has completely."""
        return _EVERYWHERE if self.world_size == 1 else Division(copies=((self.world_size, 1),))


_EVERYWHERE = Division()


class WritableTensor(Protocol):
    """What a rank writes a tensor from."""

    @property
    def value(self) -> Any:
        """All of it, if it is in one piece."""

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """As which it is stored, if that is another one than its own."""

    def pieces(self, box: Box, largest: int) -> Iterator[Bytes]:
        """The stored form of a box that this rank holds, in order, converted in parts of ``largest`` bytes."""

    def digest(self, box: Box) -> bytes:
        """Of the content of a box as this rank has it."""


class LocalTensor(NamedTuple):
    """A tensor or numpy array of the state, and the element type to store it as if that is another one."""

    key: str
    value: Any
    stored_dtype: torch.dtype | None = None

    def pieces(self, box: Box, largest: int) -> Iterator[Bytes]:
        """The stored form of a box that this rank holds, in order, converted in parts of ``largest`` bytes."""
        if _is_plain(self.value) and box.sizes == self.value.shape:
            return tensor_pieces(self.value, largest, self.stored_dtype)
        if isinstance(self.value, np.ndarray):
            return array_pieces(part_of(self.value, box), largest)
        return tensor_pieces(self._local(box), largest, self.stored_dtype)

    def digest(self, box: Box) -> bytes:
        """Of the content of a box as this rank has it."""
        value = self.value
        if isinstance(value, np.ndarray):
            return digest_pieces(array_pieces(value))
        chunk = value if type(value) in _PLAIN else self._held_chunk(box)
        return digest_of_small(chunk) or digest_pieces(tensor_pieces(chunk))

    def held(self, box: Box) -> Any:
        """One of the boxes that this rank holds, as it is in memory: a plain tensor or an array."""
        if isinstance(self.value, np.ndarray):
            return self.value
        return (self.value if _is_plain(self.value) else self._held_chunk(box)).detach()

    def _held_chunk(self, box: Box) -> torch.Tensor:
        from holdfast._layout.tensor_items import find_tensor_shard

        return find_tensor_shard(self.value, MetadataIndex(self.key, box.offsets))

    def _local(self, box: Box) -> torch.Tensor:
        """A box of the tensor, which is in one of the chunks that this rank holds."""
        if _is_plain(self.value):
            return cast("torch.Tensor", part_of(self.value, box))
        from holdfast._layout.tensor_items import local_chunks

        for held, data in local_chunks(self.value, key=self.key):
            if held == box:
                return data.detach()
            if contains(held, box):
                return cast("torch.Tensor", part_of(data.detach(), box, origin=held.offsets))
        raise AssertionError(f"this rank was asked for a part of {self.key!r} that it does not hold: {box}")


def describe(
    key: str,
    value: Any,
    *,
    stored_dtype: torch.dtype | None,
    compare: bool,
    ranks: SavingRanks = SavingRanks(),  # noqa: B008 - never changed
) -> tuple[TensorDescription, LocalTensor]:
    """Describe what this rank has of a tensor or numpy array. ``compare`` if other ranks may have the same."""
    local = LocalTensor(key, value, stored_dtype)
    if _is_dense(value) and (said := said_of_dense(stored_dtype or value.dtype, value.shape, ranks)) is not None:
        described = said._replace(key=key)
    elif isinstance(value, np.ndarray):
        described = _describe_array(key, value)._replace(division=ranks.everywhere)
    elif _is_plain(value):
        described = _describe_plain(key, value, stored_dtype)._replace(division=ranks.everywhere)
    else:
        described = _describe_distributed(key, value, stored_dtype, ranks)
    if not described.boxes and is_partitioned(value):
        raise refused([key])
    if len(described.shape) > MOST_DIMENSIONS:
        raise _too_many_dimensions(described)
    if compare and described.boxes and others_may_have_it(value):
        described = described._replace(digests=tuple(map(local.digest, described.boxes)))
    return described, local


def others_may_have_it(value: Any) -> bool:
    """Whether other ranks may hold the very same as this one."""
    if type(value) in _PLAIN or isinstance(value, np.ndarray):
        return True
    from holdfast._layout.tensor_items import may_be_replicated

    return may_be_replicated(value)


def digest_pieces(pieces: Iterator[Bytes]) -> bytes:
    """One digest of bytes that come in pieces."""
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece.data)
    return hasher.digest()


def dtype_of_whole(tensor: torch.Tensor) -> torch.dtype:
    """The element type of a tensor, of which this rank may hold a part or nothing."""
    if is_sharded_tensor(tensor):
        from holdfast._layout.tensor_items import size_and_dtype

        return size_and_dtype(tensor)[1]
    return tensor.dtype


def memory_of(value: Any) -> tuple[Any, ...] | None:
    """What two names for the very same elements have in common; None if there are no elements."""
    address = address_of(value)
    if address is None:
        return None
    if isinstance(value, np.ndarray):
        return ("numpy", address, value.dtype.str, value.shape, value.strides) if value.size else None
    local = local_part(value) if is_dtensor(value) else value
    if local.numel() == 0 or local.is_meta:
        return None
    layout = (value.device_mesh, value.placements) if is_dtensor(value) else ()
    # A conjugate has the memory of what it is the conjugate of, and other elements.
    views = local.is_conj(), local.is_neg()
    return str(local.device), address, local.dtype, tuple(value.shape), local.stride(), views, *layout


def address_of(value: Any) -> int | None:
    """Where the elements begin. A quick first look: only tensors with the same one can have the same ``memory_of``."""
    if isinstance(value, np.ndarray):
        return int(value.__array_interface__["data"][0])
    if type(value) not in _PLAIN:
        value = local_part(value) if is_dtensor(value) else value
        if not _is_plain(value):
            return None
    try:
        return int(value.data_ptr())
    except RuntimeError:  # a kind of tensor that has no memory of its own
        return None


def _too_many_dimensions(described: TensorDescription) -> UnsupportedTensorError:
    """Torch has tensors of any number of dimensions, but nobody could load them."""
    count = len(described.shape)
    return UnsupportedTensorError(
        f"'{described.key}' has {count} dimensions, and stored tensors have {MOST_DIMENSIONS} at most. Reshape it.",
        key=described.key,
        kind=f"{count} dimensions",
    )


def _is_dense(value: Any) -> bool:
    """Whether it can be seen at a glance that it is a plain tensor with bytes, as it is with most."""
    return (
        type(value) in _PLAIN
        and value.is_cpu
        and value.layout is torch.strided
        and not value.is_nested
        and has_its_memory(value)
    )


@lru_cache(maxsize=4096)
def said_of_dense(dtype: torch.dtype, size: torch.Size, ranks: SavingRanks) -> TensorDescription | None:
    """All but the key of a description, made once for tensors that are alike.

    None if they have to be looked at one by one, to say what is wrong with each.
    """
    known = dtype_of(dtype)
    if known is None or len(size) > MOST_DIMENSIONS:
        return None
    return _whole("", known.name, size)._replace(division=ranks.everywhere)


def _describe_plain(key: str, tensor: torch.Tensor, stored_dtype: torch.dtype | None) -> TensorDescription:
    from holdfast._layout.tensor_items import refuse_if_it_has_no_bytes

    refuse_if_it_has_no_bytes(key, tensor)
    return _whole(key, _dtype(key, stored_dtype or tensor.dtype), tensor.shape)


def _whole(key: str, dtype: str, size: Sequence[int], numpy: Any = None) -> TensorDescription:
    """The description of something that this rank has the whole of."""
    shape = tuple(size)
    boxes = () if 0 in shape else (Box((0,) * len(shape), shape),)
    return TensorDescription(key, dtype, shape, "replicated", boxes, numpy=numpy)


def _describe_array(key: str, array: Any) -> TensorDescription:
    little = array.dtype.newbyteorder("<")
    name = name_of(array.dtype)
    try:
        known = dtype_named(name or "").numpy is not None and array.dtype == little
    except ValueError:
        known = False
    stored = name if known and name is not None else f"raw{array.dtype.itemsize}"
    if array.dtype.itemsize == 0:
        raise UnsupportedTensorError(
            f"'{key}' is a numpy array of {array.dtype}, whose elements have no bytes. Leave it out, or convert it.",
            key=key,
            kind=str(array.dtype),
        )
    return _whole(key, stored, array.shape, _numpy_name(key, array.dtype))


def _numpy_name(key: str, dtype: Any) -> Any:
    try:
        return stored_numpy_dtype(dtype)
    except CannotStore as reason:
        raise UnsupportedTensorError(f"'{key}' cannot be stored: {reason}", key=key, kind=str(dtype)) from None


def _describe_distributed(
    key: str, tensor: Any, stored_dtype: torch.dtype | None, ranks: SavingRanks
) -> TensorDescription:
    from holdfast._layout.tensor_items import (
        follows_its_placements,
        local_chunks,
        refuse_if_it_has_no_bytes,
        size_and_dtype,
    )

    size, dtype = size_and_dtype(tensor)
    held = [(box, data) for box, data in local_chunks(tensor, key=key) if all(box.sizes)]
    for _, data in held[:1]:
        refuse_if_it_has_no_bytes(key, data)
    boxes = tuple(box for box, _ in held)
    shape = tuple(size)
    whole = is_dtensor(tensor) and all(placement.is_replicate() for placement in tensor.placements)
    division = None
    if is_dtensor(tensor) and follows_its_placements(tensor):
        from holdfast._layout.mesh_divisions import dtensor_division

        division = dtensor_division(tensor, ranks.world_size, ranks.members)
    kind = "replicated" if whole else "sharded"
    return TensorDescription(key, _dtype(key, stored_dtype or dtype), shape, kind, boxes, division=division)


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor that this rank has the whole of."""
    if type(value) in _PLAIN:
        return True
    if not isinstance(value, torch.Tensor) or is_dtensor(value) or is_sharded_tensor(value):
        return False
    from holdfast._layout.tensor_items import WRITE_HOOK

    return not hasattr(type(value), WRITE_HOOK)


def _dtype(key: str, dtype: torch.dtype) -> str:
    known = dtype_of(dtype)
    if known is None:
        raise UnsupportedTensorError(
            f"'{key}' is a tensor of {dtype}, which the format has no place for. Convert it before saving (a quantized "
            "tensor with int_repr(), and its scale beside it).",
            key=key,
            kind=str(dtype),
        )
    return known.name


def part_of(array: Any, box: Box, origin: Sequence[int] | None = None) -> Any:
    """A box of an array or tensor whose first cell is at ``origin``."""
    if box.sizes == tuple(array.shape):
        return array
    return array[place_of(box.offsets, box.sizes, origin)]
