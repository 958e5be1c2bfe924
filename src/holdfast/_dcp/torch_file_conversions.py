"""The conversions of ``holdfast.dcp.format_utils``: ``torch.save`` files to DCP checkpoints and back."""

from __future__ import annotations

import io
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from holdfast import _settings as settings
from holdfast._base.arguments import Size, checked_budget
from holdfast._base.boxes import Box
from holdfast._base.tuning import MEMORY_BUDGET, READ_BYTES
from holdfast._compat.tensors import negative_view
from holdfast._dcp.load_planner import EmptyStateDictLoadPlanner
from holdfast._dcp.save import save_state
from holdfast._dcp.save_planner import DefaultSavePlanner
from holdfast._dcp.tensor_streams import StreamingReader
from holdfast._dcp.writer import _FileSystemWriter
from holdfast._formats.archives.tensor_records import QUANTIZED_DTYPES
from holdfast._formats.archives.zip_writer import ZipWriter
from holdfast._formats.dcp.blobs import WrittenElements
from holdfast._formats.dcp.metadata import Metadata, TensorStorageMetadata
from holdfast._formats.dcp.plan import LoadItemType, LoadPlan, ReadItem, SavePlan, WriteItem, written_bytes
from holdfast._formats.tensor_bytes import as_bytes
from holdfast._formats.tensor_places import StridedArray, arrangement_of
from holdfast._formats.torch_file.description import (
    StoredBytes,
    bytes_of_storage,
    describe,
    expected_size,
    state_archive,
)
from holdfast._formats.torch_file.reading import OpenTorchFile, open_torch_file
from holdfast._ranks.shared_steps import Collectives
from holdfast._stores.durable_files import sink_atomically
from holdfast._stores.filesystem import AnyPath
from holdfast._watching.progress import Progress
from holdfast._watching.progress_line import ProgressBar
from holdfast.errors import CheckpointNotFoundError, UnsupportedTensorError

# A writer of DCP checkpoints for tensors whose elements are not in memory.


class StreamingWriter(_FileSystemWriter):
    """Asks for the elements of each tensor when it is written. ``memory`` is for those on their way to the disk."""

    def __init__(self, folder: AnyPath, elements: WrittenElements, memory: int) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # nothing is on a device
        self._elements = elements
        self._memory_budget = memory


# The elements of tensors in a ``torch.save`` file, read piece by piece when they are to be written elsewhere.


class TorchFileElements(WrittenElements):
    """Has one piece in memory at a time, of up to ``memory`` bytes."""

    def __init__(self, file: OpenTorchFile, memory: int) -> None:
        self._file = file
        self._memory = memory
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._until_next = ExitStack()

    def slab_bytes(self, tensor: torch.Tensor) -> int | None:
        """The larger a piece of a turned tensor, the fewer times parts of the file are passed over."""
        if self._file.place_of(tensor) is None:
            return None
        is_plain = not (tensor.is_conj() or tensor.is_neg())
        if is_plain and tensor.is_contiguous():
            return min(READ_BYTES, self._memory)
        return self._memory if is_plain else self._memory // 2  # another half for what is computed from it

    def of(self, view: torch.Tensor) -> torch.Tensor:
        """Read a piece, unless it is in memory."""
        found = self._file.place_of(view)
        if found is None:
            return view
        file, position = found
        self._until_next.close()
        repeated = [dim for dim, step in enumerate(view.stride()) if step == 0 and view.shape[dim] > 1]
        if repeated:
            once = view[tuple(slice(0, 1) if dim in repeated else slice(None) for dim in range(view.dim()))]
            return self.of(once).expand(view.shape)
        arrangement = arrangement_of(view.shape, view.stride())
        if arrangement is None:  # it is like nothing that slicing and turning could make
            self._until_next.enter_context(self._file.present(view))
            return view
        nbytes = view.numel() * view.dtype.itemsize
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        piece = self._buffer[:nbytes].view(view.dtype).view(view.shape)
        StridedArray(file, position, view.dtype, arrangement).read(
            Box((0,) * view.dim(), tuple(view.shape)), piece, "a tensor of the file"
        )
        if view.is_conj():
            piece = piece.conj()
        return negative_view(piece) if view.is_neg() else piece


# The conversions of ``holdfast.dcp.format_utils``: a ``torch.save`` file becomes a DCP checkpoint, or the other way.
#
# They do what DCP's own do, and are a save and a load by DCP's planners: every key, value and tensor of whatever kind
# comes out as ``dcp.save`` and ``dcp.load`` would have it, a checkpoint that is there is replaced as a save replaces
# it, and what goes wrong is a ``CheckpointException``. ``holdfast.convert`` does more (choosing, renaming, casts, a
# proof), knows the state as a tree of its own, and goes through ``Outgoing``; what writes archives and files is the
# same.
#
# Tensors go through in pieces, so that no memory is needed for any of them as a whole. What comes out appears whole
# or not at all.


