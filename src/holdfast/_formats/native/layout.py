"""Lays out data files: which chunks go into which file, where, and what the file begins with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from json.encoder import encode_basestring
from math import prod
from typing import NamedTuple

import numpy as np

from holdfast._base.alike import AlikeItems, Numbers, numbered
from holdfast._base.boxes import cut
from holdfast._formats.native.blocks import Digests, count_blocks
from holdfast._formats.native.dtypes import DType, dtype_named
from holdfast._formats.native.record import BLOCK_BYTES
from holdfast._formats.native.tables import TABLE_NAME, Boxes, encode_table, table_bytes
from holdfast._formats.safetensors.header import LENGTH_BYTES, METADATA_KEY

DATA_ALIGNMENT = 4096
"""Data begins at a multiple of this, so that it is on whole pages."""

_LARGEST_HEADER = 90_000_000
"""Readers of safetensors files refuse headers beyond 100 MB."""


class ChunkToWrite(NamedTuple):
    """A box of a tensor that is to be stored as a unit."""

    tensor: int
    key: str
    dtype: DType
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return prod(self.sizes) * self.dtype.itemsize


class Chunks(AlikeItems[ChunkToWrite]):
    """Chunks that are written one after the other, as columns."""

    def __init__(self, keys: list[str], likes: list[ChunkToWrite], kinds: Numbers, tensors: Numbers) -> None:
        super().__init__(keys, likes, kinds)
        self.tensors = tensors
        """The numbers of their tensors."""

    def _made(self, like: ChunkToWrite, position: int) -> ChunkToWrite:
        return like._replace(tensor=int(self.tensors[position]), key=self.keys[position])

    @classmethod
    def of(cls, chunks: Sequence[ChunkToWrite]) -> Chunks:
        """The same chunks, as columns."""
        if isinstance(chunks, cls):
            return chunks
        found, kinds = numbered((dtype.name, shape, offsets, sizes) for _, _, dtype, shape, offsets, sizes in chunks)
        likes = [ChunkToWrite(0, "", dtype_named(name), *box) for name, *box in found]
        tensors = np.fromiter((chunk.tensor for chunk in chunks), np.int64, len(chunks))
        return cls([chunk.key for chunk in chunks], likes, kinds, tensors)

    def chosen(self, positions: Numbers) -> Chunks:
        """Some of them, in that order."""
        keys = [self.keys[position] for position in positions.tolist()]
        return Chunks(keys, self.likes, self.kinds[positions], self.tensors[positions])

    def followed_by(self, more: Chunks) -> Chunks:
        """All of these, and then others."""
        kinds = np.concatenate([self.kinds, more.kinds + len(self.likes)])
        tensors = np.concatenate([self.tensors, more.tensors])
        return Chunks([*self.keys, *more.keys], [*self.likes, *more.likes], kinds, tensors)

    def of_kinds(self, numbers: Iterable[int]) -> Numbers:
        """For each chunk a number that was found out about its kind."""
        return np.fromiter(numbers, np.int64, len(self.likes))[self.kinds]


@dataclass(frozen=True)
class FileLayout:
    """A data file: its first bytes, the chunks that follow, each with its position in the file, and the table."""

    header: bytes
    columns: Chunks
    """The chunks, in the order in which they are stored."""
    positions: Numbers
    table_begin: int
    """Where the last chunk ends."""
    table_bytes: int
    notes: Mapping[str, str]
    """In the header of the table."""
    block_bytes: int
    """Of the blocks that have digests there."""

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return self.table_begin + self.table_bytes

    @cached_property
    def chunks(self) -> Sequence[tuple[ChunkToWrite, int]]:
        """The chunks one by one, each with its position."""
        return list(zip(self.columns, self.positions.tolist(), strict=True))

    @property
    def chunk_bytes(self) -> Numbers:
        """Of each chunk: they follow each other without gaps."""
        return np.diff(np.append(self.positions, self.table_begin))

    def table(self, digests: Digests) -> bytes:
        """The table, given the digests of what is before it."""
        order = np.argsort(self.columns.tensors, kind="stable")
        kinds, likes = self.columns.kinds[order], self.columns.likes
        boxes = Boxes.of([like.offsets for like in likes], [like.sizes for like in likes]).chosen(kinds)
        data = encode_table(self.columns.tensors[order], self.positions[order], boxes, digests, self.notes)
        if len(data) != self.table_bytes:
            raise AssertionError(f"a table was planned with {self.table_bytes} bytes and has {len(data)}")
        return data


def lay_out(
    chunks: Sequence[ChunkToWrite],
    generation: str,
    max_file_size: int | None = None,
    *,
    writers: int | None = None,
    notes: Mapping[str, str] | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> list[FileLayout]:
    """Distribute chunks over as few files as ``max_file_size`` (of data, without header and table) allows.

    Chunks that are larger are cut, down to single elements. ``writers`` is how many ranks write files, if that is
    known: the tables note it, with other ``notes``.
    """
    files = _distributed(Chunks.of(chunks), max_file_size)
    notes = {"files": str(len(files)), **(notes or {})}
    if writers is not None:
        notes["ranks"] = str(writers)
    return [_lay_out_file(file, generation, notes, block_bytes) for file in files]


def _distributed(chunks: Chunks, max_file_size: int | None) -> Sequence[Chunks]:
    """The chunks of each file."""
    if max_file_size is not None and max_file_size < 1:
        raise ValueError(f"a file cannot have {max_file_size} bytes at most; give a larger max_file_size, or None")
    if max_file_size is None and int(_most_bytes_in_header(chunks).sum()) <= _LARGEST_HEADER:
        return [chunks] if chunks else []
    if max_file_size is not None and any(like.nbytes > max_file_size for like in chunks.likes):
        chunks = Chunks.of([part for chunk in chunks for part in _cut(chunk, max_file_size)])
    begins: list[int] = []
    remaining = remaining_header = 0
    sizes, entries = chunks.of_kinds(like.nbytes for like in chunks.likes), _most_bytes_in_header(chunks)
    for position, (size, entry) in enumerate(zip(sizes.tolist(), entries.tolist(), strict=True)):
        if not begins or (max_file_size is not None and size > remaining) or entry > remaining_header:
            begins.append(position)
            remaining, remaining_header = max_file_size or 0, _LARGEST_HEADER
        remaining -= size
        remaining_header -= entry
    return [chunks.chosen(np.arange(begin, end)) for begin, end in pairwise([*begins, len(chunks)])]


def _most_bytes_in_header(chunks: Chunks) -> Numbers:
    """An upper limit for each: a character takes up to 7 bytes with escapes, a number up to 20."""
    lengths = np.fromiter(map(len, chunks.keys), np.int64, len(chunks))
    return 7 * lengths + chunks.of_kinds(64 * len(like.sizes) + 200 for like in chunks.likes)


def _cut(chunk: ChunkToWrite, largest: int) -> Iterator[ChunkToWrite]:
    """Parts of a chunk that take ``largest`` bytes at most, cut along the first dimensions."""
    for offsets, sizes in cut(chunk, largest // chunk.dtype.itemsize):
        yield chunk._replace(offsets=offsets, sizes=sizes)


def _lay_out_file(chunks: Chunks, generation: str, notes: Mapping[str, str], block_bytes: int) -> FileLayout:
    chunks = _by_alignment(chunks)
    ends = np.cumsum(chunks.of_kinds(like.nbytes for like in chunks.likes))
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    # The JSON is put together by hand, since all is the same for chunks of a kind but name and place.
    described = chunks.each([_described(like.dtype, like.sizes) for like in chunks.likes])
    names = map(encode_basestring, _names_in_file(chunks))
    rows = zip(names, described, begins.tolist(), ends.tolist(), strict=True)
    entries = [
        f'"{METADATA_KEY}":{{"holdfast":"2","generation":{encode_basestring(generation)}}}',
        *[f"{name}:{said}[{begin},{end}]}}" for name, said, begin, end in rows],
    ]
    position = int(ends[-1])
    dimensions = int(chunks.of_kinds(len(like.sizes) for like in chunks.likes).sum())
    text = ",".join(entries).encode()
    # How long the header is depends on the digits of how long the table is, and that on how many blocks there are.
    start = 0
    while True:
        nbytes = table_bytes(len(chunks), dimensions, count_blocks(start + position, block_bytes), notes)
        table = f',"{TABLE_NAME}":{{"dtype":"U8","shape":[{nbytes}],"data_offsets":[{position},{position + nbytes}]}}}}'
        needed = -(-(LENGTH_BYTES + len(text) + 1 + len(table)) // DATA_ALIGNMENT) * DATA_ALIGNMENT
        if needed <= start:
            break
        start = needed
    text = (b"{" + text + table.encode()).ljust(start - LENGTH_BYTES)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return FileLayout(header, chunks, begins + start, start + position, nbytes, notes, block_bytes)


def _described(dtype: DType, sizes: tuple[int, ...]) -> str:
    """What the header says of such chunks, up to their places."""
    shape = ",".join(map(str, dtype.shape_in_file(sizes)))
    return f'{{"dtype":"{dtype.stored_as}","shape":[{shape}],"data_offsets":'


def _by_alignment(chunks: Chunks) -> Chunks:
    """Those that need most alignment first, so that each has it: readers that map a file need it."""
    alignments = [_alignment(like.dtype.itemsize) for like in chunks.likes]
    if len(set(alignments)) <= 1:
        return chunks
    return chunks.chosen(np.argsort(-chunks.of_kinds(alignments), kind="stable"))


def _alignment(itemsize: int) -> int:
    """The largest power of two that divides an element size."""
    return itemsize & -itemsize


def _names_in_file(chunks: Chunks) -> list[str]:
    """What the chunks are called in the header, each in another way."""
    taken = {METADATA_KEY, TABLE_NAME}
    keys, is_whole = chunks.keys, [like.sizes == like.shape for like in chunks.likes]
    if all(is_whole) and "".join(keys).isascii() and len(taken.union(keys)) == len(taken) + len(keys):
        return keys
    names = []
    for key, whole, chunk in zip(keys, chunks.each(is_whole), chunks.each(chunks.likes), strict=True):
        name = key if whole else _name_of_part(key, chunk)
        if name in taken or not name.isascii():
            name = _free_name(name, taken)
        taken.add(name)
        names.append(name)
    return names


def _name_of_part(key: str, like: ChunkToWrite) -> str:
    ranges = (f"{start}:{start + size}" for start, size in zip(like.offsets, like.sizes, strict=True))
    return f"{key}[{','.join(ranges)}]"


def _free_name(name: str, taken: set[str]) -> str:
    if not name.isascii():
        name = name.encode("utf-8", "backslashreplace").decode()  # a str may hold what UTF-8 cannot
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}#{number}"
    return candidate
