"""Carries out load plans on files in DCP's format, ours or torch's.

No byte is read twice. Of a chunk that is needed as a whole the CRC is compared: with what the index holds if we wrote
the checkpoint (that notices a swapped file too), or else with what the archive itself says. Of other chunks only the
ranges that are needed are read; there is no CRC for those.
"""

from __future__ import annotations

import os
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch.futures import Future

from holdfast import _settings as settings
from holdfast._base.boxes import Box
from holdfast._base.tuning import MERGE_GAP, READ_BYTES, SEVERAL_READERS_FROM, STRAIGHT_FROM
from holdfast._dcp.blob_checks import name_of, refuse_regions_outside, refuse_short_file, wrong_crc
from holdfast._dcp.blob_contents import Blob, BlobContents
from holdfast._dcp.blob_steps import Batch, Chunk, Closing, ItemCount, StoredItems, WholeBlob
from holdfast._dcp.destinations import destination_of
from holdfast._dcp.index_files import IndexReads
from holdfast._dcp.planner import LoadPlanner, may_be_filled_at_once
from holdfast._dcp.storage import StorageReader
from holdfast._formats.box_reads import ChunkRead, WantedRegion
from holdfast._formats.dcp import names as layout
from holdfast._formats.dcp.columns import ChunksLater, PlaceColumns, PlaceTable
from holdfast._formats.dcp.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
    _StorageInfo,
    still_to_be_made,
)
from holdfast._formats.dcp.plan import LoadItemType, LoadPlan, ReadItem
from holdfast._formats.dcp.stored_chunks import archived_elements, check_envelope, sealed_elements
from holdfast._formats.dcp.transforms import ReaderTransforms, TransformRegistry
from holdfast._formats.ranged_files import (
    Ranges,
    ReadStep,
    StreamRanges,
    carry_out,
    is_plain,
    opened_ranges,
    seems_cached,
    useful_threads,
)
from holdfast._formats.tensor_places import turned
from holdfast._stores.filesystem import AnyPath, FileSystemBase, ReaderView
from holdfast._stores.local_filesystem import FileSystem
from holdfast.errors import DamagedCheckpointError, HoldfastError


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
        self.storage_data: Mapping[MetadataIndex, _StorageInfo] = {}
        self.load_id = str(uuid.uuid4())
        self.rank: int | None = None
        self.use_collectives = True
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
        return self._indexes().read(kwargs.get("rank"))

    def index_bytes(self) -> bytes:
        """The index of the whole checkpoint as it is stored."""
        return self._indexes().read_bytes()

    def index_of(self, data: bytes) -> Metadata:
        """The index behind its bytes."""
        return self._indexes().decode(data)

    def read_merged_rank_metadata(self, rank: int) -> Metadata:
        """One index out of the indexes of all ranks, for a checkpoint that was saved rank by rank."""
        return self._indexes().read_merged(rank)

    def _indexes(self) -> IndexReads:
        return IndexReads(self.fs, self.path, self._get_metadata_path, self.load_id, self._allows_pickle())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the index and the own role."""
        self._metadata = metadata
        places = still_to_be_made(metadata)
        self.storage_data = PlaceTable(places) if isinstance(places, PlaceColumns) else metadata.storage_data
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items. An error says whether the state was already changed."""
        progress = ItemCount(len(plan.items))
        try:
            self.read_items(plan.items, planner, progress)
        except HoldfastError as error:
            error.message = f"{error.message} {progress.how_far()}"
            raise
        self.bytes_read = progress.bytes_read
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read_items(self, items: Sequence[ReadItem], planner: LoadPlanner, progress: ItemCount) -> None:
        """Read items that may have nothing to do with a state, so that errors do not speak of one."""
        try:
            # Values first: one that is refused must not leave tensors changed.
            for kind in (LoadItemType.BYTE_IO, LoadItemType.TENSOR):
                self._read_items([item for item in items if item.type == kind], planner, progress)
        except HoldfastError:
            raise
        except Exception as error:
            raise HoldfastError(f"reading {self.path} failed: {type(error).__name__}: {error}.") from error

    def _read_items(self, wanted: Sequence[ReadItem], planner: LoadPlanner, progress: ItemCount) -> None:
        files = self._by_file_and_blob(wanted)
        stored = sum(blob.info.length for blobs in files.values() for blob in blobs)
        threads = 1
        if self._reads_plain_files() and stored >= SEVERAL_READERS_FROM and may_be_filled_at_once(planner):
            threads = useful_threads(stored, cached=self._seem_cached(files))
        with ExitStack() as open_files:
            try:
                carry_out(self._steps(files, planner, progress, open_files), threads=threads)
            except BaseException:
                progress.clear_what_is_half_read()
                raise

    def _seem_cached(self, files: Mapping[str, Sequence[StoredItems]]) -> bool:
        """Whether there is probably no disk to wait for: the first and the last item can be had without."""
        names = list(files)
        if not names:
            return True
        for name, at in {(names[0], 0), (names[-1], -1)}:
            with self._opened(name, files[name]) as file:
                if not seems_cached(file, files[name][at].info.offset):
                    return False
        return True

    def _steps(
        self,
        files: Mapping[str, Sequence[StoredItems]],
        planner: LoadPlanner,
        progress: ItemCount,
        open_files: ExitStack,
    ) -> Iterator[ReadStep]:
        """What to do for the blobs of each file, in the order in which they are stored."""
        verify = self._verifies()
        contents = BlobContents(self.transforms, self._stored_chunk)

        for file_name, blobs in files.items():
            source = str(self.fs.concat_path(self.path, file_name))

            def apply(blob: StoredItems, content: Blob, source: str = source) -> None:
                progress.bytes_read += blob.info.length
                contents.apply(blob, content, planner, progress, source, verify=verify)

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
        if all_of_it and (isinstance(file, StreamRanges) or info.length <= STRAIGHT_FROM):
            return None
        if info.seal is not None:
            elements = sealed_elements(info, entry.properties.dtype, stored)
        else:
            elements = archived_elements(file, info, stored, source=source, key=index.fqn, verify=verify)
        if elements is None:
            return None
        places = [destination_of(item, planner, elements.dtype) for item in items]
        wanted = [
            WantedRegion(Box(tuple(item.storage_offsets), tuple(item.lengths)), place)
            for item, place in zip(items, places, strict=True)
        ]
        sizes = tuple(stored.sizes)
        if elements.order is not None:
            wanted = [turned(part, elements.order) for part in wanted]
            sizes = tuple(sizes[dim] for dim in elements.order)
        reading = ChunkRead(file, elements.position, sizes, elements.dtype.itemsize, wanted, most=self.largest_read)
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
        """The items of each blob together, the blobs of each file in the order in which they are stored."""
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
        with opened_ranges(self.fs, file, plainly=self._reads_plain_files()) as ranges:
            yield ranges

    def _stored_chunk(self, index: MetadataIndex) -> tuple[TensorStorageMetadata, ChunkStorageMetadata]:
        assert self._metadata is not None
        entry = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        later = still_to_be_made(entry)
        if later is None and index.index is not None and 0 <= index.index < len(entry.chunks):
            hinted = entry.chunks[index.index]
            if hinted.offsets == index.offset:
                return entry, hinted
        if isinstance(later, ChunksLater) and index.index is not None and index.offset is not None:
            columns = later.columns()
            if 0 <= index.index < len(columns.offsets):
                chunk = columns.chunk(index.index)
                if chunk.offsets == index.offset:
                    return entry, chunk
        for chunk in entry.chunks:
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
