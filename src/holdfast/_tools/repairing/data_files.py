"""What data files say about themselves: the names, types and places of the chunks in them.

A tensor that is one chunk has its key as its name there; a part of one is called by its key and its region, as in
``weight[0:4,8:16]``. A name that was taken has a number behind it. So names can mean several things, and only what can
mean one thing alone is taken for it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast._base.boxes import first_overlap, volume
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.tables import TABLE_NAME
from holdfast._formats.safetensors.dtypes import in_memory
from holdfast._formats.safetensors.header import LENGTH_BYTES, MAX_LENGTH, Header, HeaderTensor, decode_header
from holdfast._stores.store import Store, too_short

_REGION = re.compile(r"(.+)\[([0-9]+:[0-9]+(?:,[0-9]+:[0-9]+)*)\]", re.DOTALL)
_NUMBERED = re.compile(r"(.+)#[0-9]+", re.DOTALL)


class FoundChunk(NamedTuple):
    """A chunk: which box of which tensor, and where it is stored."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    """The position of its file in the list of files."""
    begin: int


class Meaning(NamedTuple):
    """What a name in a data file may stand for."""

    key: str
    offsets: tuple[int, ...] | None
    """None for a whole tensor."""
    sizes: tuple[int, ...] | None


@dataclass(frozen=True)
class Parts:
    """The chunks of all files, and what is wrong with them."""

    tensors: Sequence[TensorRef]
    parts: Mapping[str, Sequence[FoundChunk]]
    """By key."""
    incomplete: Mapping[str, str]
    """What is wrong with tensors of which chunks are missing, overlap or cannot be told apart."""


def header_in(store: Store, name: str, nbytes: int | None = None) -> Header:
    """The header of a data file, which has ``nbytes`` if it is intact."""
    path = store.path_of(name)
    with store.reader(name) as reader:
        if reader.size < LENGTH_BYTES:
            raise too_short(path, LENGTH_BYTES, reader.size)
        start = bytearray(LENGTH_BYTES)
        reader.read_into(0, start)
        length = int.from_bytes(start, "little")
        if length > min(reader.size - LENGTH_BYTES, MAX_LENGTH):
            raise too_short(path, LENGTH_BYTES + length, reader.size)
        text = bytearray(length)
        reader.read_into(LENGTH_BYTES, text)
        return decode_header(bytes(text), reader.size if nbytes is None else nbytes, path)


def chunks_in(header: Header) -> dict[str, HeaderTensor]:
    """All tensors of a data file but its table."""
    return {name: tensor for name, tensor in header.tensors.items() if name != TABLE_NAME}


def parts_of_known(headers: Sequence[Header], tensors: Sequence[TensorRef]) -> Parts:
    """The chunks of tensors that a record describes.

    >>> parts_of_known([], [TensorRef("weight", dtype_named("float32"), (2,))]).incomplete
    {'weight': 'has 0 of its 2 elements'}
    """
    found, unclear = known_chunks(headers, tensors)
    return Parts(tensors, found, {**_incomplete(found, tensors), **unclear})


def known_chunks(
    headers: Sequence[Header], tensors: Sequence[TensorRef]
) -> tuple[dict[str, list[FoundChunk]], dict[str, str]]:
    """The chunks in some files of tensors that a record describes, by key, and keys of which that is not clear."""
    by_key = {ref.key: ref for ref in tensors}
    found: dict[str, list[FoundChunk]] = defaultdict(list)
    unclear: dict[str, str] = {}
    for number, header in enumerate(headers):
        meanings = {name: list(_known_meanings(name, header, by_key)) for name in chunks_in(header)}
        sure = {possible[0] for possible in meanings.values() if len(possible) == 1}
        for name, possible in meanings.items():
            left = possible if len(possible) <= 1 else [meaning for meaning in possible if meaning not in sure]
            if len(left) == 1:
                key, offsets, sizes = left[0]
                found[key].append(FoundChunk(key, offsets, sizes, number, header.position(name)))
            for key, _, _ in left if len(left) > 1 else ():
                unclear[key] = f"has a chunk {name!r} that may be of another tensor"
    return found, unclear


def parts_of_unknown(headers: Sequence[Header], sources: Sequence[str]) -> Parts:
    """The chunks in these files, and the tensors that they make up, of which nothing else is known."""
    found: dict[str, list[FoundChunk]] = defaultdict(list)
    types: dict[str, set[str]] = defaultdict(set)
    cut: set[str] = set()
    for number, (header, source) in enumerate(zip(headers, sources, strict=True)):
        for name, stored in chunks_in(header).items():
            dtype, shape = in_memory(name, stored.dtype, stored.shape, source)
            key, offsets, sizes = _likeliest_meaning(name, shape)
            found[key].append(FoundChunk(key, offsets, sizes, number, header.position(name)))
            types[key].add(dtype)
            if key != name:
                cut.add(key)
    tensors, incomplete = [], {}
    for key, parts in found.items():
        if len(types[key]) > 1 or len({len(part.sizes) for part in parts}) > 1:
            incomplete[key] = "has chunks of different types"
            continue
        if key in cut and len(parts) == 1:
            incomplete[key] = "has one chunk, which is a part of it, and the others are missing"
        kind = "sharded" if len(parts) > 1 else "replicated"
        tensors.append(TensorRef(key, dtype_named(next(iter(types[key]))), _reach(parts), kind))
    return Parts(tensors, found, {**_incomplete(found, tensors), **incomplete})


def _known_meanings(
    name: str, header: Header, tensors: Mapping[str, TensorRef]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """What a name can stand for, given the tensors that there are and the type and shape of its data."""
    stored = header.tensors[name]
    for meaning in _meanings(name):
        ref = tensors.get(meaning.key)
        if ref is None:
            continue
        whole = (0,) * len(ref.shape)
        offsets = whole if meaning.offsets is None else meaning.offsets
        sizes = ref.shape if meaning.sizes is None else meaning.sizes
        if len(sizes) != len(ref.shape) or (meaning.sizes is not None and sizes == ref.shape):
            continue
        if any(at + length > most for at, length, most in zip(offsets, sizes, ref.shape, strict=True)):
            continue
        if stored.dtype == ref.dtype.stored_as and stored.shape == ref.dtype.shape_in_file(sizes):
            yield meaning.key, offsets, sizes


def _meanings(name: str) -> Iterator[Meaning]:
    """All that a name could stand for, by its text alone.

    >>> [meaning.key for meaning in _meanings("a[0:2]")], [meaning.key for meaning in _meanings("b#2")]
    (['a[0:2]', 'a'], ['b#2', 'b'])
    """
    numbered = _NUMBERED.fullmatch(name)
    for text in [name] if numbered is None else [name, numbered.group(1)]:
        yield Meaning(text, None, None)
        region = _region(text)
        if region is not None:
            yield region


def _region(name: str) -> Meaning | None:
    found = _REGION.fullmatch(name)
    if found is None:
        return None
    ranges = [tuple(map(int, text.split(":"))) for text in found.group(2).split(",")]
    if any(begin >= end for begin, end in ranges):
        return None
    return Meaning(found.group(1), tuple(begin for begin, _ in ranges), tuple(end - begin for begin, end in ranges))


def _likeliest_meaning(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """What a name stands for if the tensors are not known: a region, where the shape of the data is that of it.

    Types that safetensors files do not have are bytes there, in one more dimension, and stay so.
    """
    region = _region(name)
    if region is not None and region.offsets is not None and region.sizes is not None:
        if region.sizes == shape:
            return region.key, region.offsets, region.sizes
        if region.sizes == shape[:-1]:
            return region.key, (*region.offsets, 0), shape
    return name, (0,) * len(shape), shape


def _reach(parts: Iterable[FoundChunk]) -> tuple[int, ...]:
    ends = ([at + size for at, size in zip(part.offsets, part.sizes, strict=True)] for part in parts)
    return tuple(max(along) for along in zip(*ends, strict=True))


def _incomplete(found: Mapping[str, Sequence[FoundChunk]], tensors: Iterable[TensorRef]) -> dict[str, str]:
    """Tensors that their chunks do not tile."""
    problems = {}
    for ref in tensors:
        parts = found.get(ref.key, [])
        filled = sum(volume(part.sizes) for part in parts)
        if first_overlap(parts) is not None:
            problems[ref.key] = "has chunks that overlap"
        elif filled != volume(ref.shape):
            problems[ref.key] = f"has {filled} of its {volume(ref.shape)} elements"
    return problems
