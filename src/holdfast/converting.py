"""The conversion flows: a ``torch.save`` file becomes a DCP checkpoint, and the other way round.

Tensors go through one by one, so that memory is needed for the largest of them and not for all. What comes out
appears whole or not at all.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from holdfast import settings
from holdfast.coordination.collectives import Collectives
from holdfast.errors import CheckpointNotFoundError, UnsupportedTensorError
from holdfast.formats.dcp.tensor_records import QUANTIZED_DTYPES
from holdfast.formats.torch_file.description import describe
from holdfast.formats.torch_file.reading import OpenTorchFile, open_torch_file
from holdfast.formats.torch_file.zip_writer import ZipWriter
from holdfast.metadata import Metadata, TensorStorageMetadata
from holdfast.planning.load_planner import EmptyStateDictLoadPlanner
from holdfast.planning.local_bytes import as_bytes
from holdfast.planning.plan import LoadItemType, LoadPlan, ReadItem, SavePlan, WriteItem, written_bytes
from holdfast.planning.save_planner import DefaultSavePlanner
from holdfast.progress import ProgressBar
from holdfast.saving import save_state
from holdfast.storage.reader import FileSystemReader
from holdfast.storage.writer import _FileSystemWriter
from holdfast.stores.atomic import written_atomically
from holdfast.stores.filesystem import AnyPath

logger = logging.getLogger(__name__)


def torch_file_to_dcp(file: AnyPath, folder: AnyPath, *, allow_pickle: bool | None, progress: bool) -> None:
    """Save the dict in a ``torch.save`` file as a DCP checkpoint, from this process alone."""
    knobs = settings.current()
    allowed = knobs.allow_pickle if allow_pickle is None else allow_pickle
    opened = open_torch_file(file, allow_pickle=allowed, verify=knobs.verify)
    try:
        with _no_new_folder_after_an_error(folder), _bar("saving", progress) as bar:
            save_state(opened.state, _FileSystemWriter(folder), _OneTensorAtATime(opened, bar), _alone())
    finally:
        opened.close()
    logger.info("converted %s to %s", file, folder)


def dcp_to_torch_file(folder: AnyPath, file: AnyPath, *, allow_pickle: bool | None, progress: bool) -> None:
    """Write a DCP checkpoint as one ``torch.save`` file of whole tensors, from this process alone.

    What is wrong with the checkpoint is a ``CheckpointException``, as in a load; what is wrong with the file is raised
    as it is.
    """
    export = _Export(folder, allow_pickle)
    export.plan()
    with written_atomically(file) as stream, _bar("writing", progress) as bar:
        export.read_values()
        export.write(ZipWriter(stream), bar)
    logger.info("converted %s to %s", folder, file)


class _OneTensorAtATime(DefaultSavePlanner):
    """Saves tensors of a file, each of which is in memory until the next one's turn comes."""

    def __init__(self, file: OpenTorchFile, bar: ProgressBar) -> None:
        super().__init__()
        self._file = file
        self._bar = bar
        self._under_way = ExitStack()

    def create_local_plan(self) -> SavePlan:
        """Plan as usual; the bar learns how much there is to do, and the file what will be asked for."""
        plan = super().create_local_plan()
        self._file.split(self.state_dict.values(), _is_array)
        self._bar.total = sum(map(written_bytes, plan.items))
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of an item, which is asked for when the one before has been written."""
        self._under_way.close()
        data = super().resolve_data(write_item)
        if _is_array(data):
            assert isinstance(data, torch.Tensor)
            self._under_way.enter_context(self._file.present(data))
        self._under_way.callback(self._bar.advance, written_bytes(write_item))
        return data


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized


class _Export:
    """One checkpoint on its way into a file. Its methods are the steps, in the order in which they happen."""

    def __init__(self, folder: AnyPath, allow_pickle: bool | None) -> None:
        self.reader = FileSystemReader(folder, allow_pickle=allow_pickle)
        self.planner = EmptyStateDictLoadPlanner(allow_pickle=allow_pickle)
        self.ranks = _alone()
        self.value_items: list[ReadItem] = []
        self.tensor_items: dict[str, list[ReadItem]] = defaultdict(list)

    def plan(self) -> None:
        """Read the index, and find out what to read for every key."""
        self.ranks.all_gather_status("plan", self._plan)

    def read_values(self) -> None:
        """Read all that is not a tensor. Values are part of the description, which comes first in the file."""
        self._read(self.value_items)

    def write(self, archive: ZipWriter, bar: ProgressBar) -> None:
        """Write the description of everything, then the bytes of one tensor after the other."""
        keys = {id(value): key for key, value in self.planner.state_dict.items() if _is_stand_in(value)}
        stand_ins = [self.planner.state_dict[key] for key in keys.values()]
        description, entries = describe(self.planner.original_state_dict, stand_ins)
        bar.total = sum(entry.nbytes for entry in entries)
        archive.add("data.pkl", description)
        archive.add("byteorder", sys.byteorder.encode())
        for number, entry in enumerate(entries):
            if isinstance(entry.source, torch.Tensor):
                archive.add(f"data/{number}", as_bytes(self._tensor(keys[id(entry.source)])))
            else:
                archive.add(f"data/{number}", _bytes_of_storage(entry.source))
            bar.advance(entry.nbytes)
        archive.add("version", b"3\n")
        archive.close()

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

    def _tensor(self, key: str) -> torch.Tensor:
        """A tensor in memory, put together from its chunks."""
        places = self.planner.state_dict
        stand_in = places[key]
        places[key] = torch.empty(stand_in.shape, dtype=stand_in.dtype)
        try:
            self._read(self.tensor_items[key])
            whole: torch.Tensor = places[key]
        finally:
            places[key] = stand_in
        return whole

    def _read(self, items: list[ReadItem]) -> None:
        self.ranks.all_gather_status("read", lambda: self.reader.read_data(LoadPlan(items), self.planner).wait())


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


def _bytes_of_storage(storage: torch.UntypedStorage) -> memoryview:
    return as_bytes(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))


def _alone() -> Collectives:
    return Collectives(None, use_dist=False, coordinator_rank=0)


@contextmanager
def _bar(label: str, progress: bool) -> Iterator[ProgressBar]:
    """A bar that is seen only if somebody wants to see it."""
    with ProgressBar(0, label, stream=None if progress else io.StringIO()) as bar:
        yield bar
        bar.advance(bar.total - bar.done)


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
