"""Lays out data files: which chunks go into which file, where, and what the file begins with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from math import prod
from typing import NamedTuple

from holdfast._base.boxes import cut
from holdfast._formats.native.dtypes import DType
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
    """A data file: its first bytes, and the chunks that follow, each with its position in the file."""

    header: bytes
    chunks: Sequence[tuple[ChunkToWrite, int]]
    nbytes: int


def lay_out(chunks: Sequence[ChunkToWrite], generation: str, max_file_size: int | None = None) -> list[FileLayout]:
    """Distribute chunks over as few files as ``max_file_size`` (of data, without the header) allows.

    Chunks that are larger are cut, down to single elements.
    """
    if max_file_size is not None and max_file_size < 1:
        raise ValueError(f"a file cannot have {max_file_size} bytes at most; give a larger max_file_size, or None")
    if max_file_size is None and sum(map(_most_bytes_in_header, chunks)) <= _LARGEST_HEADER:
        return [_lay_out_file(chunks, generation)] if chunks else []
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
    return [_lay_out_file(file, generation) for file in files]


def _most_bytes_in_header(chunk: ChunkToWrite) -> int:
    """An upper limit: a character takes up to 7 bytes with escapes, a number up to 20."""
    return 7 * len(chunk.key) + 64 * len(chunk.sizes) + 200


def _cut(chunk: ChunkToWrite, largest: int) -> Iterator[ChunkToWrite]:
    """Parts of a chunk that take ``largest`` bytes at most, cut along the first dimensions."""
    for offsets, sizes in cut(chunk, largest // chunk.dtype.itemsize):
        yield chunk._replace(offsets=offsets, sizes=sizes)


def _lay_out_file(chunks: Sequence[ChunkToWrite], generation: str) -> FileLayout:
    entries = [f'"{METADATA_KEY}":{{"holdfast":"1","generation":{encode_basestring(generation)}}}']
    taken = {METADATA_KEY}
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
    text = f"{{{','.join(entries)}}}".encode()
    text += b" " * (-(len(text) + LENGTH_BYTES) % DATA_ALIGNMENT)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    start = len(header)
    return FileLayout(header, [(chunk, start + at) for chunk, at in placed], start + position)


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
