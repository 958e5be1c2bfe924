"""How many bytes of a checkpoint with blocks of the usual size are read for parts of its tensors."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast._formats.native.record import BLOCK_BYTES as BLOCK
from holdfast._formats.native.source import NativeSource
from holdfast._formats.source import ReadRequest, WholeReads
from tests.properties import examples
from tests.stores.counting import CountingMemoryStore, bytes_in, bytes_twice


def new_store() -> CountingMemoryStore:
    return CountingMemoryStore(uuid.uuid4().hex)


ROWS, COLUMNS = 60, 50_000
CONTENT = torch.arange(ROWS * COLUMNS, dtype=torch.int32).reshape(ROWS, COLUMNS)
"""12 MB, in rows of 200 kB, which are no multiple of a block."""
NARROW = torch.arange(300_000 * 8, dtype=torch.int32).reshape(300_000, 8)


@pytest.fixture(scope="module")
def place() -> CountingMemoryStore:
    place = new_store()
    holdfast.save({"before": torch.zeros(5), "wide": CONTENT, "narrow": NARROW}, place)
    return place


@pytest.fixture
def source(place: CountingMemoryStore) -> NativeSource:
    """With the header of its file checked, which is done once."""
    source = NativeSource(place)
    source.read([ReadRequest("before", (0,), (5,), np.zeros(5, "<u4"))])
    place.reads.clear()
    return source


def read(source: NativeSource, key: str, places: list[tuple[slice, slice]]) -> None:
    """Read parts of a tensor in one go, and compare them."""
    content = CONTENT if key == "wide" else NARROW
    requests = []
    for rows, columns in places:
        sizes = (rows.stop - rows.start, columns.stop - columns.start)
        requests.append(ReadRequest(key, (rows.start, columns.start), sizes, np.zeros(sizes, "<u4")))
    source.read(requests)
    for request, part in zip(requests, places, strict=True):
        assert np.array_equal(request.into, content.numpy().view("<u4")[part])


def slices(size: int) -> st.SearchStrategy[slice]:
    return st.tuples(st.integers(0, size - 1), st.integers(1, size)).map(lambda s: slice(s[0], min(s[0] + s[1], size)))


FEW = settings(
    max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@FEW
@given(st.lists(slices(ROWS), min_size=1, max_size=4))
def test_rows_take_little_more_than_their_bytes(place, source, rows):
    place.reads.clear()
    read(source, "wide", [(part, slice(0, COLUMNS)) for part in rows])
    touched = set().union(*(range(part.start, part.stop) for part in rows))
    needed = len(touched) * COLUMNS * 4
    assert bytes_in(place.data_reads()) <= 1.1 * needed + 2 * len(rows) * BLOCK
    assert bytes_twice(place.data_reads()) == 0
    assert len(place.data_reads()) <= needed // (1 << 20) + 4 * len(rows) + 2


@FEW
@given(st.lists(st.tuples(slices(ROWS), slices(COLUMNS)), min_size=1, max_size=4))
def test_columns_take_the_blocks_of_the_rows_that_they_touch_and_no_byte_twice(place, source, parts):
    place.reads.clear()
    read(source, "wide", parts)
    assert bytes_twice(place.data_reads()) == 0
    begin = min(rows.start for rows, _ in parts) * COLUMNS * 4
    end = max(rows.stop for rows, _ in parts) * COLUMNS * 4
    assert bytes_in(place.data_reads()) <= end - begin + 2 * BLOCK
    # Each row of a part has its own blocks at most.
    blocks = sum(
        (rows.stop - rows.start) * ((columns.stop - columns.start) * 4 // BLOCK + 2) for rows, columns in parts
    )
    assert bytes_in(place.data_reads()) <= blocks * BLOCK


@FEW
@given(st.lists(st.tuples(slices(300_000), slices(8)), min_size=1, max_size=4))
def test_columns_of_short_rows_are_read_in_large_pieces(place, source, parts):
    place.reads.clear()
    read(source, "narrow", parts)
    assert bytes_twice(place.data_reads()) == 0
    touched = sum((rows.stop - rows.start) * 32 for rows, _ in parts)
    assert bytes_in(place.data_reads()) <= touched + 2 * len(parts) * BLOCK
    assert len(place.data_reads()) <= touched // (1 << 20) + 6 * len(parts)


def test_a_load_of_several_parts_of_a_tensor_reads_no_byte_twice(place):
    """As one rank has them that holds several columns of a tensor, converted or not."""
    place.reads.clear()
    state = {"wide": torch.zeros(ROWS, COLUMNS, dtype=torch.float64), "narrow": torch.zeros(8, 300_000).int().T}
    holdfast.load(state, place, cast=True)
    assert torch.equal(state["wide"], CONTENT.double())
    assert torch.equal(state["narrow"], NARROW)
    assert bytes_twice(place.data_reads()) == 0


# --- what several ranks read -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wholes", "rows", "several_ranks", "left_for_others"),
    [(2, 0, True, True), (2, 3, True, True), (0, 3, True, False), (1, 59, True, False), (2, 0, False, False)],
)
def test_whole_tensors_that_all_ranks_want_stay_in_the_page_cache(wholes, rows, several_ranks, left_for_others):
    """Of tensors that are spread over ranks each reads its own part, which would only fill the cache."""
    store = new_store()
    holdfast.save({f"t{number}": CONTENT[:20].clone() for number in range(2)} | {"spread": CONTENT}, store)
    source = NativeSource(store)
    memory = {f"t{number}": np.empty((20, COLUMNS), "<u4") for number in range(wholes)}
    parts = [ReadRequest("spread", (row, 0), (1, COLUMNS), np.empty((1, COLUMNS), "<u4")) for row in range(rows)]
    source.read_many(parts, WholeReads.into(memory), shared=several_ranks)
    assert {read.shared for read in store.data_reads()} == {left_for_others}
