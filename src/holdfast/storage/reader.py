"""Carries out load plans on files in DCP's format, ours or torch's.

No byte is read twice. Of a chunk that is needed as a whole the CRC is compared: with what the index holds if we wrote
the checkpoint (that notices a swapped file too), or else with what the archive itself says. Of other chunks only the
ranges that are needed are read; there is no CRC for those.
"""

from __future__ import annotations

import io
import os
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any, TypeAlias

import torch
from torch.futures import Future

from holdfast import settings
from holdfast.boxes import Box
from holdfast.errors import CheckpointNotFoundError, DamagedCheckpointError, HoldfastError
from holdfast.formats.crc import crc32
from holdfast.formats.dcp.archive import read_tensor
from holdfast.formats.dcp.familiar_archives import FamiliarArchives
from holdfast.formats.dcp.index import decode_index
from holdfast.formats.dcp.storage_info import _StorageInfo
from holdfast.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from holdfast.planning.plan import LoadItemType, LoadPlan, ReadItem
from holdfast.planning.planner import LoadPlanner, may_be_filled_at_once
from holdfast.storage import layout
from holdfast.storage.blob_checks import check_seal, name_of, refuse_regions_outside, refuse_short_file, wrong_crc
from holdfast.storage.blob_steps import Batch, Chunk, Closing, StoredItems, WholeBlob
from holdfast.storage.byte_ranges import Ranges, StreamRanges, is_plain, opened_ranges
from holdfast.storage.chunk_reads import ChunkRead, Wanted
from holdfast.storage.contract import StorageReader
from holdfast.storage.filling import narrowed
from holdfast.storage.load_progress import Progress
from holdfast.storage.rank_local import merge_rank_metadata, shared_save_id
from holdfast.storage.read_steps import Step, carry_out
from holdfast.storage.stored_chunks import archived_elements, check_envelope, sealed_elements
from holdfast.storage.tensor_places import destination_of
from holdfast.storage.transforms import ReaderTransforms, TransformRegistry
from holdfast.stores.filesystem import AnyPath, FileSystemBase
from holdfast.stores.local import FileSystem
from holdfast.stores.windows import ReaderView
from holdfast.tuning import MERGE_GAP, READ_BYTES, SEVERAL_READERS_FROM

Blob: TypeAlias = bytes | bytearray | memoryview

_SMALL_BLOB = 256 << 10
"""Blobs of up to so many bytes are read together with their neighbours, and copied."""
_TRANSFORM_PIECE = 1 << 20
_ENVELOPE = 1 << 20
"""More than an archive takes around the bytes of a tensor."""
_WIDEST_ELEMENT = 16
"""What an element may take beyond the index's dtype: it was converted on its way, or it has a scale of its own."""
_LARGEST_VALUE = 4 << 30
_LARGEST_RATIO = 1024
"""A value may be that much larger than what is stored of it, or ``_LARGEST_VALUE``. The index does not tell more."""


