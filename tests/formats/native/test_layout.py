"""Data files are laid out so that everything lies somewhere once, on pages, and any safetensors reader agrees."""

from __future__ import annotations

import io
import itertools
import json
from math import prod
from unittest import mock

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast._base.boxes import Box, first_overlap
from holdfast._formats.native import layout as layouts
from holdfast._formats.native.array_files import decode_arrays
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.layout import DATA_ALIGNMENT, ChunkToWrite, lay_out
from holdfast._formats.native.stored_files import TablePlace
from holdfast._formats.native.tables import TABLE_ARRAYS
from holdfast._formats.native.writing import ChunkBytes, write_data_file
from holdfast._formats.safetensors.header import decode_header
from tests.golden.contents import DTYPES

GENERATION = "00112233aabbccdd"


def chunk(key: str, dtype: str = "float32", shape: tuple[int, ...] = (4,), number: int = 0) -> ChunkToWrite:
    return ChunkToWrite(number, key, dtype_named(dtype), shape, (0,) * len(shape), shape)


@st.composite
def chunks(draw: st.DrawFn) -> list[ChunkToWrite]:
    kinds = st.sampled_from([*DTYPES, "raw3", "raw12", "raw24", "raw1000"])
    keys = draw(st.lists(st.text(max_size=6), unique=True, max_size=8))
    shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)
    return [chunk(key, draw(kinds), draw(shapes), number) for number, key in enumerate(keys)]


@given(chunks(), st.none() | st.integers(1, 3000))
def test_every_element_lies_in_one_place_of_a_valid_file(wanted, limit):
    files = lay_out(wanted, GENERATION, limit)
    placed = [part for file in files for part, _ in file.chunks]
    for whole in wanted:
        parts = [Box(part.offsets, part.sizes) for part in placed if part.tensor == whole.tensor]
        assert sum(prod(part.sizes) for part in parts) == prod(whole.sizes)
        assert first_overlap(parts) is None
    for file in files:
        header = decode_header(file.header[8:], file.nbytes, "file")
        assert header.data_start == len(file.header)
        assert len(file.header) % DATA_ALIGNMENT == 0
        assert header.notes == {"holdfast": "2", "generation": GENERATION}
        by_place = {header.position(name): tensor for name, tensor in header.tensors.items()}
        table = by_place.pop(file.table_begin)
        assert list(header.tensors)[-1] == "holdfast.table"
        assert (table.dtype, table.shape, table.nbytes) == ("U8", (file.table_bytes,), file.table_bytes)
        assert len(file.chunks) == len(by_place)
        for part, position in file.chunks:
            entry = by_place[position]
            assert (entry.dtype, entry.nbytes) == (part.dtype.stored_as, part.nbytes)
            assert entry.shape == part.dtype.shape_in_file(part.sizes)
            if part.dtype.stored_as != "U8":
                assert position % part.dtype.itemsize == 0
        if limit is not None and len(file.chunks) > 1:
            assert sum(part.nbytes for part, _ in file.chunks) <= limit
        elif limit is not None:
            assert file.chunks[0][0].nbytes <= max(limit, file.chunks[0][0].dtype.itemsize)


@given(chunks(), st.none() | st.integers(1, 3000), st.sampled_from([4096, 65536]), st.integers(1, 50_000))
def test_a_file_is_written_as_it_was_laid_out_with_the_digests_of_its_bytes(wanted, limit, block, write_bytes):
    def pieces(part):
        content = np.full(part.nbytes, part.tensor + 1, np.uint8)
        for at in range(0, part.nbytes, 777):
            yield content[at : at + 777]

    for file in lay_out(wanted, GENERATION, limit, block_bytes=block):
        stream = io.BytesIO()
        table = write_data_file(stream, file, ChunkBytes(pieces), write_bytes)
        written = stream.getvalue()
        assert len(written) == file.nbytes
        assert written.startswith(file.header)
        for part, position in file.chunks:
            assert set(written[position : position + part.nbytes]) <= {part.tensor + 1}
        assert digests_in(written, table) == digests_of(written[: table.begin], block)


