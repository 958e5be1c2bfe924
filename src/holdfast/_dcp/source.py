"""Checkpoints of ``torch.distributed.checkpoint``, whether torch or ``holdfast.dcp`` has written them."""

from __future__ import annotations

import hashlib
import io
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast._base.boxes import Box, out_of_bounds, place_of
from holdfast._base.tiling import tiling_problems
from holdfast._dcp.blob_steps import ItemCount
from holdfast._dcp.destinations import Destination, DestinationPlanner
from holdfast._dcp.planner import LoadPlanner
from holdfast._dcp.read_items import create_read_item_for_bytes, create_read_items_for_chunk_list
from holdfast._dcp.reader import FileSystemReader
from holdfast._dcp.tensor_streams import StreamingReader
from holdfast._formats.archives.values import decode_value
from holdfast._formats.box_reads import Buffer
from holdfast._formats.dcp import names as layout
from holdfast._formats.dcp.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from holdfast._formats.dcp.plan import ReadItem
from holdfast._formats.native.refs import PickledValue, TensorRef, UnknownValue
from holdfast._formats.native.torch_elements import as_array, as_tensor, dtype_of
from holdfast._formats.nesting import nested, renamed_by_a_bit
from holdfast._formats.ranged_files import read_size
from holdfast._formats.source import (
    ByteStream,
    ChunkPlace,
    DiscardingArray,
    Into,
    ReadRequest,
    Source,
    check_requests,
    part_of,
    sizes_of,
)
from holdfast._formats.tensor_places import TensorPlace, elements_at
from holdfast._stores.store import Store
from holdfast._stores.store_files import StoreFiles
from holdfast.errors import CheckpointNotFoundError, DamagedCheckpointError, RefusedPickleError


class StoredItem(NamedTuple):
    """A chunk of a tensor, or a value, and where it is stored."""

    key: str
    offsets: tuple[int, ...]
    file: str
    begin: int
    nbytes: int


