"""Whole model files: which tensors go into which, and how each is made out of parts with little memory."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from holdfast._base.box_bytes import readable_parts
from holdfast._base.boxes import Box, overlaps, volume
from holdfast._base.threads import work_through
from holdfast._base.tuning import WRITE_BUFFER_BYTES
from holdfast._formats.hf_folder.commit import Folder
from holdfast._formats.hf_folder.folder import Contents, FolderChunk, StoredKey
from holdfast._formats.hf_folder.names import FileNotes, file_name, notes_of_whole_tensors, opened_as_described
from holdfast._formats.safetensors.torch_dtypes import to_safetensors
from holdfast._formats.safetensors.writer import SafetensorsWriter
from holdfast._formats.tensor_places import narrowed, read_region
from holdfast._stores.durable_files import flush_to_disk
from holdfast._stores.filesystem import FileSystemBase
from holdfast.errors import InvalidPlanError

_MOST_OPEN = 32


def assign_files(keys: Iterable[str], index_of: Mapping[str, int] | None) -> dict[str, list[str]]:
    """The names of model files, and the keys that go into each."""
    if index_of is None:
        listed = sorted(keys)
        return {file_name(1, 1): listed} if listed else {}
    refuse_unmapped(keys, index_of)
    largest = max(index_of.values(), default=1)
    files: dict[str, list[str]] = defaultdict(list)
    for key in sorted(keys):
        files[file_name(index_of[key], largest)].append(key)
    return dict(sorted(files.items()))


def refuse_unmapped(keys: Iterable[str], index_of: Mapping[str, int]) -> None:
    """Raise if there are keys of which the mapping does not say which file they go into."""
    unmapped = sorted({key for key in keys if key not in index_of})
    if unmapped:
        shown = ", ".join(unmapped[:10]) + (", …" if len(unmapped) > 10 else "")
        raise InvalidPlanError(
            f"fqn_to_index_mapping does not say which file {len(unmapped)} tensor(s) go into: {shown}. Add them, or "
            "give no mapping at all to have everything in one file.",
            problems=unmapped,
        )


def write_model_files(folder: Folder, files: Mapping[str, list[str]], contents: Contents, *, threads: int = 1) -> None:
    """Write files of whole tensors, given as name and keys; ``threads`` at a time. The first error is raised."""

    def write(name: str) -> None:
        keys = {key: contents.keys[key] for key in files[name]}
        _write_model_file(folder, name, keys, contents.save_id)

    work_through(files, write, min(threads, len(files)), "holdfast-consolidate")


def _write_model_file(folder: Folder, name: str, keys: Mapping[str, StoredKey], save_id: str | None) -> None:
    entries = [(key, *to_safetensors(key, stored.dtype, stored.size)) for key, stored in keys.items()]
    buffer = torch.empty(WRITE_BUFFER_BYTES, dtype=torch.uint8)
    with folder.fs.create_stream(folder.at(name), "wb") as stream, _OpenFiles(folder.fs) as sources:
        writer = SafetensorsWriter(stream, entries, notes_of_whole_tensors(FileNotes(save_id)))
        for key in writer.header.tensors:
            writer.write(key, _blocks(key, keys[key], sources, buffer))
        writer.finish()
        if folder.sync:
            flush_to_disk(stream)


def _blocks(key: str, stored: StoredKey, sources: _OpenFiles, buffer: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a whole tensor, block by block, each brought together from all parts that reach into it."""
    itemsize = stored.dtype.itemsize
    whole = Box((0,) * len(stored.size), stored.size)
    # No gaps: every block is one run of bytes of the whole tensor. The bytes of an element are one more dimension, so
    # that no dtype is special.
    for block in readable_parts(stored.size, whole, itemsize, most=buffer.numel(), gap=0):
        count = volume(block.sizes) * itemsize
        filled = buffer[:count].view(*block.sizes, itemsize)
        for found in overlaps([block], stored.chunks):
            chunk = stored.chunks[found.source]
            place = narrowed(
                filled,
                (*(at - start for at, start in zip(found.start, block.offsets, strict=True)), 0),
                (*found.lengths, itemsize),
            )
            offsets = (*(at - start for at, start in zip(found.start, chunk.offsets, strict=True)), 0)
            read_region(
                sources.holding(chunk),
                chunk.position,
                (*chunk.sizes, itemsize),
                torch.uint8,
                Box(offsets, (*found.lengths, itemsize)),
                place,
                source=chunk.file,
                key=key,
            )
        yield buffer[:count].numpy().data


class _OpenFiles:
    """Streams of files that are read, of which only the most recently used are open."""

    def __init__(self, fs: FileSystemBase) -> None:
        self._fs = fs
        self._open: OrderedDict[tuple[str, bytes], tuple[AbstractContextManager[Any], Any]] = OrderedDict()

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._open:
            self._close_oldest()

    def holding(self, chunk: FolderChunk) -> Any:
        """The file that a chunk is in, as it was when the chunk was found there."""
        file = (chunk.file, chunk.header_digest)
        if file not in self._open:
            if len(self._open) >= _MOST_OPEN:
                self._close_oldest()
            opening = opened_as_described(self._fs, *file)
            self._open[file] = (opening, opening.__enter__())
        self._open.move_to_end(file)
        return self._open[file][1]

    def _close_oldest(self) -> None:
        _, (opening, _) = self._open.popitem(last=False)
        opening.__exit__(None, None, None)
