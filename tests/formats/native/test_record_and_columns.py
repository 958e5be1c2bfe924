"""The record and the columns come back as they were written. What is wrong with forged ones is in tests/attacks."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast._base.divisions import Cut, Division
from holdfast._formats.native.columns import (
    ChunkTable,
    Columns,
    decode_columns,
    digest_of,
    encode_columns,
    first_blocks,
    header_ends,
)
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.names import data_file, index_file
from holdfast._formats.native.record import Record, decode_record, encode_record
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.stored_files import StoredFile, TablePlace
from holdfast._formats.native.stored_parts import WHOLE, PartsByRule, Places, places_of
from holdfast.errors import DamagedCheckpointError, UnsupportedVersionError
from tests.golden.contents import DTYPES

GENERATION = "00112233aabbccdd"

any_text = st.text(st.characters())
"""Lone surrogates included."""
plain_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**2000), 2**2000)
    | st.floats(allow_nan=False, allow_infinity=False)
    | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def refs(draw: st.DrawFn) -> list[TensorRef]:
    found = []
    for key in draw(st.lists(any_text, unique=True, max_size=5)):
        kind = draw(st.sampled_from(["sharded", "replicated", "per_rank"]))
        rank = draw(st.integers(0, 2**40)) if kind == "per_rank" else None
        shape = tuple(draw(st.lists(st.integers(0, 1000), max_size=4)))
        if draw(st.booleans()):
            found.append(TensorRef(key, dtype_named("raw8"), shape, kind, "<M8[ns]", rank))
        else:
            found.append(TensorRef(key, dtype_named(draw(st.sampled_from(DTYPES))), shape, kind, None, rank))
    return found


@given(
    refs(), plain_json, plain_json, st.lists(st.integers(0, 2**62 - 1), max_size=3), st.sampled_from([4096, 1 << 30])
)
def test_a_record_of_version_1_comes_back_as_it_was(tensors, tree, metadata, sizes, block):
    files = [StoredFile(data_file(GENERATION, 0, number), size) for number, size in enumerate(sizes)]
    index = StoredFile(index_file(GENERATION), 77, "0" * 32)
    record = Record(GENERATION, files, index, tensors, tree, metadata, {"by": "me"}, block, version=(1, 0))
    encoded = encode_record(record)
    assert decode_record(encoded, "holdfast.json") == record
    assert encoded.isascii()
    assert json.loads(encoded)["check"] == encoded[-35:-3].decode()


def whole(tensors: list[TensorRef]) -> Places:
    """As of tensors that the only rank has stored."""
    return places_of([PartsByRule(WHOLE)] * len(tensors))


divisions = st.builds(
    lambda cuts, ranks: Division(
        tuple(Cut(0, parts) for parts, _ in cuts), tuple(step for _, step in cuts), ranks=ranks
    ),
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 100)), max_size=3),
    st.none() | st.lists(st.integers(0, 7), min_size=1, max_size=9).map(tuple),
)


@given(refs(), plain_json, st.data())
def test_a_record_comes_back_as_it_was(tensors, tree, data):
    parts = [PartsByRule(data.draw(divisions) if ref.shape else WHOLE, data.draw(st.integers(0, 7))) for ref in tensors]
    lists = data.draw(st.lists(st.lists(st.integers(-65, len(tensors) - 1), max_size=4), max_size=2))
    listed = st.none() | st.integers(0, len(lists) - 1) if lists else st.none()
    files = []
    for number in range(data.draw(st.integers(0, 3))):
        begin, nbytes = data.draw(st.integers(0, 2**61)), data.draw(st.integers(0, 2**20))
        table = TablePlace(begin, nbytes, "a" * 32, *data.draw(st.tuples(st.integers(0, 9), st.integers(-1, 9))))
        table = replace(table, tensor_list=data.draw(listed))
        rank = data.draw(st.integers(0, 7))
        files.append(StoredFile(data_file(GENERATION, rank, number), begin + nbytes, rank=rank, table=table))
    index = data.draw(st.none() | st.just(StoredFile(index_file(GENERATION), 77, "0" * 32)))
    record = Record(GENERATION, files, index, tensors, tree, world_size=8, places=places_of(parts), tensor_lists=lists)
    found = decode_record(encode_record(record), "holdfast.json")
    assert found == record
    assert encode_record(found) == encode_record(record)


def test_a_file_or_tensor_has_a_line_of_its_own():
    files = [StoredFile(data_file(GENERATION, 0, number), 10) for number in range(3)]
    tensors = [TensorRef(f"t{number}", dtype_named("float32"), (2,)) for number in range(4)]
    lines = encode_record(
        Record(GENERATION, files, StoredFile(index_file(GENERATION), 1, ""), tensors, {}, places=whole(tensors))
    ).splitlines()
    assert sum(line.startswith(b'{"name":') for line in lines) == 3
    assert sum(line.startswith(b'{"key":') for line in lines) == 4


def test_tensors_that_are_alike_in_part_keep_what_is_their_own():
    float32, int32 = dtype_named("float32"), dtype_named("int32")
    tensors = [
        TensorRef("a", float32, (2,)),
        TensorRef("b", int32, (2,)),
        TensorRef("c", float32, (2,), "sharded"),
        TensorRef("d", float32, (2,), "per_rank", rank=0),
        TensorRef("e", float32, (2,), "per_rank", rank=1),
        TensorRef("f", float32, (2,), numpy="<f4"),
        TensorRef("g", float32, (1, 2)),
        TensorRef('"\n\ud800', float32, (2,)),
    ]
    record = Record("0" * 16, [], None, tensors, {}, places=whole(tensors))
    assert list(decode_record(encode_record(record), "record").tensors) == tensors


@pytest.mark.parametrize("shape", ["[true]", "[1.0]", "{}", '"1"'])
def test_a_shape_that_only_equals_that_of_another_tensor_is_refused(shape):
    tensors = [TensorRef(key, dtype_named("float32"), (1,)) for key in "ab"]
    data = encode_record(Record(GENERATION, [], None, tensors, {}, places=whole(tensors)))
    body = data[: data.rindex(b',"check"')]
    first, _, last = body.rpartition(b"[1]")
    forged = first + shape.encode() + last
    check = xxhash.xxh3_128_hexdigest(forged).encode()
    with pytest.raises(DamagedCheckpointError, match="no valid shape for 'b'"):
        decode_record(forged + b',"check":"%s"}\n' % check, "holdfast.json")


def test_what_json_cannot_hold_is_no_metadata():
    with pytest.raises(ValueError, match="JSON"):
        encode_record(Record(GENERATION, [], StoredFile(index_file(GENERATION), 1, ""), [], {}, float("nan")))


def test_a_damaged_record_that_seems_to_be_of_a_later_version_says_that_it_may_be_damaged():
    record = Record(GENERATION, [], StoredFile(index_file(GENERATION), 1, "0" * 32), [], {})
    data = encode_record(record)
    with pytest.raises(UnsupportedVersionError, match="unless it is damaged"):
        decode_record(data.replace(b"[2,0]", b"[3,0]"), "holdfast.json")
    with pytest.raises(DamagedCheckpointError, match="digest differs"):
        decode_record(data.replace(b"[2,0]", b"[2,1]"), "holdfast.json")


@st.composite
def stored(draw: st.DrawFn) -> tuple[Record, Columns]:
    """Tensors cut along their first dimension, whose chunks lie one behind the other in some files."""
    count = draw(st.integers(1, 3))
    ends = [draw(st.integers(0, 5000)) for _ in range(count)]
    tensors, rows = [], []
    for number in range(draw(st.integers(0, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        dtype = dtype_named(draw(st.sampled_from(["uint8", "float64", "raw12"])))
        tensors.append(TensorRef(f"t{number}", dtype, shape))
        if prod(shape) == 0:
            continue
        cuts = sorted({0, shape[0], *draw(st.lists(st.integers(0, shape[0]), max_size=2))}) if shape else [0, 1]
        for begin, end in itertools.pairwise(cuts):
            offsets = (begin, *[0] * (len(shape) - 1)) if shape else ()
            sizes = (end - begin, *shape[1:]) if shape else ()
            file = draw(st.integers(0, count - 1))
            rows.append((number, file, ends[file], offsets, sizes))
            ends[file] += prod(sizes) * dtype.itemsize
    block = draw(st.sampled_from([4096, 65536]))
    files = [StoredFile(data_file(GENERATION, 0, number), size) for number, size in enumerate(ends)]
    columns = Columns(
        *(np.array([row[place] for row in rows], np.int64) for place in range(3)),
        *(np.array([number for row in rows for number in row[place]], np.int64) for place in (3, 4)),
        np.arange(sum(-(-size // block) for size in ends), dtype=np.uint32),
    )
    data = encode_columns(columns)
    index = StoredFile(index_file(GENERATION), len(data), digest_of(data))
    return Record(GENERATION, files, index, tensors, {}, block_bytes=block, version=(1, 0)), columns


@given(stored())
def test_columns_come_back_as_they_were_and_give_the_chunks_of_each_tensor(example):
    record, columns = example
    found = decode_columns(encode_columns(columns), record, "index")
    for name in ("chunk_tensor", "chunk_file", "chunk_begin", "chunk_offsets", "chunk_sizes", "digests"):
        assert getattr(found, name).tolist() == getattr(columns, name).tolist()
    table = ChunkTable(found, record, "index")
    at = place = 0
    for number, ref in enumerate(record.tensors):
        chunks = table.of(number)
        assert sum(prod(chunk.sizes) for chunk in chunks) == prod(ref.shape)
        for chunk in chunks:
            ndim = len(ref.shape)
            assert chunk.offsets == tuple(columns.chunk_offsets[at : at + ndim])
            assert chunk.sizes == tuple(columns.chunk_sizes[at : at + ndim])
            assert (chunk.file, chunk.begin) == (columns.chunk_file[place], columns.chunk_begin[place])
            at, place = at + ndim, place + 1
    assert place == len(columns.chunk_tensor)


@given(stored())
def test_headers_end_where_the_first_chunk_begins_and_blocks_are_counted_file_by_file(example):
    record, columns = example
    for number, (end, file) in enumerate(zip(header_ends(columns, record.files), record.files, strict=True)):
        begins = columns.chunk_begin[columns.chunk_file == number].tolist()
        assert end == min(begins, default=file.nbytes)
    counts = [-(-file.nbytes // record.block_bytes) for file in record.files]
    assert first_blocks(record.files, record.block_bytes) == [sum(counts[:number]) for number in range(len(counts) + 1)]


@given(stored(), st.data())
def test_columns_that_were_changed_are_refused(example, data):
    record, columns = example
    encoded = bytearray(encode_columns(columns))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DamagedCheckpointError, match="digest differs"):
        decode_columns(bytes(encoded), record, "index")
