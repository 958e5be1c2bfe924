"""Safetensors files, and folders of them as Hugging Face models are stored."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from holdfast._base.boxes import Box, overlaps, volume
from holdfast._base.byte_counts import count_bytes
from holdfast._base.threads import work_through
from holdfast._base.tuning import SEVERAL_READERS_FROM, SMALL_TENSOR
from holdfast._formats.box_reads import ArrayPlace, ByteRange, ChunkRead, WantedRegion
from holdfast._formats.hf_folder.commit import Folder
from holdfast._formats.hf_folder.folder import Contents, FolderChunk, IndexCheck, check_index, read_contents, read_files
from holdfast._formats.hf_folder.names import COMMIT_NAME, INDEX_NAME, SUFFIX, opened_as_described
from holdfast._formats.native.names import generation_of
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.ranged_files import (
    Ranges,
    StreamRanges,
    ranges_behind,
    read_size,
    refuse_short_chunk,
    seems_cached,
    useful_threads,
)
from holdfast._formats.safetensors.header import read_header
from holdfast._formats.source import ChunkPlace, ReadRequest, Source, check_requests, part_of, sizes_of
from holdfast._stores.store import Store
from holdfast._stores.store_files import files_of


class SafetensorsSource(Source):
    """One file, or a folder: with an index, or with parts of tensors that every rank has written for itself.

    The format has no checksums; what is noticed is a file that is cut off, or that was replaced meanwhile.

    >>> import tempfile, torch, numpy as np
    >>> from safetensors.torch import save_file
    >>> file = tempfile.mkdtemp() + "/model.safetensors"
    >>> save_file({"w": torch.tensor([[1, 2], [3, 4]])}, file)
    >>> source = SafetensorsSource(file)
    >>> column = np.empty((2, 1), source.tensors["w"].dtype.carrier)
    >>> _ = source.read([ReadRequest("w", (0, 1), (2, 1), column)])
    >>> column.tolist()
    [[2], [4]]
    """

    format = "safetensors"

    def __init__(self, path: str | Path | Store, *, file: str | None = None) -> None:
        """``path`` is that of a file or folder, or the store that is one; ``file`` is the object in it that is all."""
        self._notes: Mapping[str, str] = {}
        self._names: dict[str, str] = {}
        if isinstance(path, Store):
            self._fs, self._only_file = files_of(path), file or ""
            self._folder = Folder(self._fs, path.location)
        else:
            place = Path(path)
            self._fs, self._only_file = files_of(path), "" if place.is_dir() else place.name
            self._folder = Folder(self._fs, place if place.is_dir() else place.parent)
        self.location = str(self._folder.at(self._only_file) if self._only_file else self._folder.path)
        if not self._only_file:
            self._contents = _contents_of(self._folder)
        else:
            self._contents = read_files(self._folder, [self._only_file])
            with self._fs.create_stream(self.location, "rb") as stream:
                self._notes = read_header(stream, self.location).notes
        self.identity = _identity_of(self._contents)

    @cached_property
    def tensors(self) -> Mapping[str, TensorRef]:
        """Every stored tensor, by its key."""
        found = {}
        for key, stored in self._contents.keys.items():
            kind = "sharded" if len(stored.chunks) > 1 else "replicated"
            found[key] = TensorRef(key, stored.elements, stored.size, kind)
        return found

    @property
    def tree(self) -> dict[str, TensorRef]:
        """All tensors by key; the format knows nothing else."""
        return dict(self.tensors)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The notes in the header of a single file, and the save that the files are of if it is known."""
        save_id = self._contents.save_id
        return {**self._notes, **({} if save_id is None else {"save_id": save_id})}

    def chunks(self, key: str) -> list[Box]:
        """The boxes in which a tensor is stored."""
        return [Box(chunk.offsets, chunk.sizes) for chunk in self._contents.keys[key].chunks]

    def chunk_places(self, key: str) -> list[ChunkPlace]:
        """The same boxes, with the files that they are stored in. Numbers in their names are not always the ranks."""
        itemsize = self.tensors[key].dtype.itemsize
        return [
            ChunkPlace(
                chunk.offsets,
                chunk.sizes,
                self._name_of(chunk.file),
                chunk.position,
                volume(chunk.sizes) * itemsize,
                None,
            )
            for chunk in self._contents.keys[key].chunks
        ]

    def files(self) -> list[tuple[str, int]]:
        """The index if there is one, and the files that hold tensors; in a folder without an index, all files."""
        if self._only_file:
            return sizes_of(self._fs, self._folder.path, [self._only_file])
        present = self._folder.names()
        about = [name for name in (INDEX_NAME, COMMIT_NAME) if name in present]
        if about:
            names = {self._name_of(chunk.file) for key in self._contents.keys.values() for chunk in key.chunks}
        else:
            names = {name for name in present if name.endswith(SUFFIX) and generation_of(name) is None}
        return sizes_of(self._fs, self._folder.path, [*about, *sorted(names)])

    def check_index(self) -> IndexCheck | None:
        """Compare the index with the headers of the files; None if there is no index."""
        return None if self._only_file else check_index(self._folder)

    def _name_of(self, file: str) -> str:
        name = self._names.get(file)
        if name is None:
            name = self._names[file] = str(PurePath(file).relative_to(self._folder.path))
        return name

    def read(self, requests: Sequence[ReadRequest], *, verify: bool = True, memory: int | None = None) -> int:
        """Fill the memory of all requests, file by file; of the files only what is needed is read.

        ``verify`` makes no difference: there is nothing to compare with.
        """
        check_requests(requests, self.tensors)
        total = 0
        for parts in self._by_file(requests).values():
            file, digest = parts[0].chunk.file, parts[0].chunk.header_digest
            with opened_as_described(self._fs, file, digest) as stream, ranges_behind(stream, self._fs, file) as ranges:
                total += _read_parts(stream, ranges, parts, memory)
        return total

    def _by_file(self, requests: Sequence[ReadRequest]) -> dict[str, list[_Part]]:
        """What to read of every file, in the order in which it is stored."""
        files: dict[str, list[_Part]] = defaultdict(list)
        for request in requests:
            chunks = self._contents.keys[request.key].chunks
            if not volume(request.sizes):
                continue
            if len(chunks) == 1 and not any(chunks[0].offsets):  # as nearly always
                part = _Part(request.key, chunks[0], Box(request.offsets, request.sizes), request.into)
                files[chunks[0].file].append(part)
                continue
            for shared in overlaps([request], chunks):
                chunk = chunks[shared.source]
                inside = tuple(at - base for at, base in zip(shared.start, chunk.offsets, strict=True))
                first = [at - base for at, base in zip(shared.start, request.offsets, strict=True)]
                place = part_of(request.into, first, shared.lengths)
                part = _Part(request.key, chunk, Box(inside, shared.lengths), place)
                files[chunk.file].append(part)
        for parts in files.values():
            parts.sort(key=lambda part: (part.chunk.position, part.region.offsets))
        return files