class DcpSource(Source):
    """A folder with an index and data files. A checkpoint that was saved rank by rank is seen as one.

    >>> import tempfile, torch, numpy as np
    >>> import holdfast.dcp
    >>> folder = tempfile.mkdtemp()
    >>> _ = holdfast.dcp.save({"model": {"w": torch.tensor([[1, 2], [3, 4]])}, "step": 7}, checkpoint_id=folder)
    >>> source = DcpSource(folder)
    >>> source.tree["step"], source.tree["model"]["w"].shape
    (7, (2, 2))
    >>> column = np.empty((2, 1), source.tensors["model.w"].dtype.carrier)
    >>> _ = source.read([ReadRequest("model.w", (0, 1), (2, 1), column)])
    >>> column.tolist()
    [[2], [4]]
    """

    format = "dcp"
    checks_parts = False

    def __init__(self, path: str | Path | Store, *, allow_pickle: bool = False) -> None:
        self._store = path if isinstance(path, Store) else None
        self.location = path.location if isinstance(path, Store) else str(path)
        self._allow_pickle = allow_pickle
        self._index = self._read_index()
        self.identity = _identity_of(self._index)

    @cached_property
    def tensors(self) -> Mapping[str, TensorRef]:
        """Every stored tensor that is nothing but its bytes, by its key."""
        found = {}
        for key, entry in self._index.state_dict_metadata.items():
            dtype = dtype_of(entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
            if isinstance(entry, TensorStorageMetadata) and dtype is not None:
                kind = "sharded" if len(entry.chunks) > 1 else "replicated"
                found[key] = TensorRef(key, dtype, tuple(entry.size), kind)
        return found

    @cached_property
    def tree(self) -> dict[Any, Any]:
        """The saved state. Where a part of it was saved as it is only needed with code, it is a ``PickledValue``.

        Lists stay lists; other kinds of sequences, and keys other than str, are not recorded by this format.
        """
        taking = _ValueCollector(self._allow_pickle)
        self._read_values(taking)
        leaves: dict[str, Any] = {}
        for key, entry in self._index.state_dict_metadata.items():
            if key in self.tensors:
                leaves[key] = self.tensors[key]
            elif isinstance(entry, TensorStorageMetadata):
                leaves[key] = UnknownValue(str(entry.properties.dtype), {"shape": list(entry.size)})
            else:
                leaves[key] = taking.values[key]
        return nested(leaves, self._index.planner_data)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the index says about the save."""
        meta = self._index.storage_meta
        known: dict[str, Any] = {"version": self._index.version}
        if meta is not None:
            known |= {"save_id": meta.save_id, "checkpoint_id": meta.checkpoint_id}
        return {name: value for name, value in known.items() if value is not None}

    def chunks(self, key: str) -> list[Box]:
        """The boxes in which a tensor is stored."""
        self.tensors[key]
        entry = self._index.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]

    def chunk_places(self, key: str) -> list[ChunkPlace]:
        """The same boxes, with the archives that they are stored in and who wrote them."""
        found = []
        for box in self.chunks(key):
            info = self._places.get((key, box.offsets))
            if info is not None:
                name = info.relative_path
                rank = layout.rank_of_data_file(PurePath(name).name)
                found.append(ChunkPlace(box.offsets, box.sizes, name, info.offset, info.length, rank))
        return found

    @cached_property
    def _places(self) -> Mapping[tuple[str, tuple[int, ...]], Any]:
        """Where each chunk is stored, by its key and offsets."""
        return {(item.fqn, tuple(item.offset or ())): info for item, info in (self._index.storage_data or {}).items()}

    def stored_items(self) -> list[StoredItem]:
        """All chunks and values, each with the range of bytes that it has in a file."""
        return [
            StoredItem(key, offsets, info.relative_path, info.offset, info.length)
            for (key, offsets), info in self._places.items()
            if key in self._index.state_dict_metadata
        ]

    def keys_without_place(self) -> list[str]:
        """Keys of which the index does not say, for all or for a part, where they are stored."""
        lacking = []
        for key, entry in self._index.state_dict_metadata.items():
            chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else [None]
            places = [(key, () if chunk is None else tuple(chunk.offsets)) for chunk in chunks]
            if not all(place in self._places for place in places):
                lacking.append(key)
        return lacking

    def contradictions(self) -> dict[str, str]:
        """What the index says of keys and cannot be so: chunks that do not tile their tensor, a path of another key."""
        found: dict[str, str] = {}
        for key, entry in self._index.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                continue
            problems = tiling_problems(entry.chunks, entry.size) if entry.size or not entry.chunks else []
            if problems:
                found[key] = f"key '{key}': {'; '.join(problems)}"
        renamed = renamed_by_a_bit(self._index.state_dict_metadata, self._index.planner_data)
        if renamed is not None:
            key, path = renamed
            found.setdefault(key, f"key '{key}' has the path of '{path}': one of them has a changed bit")
        return found

    def read_items(self, items: Sequence[StoredItem], *, memory: int | None = None) -> int:
        """Read whole chunks and values only to compare them with their CRCs. Returns how many bytes that were."""
        values, requests = list[ReadItem](), list[ReadRequest]()
        for item in items:
            entry = self._index.state_dict_metadata[item.key]
            if not isinstance(entry, TensorStorageMetadata):
                values.append(create_read_item_for_bytes(item.key))
            elif item.key in self.tensors:
                sizes = self._sizes_of(item, entry)
                place = DiscardingArray(sizes, self.tensors[item.key].dtype.carrier)
                requests.append(ReadRequest(item.key, item.offsets, sizes, place))
        read = self._carry_out(values, _ValueCollector(self._allow_pickle), verify=True) if values else 0
        return read + (self.read(requests, memory=memory) if requests else 0)

    def _sizes_of(self, item: StoredItem, entry: TensorStorageMetadata) -> tuple[int, ...]:
        """Of a chunk, which must be inside of its tensor."""
        ref = self.tensors[item.key]
        for chunk in entry.chunks:
            if tuple(chunk.offsets) == item.offsets and not out_of_bounds([chunk], ref.shape):
                return tuple(chunk.sizes)
        raise DamagedCheckpointError(
            f"the index of {self.location} refers to a chunk of {item.key!r} at {list(item.offsets)} that it does not "
            f"list, or that is not inside of the shape {list(ref.shape)}.",
            file=".metadata",
            key=item.key,
            expected="a chunk inside of its tensor",
            found=list(item.offsets),
        )

    def files(self) -> list[tuple[str, int]]:
        """The index, or those of all ranks, and the data files that are in it."""
        reader = self._reader()
        names = {PurePath(path).name for path in reader.fs.ls(reader.path)}
        indexes = sorted(name for name in names if layout.is_index(name))
        data = dict.fromkeys(info.relative_path for info in self._places.values())
        return sizes_of(reader.fs, reader.path, [*indexes, *data])

    def read(self, requests: Sequence[ReadRequest], *, verify: bool = True, memory: int | None = None) -> int:
        """Fill the memory of all requests, chunk by chunk; what several requests share is read once.

        With ``verify`` a chunk of which all is wanted is compared with its CRC. There is none for parts of chunks: of
        those only the ranges that are wanted are read, unchecked. Chunks that were compressed are in memory as a whole
        meanwhile, some at a time.
        """
        check_requests(requests, self.tensors)
        by_key: dict[str, list[ReadRequest]] = defaultdict(list)
        for request in requests:
            by_key[request.key].append(request)
        items: list[ReadItem] = []
        for key, wanted in by_key.items():
            entry = self._index.state_dict_metadata[key]
            assert isinstance(entry, TensorStorageMetadata)
            boxes = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in wanted]
            items += create_read_items_for_chunk_list(key, entry, boxes)
        return self._carry_out(items, _Placing(by_key, self._index), verify=verify, memory=memory)

    @contextmanager
    def stream(self, key: str, *, memory: int, scratch: str | os.PathLike[str] | None = None) -> Iterator[ByteStream]:
        """The bytes of a tensor, put together from its chunks, which are compared with their CRCs in the end."""
        ref, entry = self.tensors[key], self._index.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        reader = StreamingReader(self.location, scratch, memory, allow_pickle=self._allow_pickle, verify=True)
        self._lead_to_store(reader)
        reader.set_up_storage_reader(self._index, is_coordinator=True)
        whole = ChunkStorageMetadata(torch.Size([0] * len(ref.shape)), torch.Size(ref.shape))
        items = create_read_items_for_chunk_list(key, entry, [whole])
        with reader.stream(items, ref.shape, entry.properties.dtype) as stream:
            yield stream

    def verify(self) -> int:
        """Read all tensors and values, to see whether they are undamaged. Returns how many bytes that were."""
        return self._read_values(_ValueCollector(self._allow_pickle)) + super().verify()

    def _read_index(self) -> Metadata:
        reader = self._reader()
        try:
            return reader.read_metadata()
        except CheckpointNotFoundError as not_saved_together:
            try:
                return reader.read_merged_rank_metadata(0)
            except CheckpointNotFoundError:
                raise not_saved_together from None

    def _read_values(self, taking: _ValueCollector) -> int:
        keys = [
            key
            for key, entry in self._index.state_dict_metadata.items()
            if not isinstance(entry, TensorStorageMetadata)
        ]
        return self._carry_out([create_read_item_for_bytes(key) for key in keys], taking, verify=True)

    def _carry_out(
        self, items: list[ReadItem], planner: LoadPlanner, *, verify: bool, memory: int | None = None
    ) -> int:
        reader = self._reader(verify=verify)  # one for every call: it is cheap, and calls may come from many threads
        reader.set_up_storage_reader(self._index, is_coordinator=True)
        reader.largest_read = read_size(memory)
        progress = ItemCount(len(items))
        reader.read_items(items, planner, progress)
        return progress.bytes_read

    def _reader(self, *, verify: bool | None = None) -> FileSystemReader:
        reader = FileSystemReader(self.location, allow_pickle=self._allow_pickle, verify=verify)
        self._lead_to_store(reader)
        return reader

    def _lead_to_store(self, reader: FileSystemReader) -> None:
        """Have a reader read the objects of the store, if the checkpoint is in one."""
        if self._store is not None:
            reader.fs, reader.path = StoreFiles(self._store), self.location


class _Placing(DestinationPlanner):
    """Has the parts of chunks put where the requests want them."""

    def __init__(self, requests: Mapping[str, Sequence[ReadRequest]], index: Metadata) -> None:
        self._requests = requests
        self._index = index

    def destination(self, read_item: ReadItem, stored: torch.dtype) -> Destination:
        key, number = read_item.dest_index.fqn, read_item.dest_index.index
        entry = self._index.state_dict_metadata[key]
        assert number is not None
        assert isinstance(entry, TensorStorageMetadata)
        place = part_of(self._requests[key][number].into, read_item.dest_offsets, read_item.lengths)
        tensor = as_tensor(place, entry.properties.dtype) if isinstance(place, np.ndarray) else None
        if tensor is None:  # it is not an array, or one that no tensor could be
            return _AssignedPlace(place, entry.properties.dtype, stored)
        return _TensorInRequest(tensor, stored, key)


class _TensorInRequest(TensorPlace):
    """The memory of a request."""

    def commit(self) -> None:
        """Nobody waits for that."""


class _AssignedPlace:
    """What takes elements of the type that the index says, as an array does."""

    def __init__(self, into: Into, dtype: torch.dtype, stored: torch.dtype) -> None:
        self._into = into
        self._dtype = dtype
        self._stored = stored
        self.memory: memoryview | None = None

    def put(self, start: Sequence[int], sizes: Sequence[int], read: Buffer, at: int, strides: Sequence[int]) -> None:
        """Assign a part."""
        elements = elements_at(read, at, sizes, strides, self._stored)
        self._into[place_of(start, sizes)] = as_array(elements.to(self._dtype))

    def take(self, elements: torch.Tensor) -> None:
        """Assign everything."""
        self._into[...] = as_array(elements.to(self._dtype))

    def clear(self) -> None:
        """Leave zeros."""
        self._into[...] = np.zeros((), self._into.dtype)

    def commit(self) -> None:
        """Nobody waits for that."""


class _ValueCollector(LoadPlanner):
    """Collects values."""

    def __init__(self, allow_pickle: bool) -> None:
        self.values: dict[str, Any] = {}
        self._allow_pickle = allow_pickle

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key, blob = read_item.dest_index.fqn, value.getvalue()
        source, verify = getattr(value, "name", "the checkpoint"), getattr(value, "verify", True)
        try:
            decoded = decode_value(blob, source=source, key=key, verify=verify)
        except RefusedPickleError:
            if self._allow_pickle:
                decoded = decode_value(blob, source=source, key=key, verify=verify, allow_pickle=True)
            else:
                decoded = PickledValue(blob)
        self.values[key] = decoded


def _identity_of(index: Metadata) -> str:
    """The id of the save, or, from writers that had none, a digest of what is stored and where."""
    if index.storage_meta is not None and index.storage_meta.save_id is not None:
        return index.storage_meta.save_id
    places = [
        (item.fqn, tuple(item.offset or ()), place.relative_path, place.offset, place.length)
        for item, place in (index.storage_data or {}).items()
    ]
    shapes = [
        (key, tuple(entry.size), str(entry.properties.dtype))
        for key, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    ]
    return hashlib.blake2b(repr((sorted(places), sorted(shapes))).encode(), digest_size=16).hexdigest()
