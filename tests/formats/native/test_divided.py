"""Any box of any divided tensor is what numpy slicing gives, and takes the tables of the ranks that have it alone."""

from __future__ import annotations

import itertools
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast._base.boxes import Box, overlap
from holdfast._base.divisions import Cut, Division
from holdfast._formats.native import chunk_index
from holdfast._formats.native.source import NativeSource
from holdfast._formats.native.stored_parts import WHOLE, PartsByRule, StoredParts, listed_parts, places_of
from holdfast._formats.source import ReadRequest, WholeReads
from holdfast._stores.local_store import LocalStore
from tests.formats.native.divided import rows_of, write_divided
from tests.formats.native.specified_reader import SpecifiedReader
from tests.properties import examples
from tests.stores.counting import CountingMemoryStore


@st.composite
def divisions(draw: st.DrawFn, shape: tuple[int, ...], world_size: int) -> PartsByRule:
    cuts = draw(st.lists(st.tuples(st.integers(0, len(shape) - 1), st.integers(1, 5)), max_size=3)) if shape else []
    ranks = st.lists(st.integers(0, world_size - 1), min_size=1, max_size=6).map(tuple)
    division = Division(
        tuple(Cut(*cut) for cut in cuts),
        tuple(draw(st.integers(0, 7)) for _ in cuts),
        ranks=draw(st.none() | ranks),
    )
    return PartsByRule(division, draw(st.integers(0, 9)))


@st.composite
def lists(draw: st.DrawFn, shape: tuple[int, ...], world_size: int) -> StoredParts:
    """A grid, whose cells have any ranks."""
    sides = []
    for size in shape:
        lines = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        sides.append([(low, high - low) for low, high in itertools.pairwise(lines)])
    cells = list(itertools.product(*sides))
    rank = st.integers(0, world_size - 1)
    return listed_parts([(tuple(at for at, _ in cell), tuple(n for _, n in cell), draw(rank)) for cell in cells])


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], dict[str, StoredParts], int, int | None]:
    world_size = draw(st.integers(1, 6))
    arrays, parts = {}, {}
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        dtype = draw(st.sampled_from(["uint8", "uint16", "uint64"]))
        count = int(np.prod(shape, dtype=np.int64))
        key = f"tensor {number}"
        arrays[key] = (np.arange(count) * 7 + number).astype(dtype).reshape(shape)
        by_rule = 0 in shape or draw(st.booleans())
        parts[key] = draw(divisions(shape, world_size) if by_rule else lists(shape, world_size))
    return arrays, parts, world_size, draw(st.none() | st.integers(1, 60))


def boxes_in(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    sides = [
        st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda ends: (min(ends), abs(ends[1] - ends[0])))
        for size in shape
    ]
    return st.tuples(*sides).map(lambda found: Box(tuple(at for at, _ in found), tuple(size for _, size in found)))