class _Part(NamedTuple):
    """A region of a chunk, and where it goes."""

    key: str
    chunk: FolderChunk
    region: Box
    into: Any


def _by_chunk(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """What is wanted of each chunk: no byte of it is to be read twice."""
    for _, of_chunk in groupby(parts, key=lambda part: part.chunk.position):
        yield list(of_chunk)


def _read_parts(stream: Any, file: Ranges, parts: Sequence[_Part], memory: int | None) -> int:
    """Read what is wanted of one file: small tensors one after the other, large ones by several threads."""
    wanted = sum(part.into.nbytes for part in parts)
    may_share = not isinstance(file, StreamRanges) and wanted >= SEVERAL_READERS_FROM
    threads = useful_threads(wanted, cached=seems_cached(file, parts[0].chunk.position)) if may_share else 1
    most = read_size(memory, at_once=threads)
    total = 0
    large: list[tuple[ChunkRead, ByteRange]] = []
    for of_chunk in _by_chunk(parts):
        if _read_small(stream, of_chunk):
            total += of_chunk[0].into.nbytes
            continue
        chunk = of_chunk[0].chunk
        regions = [WantedRegion(part.region, ArrayPlace(part.into)) for part in of_chunk]
        reading = ChunkRead(file, chunk.position, chunk.sizes, of_chunk[0].into.itemsize, regions, most=most)
        refuse_short_chunk(file, chunk.position, reading.nbytes, chunk.file, of_chunk[0].key)
        total += reading.bytes_read
        large += [(reading, run) for run in reading.reads()]
    work_through(large, lambda part: part[0].read(part[1], summed=False), min(threads, len(large)), "holdfast-read")
    return total


def _read_small(stream: Any, parts: Sequence[_Part]) -> bool:
    """Read all of a small chunk, if that is what is wanted and it is there."""
    chunk, into = parts[0].chunk, parts[0].into
    if len(parts) > 1 or into.nbytes > SMALL_TENSOR or parts[0].region.sizes != chunk.sizes:
        return False
    stream.seek(chunk.position)
    data = stream.read(into.nbytes)
    count_bytes(len(data))
    if len(data) != into.nbytes:
        return False
    into[...] = np.frombuffer(data, into.dtype).reshape(chunk.sizes)
    return True


def _contents_of(folder: Folder) -> Contents:
    """What is in a folder. Data files of ours are left over from a save that was cut off, and are passed over."""
    names = folder.names()
    left_over = {name for name in names if generation_of(name) is not None}
    if not left_over or names & {INDEX_NAME, COMMIT_NAME}:
        return read_contents(folder)
    return read_files(folder, sorted(name for name in names - left_over if name.endswith(SUFFIX)))


def _identity_of(contents: Contents) -> str:
    """The id of the save, or, from writers that had none, a digest of what the headers say."""
    if contents.save_id is not None:
        return contents.save_id
    files = {(chunk.file, chunk.header_digest) for key in contents.keys.values() for chunk in key.chunks}
    headers = [(PurePath(file).name, digest) for file, digest in files]
    return hashlib.blake2b(repr(sorted(headers)).encode(), digest_size=16).hexdigest()
