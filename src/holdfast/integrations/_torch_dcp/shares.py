"""What one rank writes of a checkpoint that torch has planned: chunks of tensors, and values with what is in them."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from holdfast._base.boxes import Box, volume
from holdfast._formats.archives.known_names import AllowedName, known_class
from holdfast._formats.archives.values import decode_value
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.layout import ChunkToWrite
from holdfast._formats.native.registered_types import registered_type
from holdfast._formats.native.stored_files import StoredFile
from holdfast._formats.native.values import JSON, Encoder, Path
from holdfast._formats.tensor_bytes import tensor_pieces
from holdfast._layout.descriptions import Bytes, LocalTensor, TensorDescription, describe
from holdfast._ranks.failures import PackedFailure
from holdfast.errors import DamagedCheckpointError, InvalidPlanError, RefusedPickleError, UnsupportedValueError

_MOST_SHOWN = 20


class WrittenTensor(NamedTuple):
    """A tensor of which a rank has written something. Its place in the list of the rank is its number there."""

    fqn: str
    part: int | None
    """None if it is what has this name; else which of the tensors and arrays in the value of this name it is."""
    dtype: str
    shape: tuple[int, ...]
    numpy: Any = None


@dataclass
class WrittenShare:
    """What a rank has written, as it is sent to the coordinator."""

    rank: int
    tensors: list[WrittenTensor] = field(default_factory=list)
    values: dict[str, JSON] = field(default_factory=dict)
    """Typed values by name. Tensors in them are referred to by the number of the part."""
    boxes: list[tuple[int, Box]] = field(default_factory=list)
    """Of each chunk the number of its tensor in the list of this rank, and which part of it it is."""
    files: list[StoredFile] = field(default_factory=list)
    failure: PackedFailure | None = None
    """Why there is nothing."""


class Gathering:
    """Collects what a plan wants from one rank. Values are taken at once, tensors only when they are written."""

    def __init__(self, planner: SavePlanner, share: WrittenShare, *, allow_pickle: bool) -> None:
        self._resolve = _Resolver(planner)
        self._allow_pickle = allow_pickle
        self._share = share
        self._numbers: dict[str, int] = {}
        self._refused: dict[str, str] = {}
        self.chunks: list[ChunkToWrite] = []
        self.local: dict[str, LocalTensor] = {}

    def take(self, plan: SavePlan) -> None:
        """Look at all items. Raises if there is something that cannot be stored, naming all such values."""
        for item in plan.items:
            if item.type is not WriteItemType.BYTE_IO:
                self._take_chunk(item)
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                self._take_value(item.index.fqn, self._resolve.value(item))
        if self._refused:
            raise _unsupported(self._refused)
        self.chunks.sort(key=lambda chunk: (chunk.tensor, chunk.offsets))

    def _take_chunk(self, item: WriteItem) -> None:
        fqn, data = item.index.fqn, item.tensor_data
        assert data is not None
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        # A planner may turn a tensor into one of another type, which shows only in what it gives.
        description, _ = describe(fqn, self._resolve(item), stored_dtype=None, compare=False)
        if fqn not in self._numbers:
            self._numbers[fqn] = self._add(WrittenTensor(fqn, None, description.dtype, tuple(data.size)))
            self.local[fqn] = PlannedTensor(fqn, [])
        if volume(box.sizes):
            planned = self.local[fqn]
            planned.value.append((box, lambda: self._resolve(item)))
            self._add_chunk(self._numbers[fqn], fqn, description, tuple(data.size), box)

    def _take_value(self, fqn: str, blob: bytes) -> None:
        parts: dict[int, tuple[str, Any]] = {}

        def take(path: Path, tensor: Any) -> str:
            label, _ = parts.setdefault(id(tensor), (str(len(parts)), tensor))
            return label

        try:
            value = self._decoded(fqn, blob)
            self._share.values[fqn] = Encoder(take, allow_pickle=self._allow_pickle).encode(value, (fqn,))
        except RefusedPickleError as error:
            self._refused[fqn] = f"it needs {error.global_name}, which is not loaded without being asked for"
        except DamagedCheckpointError as error:
            self._refused[fqn] = f"the planner gave bytes that torch.save did not write ({error.found})"
        except UnsupportedValueError as error:
            self._refused[fqn] = error.message.partition("\n")[2].strip() or error.message
        else:
            for number, (_, tensor) in enumerate(parts.values()):
                self._take_part(fqn, number, tensor)

    def _decoded(self, fqn: str, blob: bytes) -> Any:
        try:
            return decode_value(blob, source="the state", key=fqn, find_also=_find_registered)
        except RefusedPickleError:
            if not self._allow_pickle:
                raise
            return decode_value(blob, source="the state", key=fqn, allow_pickle=True)

    def _take_part(self, fqn: str, part: int, tensor: Any) -> None:
        name = _free(f"{fqn}#{part}", self.local)
        description, self.local[name] = describe(name, tensor, stored_dtype=None, compare=False)
        number = self._add(WrittenTensor(fqn, part, description.dtype, description.shape, description.numpy))
        for box in description.boxes:
            self._add_chunk(number, name, description, description.shape, box)

    def _add(self, tensor: WrittenTensor) -> int:
        self._share.tensors.append(tensor)
        return len(self._share.tensors) - 1

    def _add_chunk(
        self, number: int, name: str, description: TensorDescription, shape: tuple[int, ...], box: Box
    ) -> None:
        dtype = dtype_named(description.dtype)
        stored = self._share.tensors[number]
        if stored.dtype != description.dtype:
            raise InvalidPlanError(
                f"the planner gives parts of '{stored.fqn}' as {stored.dtype} and as {description.dtype}. Let it give "
                "all parts of a tensor in one dtype.",
                problems=[stored.fqn],
            )
        self.chunks.append(ChunkToWrite(number, name, dtype, shape, box.offsets, box.sizes))
        self._share.boxes.append((number, box))


class PlannedTensor(LocalTensor):
    """A tensor whose boxes come from a planner when they are needed: ``value`` is a list of boxes and functions."""

    __slots__ = ()

    def pieces(self, box: Box, largest: int) -> Iterator[Bytes]:
        """The stored form of a box that is in one of the planned ones."""
        planned: Sequence[tuple[Box, Callable[[], torch.Tensor]]] = self.value
        for held, resolve in planned:
            origin = [at - first for at, first in zip(box.offsets, held.offsets, strict=True)]
            ends = [at + size for at, size in zip(origin, box.sizes, strict=True)]
            if min(origin, default=0) >= 0 and all(end <= size for end, size in zip(ends, held.sizes, strict=True)):
                part = resolve()[tuple(slice(at, end) for at, end in zip(origin, ends, strict=True))]
                return tensor_pieces(part, largest)
        raise AssertionError(f"a part of {self.key!r} was asked for that was not planned: {box}")


class _Resolver:
    """Asks a planner for data. The last tensor is kept, since it may be asked for in several parts."""

    def __init__(self, planner: SavePlanner) -> None:
        self._planner = planner
        self._last: tuple[WriteItem | None, Any] = (None, None)

    def __call__(self, item: WriteItem) -> torch.Tensor:
        if self._last[0] is not item:
            self._last = (None, None)  # let go of it before there is another one
            self._last = (item, self._tensor(item))
        return cast("torch.Tensor", self._last[1])

    def value(self, item: WriteItem) -> bytes:
        data: Any = self._planner.resolve_data(item)
        if not isinstance(data, io.IOBase):
            raise InvalidPlanError(
                f"the planner gave {type(data).__name__} for the value '{item.index.fqn}' where a stream of bytes was "
                "planned.",
                problems=[item.index.fqn],
            )
        return data.getvalue() if isinstance(data, io.BytesIO) else cast("bytes", cast("Any", data).read())

    def _tensor(self, item: WriteItem) -> torch.Tensor:
        data: Any = self._planner.resolve_data(item)
        assert item.tensor_data is not None
        expected = tuple(item.tensor_data.chunk.sizes)
        found = tuple(data.shape) if isinstance(data, torch.Tensor) else type(data).__name__
        if found != expected:
            raise InvalidPlanError(
                f"the planner gave {found} for a part of '{item.index.fqn}' where a tensor of shape {expected} was "
                "planned. A planner may change the elements of a tensor, but not its shape.",
                problems=[item.index.fqn],
            )
        return cast("torch.Tensor", data.detach())


def _find_registered(module: str, name: str) -> AllowedName | None:
    """A class that the program registered, if there is one where the name leads to."""
    place: Any = sys.modules.get(module)
    for part in name.split("."):
        place = getattr(place, "__dict__", {}).get(part)  # no lookup that could run something
    return known_class(place) if isinstance(place, type) and registered_type(place) is not None else None


def _free(name: str, taken: dict[str, LocalTensor]) -> str:
    while name in taken:
        name += "#"
    return name


def _unsupported(refused: dict[str, str]) -> UnsupportedValueError:
    lines = [f"  '{fqn}': {why}" for fqn, why in list(refused.items())[:_MOST_SHOWN]]
    if len(refused) > _MOST_SHOWN:
        lines.append(f"  and {len(refused) - _MOST_SHOWN} more (see the field `keys` of this error)")
    return UnsupportedValueError(
        "These values cannot be stored, so nothing was saved:\n"
        + "\n".join(lines)
        + "\nTurn them into plain values, register their classes with holdfast.register_type, or pass "
        "HoldfastWriter(..., allow_pickle=True) to store them as pickles.",
        key=next(iter(refused)),
        keys=list(refused),
    )