class FileSystemReader(StorageReader):
    """Reads DCP checkpoints from a file system."""

    def __init__(
        self,
        path: AnyPath,
        _extension_registry: TransformRegistry | None = None,
        *,
        allow_pickle: bool | None = None,
        verify: bool | None = None,
    ) -> None:
        super().__init__()
        self.fs: FileSystemBase = FileSystem()
        self.path = self.fs.init_path(path)
        self.transforms = ReaderTransforms(_extension_registry)
        self.allow_pickle = allow_pickle
        self.verify = verify
        self.storage_data: dict[MetadataIndex, _StorageInfo] = {}
        self.load_id = str(uuid.uuid4())
        self.rank: int | None = None
        self.use_collectives = True
        self._familiar = FamiliarArchives()
        self.bytes_read = 0
        """Of data files, by the last ``read_data``."""
        self.largest_read = READ_BYTES
        """What is read at once, unless it can only be read as a whole."""
        self._metadata: Metadata | None = None

    @property
    def checkpoint_id(self) -> AnyPath:
        """Where the checkpoint is."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Whether this could be a local path."""
        return FileSystem.validate_for_reading(checkpoint_id)

    def reset(self, checkpoint_id: AnyPath | None = None) -> None:
        """A new load begins."""
        self.storage_data = {}
        self._metadata = None
        if checkpoint_id is not None and checkpoint_id != "":
            self.path = self.fs.init_path(checkpoint_id)
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of the whole checkpoint, or with ``rank=`` that of one rank's own part."""
        rank: int | None = kwargs.get("rank")
        if rank:
            name = self._committed_without_name(rank)
            if name is not None:
                return self._read_index(self.fs.concat_path(self.path, name))
        return self._read_index(self._get_metadata_path(rank))

    def read_merged_rank_metadata(self, rank: int) -> Metadata:
        """One index out of the indexes of all ranks, for a checkpoint that was saved rank by rank."""
        parts = {}
        for name in self._names():
            for other in (layout.rank_of_index(name), layout.rank_of_temporary_index(name)):
                if other is not None and other not in parts:
                    with suppress(CheckpointNotFoundError):  # it only has an index of a save that was not committed
                        parts[other] = self.read_metadata(rank=other)
        if not parts:
            raise CheckpointNotFoundError(self._what_is_here_instead(layout.METADATA_NAME), path=str(self.path))
        return merge_rank_metadata(parts, rank)

    def _read_index(self, file: AnyPath) -> Metadata:
        try:
            with self.fs.create_stream(file, "rb") as stream:
                data: bytes = stream.read()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointNotFoundError(
                self._what_is_here_instead(PurePath(file).name), path=str(self.path)
            ) from error
        metadata = decode_index(data, source=str(file), allow_pickle=self._allows_pickle())
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _committed_without_name(self, rank: int) -> str | None:
        """A rank's index of the save that rank 0 has committed, if the save was killed before it got its name."""
        waiting = [name for name in self._names() if layout.rank_of_temporary_index(name) == rank]
        if not waiting:
            return None
        try:
            committed = shared_save_id(self._read_index(self._get_metadata_path(0)))
        except CheckpointNotFoundError:
            return None
        name = layout.temporary_name(layout.metadata_name(rank), committed or "")
        return name if name in waiting else None

    def _names(self) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return [PurePath(path).name for path in self.fs.ls(self.path)]
        return []

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the index and the own role."""
        self._metadata = metadata
        self.storage_data = metadata.storage_data
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items. An error tells whether the state was already changed."""
        progress = Progress(len(plan.items))
        try:
            self.read_items(plan.items, planner, progress)
        except HoldfastError as error:
            error.message = f"{error.message} {progress.how_far()}"
            raise
        self.bytes_read = progress.bytes_read
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read_items(self, items: Sequence[ReadItem], planner: LoadPlanner, progress: Progress) -> None:
        """Read items that may have nothing to do with a state, so that errors do not speak of one."""
        self._familiar = FamiliarArchives()
        try:
            # Values first: one that is refused must not leave tensors changed.
            for kind in (LoadItemType.BYTE_IO, LoadItemType.TENSOR):
                self._read_items([item for item in items if item.type == kind], planner, progress)
        except HoldfastError:
            raise
        except Exception as error:
            raise HoldfastError(f"reading {self.path} failed: {type(error).__name__}: {error}.") from error

    def _read_items(self, wanted: Sequence[ReadItem], planner: LoadPlanner, progress: Progress) -> None:
        files = self._by_file_and_blob(wanted)
        stored = sum(blob.info.length for blobs in files.values() for blob in blobs)
        in_threads = self._reads_plain_files() and stored >= SEVERAL_READERS_FROM and may_be_filled_at_once(planner)
        with ExitStack() as open_files:
            try:
                carry_out(self._steps(files, planner, progress, open_files), in_threads=in_threads)
            except BaseException:
                progress.clear_what_is_half_read()
                raise

    def _steps(
        self,
        files: Mapping[str, Sequence[StoredItems]],
        planner: LoadPlanner,
        progress: Progress,
        open_files: ExitStack,
    ) -> Iterator[Step]:
        """What to do for the blobs of each file, in the order in which they lie."""
        verify = self._verifies()

        for file_name, blobs in files.items():
            source = str(self.fs.concat_path(self.path, file_name))

            def apply(blob: StoredItems, content: Blob, source: str = source) -> None:
                progress.bytes_read += blob.info.length
                self._apply_blob(blob, content, planner, progress, source, verify=verify)

            until_read = open_files.enter_context(ExitStack())
            file = until_read.enter_context(self._opened(file_name, blobs))
            together = Batch(file, apply)
            for blob in blobs:
                refuse_short_file(file, blob, source)
                chunk = self._as_chunk(file, blob, planner, source, verify=verify)
                if chunk is not None:
                    yield from together.steps()
                    together = Batch(file, apply)
                    yield from chunk.steps(progress)
                elif isinstance(file, StreamRanges):
                    yield WholeBlob(blob, partial(_all_of, self._slice_file(file.stream, blob.info)), apply)
                else:
                    if not together.takes(blob.info, most=self.largest_read, gap=MERGE_GAP):
                        yield together
                        together = Batch(file, apply)
                    together.add(blob)
            yield from together.steps()
            yield Closing(until_read.close)

    def _as_chunk(
        self, file: Ranges, blob: StoredItems, planner: LoadPlanner, source: str, *, verify: bool
    ) -> Chunk | None:
        """The blob as a chunk that is read in ranges; None if it is to be read as a whole."""
        info, items = blob
        if items[0].type == LoadItemType.BYTE_IO or info.transform_descriptors or info.length <= MERGE_GAP:
            return None
        if len(items) > 1 and not may_be_filled_at_once(planner):
            return None
        index = items[0].storage_index
        entry, stored = self._stored_chunk(index)
        refuse_regions_outside(items, stored.sizes)
        all_of_it = sum(item.lengths.numel() for item in items) >= stored.sizes.numel()
        if all_of_it and (isinstance(file, StreamRanges) or info.length <= _SMALL_BLOB):
            return None
        if info.seal is not None:
            elements = sealed_elements(info, entry.properties.dtype, stored)
        else:
            elements = archived_elements(file, info, stored, source=source, key=index.fqn, verify=verify)
        if elements is None:
            return None
        places = [destination_of(item, planner, elements.dtype) for item in items]
        wanted = [
            Wanted(Box(tuple(item.storage_offsets), tuple(item.lengths)), place)
            for item, place in zip(items, places, strict=True)
        ]
        reading = ChunkRead(
            file, elements.position, stored.sizes, elements.dtype.itemsize, wanted, most=self.largest_read
        )
        # A part of a chunk has no CRC of its own that it could be compared with.
        checked = verify and reading.is_whole and elements.crc is not None
        if checked and info.seal is not None:
            check_envelope(file, info, info.seal, source, index.fqn)

        def finish(crc: int) -> None:
            if checked and crc != elements.crc:
                raise wrong_crc(info, source, index, elements.crc or 0, crc)
            for place in places:
                place.commit()

        return Chunk(reading, places, finish, summed=checked)

    def _reads_plain_files(self) -> bool:
        """Whether files may be read directly. Those who have a file system or slices of their own see every blob."""
        return is_plain(self.fs) and type(self)._slice_file is FileSystemReader._slice_file

    def _get_metadata_path(self, rank: int | None = None) -> AnyPath:
        return self.fs.concat_path(self.path, layout.metadata_name(rank))

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> ReaderView:
        return ReaderView(file, sinfo.offset, sinfo.length)

    def _by_file_and_blob(self, wanted: Sequence[ReadItem]) -> dict[str, list[StoredItems]]:
        """The items of each blob together, the blobs of each file in the order in which they lie."""
        by_index: dict[MetadataIndex, list[ReadItem]] = defaultdict(list)
        for item in wanted:
            by_index[item.storage_index].append(item)
        files: dict[str, list[StoredItems]] = defaultdict(list)
        for index, items in by_index.items():
            info = self.storage_data.get(index)
            if info is None:
                raise DamagedCheckpointError(
                    f"{self.path}: the index lists {name_of(index)} but not where it is stored; the checkpoint was not "
                    "saved completely. Load another one.",
                    file=str(self.path),
                    key=index.fqn,
                    expected="a place in a file",
                    found=None,
                )
            files[info.relative_path].append(StoredItems(info, items))
        for blobs in files.values():
            blobs.sort(key=lambda blob: blob.info.offset)
        return files

    @contextmanager
    def _opened(self, file_name: str, blobs: Sequence[StoredItems]) -> Iterator[Ranges]:
        file = self.fs.concat_path(self.path, file_name)
        if not self.fs.exists(file):
            key = blobs[0].items[0].storage_index.fqn
            raise DamagedCheckpointError(
                f"{file} is missing; '{key}' and {len(blobs) - 1} other stored item(s) are in it. If a save has "
                "replaced the checkpoint meanwhile, load again; if not, copy the file back or load another checkpoint.",
                file=str(file),
                key=key,
                expected="a file",
                found=None,
            )
        if self._reads_plain_files():
            with opened_ranges(self.fs, file) as ranges:
                yield ranges
        else:
            with self.fs.create_stream(file, "rb") as stream:
                yield StreamRanges(stream, file)

    def _apply_blob(
        self, stored: StoredItems, blob: Blob, planner: LoadPlanner, progress: Progress, source: str, *, verify: bool
    ) -> None:
        """Apply items that need a part of one blob, which is in memory."""
        info, items = stored
        index = items[0].storage_index
        if verify and info.seal is not None:
            check_seal(blob, info, source, index)
        if info.transform_descriptors:
            blob = self._transformed_back(blob, info.transform_descriptors, source, items[0])
        if items[0].type == LoadItemType.BYTE_IO:
            for item in items:
                planner.load_bytes(item, _NamedBytes(blob, source, verify and info.seal is None))
                progress.applied += 1
            return
        tensor = self._tensor_of(blob, info, source, index, verify=verify)
        for item in items:
            place = destination_of(item, planner, tensor.dtype)
            whole = item.lengths == tensor.size()
            place.take(tensor if whole else narrowed(tensor, item.storage_offsets, item.lengths))
            progress.applied += 1
            place.commit()

    def _transformed_back(self, blob: Blob, descriptors: Sequence[str], source: str, item: ReadItem) -> Blob:
        """What the blob was before it went through transforms."""
        content = bytearray()
        for piece in self._pieces_transformed_back(io.BytesIO(blob), len(blob), descriptors, source, item):
            content += piece
        return content

    def _pieces_transformed_back(
        self, blob: Any, stored: int, descriptors: Sequence[str], source: str, item: ReadItem
    ) -> Iterator[bytes]:
        """What a blob was before it went through transforms, in order. What they cannot undo is damaged."""
        limit = self._most_bytes(item, stored)
        length = 0
        try:
            stream = self.transforms.transform_load_stream(item, descriptors, blob)
            while length <= limit and (piece := stream.read(_TRANSFORM_PIECE)):
                length += len(piece)
                if length <= limit:
                    yield piece
        except (HoldfastError, MemoryError):
            raise
        except Exception as error:
            raise DamagedCheckpointError(
                f"{source} is damaged: {name_of(item.storage_index)} went through {list(descriptors)} when it was "
                f"saved, and undoing that fails ({type(error).__name__}: {error}). Copy the file again, or load "
                "another checkpoint.",
                file=source,
                key=item.storage_index.fqn,
                expected=list(descriptors),
                found=str(error),
            ) from error
        if length > limit:
            raise DamagedCheckpointError(
                f"{source} is damaged, or made to fill the memory: undoing {list(descriptors)} for "
                f"{name_of(item.storage_index)} gives more than the {limit} bytes that it can have by the index. Copy "
                "the file again, or load another checkpoint.",
                file=source,
                key=item.storage_index.fqn,
                expected=limit,
                found=length,
            )

    def _most_bytes(self, item: ReadItem, stored: int) -> int:
        """How large the archive of an item can be of which so many bytes are stored."""
        if item.type == LoadItemType.BYTE_IO:
            return max(_LARGEST_VALUE, _LARGEST_RATIO * stored)
        entry, chunk = self._stored_chunk(item.storage_index)
        return chunk.sizes.numel() * (entry.properties.dtype.itemsize + _WIDEST_ELEMENT) + _ENVELOPE

    def _tensor_of(
        self, blob: Blob, info: _StorageInfo, source: str, index: MetadataIndex, *, verify: bool
    ) -> torch.Tensor:
        entry, chunk = self._stored_chunk(index)
        seal = info.seal
        if seal is not None and seal.payload_length < len(blob) and not info.transform_descriptors:
            payload = memoryview(blob)[seal.payload_offset : seal.payload_offset + seal.payload_length]
            tensor = _from_payload(payload, entry.properties.dtype, chunk)
            if tensor is not None:
                return tensor
        if seal is None and not info.transform_descriptors:
            tensor = self._familiar_tensor(memoryview(blob), info, source, index, chunk, verify=verify)
            if tensor is not None:
                return tensor
        tensor = read_tensor(blob, source=source, key=index.fqn, verify=verify and seal is None)
        if tensor.size() != chunk.sizes:
            raise DamagedCheckpointError(
                f"{source}: {name_of(index)} should be of shape {list(chunk.sizes)}, not {list(tensor.size())}. "
                "The file belongs to another save; copy the right one, or load another checkpoint.",
                file=source,
                key=index.fqn,
                expected=list(chunk.sizes),
                found=list(tensor.size()),
            )
        return tensor

    def _familiar_tensor(
        self,
        blob: memoryview,
        info: _StorageInfo,
        source: str,
        index: MetadataIndex,
        chunk: ChunkStorageMetadata,
        *,
        verify: bool,
    ) -> torch.Tensor | None:
        """The tensor in an archive that is like one before; None if it is not."""
        known = self._familiar.recognize(blob)
        if known is not None and known.sizes == tuple(chunk.sizes):
            if verify and (found := crc32(known.elements)) != known.crc:
                raise wrong_crc(info, source, index, known.crc, found)
            return _from_payload(known.elements, known.dtype, chunk)
        if self._familiar.is_worth_learning(len(blob)):
            whole = replace(info, offset=0)
            content = StreamRanges(io.BytesIO(blob), source)
            elements = archived_elements(content, whole, chunk, source=source, key=index.fqn, verify=verify)
            if elements is not None:
                self._familiar.remember(blob, elements.position, elements.dtype, tuple(chunk.sizes))
        return None

    def _stored_chunk(self, index: MetadataIndex) -> tuple[TensorStorageMetadata, ChunkStorageMetadata]:
        assert self._metadata is not None
        entry = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        hinted = entry.chunks[index.index : index.index + 1] if index.index is not None else []
        for chunk in [*hinted, *entry.chunks]:
            if chunk.offsets == index.offset:
                return entry, chunk
        raise DamagedCheckpointError(
            f"{self.path}: the index has no chunk {name_of(index)}. A planner has asked for what is not there, or the "
            "index is of another checkpoint; copy the right one, or load another checkpoint.",
            file=str(self.path),
            key=index.fqn,
            expected=index.offset,
            found=None,
        )

    def _allows_pickle(self) -> bool:
        return settings.current().allow_pickle if self.allow_pickle is None else self.allow_pickle

    def _verifies(self) -> bool:
        return settings.current().verify if self.verify is None else self.verify

    def _what_is_here_instead(self, wanted: str) -> str:
        here = f"no checkpoint at {self.path}: "
        if not self.fs.exists(self.path):
            return here + "the path does not exist. Check it for a typo, and that all ranks see the same disk."
        try:
            names = sorted(PurePath(path).name for path in self.fs.ls(self.path))
        except OSError:
            return here + "it is not a folder."
        data = [name for name in names if layout.is_data_file(name)]
        if data:
            return here + f"it has {len(data)} data file(s) but no {wanted}, so the save was not finished."
        inner = [
            name for name in names if self.fs.exists(self.fs.concat_path(self.path, f"{name}/{layout.METADATA_NAME}"))
        ]
        if inner:
            return here + f"but there are checkpoints inside of it: {', '.join(inner[-5:])}. Give one of those paths."
        return here + f"there is no {wanted} in it ({len(names)} other file(s))."


class _NamedBytes(io.BytesIO):
    """Bytes that know their file, as files do, and whether they still have to be checked, for planners to use."""

    def __init__(self, content: Blob, name: str, verify: bool) -> None:
        super().__init__(content)
        self.name = name
        self.verify = verify


def _all_of(window: ReaderView) -> bytearray:
    """What a window shows, as memory that a tensor can use without another copy; less than promised at a file's end."""
    promised, stream = window.len, window.base_stream
    blob = bytearray(min(promised, max(0, stream.seek(0, os.SEEK_END) - window.offset)))
    filled = 0
    with memoryview(blob) as view:
        while filled < len(blob) and (count := window.readinto(view[filled:])):
            filled += count
    del blob[filled:]
    return blob


def _from_payload(payload: memoryview, dtype: torch.dtype, chunk: ChunkStorageMetadata) -> torch.Tensor | None:
    """The tensor behind raw bytes; None if they are not what the index describes."""
    if payload.nbytes != chunk.sizes.numel() * dtype.itemsize:
        return None
    if payload.nbytes == 0:
        return torch.empty(chunk.sizes, dtype=dtype)
    raw = torch.frombuffer(payload if not payload.readonly else bytearray(payload), dtype=torch.uint8)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(chunk.sizes)
