"""Lays out data files: which chunks go into which file, where, and what the file begins with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from holdfast.formats.native.dtypes import DType
from holdfast.formats.safetensors.header import LENGTH_BYTES, METADATA_KEY

DATA_ALIGNMENT = 4096
"""Data begins at a multiple of this, so that it lies on whole pages."""

_MOST_CHUNKS = 200_000
"""Of a file: readers refuse headers beyond 100 MB."""


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
    files: list[list[ChunkToWrite]] = []
    room = 0
    for chunk in chunks:
        for part in [chunk] if max_file_size is None else _cut(chunk, max_file_size):
            size = part.nbytes
            if not files or (max_file_size is not None and size > room) or len(files[-1]) >= _MOST_CHUNKS:
                files.append([])
                room = max_file_size or 0
            files[-1].append(part)
            room -= size
    return [_lay_out_file(file, generation) for file in files]


def _cut(chunk: ChunkToWrite, largest: int) -> Iterator[ChunkToWrite]:
    """Parts of a chunk that take ``largest`` bytes at most, cut along the first dimensions."""
    if chunk.nbytes <= largest or prod(chunk.sizes) == 1:
        yield chunk
        return
    dim = next(dim for dim, size in enumerate(chunk.sizes) if size > 1)
    slice_bytes = chunk.nbytes // chunk.sizes[dim]
    step = max(1, largest // slice_bytes)
    for start in range(0, chunk.sizes[dim], step):
        length = min(step, chunk.sizes[dim] - start)
        offsets = (*chunk.offsets[:dim], chunk.offsets[dim] + start, *chunk.offsets[dim + 1 :])
        yield from _cut(
            chunk._replace(offsets=offsets, sizes=(*chunk.sizes[:dim], length, *chunk.sizes[dim + 1 :])), largest
        )


def _lay_out_file(chunks: Sequence[ChunkToWrite], generation: str) -> FileLayout:
    content: dict[str, object] = {METADATA_KEY: {"holdfast": "1", "generation": generation}}
    placed: list[tuple[ChunkToWrite, int]] = []
    position = 0
    # Large elements first, so that each begins at a multiple of its size.
    for chunk in sorted(chunks, key=lambda chunk: -chunk.dtype.itemsize):
        end = position + chunk.nbytes
        name = _free_name(_name(chunk), content)
        shape = chunk.dtype.shape_in_file(chunk.sizes)
        content[name] = {"dtype": chunk.dtype.stored_as, "shape": shape, "data_offsets": (position, end)}
        placed.append((chunk, position))
        position = end
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + LENGTH_BYTES) % DATA_ALIGNMENT)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    start = len(header)
    return FileLayout(header, [(chunk, start + at) for chunk, at in placed], start + position)


def _name(chunk: ChunkToWrite) -> str:
    if chunk.sizes == chunk.shape:
        return chunk.key
    ranges = (f"{start}:{start + size}" for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return f"{chunk.key}[{','.join(ranges)}]"


def _free_name(name: str, taken: dict[str, object]) -> str:
    if not name.isascii():
        name = name.encode("utf-8", "backslashreplace").decode()  # a text may hold what UTF-8 cannot
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}#{number}"
    return candidate
