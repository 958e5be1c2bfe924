"""Lays out data files: which chunks go into which file, where, and what the file begins with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from math import prod
from typing import NamedTuple

from holdfast._base.boxes import cut
from holdfast._formats.native.blocks import Digests, count_blocks
from holdfast._formats.native.dtypes import DType
from holdfast._formats.native.record import BLOCK_BYTES
from holdfast._formats.native.tables import TABLE_NAME, encode_table, table_bytes
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


@dataclass(frozen=True)
class FileLayout:
    """A data file: its first bytes, the chunks that follow, each with its position in the file, and the table."""

    header: bytes
    chunks: Sequence[tuple[ChunkToWrite, int]]
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

    def table(self, digests: Digests) -> bytes:
        """The table, given the digests of what is before it."""
        data = encode_table([(chunk[0], at, chunk[4], chunk[5]) for chunk, at in self.chunks], digests, self.notes)
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
    files = _distributed(chunks, max_file_size)
    notes = {"files": str(len(files)), **(notes or {})}
    if writers is not None:
        notes["ranks"] = str(writers)
    return [_lay_out_file(file, generation, notes, block_bytes) for file in files]


def _distributed(chunks: Sequence[ChunkToWrite], max_file_size: int | None) -> Sequence[Sequence[ChunkToWrite]]:
    """The chunks of each file."""
    if max_file_size is not None and max_file_size < 1:
        raise ValueError(f"a file cannot have {max_file_size} bytes at most; give a larger max_file_size, or None")
    if max_file_size is None and sum(map(_most_bytes_in_header, chunks)) <= _LARGEST_HEADER:
        return [chunks] if chunks else []
    files: list[list[ChunkToWrite]] = []
    remaining = remaining_header = 0
    for chunk in chunks:
        for part in [chunk] if max_file_size is None else _cut(chunk, max_file_size):
            size, entry = part.nbytes, _most_bytes_in_header(part)
            if not files or (max_file_size is not None and size > remaining) or entry > remaining_header:
                files.append([])
                remaining, remaining_header = max_file_size or 0, _LARGEST_HEADER
            files[-1].append(part)
            remaining -= size
            remaining_header -= entry
    return files


def _most_bytes_in_header(chunk: ChunkToWrite) -> int:
    """An upper limit: a character takes up to 7 bytes with escapes, a number up to 20."""
    return 7 * len(chunk.key) + 64 * len(chunk.sizes) + 200


def _cut(chunk: ChunkToWrite, largest: int) -> Iterator[ChunkToWrite]:
    """Parts of a chunk that take ``largest`` bytes at most, cut along the first dimensions."""
    for offsets, sizes in cut(chunk, largest // chunk.dtype.itemsize):
        yield chunk._replace(offsets=offsets, sizes=sizes)


def _lay_out_file(
    chunks: Sequence[ChunkToWrite], generation: str, notes: Mapping[str, str], block_bytes: int
) -> FileLayout:
    entries = [f'"{METADATA_KEY}":{{"holdfast":"2","generation":{encode_basestring(generation)}}}']
    taken = {METADATA_KEY, TABLE_NAME}
    placed: list[tuple[ChunkToWrite, int]] = []
    position = 0
    # The JSON is put together by hand, since all is the same for chunks of one dtype and size but name and place.
    alike: dict[tuple[str, tuple[int, ...]], tuple[str, int]] = {}
    for chunk in _by_alignment(chunks):
        _, key, dtype, shape, _, sizes = chunk
        known = alike.get((dtype.name, sizes))
        if known is None:
            known = alike[dtype.name, sizes] = _described(dtype, sizes), chunk.nbytes
        described, nbytes = known
        name = key if sizes == shape else _name_of_part(chunk)
        if name in taken or not name.isascii():
            name = _free_name(name, taken)
        taken.add(name)
        end = position + nbytes
        entries.append(f"{encode_basestring(name)}:{described}[{position},{end}]}}")
        placed.append((chunk, position))
        position = end
    dimensions = sum(len(chunk.sizes) for chunk in chunks)
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
    return FileLayout(
        header, [(chunk, start + at) for chunk, at in placed], start + position, nbytes, notes, block_bytes
    )


def _described(dtype: DType, sizes: tuple[int, ...]) -> str:
    """What the header says of such chunks, up to their places."""
    shape = ",".join(map(str, dtype.shape_in_file(sizes)))
    return f'{{"dtype":"{dtype.stored_as}","shape":[{shape}],"data_offsets":'


def _by_alignment(chunks: Sequence[ChunkToWrite]) -> Sequence[ChunkToWrite]:
    """Those that need most alignment first, so that each has it: readers that map a file need it."""
    alignments = [_alignment(chunk.dtype.itemsize) for chunk in chunks]
    if len(set(alignments)) <= 1:
        return chunks
    order = sorted(range(len(chunks)), key=alignments.__getitem__, reverse=True)  # stable also in reverse
    return [chunks[number] for number in order]


def _alignment(itemsize: int) -> int:
    """The largest power of two that divides an element size."""
    return itemsize & -itemsize


def _name_of_part(chunk: ChunkToWrite) -> str:
    ranges = (f"{start}:{start + size}" for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return f"{chunk.key}[{','.join(ranges)}]"


def _free_name(name: str, taken: set[str]) -> str:
    if not name.isascii():
        name = name.encode("utf-8", "backslashreplace").decode()  # a str may hold what UTF-8 cannot
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}#{number}"
    return candidate