class LendsBuffers(io.BytesIO):
    """A sink whose buffers have any size, and that sometimes has none."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes = itertools.cycle(sizes)
        self.lent = None

    def buffer(self):
        if self.lent is None:
            size = next(self.sizes)
            self.lent = bytearray(size) if size else None
        return self.lent and memoryview(self.lent)

    def advance(self, count):
        self.write(self.lent[:count])
        self.lent = self.lent[count:] or None


@given(chunks(), st.lists(st.integers(0, 20_000), min_size=1, max_size=4))
def test_buffers_of_any_size_get_the_digests_of_the_file(wanted, sizes):
    for file in lay_out(wanted, GENERATION, block_bytes=4096):
        stream = LendsBuffers(sizes)
        table = write_data_file(
            stream, file, ChunkBytes(lambda part: [np.full(part.nbytes, part.tensor + 1, np.uint8)])
        )
        written = stream.getvalue()
        assert len(written) == file.nbytes
        assert digests_in(written, table) == digests_of(written[: table.begin], 4096)


def digests_in(written: bytes, table: TablePlace) -> list[int]:
    """The digests that a table has, which ends with its own."""
    content = written[table.begin :]
    assert len(content) == table.nbytes
    assert xxhash.xxh3_128_digest(content[:-16]) == content[-16:] == bytes.fromhex(table.digest)
    return decode_arrays(content, TABLE_ARRAYS, "table")[0]["digests"].tolist()


def digests_of(data: bytes, block: int) -> list[int]:
    return [xxhash.xxh3_64_intdigest(data[at : at + block]) & 0xFFFFFFFF for at in range(0, len(data), block)]


@pytest.mark.parametrize("count", [3, 5])
def test_a_chunk_that_comes_with_another_number_of_bytes_is_not_written_as_if_nothing_was(count):
    (file,) = lay_out([chunk("a", "uint8", (4,))], GENERATION)
    with pytest.raises(AssertionError, match=f"4 bytes and came with {count}"):
        write_data_file(io.BytesIO(), file, ChunkBytes(lambda _: [np.zeros(count, np.uint8)]))


def test_elements_that_need_alignment_have_it_beside_elements_of_odd_sizes():
    wanted = [chunk("raw", "raw12", (3,)), chunk("pair", "complex128", (1,)), chunk("double", "float64", (3,))]
    (file,) = lay_out([*wanted, chunk("odd", "raw3", (1,)), chunk("short", "int16", (1,))], GENERATION)
    at = {part.key: position for part, position in file.chunks}
    assert at["double"] % 8 == at["pair"] % 16 == at["raw"] % 4 == at["short"] % 2 == 0


def test_headers_stay_below_what_readers_take():
    wanted = [chunk(f"key {number} \x01\u20ac", number=number) for number in range(300)]
    with mock.patch.object(layouts, "_LARGEST_HEADER", 20_000):
        files = lay_out(wanted, GENERATION)
    assert len(files) > 1
    assert sum(len(file.chunks) for file in files) == 300
    assert all(len(file.header) <= 20_000 + DATA_ALIGNMENT for file in files)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_no_file_keeps_is_refused(limit):
    with pytest.raises(ValueError, match="max_file_size"):
        lay_out([chunk("a")], GENERATION, limit)


def test_nothing_takes_no_file():
    assert lay_out([], GENERATION) == []


def test_names_in_the_file_are_the_key_the_key_with_the_region_or_something_else_that_is_free():
    whole = chunk("w[0:2]", shape=(2,), number=0)
    part = ChunkToWrite(1, "w", dtype_named("float32"), (4,), (0,), (2,))
    taken = chunk("__metadata__", number=2)
    half_a_pair = chunk("\ud83d", number=3)
    (file,) = lay_out([whole, part, taken, half_a_pair, chunk("w[0:2]#2", number=4)], GENERATION)
    names = list(json.loads(file.header[8:]))
    assert names[0] == "__metadata__"
    assert names[1:4] == ["w[0:2]", "w[0:2]#2", "__metadata__#2"]
    assert names[-1] == "holdfast.table"
    assert len(set(names)) == 7


def test_a_tensor_that_is_called_like_the_table_has_another_name_in_the_file():
    (file,) = lay_out([chunk("holdfast.table")], GENERATION)
    assert list(json.loads(file.header[8:])) == ["__metadata__", "holdfast.table#2", "holdfast.table"]


@pytest.mark.parametrize("start", range(4096 - 230, 4096 - 150))
def test_a_header_that_just_fits_has_room_for_the_table(start):
    (file,) = lay_out([chunk("k" * start, "uint8", (60_000,))], GENERATION, block_bytes=4096)
    assert len(file.header) % DATA_ALIGNMENT == 0
    stream = io.BytesIO()
    write_data_file(stream, file, ChunkBytes(lambda part: [np.zeros(part.nbytes, np.uint8)]))
    header = decode_header(file.header[8:], len(stream.getvalue()), "file")
    assert header.position("holdfast.table") == file.table_begin


@pytest.mark.parametrize(("second", "files"), [(100, 1), (101, 2)])
def test_a_file_is_filled_up_to_the_limit_and_no_further(second, files):
    wanted = [chunk("a", "uint8", (100,)), chunk("b", "uint8", (second,), number=1)]
    assert len(lay_out(wanted, GENERATION, 200)) == files


@given(chunks(), st.none() | st.integers(1, 3000))
def test_headers_are_as_json_writes_them(wanted, limit):
    for file in lay_out(wanted, GENERATION, limit):
        text = file.header[8:].rstrip(b" ").decode()
        assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)


@given(chunks(), st.integers(0, 5), st.integers(1, 50_000), st.data())
def test_files_are_the_same_whether_chunks_are_gathered_or_come_in_pieces(wanted, most, memory, data):
    def content(part):
        return np.full(part.nbytes, part.tensor + 1, np.uint8)

    for file in lay_out(wanted, GENERATION, block_bytes=4096):
        asked = []

        def gather(number, buffer, file=file, asked=asked):
            asked.append(number)
            count = filled = 0
            for part, _ in file.chunks[number:][: data.draw(st.integers(0, most))]:
                if filled + part.nbytes > buffer.nbytes:
                    break
                buffer[filled : filled + part.nbytes] = content(part)
                count, filled = count + 1, filled + part.nbytes
            return count, filled

        alone, gathered = io.BytesIO(), io.BytesIO()
        expected = write_data_file(alone, file, ChunkBytes(lambda part: [content(part)]), memory)
        found = write_data_file(gathered, file, ChunkBytes(lambda part: [content(part)], gather), memory)
        assert gathered.getvalue() == alone.getvalue()
        assert found == expected
        assert asked[0] == 0