SLOW = settings(max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@SLOW
@given(checkpoints(), st.data())
def test_any_box_is_what_slicing_gives_and_takes_the_tables_of_its_ranks_alone(example, data):
    arrays, parts, world_size, limit = example
    store = CountingMemoryStore(uuid.uuid4().hex)
    write_divided(store, arrays, parts, world_size, max_file_size=limit)
    source = NativeSource(store)
    store.reads.clear()
    requests, ranks = [], set()
    for key in data.draw(st.lists(st.sampled_from(sorted(arrays)), max_size=4)):
        box = data.draw(boxes_in(arrays[key].shape))
        requests.append(ReadRequest(key, box.offsets, box.sizes, np.zeros(box.sizes, arrays[key].dtype)))
        for offsets, sizes, rank in rows_of(parts[key], arrays[key].shape, world_size):
            if overlap(offsets, sizes, *box) is not None:
                ranks.add(rank)
    source.read(requests)
    for request in requests:
        place = tuple(slice(at, at + size) for at, size in zip(request.offsets, request.sizes, strict=True))
        assert np.array_equal(request.into, arrays[request.key][place])
    files = {file.name: file.rank for file in source.record.files}
    assert {files[read.name] for read in store.table_reads()} == ranks
    assert len({read.name for read in store.table_reads()}) == len(store.table_reads())


@SLOW
@given(checkpoints())
def test_whole_tensors_chunks_and_all_digests_are_found(example):
    arrays, parts, world_size, limit = example
    store = CountingMemoryStore(uuid.uuid4().hex)
    write_divided(store, arrays, parts, world_size, max_file_size=limit)
    source = NativeSource(store)
    assert source.verify() == sum(file.nbytes for file in source.record.files)
    found = {key: np.zeros_like(array) for key, array in arrays.items()}
    source.read_many([], WholeReads.into(found))
    for key, array in arrays.items():
        assert np.array_equal(found[key], array)
        covered = np.zeros(array.shape, np.int64)
        for chunk in source.chunk_places(key):
            covered[tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
        assert (covered == 1).all()


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(checkpoints())
def test_a_reader_that_is_written_from_the_page_reads_the_same(tmp_path_factory: Any, example):
    arrays, parts, world_size, limit = example
    folder = tmp_path_factory.mktemp("divided")
    write_divided(LocalStore(folder), arrays, parts, world_size, max_file_size=limit)
    reader = SpecifiedReader(Path(folder))
    for key, array in arrays.items():
        assert reader.tensors[key].raw.tobytes() == array.tobytes()


def test_of_very_many_ranks_one_table_is_read(monkeypatch):
    """A load of one part does not look at what the others have stored."""
    world_size = 300
    store = CountingMemoryStore(uuid.uuid4().hex)
    arrays = {f"w{number}": np.arange(world_size * 4, dtype=np.uint64).reshape(world_size, 4) for number in range(3)}
    rows = PartsByRule(Division((Cut(0, world_size),), (1,)))
    write_divided(store, arrays, dict.fromkeys(arrays, rows), world_size)
    source = NativeSource(store)
    assert len(source.record.places.divisions) == 1
    store.reads.clear()
    requests = [ReadRequest(key, (77, 0), (1, 4), np.zeros((1, 4), np.uint64)) for key in arrays]
    source.read(requests)
    assert len(store.table_reads()) == 1
    assert {read.name.split("-")[2] for read in store.reads} == {"77"}
    assert requests[0].into.tolist() == [[308, 309, 310, 311]]


def test_of_very_many_files_of_a_rank_those_with_the_tensor_are_looked_at():
    store = CountingMemoryStore(uuid.uuid4().hex)
    arrays = {f"w{number}": np.arange(50, dtype=np.uint8) for number in range(30)}
    write_divided(store, arrays, dict.fromkeys(arrays, PartsByRule(WHOLE)), 1, max_file_size=100)
    source = NativeSource(store)
    assert len(source.record.files) == 15
    store.reads.clear()
    into = np.zeros(7, np.uint8)
    source.read([ReadRequest("w11", (3,), (7,), into)])
    assert into.tolist() == list(range(3, 10))
    source.read_many([], WholeReads.into({"w10": np.zeros(50, np.uint8)}))
    assert len(store.table_reads()) == 1


def test_many_tables_are_read_by_several_threads(monkeypatch):
    seen = []
    original = chunk_index.map_in_threads

    def noted(function, items, threads, name):
        seen.append((len(list(items)), threads))
        return original(function, items, threads, name)

    monkeypatch.setattr(chunk_index, "map_in_threads", noted)
    store = CountingMemoryStore(uuid.uuid4().hex)
    array = np.arange(40, dtype=np.uint8)
    write_divided(store, {"w": array}, {"w": PartsByRule(Division((Cut(0, 20),), (1,)))}, 20)
    into = np.zeros(40, np.uint8)
    NativeSource(store).read([ReadRequest("w", (0,), (40,), into)])
    assert np.array_equal(into, array)
    assert [count for count, _ in seen] == [20]
    assert seen[0][1] > 1


def test_a_division_with_copies_is_not_stored():
    with pytest.raises(ValueError, match="each part once"):
        places_of([PartsByRule(Division(copies=((2, 1),)))])
