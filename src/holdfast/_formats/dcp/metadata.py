"""What a DCP checkpoint contains, as plain data, and where each item of it is stored."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

# The nouns: what a checkpoint contains, as plain data.
#
# These classes know nothing about files, ranks or pickling. Their field names follow
# ``torch.distributed.checkpoint.metadata``, because the DCP index stores them under these names; how they become
# bytes is the business of the modules beside this one.


@dataclass
class ChunkStorageMetadata:
    """One axis-aligned box of a tensor that is stored as a unit."""

    offsets: torch.Size
    sizes: torch.Size


class _MEM_FORMAT_ENCODING(Enum):  # noqa: N801 - the name is part of the stored format
    """How a memory format is written into the index (torch's own objects do not pickle)."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


_MEMORY_FORMATS = {
    torch.contiguous_format: _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT,
    torch.channels_last: _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST,
    torch.preserve_format: _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT,
}
_MEMORY_FORMATS_BY_ENCODING = {encoding: fmt for fmt, encoding in _MEMORY_FORMATS.items()}


@dataclass
class TensorProperties:
    """What a tensor is besides its shape. Only ``dtype`` matters to a reader; the rest is kept for the format."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = field(default=torch.strided)
    requires_grad: bool = False
    memory_format: torch.memory_format = field(default=torch.contiguous_format)
    pin_memory: bool = False
    strides: tuple[int, ...] | None = None
    """How the tensor was laid out in memory, if stock of torch 2.15 or newer saved it; files are row-major."""

    def __getstate__(self) -> tuple[Any, ...]:
        if self.memory_format not in _MEMORY_FORMATS:
            raise RuntimeError(f"memory format {self.memory_format} has no place in a checkpoint's index")
        encoded = _MEMORY_FORMATS[self.memory_format]
        return self.dtype, self.layout, self.requires_grad, encoded, self.pin_memory, self.strides

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        # Until torch 2.14 there are five fields. Later versions add theirs at the end.
        self.dtype, self.layout, self.requires_grad, encoded, self.pin_memory, *newer = state
        self.strides = newer[0] if newer else None
        self.memory_format = _MEMORY_FORMATS_BY_ENCODING[_MEM_FORMAT_ENCODING(encoded)]

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """Describe ``tensor``."""
        return TensorProperties(
            dtype=tensor.dtype,
            layout=tensor.layout,
            requires_grad=tensor.requires_grad,
            pin_memory=tensor.device.type == "cpu" and tensor.is_pinned(),
        )


class _FilledLater:
    """A record one field of which is made when somebody looks at it.

    A checkpoint of many ranks has chunks by the hundred thousand, and few of those who get its index look at them.
    """

    def __getattr__(self, name: str) -> Any:
        # Only called for what is not there yet.
        later = vars(self).get("_later")
        if later is None or later[0] != name:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = vars(self)[name] = later[1].made()
        del vars(self)["_later"]
        return value

    def _leave(self, name: str, maker: Maker) -> None:
        vars(self).pop(name, None)
        vars(self)["_later"] = (name, maker)


class Maker(Protocol):
    """Makes a field when somebody looks at it. Goes with its record wherever that is sent."""

    def made(self) -> Any: ...


@dataclass
class TensorStorageMetadata(_FilledLater):
    """A tensor of the checkpoint: its properties, full size, and the chunks that tile it."""

    properties: TensorProperties
    size: torch.Size
    chunks: list[ChunkStorageMetadata]

    @classmethod
    def with_chunks_later(cls, properties: TensorProperties, size: torch.Size, maker: Maker) -> TensorStorageMetadata:
        """One whose chunks are made when somebody looks at them."""
        entry = cls(properties, size, [])
        entry._leave("chunks", maker)
        return entry


@dataclass
class BytesStorageMetadata:
    """A value of the checkpoint that is not a tensor."""


STORAGE_TYPES: TypeAlias = TensorStorageMetadata | BytesStorageMetadata
STATE_DICT_TYPE: TypeAlias = dict[str, Any]


@dataclass
class StorageMeta:
    """Where and as what a checkpoint was saved; information only."""

    checkpoint_id: str | os.PathLike[str] | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list)


@dataclass
class Metadata(_FilledLater):
    """The index of a checkpoint: every key, how it is cut into chunks, and where the storage put them."""

    state_dict_metadata: dict[str, STORAGE_TYPES]
    planner_data: Any = None
    storage_data: Any = None
    storage_meta: StorageMeta | None = None
    version: str | None = None

    def leave_places(self, maker: Maker) -> None:
        """Let ``storage_data`` be made when somebody looks at it."""
        self._leave("storage_data", maker)


class _UntilMade:
    """On the class what stock's has there, the default. On an instance without a value, what it is to become."""

    def __get__(self, metadata: Metadata | None, owner: type) -> Any:
        return None if metadata is None else metadata.__getattr__("storage_data")


Metadata.storage_data = _UntilMade()


def still_to_be_made(record: TensorStorageMetadata | Metadata) -> Maker | None:
    """What will make the chunks of a tensor, or the places of an index; None if they are there."""
    later = vars(record).get("_later")
    maker: Maker | None = None if later is None else later[1]
    return maker


@dataclass(frozen=True)
class MetadataIndex:
    """Names one stored unit: a key, and for tensors the offsets of the chunk.

    ``index`` is a hint (the chunk's position in its list) and takes no part in equality.
    """

    fqn: str
    offset: torch.Size | None = None
    index: int | None = field(hash=False, compare=False, default=None)

    def __init__(self, fqn: str, offset: Sequence[int] | None = None, index: int | None = None) -> None:
        own = vars(self)  # a frozen class takes its values in no other way
        own["fqn"] = fqn
        own["index"] = index
        # Without an offset the attribute stays on the class: that is the form stored indexes have.
        if offset is not None:
            own["offset"] = offset if type(offset) is torch.Size else torch.Size(offset)


# Where one item of a DCP checkpoint is stored, and what its bytes must add up to.


SEAL_STATE_KEY = "holdfast_seal"
"""Name of the extra attribute in the stored index. Readers that do not know it ignore it."""


class Seal(NamedTuple):
    """What the bytes of a blob must add up to, kept in the index so that a swapped file is noticed too."""

    payload_offset: int
    """First payload byte (raw tensor data, or the whole blob), counted from the start of the blob."""
    payload_length: int
    payload_crc: int
    """CRC-32 of the payload."""
    envelope_crc: int
    """CRC-32 of all other bytes of the blob, in order."""


@dataclass
class _StorageInfo:
    """One stored item: ``length`` bytes at ``offset`` of the file ``relative_path``."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None = None
    seal: Seal | None = None

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "relative_path": self.relative_path,
            "offset": self.offset,
            "length": self.length,
        }
        if self.transform_descriptors is not None:
            state["transform_descriptors"] = list(self.transform_descriptors)
        if self.seal is not None:
            state[SEAL_STATE_KEY] = tuple(self.seal)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        seal = state.get(SEAL_STATE_KEY)
        self.__init__(  # type: ignore[misc]
            state["relative_path"],
            state["offset"],
            state["length"],
            state.get("transform_descriptors"),
            None if seal is None else Seal(*seal),
        )


@dataclass
class _StoragePrefix:
    """The start of the names of all files that one rank writes."""

    prefix: str