logger = logging.getLogger(__name__)
T = TypeVar("T")


def torch_file_to_dcp(
    file: AnyPath,
    folder: AnyPath,
    *,
    allow_pickle: bool | None = None,
    memory_budget: Size | None = None,
    progress: bool = False,
) -> None:
    """Save the dict in a ``torch.save`` file as a DCP checkpoint, from this process alone."""
    budget = checked_budget(memory_budget) or MEMORY_BUDGET
    knobs = settings.current()
    allowed = knobs.allow_pickle if allow_pickle is None else allow_pickle
    opened = open_torch_file(file, allow_pickle=allowed, verify=knobs.verify)
    try:
        with _no_new_folder_after_an_error(folder), _bar("saving", progress) as bar:
            writer = StreamingWriter(folder, TorchFileElements(opened, budget // 2), budget // 2)
            save_state(opened.state, writer, _FromFile(opened, bar), _alone())
    finally:
        opened.close()
    logger.info("converted %s to %s", file, folder)


def dcp_to_torch_file(
    folder: AnyPath,
    file: AnyPath,
    *,
    allow_pickle: bool | None = None,
    memory_budget: Size | None = None,
    progress: bool = False,
) -> None:
    """Write a DCP checkpoint as one ``torch.save`` file of whole tensors, from this process alone.

    What is wrong with the checkpoint is a ``CheckpointException``, as in a load; what is wrong with the file is raised
    as it is.
    """
    budget = checked_budget(memory_budget) or MEMORY_BUDGET
    scratch = Path(os.path.realpath(file)).parent
    export = _Export(folder, scratch, allow_pickle, memory=budget // 2)
    export.plan()
    description, entries = export.describe()
    expected = expected_size(description, entries)
    with (
        sink_atomically(file, expected, budget // 2) as sink,
        _bar("writing", progress) as bar,
        state_archive(sink, description) as archive,
    ):
        export.write(archive, entries, bar)
    logger.info("converted %s to %s", folder, file)


class _FromFile(DefaultSavePlanner):
    """Saves the tensors of a file, whose elements are not in memory."""

    def __init__(self, file: OpenTorchFile, progress: Progress) -> None:
        super().__init__()
        self._file = file
        self._progress = progress
        self._under_way = 0

    def create_local_plan(self) -> SavePlan:
        """Plan as usual; now it is known how much there is to do, and what the file will be asked for."""
        plan = super().create_local_plan()
        self._file.split(self.state_dict.values(), _is_array)
        self._progress.total_bytes = sum(map(written_bytes, plan.items))
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of an item, which is asked for when the one before has been written."""
        self._progress.advance(self._under_way)
        self._under_way = written_bytes(write_item)
        return super().resolve_data(write_item)


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized


class _Export:
    """One checkpoint on its way into a file. Its methods are the steps, in the order in which they happen."""

    def __init__(self, folder: AnyPath, scratch: Path, allow_pickle: bool | None, memory: int) -> None:
        self.reader = StreamingReader(folder, scratch, memory, allow_pickle=allow_pickle)
        self.planner = EmptyStateDictLoadPlanner(allow_pickle=allow_pickle)
        self.ranks = _alone()
        self.batch_bytes = min(READ_BYTES, memory)
        self.value_items: list[ReadItem] = []
        self.tensor_items: dict[str, list[ReadItem]] = defaultdict(list)
        self._keys: dict[int, str] = {}

    def plan(self) -> None:
        """Read the index, and find out what to read for every key."""
        with self.ranks.step("plan"):
            self._plan()

    def describe(self) -> tuple[bytes, list[StoredBytes]]:
        """The description of everything, and what it refers to. Values are a part of it, and are read for it."""
        self._read(self.value_items)
        self._keys = {id(value): key for key, value in self.planner.state_dict.items() if _is_stand_in(value)}
        stand_ins = [self.planner.state_dict[key] for key in self._keys.values()]
        return describe(self.planner.original_state_dict, stand_ins)

    def write(self, archive: ZipWriter, entries: Sequence[StoredBytes], progress: Progress) -> None:
        """Write the bytes of one tensor after the other."""
        progress.total_bytes = sum(entry.nbytes for entry in entries)
        for batch in self._batches(entries):
            if isinstance(batch[0].source, torch.UntypedStorage):
                archive.add(batch[0].name, bytes_of_storage(batch[0].source))
            elif batch[0].nbytes > self.batch_bytes:
                self._add_large(archive, batch[0].name, self._keys[id(batch[0].source)])
            else:
                self._add_small(archive, {entry.name: self._keys[id(entry.source)] for entry in batch})
            progress.advance(sum(entry.nbytes for entry in batch))

    def _batches(self, entries: Sequence[StoredBytes]) -> Iterator[list[StoredBytes]]:
        """Entries that are worth being read together: small tensors."""
        batch: list[StoredBytes] = []
        for entry in entries:
            is_in_memory = isinstance(entry.source, torch.UntypedStorage)
            if batch and (is_in_memory or sum(other.nbytes for other in batch) + entry.nbytes > self.batch_bytes):
                yield batch
                batch = []
            batch.append(entry)
            if is_in_memory:
                yield batch
                batch = []
        if batch:
            yield batch

    def _add_small(self, archive: ZipWriter, keys: Mapping[str, str]) -> None:
        """Write tensors that are read together. ``keys`` are those of the entries."""
        places = self.planner.state_dict
        stand_ins = {key: places[key] for key in keys.values()}
        places.update(
            (key, torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")) for key, tensor in stand_ins.items()
        )
        try:
            self._read([item for key in stand_ins for item in self.tensor_items[key]])
            for name, key in keys.items():
                archive.add(name, as_bytes(places[key]))
        finally:
            places.update(stand_ins)

    def _add_large(self, archive: ZipWriter, name: str, key: str) -> None:
        """Write a tensor of which only pieces are in memory."""
        stand_in = self.planner.state_dict[key]
        with ExitStack() as until_read:
            opening = self.reader.stream(self.tensor_items[key], stand_in.shape, stand_in.dtype)
            stream = self._reading(lambda: until_read.enter_context(opening))
            archive.add_in_pieces(
                name, stand_in.nbytes, lambda *piece: self._reading(lambda: stream.fill_with_crc(*piece))
            )
            self._reading(stream.finish)

    def _plan(self) -> None:
        metadata = self._read_index()
        _refuse_quantized_tensors(metadata)
        with torch.device("meta"):  # the planner makes a place for every tensor; none of them gets memory here
            self.planner.set_up_planner({}, metadata, is_coordinator=True)
        self.reader.set_up_storage_reader(metadata, is_coordinator=True)
        for item in self.planner.create_local_plan().items:
            if item.type == LoadItemType.BYTE_IO:
                self.value_items.append(item)
            else:
                self.tensor_items[item.dest_index.fqn].append(item)

    def _read_index(self) -> Metadata:
        try:
            return self.reader.read_metadata()
        except CheckpointNotFoundError as not_saved_together:
            try:
                return self.reader.read_merged_rank_metadata(0)
            except CheckpointNotFoundError:
                raise not_saved_together from None

    def _read(self, items: list[ReadItem]) -> None:
        self._reading(lambda: self.reader.read_data(LoadPlan(items), self.planner).wait())

    def _reading(self, step: Callable[[], T]) -> T:
        """An error in a step of reading is reported as in a load."""
        with self.ranks.step("read"):
            return self.reader.explaining_failures(step)


def _refuse_quantized_tensors(metadata: Metadata) -> None:
    """Their scales are not in the index, so there is nothing to put them together with."""
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and entry.properties.dtype in QUANTIZED_DTYPES:
            raise UnsupportedTensorError(
                f"'{key}' is a quantized tensor ({entry.properties.dtype}), which can only be loaded into one with the "
                "same scales. Load it with holdfast.dcp.load, and torch.save the state.",
                key=key,
                kind=str(entry.properties.dtype),
            )


def _is_stand_in(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _alone() -> Collectives:
    return Collectives(None, use_dist=False, coordinator_rank=0)


@contextmanager
def _bar(label: str, is_wanted: bool) -> Iterator[Progress]:
    """Counts what is done, and shows it if somebody wants to see it."""
    with ProgressBar(label) if is_wanted else nullcontext() as bar:
        progress = Progress(0, None if bar is None else bar.show)
        yield progress
        progress.advance(progress.total_bytes - progress.done_bytes)


@contextmanager
def _no_new_folder_after_an_error(folder: AnyPath) -> Iterator[None]:
    """Remove the folders that the block made, if it fails. The files in them are removed by whoever made them."""
    path = Path(os.path.abspath(folder))
    new = [place for place in (path, *path.parents) if not place.exists()]
    try:
        yield
    except BaseException:
        for place in new:
            with suppress(OSError):  # somebody else may have put something there meanwhile
                place.rmdir()
        raise
