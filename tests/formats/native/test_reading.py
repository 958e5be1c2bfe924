"""Any region of any chunked tensor is what numpy slicing gives, and takes the blocks that hold it, each once."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast._base.boxes import Box
from holdfast._base.tuning import READ_BYTES, READERS
from holdfast._formats.native import read_plan, readable_files, reading
from holdfast._formats.native.columns import digest_of
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.layout import ChunkToWrite, lay_out
from holdfast._formats.native.names import RECORD, data_file, index_file, new_generation
from holdfast._formats.native.part_index import encode_index
from holdfast._formats.native.record import Record, encode_record
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.source import NativeSource
from holdfast._formats.native.stored_files import StoredFile
from holdfast._formats.native.stored_parts import parts_of_shares, places_of
from holdfast._formats.native.writing import ChunkBytes, write_data_file
from holdfast._formats.source import ReadRequest
from holdfast._stores.memory_store import MemoryStore
from holdfast.errors import DamagedCheckpointError
from tests.properties import examples
from tests.stores.counting import CountingMemoryStore, bytes_in

BLOCK = 4096


@contextmanager
def sizes(*, window: int = BLOCK, straight_from: int = BLOCK, threaded: bool = False, gap: int = 0) -> Iterator[None]:
    """Read in small parts, by several threads, or straight into memory, also where there is little to read."""
    with (
        mock.patch.object(reading, "READ_BYTES", window),
        mock.patch.object(reading, "SMALLEST_BUFFER", BLOCK),
        mock.patch.object(reading, "CACHED_READ_BYTES", 2 * BLOCK),
        mock.patch.object(reading, "SEVERAL_READERS_FROM", 0 if threaded else 1 << 40),
        mock.patch.object(read_plan, "STRAIGHT_FROM", straight_from),
        mock.patch.object(read_plan, "MERGE_GAP", gap),
    ):
        yield


@dataclass
class Stored:
    """A checkpoint in memory, with the arrays that it was made of."""

    store: CountingMemoryStore
    arrays: dict[str, np.ndarray]
    places: dict[str, list[tuple[str, int, Box]]] = field(default_factory=dict)
    """Per tensor, for each chunk: its file, where it begins, and its box."""
    header_ends: dict[str, int] = field(default_factory=dict)

    def blocks_of(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> set[tuple[str, int]]:
        """The blocks that hold elements of a region, element by element."""
        itemsize = self.arrays[key].itemsize
        found = set()
        for file, begin, box in self.places[key]:
            strides = np.array([int(np.prod(box.sizes[dim + 1 :])) for dim in range(len(box.sizes))], dtype=np.int64)
            low = [max(at, start) for at, start in zip(offsets, box.offsets, strict=True)]
            high = [
                min(at + size, start + length)
                for at, size, start, length in zip(offsets, sizes, box.offsets, box.sizes, strict=True)
            ]
            for element in itertools.product(*(range(a, b) for a, b in zip(low, high, strict=True))):
                at = begin + int(np.dot(np.array(element) - box.offsets, strides)) * itemsize if element else begin
                found |= {(file, block) for block in range(at // BLOCK, (at + itemsize - 1) // BLOCK + 1)}
        return found

    def blocks_of_headers(self, files: set[str]) -> set[tuple[str, int]]:
        return {(file, block) for file in files for block in range(-(-self.header_ends[file] // BLOCK))}


def store(arrays: dict[str, np.ndarray], boxes: dict[str, list[Box]], max_file_size: int | None) -> Stored:
    """Write a checkpoint with blocks of the smallest size."""
    made = Stored(CountingMemoryStore(uuid.uuid4().hex), arrays)
    generation = new_generation()
    refs = [TensorRef(key, dtype_named(f"raw{array.itemsize}"), array.shape) for key, array in arrays.items()]
    chunks = [
        ChunkToWrite(number, ref.key, ref.dtype, ref.shape, box.offsets, box.sizes)
        for number, ref in enumerate(refs)
        for box in boxes[ref.key]
    ]

    def pieces(chunk: ChunkToWrite) -> Iterator[np.ndarray]:
        part = arrays[chunk.key][region(chunk.offsets, chunk.sizes)]
        yield np.frombuffer(part.tobytes(), np.uint8)

    files = []
    for number, layout in enumerate(lay_out(chunks, generation, max_file_size, block_bytes=BLOCK)):
        name = data_file(generation, 0, number)
        with made.store.create(name, layout.nbytes) as sink:
            table = write_data_file(sink, layout, ChunkBytes(pieces), 3 * BLOCK)
        files.append(StoredFile(name, layout.nbytes, table=table))
        made.header_ends[name] = len(layout.header)
        for chunk, position in layout.chunks:
            made.places.setdefault(chunk.key, []).append((name, position, Box(chunk.offsets, chunk.sizes)))
    parts = parts_of_shares(refs, [chunks])
    index = None
    data = encode_index(parts)
    if data is not None:
        made.store.put(index_file(generation), data)
        index = StoredFile(index_file(generation), len(data), digest_of(data))
    record = Record(generation, files, index, refs, tree=[], block_bytes=BLOCK, places=places_of(parts))
    made.store.commit(RECORD, encode_record(record), replaces=None)
    return made


def region(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[Any, ...]:
    return (*(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)), ...)


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut along lines through all of it, in any order."""
    ranges = []
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(1, size), max_size=2))})
        ranges.append([(begin, end - begin) for begin, end in itertools.pairwise(cuts)])
    boxes = [Box(tuple(at for at, _ in cell), tuple(size for _, size in cell)) for cell in itertools.product(*ranges)]
    return draw(st.permutations(boxes))


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True)]
    return tuple(offsets), tuple(sizes)


@st.composite
def checkpoints(draw: st.DrawFn) -> Stored:
    arrays, boxes = {}, {}
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
        itemsize = draw(st.sampled_from([1, 3, 64, 500, 1024, 5000]))
        count = int(np.prod(shape))
        content = np.random.default_rng(number).integers(0, 256, count * itemsize, dtype=np.uint8)
        arrays[f"tensor {number}"] = content.view(f"V{itemsize}").reshape(shape)
        boxes[f"tensor {number}"] = draw(grids(shape))
    return store(arrays, boxes, draw(st.sampled_from([None, None, 3000, 40_000])))


def memory_for(array: np.ndarray, sizes: Sequence[int], kind: str) -> np.ndarray:
    """Memory of these sizes with elements that lie in it in different ways."""
    carrier = dtype_named(f"raw{array.itemsize}").carrier
    if kind == "columns first":
        return np.zeros(sizes[::-1], carrier).transpose()
    if kind == "with gaps":
        return np.zeros([2 * size for size in sizes], carrier)[(*[slice(None, None, 2)] * len(sizes), ...)]
    if kind == "backwards":
        return np.zeros(sizes, carrier)[(*[slice(None, None, -1)] * len(sizes), ...)]
    return np.zeros(sizes, carrier)


@settings(max_examples=examples(120), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_any_region_is_what_slicing_gives_and_takes_the_blocks_that_hold_it_once(data):
    stored = data.draw(checkpoints())
    keys = data.draw(st.lists(st.sampled_from(sorted(stored.arrays)), min_size=1, max_size=4))
    requests = []
    for key in keys:
        offsets, lengths = data.draw(regions(stored.arrays[key].shape))
        kind = data.draw(st.sampled_from(["dense", "columns first", "with gaps", "backwards"]))
        requests.append(ReadRequest(key, offsets, lengths, memory_for(stored.arrays[key], lengths, kind)))

    with sizes(
        window=data.draw(st.sampled_from([BLOCK, 3 * BLOCK, 100_000])),
        straight_from=data.draw(st.sampled_from([1, 3 * BLOCK, 1 << 20])),
        threaded=data.draw(st.booleans()),
    ):
        source = NativeSource(stored.store)
        assert source.columns is not None
        stored.store.reads.clear()
        total = source.read(requests)

    for request in requests:
        expected = stored.arrays[request.key][region(request.offsets, request.sizes)]
        assert np.array(request.into).tobytes() == expected.tobytes()
    needed = set().union(*(stored.blocks_of(request.key, request.offsets, request.sizes) for request in requests))
    needed |= stored.blocks_of_headers({file for file, _ in needed})
    check_reads(stored, needed, total)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_of_a_store_that_is_far_away_any_region_is_what_slicing_gives_too(data):
    """Few requests rather than small ones: a block may be read twice, and no other ones are read."""
    stored = data.draw(checkpoints())
    keys = data.draw(st.lists(st.sampled_from(sorted(stored.arrays)), min_size=1, max_size=4))
    requests = []
    for key in keys:
        offsets, lengths = data.draw(regions(stored.arrays[key].shape))
        kind = data.draw(st.sampled_from(["dense", "columns first", "with gaps", "backwards"]))
        requests.append(ReadRequest(key, offsets, lengths, memory_for(stored.arrays[key], lengths, kind)))
    window = data.draw(st.sampled_from([BLOCK, 3 * BLOCK, 8 * BLOCK]))
    stored.store.read_bytes = READ_BYTES + data.draw(st.integers(1, 10 * BLOCK))

    with sizes(window=window), mock.patch.object(reading, "REMOTE_BUFFERED_BYTES", window):
        source = NativeSource(stored.store)
        assert source.columns is not None
        stored.store.reads.clear()
        total = source.read(requests)

    for request in requests:
        expected = stored.arrays[request.key][region(request.offsets, request.sizes)]
        assert np.array(request.into).tobytes() == expected.tobytes()
    needed = set().union(*(stored.blocks_of(request.key, request.offsets, request.sizes) for request in requests))
    needed |= stored.blocks_of_headers({file for file, _ in needed})
    assert set(blocks_in(stored)) == needed
    assert total == bytes_in(stored.store.data_reads())


def test_what_is_only_checked_takes_a_buffer_however_far_away_it_is():
    stored = store({"w": np.zeros(50 * BLOCK, "V1")}, {"w": [Box((0,), (50 * BLOCK,))]}, None)
    stored.store.read_bytes = READ_BYTES + 1
    source = NativeSource(stored.store)
    assert source.columns is not None
    stored.store.reads.clear()

    with sizes(), mock.patch.object(reading, "REMOTE_BUFFERED_BYTES", 4 * BLOCK):
        source.verify()
    checked = [read.nbytes for read in stored.store.reads]
    stored.store.reads.clear()
    with sizes(), mock.patch.object(reading, "REMOTE_BUFFERED_BYTES", 4 * BLOCK):
        source.read([ReadRequest("w", (0,), (50 * BLOCK,), np.empty(50 * BLOCK, np.uint8))])

    assert max(checked) <= 4 * BLOCK
    assert max(read.nbytes for read in stored.store.reads) > 40 * BLOCK


def blocks_in(stored: Stored) -> list[tuple[str, int]]:
    """All blocks that were read."""
    blocks: list[tuple[str, int]] = []
    for name, begin, end, _ in stored.store.data_reads():
        assert begin % BLOCK == 0
        assert end % BLOCK == 0 or end == stored.store.table_begin(name)
        blocks.extend((name, block) for block in range(begin // BLOCK, -(-end // BLOCK)))
    return blocks


def check_reads(stored: Stored, needed: set[tuple[str, int]], total: int) -> None:
    """Each block that is needed, once, and no others."""
    blocks = blocks_in(stored)
    assert set(blocks) == needed
    assert len(blocks) == len(needed), "a block was read twice"
    assert total == bytes_in(stored.store.data_reads())


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_regions_that_overlap_are_all_filled(data):
    stored = data.draw(checkpoints())
    key = sorted(stored.arrays)[0]
    asked = data.draw(st.lists(regions(stored.arrays[key].shape), min_size=2, max_size=4))
    requests = [ReadRequest(key, *one, memory_for(stored.arrays[key], one[1], "dense")) for one in asked]
    with sizes():
        NativeSource(stored.store).read(requests)
    for request in requests:
        expected = stored.arrays[key][region(request.offsets, request.sizes)]
        assert request.into.tobytes() == expected.tobytes()


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_everything_is_verified_block_by_block(data):
    stored = data.draw(checkpoints())
    source = NativeSource(stored.store)
    stored.store.reads.clear()
    total = source.verify()
    sizes = [listed.size for listed in stored.store.list() if listed.name.startswith("data-")]
    assert total == sum(sizes) == bytes_in([*stored.store.data_reads(), *stored.store.table_reads()])


def large() -> Stored:
    """Rows of several blocks: 20 rows of 100 elements of 1024 bytes."""
    content = np.random.default_rng(0).integers(0, 256, 20 * 100 * 1024, dtype=np.uint8).view("V1024").reshape(20, 100)
    return store({"a": content}, {"a": [Box((0, 0), (20, 100))]}, None)


def test_a_column_takes_a_block_of_each_row_and_not_what_lies_between():
    stored = large()
    source = NativeSource(stored.store)
    into = np.zeros((20, 1), "V1024")
    assert source.read([ReadRequest("a", (0, 7), (20, 1), into)]) <= (20 + 2) * BLOCK
    assert into.tobytes() == stored.arrays["a"][:, 7:8].tobytes()


def test_the_header_of_a_file_is_checked_once():
    stored = large()
    source = NativeSource(stored.store)
    one = ReadRequest("a", (10, 0), (1, 4), np.zeros((1, 4), "V1024"))
    first, second = source.read([one]), source.read([one])
    assert first - second == BLOCK


def test_without_verification_no_header_is_read_and_damage_goes_unnoticed():
    stored = large()
    name = stored.places["a"][0][0]
    damage(stored.store, name, 0)
    damage(stored.store, name, stored.store.table_begin(name) - 1)
    into = np.zeros((20, 100), "V1024")
    NativeSource(stored.store).read([ReadRequest("a", (0, 0), (20, 100), into)], verify=False)
    assert into[:19].tobytes() == stored.arrays["a"][:19].tobytes()
    assert into[19].tobytes() != stored.arrays["a"][19].tobytes()


def damage(place: MemoryStore, name: str, position: int) -> None:
    content = bytearray(place.read(name))
    content[position] ^= 16
    place.delete([name])
    place.put(name, content)


@pytest.mark.parametrize("threaded", [False, True])
def test_an_error_of_any_thread_is_raised(threaded):
    stored = large()
    name, begin, _ = stored.places["a"][0]
    damage(stored.store, name, begin + 15 * 100 * 1024)
    into = np.zeros((20, 100), "V1024")
    with (
        sizes(window=8 * BLOCK, threaded=threaded),
        pytest.raises(DamagedCheckpointError, match="'a'") as caught,
    ):
        NativeSource(stored.store).read([ReadRequest("a", (0, 0), (20, 100), into)])
    assert caught.value.file.endswith(name)


def test_an_interrupt_does_not_overtake_what_is_being_read(monkeypatch):
    """The memory that it goes to may belong to somebody else as soon as the call is over."""
    stored, all_at_work, over = large(), threading.Barrier(READERS, timeout=60), threading.Event()
    fill, interrupts, one_by_one = reading._Job._fill, iter([signal.SIGINT] * 2), threading.Lock()
    overtaken = []

    def interrupt_and_fill(self: Any, *args: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):  # after the first time
            all_at_work.wait()
            all_at_work.abort()
        if threading.current_thread() is not threading.main_thread():
            with one_by_one:
                for interrupt in interrupts:
                    overtaken.append(over.wait(0.1))
                    signal.pthread_kill(threading.main_thread().ident or 0, interrupt)
                    overtaken.append(over.wait(0.1))
        fill(self, *args)

    into = np.zeros((20, 100), "V1024")
    monkeypatch.setattr(reading._Job, "_fill", interrupt_and_fill)
    with sizes(window=2 * BLOCK, threaded=True):
        with pytest.raises(KeyboardInterrupt):
            NativeSource(stored.store).read([ReadRequest("a", (0, 0), (20, 100), into)])
        over.set()
    with one_by_one:
        assert overtaken == [False] * 4


@pytest.mark.parametrize(("rows", "reads"), [((3, 4), 1), ((3, 5), 2)])
def test_a_small_gap_is_read_and_a_large_one_is_not(rows, reads):
    """Between the first elements of two rows lie 100 KiB less one element, and twice that between every other row."""
    stored = large()
    source = NativeSource(stored.store)
    asked = [ReadRequest("a", (row, 0), (1, 20), np.zeros((1, 20), "V1024")) for row in rows]
    assert source.columns is not None
    stored.store.reads.clear()
    with mock.patch.object(read_plan, "MERGE_GAP", 90_000):
        source.read(asked, verify=False)
    assert all(one.into.tobytes() == stored.arrays["a"][one.offsets[0], :20].tobytes() for one in asked)
    assert len(stored.store.reads) == reads


def test_nothing_of_a_damaged_block_is_used():
    stored = large()
    name, begin, _ = stored.places["a"][0]
    damage(stored.store, name, begin)
    into = np.zeros((20, 100), "V1024")
    with pytest.raises(DamagedCheckpointError):
        NativeSource(stored.store).read([ReadRequest("a", (0, 0), (20, 100), into)])
    assert not np.frombuffer(into.tobytes(), np.uint8)[:BLOCK].any()


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("position", [0, 700_000, 20 * 100 * 1024 - 1])
def test_what_was_read_straight_into_memory_and_is_damaged_is_not_left_there(position, threaded):
    stored = large()
    name, begin, _ = stored.places["a"][0]
    damage(stored.store, name, begin + position)
    into = np.full((20, 100), b"\x77" * 1024, "V1024")
    with sizes(window=8 * BLOCK, threaded=threaded), pytest.raises(DamagedCheckpointError):
        NativeSource(stored.store).read([ReadRequest("a", (0, 0), (20, 100), into)])
    found, saved = (np.frombuffer(array.tobytes(), np.uint8) for array in (into, stored.arrays["a"]))
    # As it was saved, as it was before, or zero; and never as it is in the file.
    assert np.all((found == saved) | (found == 0x77) | (found == 0))
    assert found[position] != saved[position] ^ 16


def test_what_was_half_read_when_the_file_failed_is_not_left_in_memory():
    stored = large()
    into = np.full((20, 100), b"\x77" * 1024, "V1024")
    source = NativeSource(stored.store)
    real = stored.store.reader

    @contextmanager
    def failing(name: str) -> Iterator[Any]:
        with real(name) as inner:

            class Failing:
                size = inner.size

                def read_into(_, begin: int, buffer: Any) -> None:  # noqa: N805
                    memoryview(buffer).cast("B")[:100] = b"?" * 100
                    raise OSError("the disk is gone")

            yield Failing()

    assert source.columns is not None
    with (
        mock.patch.object(stored.store, "reader", failing),
        sizes(window=8 * BLOCK),
        pytest.raises(OSError, match="gone"),
    ):
        source.read([ReadRequest("a", (0, 0), (20, 100), into)])
    assert b"?" * 100 not in into.tobytes()


class Cached:
    """A reader of which a part is in a cache."""

    def __init__(self, inner: Any, until: int, calls: list[tuple[str, int, int]]) -> None:
        self.inner, self.until, self.calls, self.size = inner, until, calls, inner.size

    def read_into(self, begin: int, buffer: Any) -> None:
        self.calls.append(("read", begin, memoryview(buffer).nbytes))
        self.inner.read_into(begin, buffer)

    def is_cached(self, begin: int, size: int) -> bool:
        return begin + size <= self.until

    def read_cached(self, begin: int, buffer: Any) -> bool:
        view = memoryview(buffer).cast("B")
        if begin + view.nbytes > self.until:
            view[:] = b"!" * view.nbytes  # what is in there then, nobody knows
            return False
        self.calls.append(("cached", begin, view.nbytes))
        self.inner.read_into(begin, buffer)
        return True


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow])
@given(until=st.integers(0, 60 * BLOCK), straight=st.booleans())
def test_what_is_cached_is_taken_in_small_steps_and_the_rest_at_once(until, straight):
    stored = large()
    source = NativeSource(stored.store)
    assert source.columns is not None
    calls: list[tuple[str, int, int]] = []
    real = stored.store.reader

    @contextmanager
    def half_cached(name: str) -> Iterator[Any]:
        with real(name) as inner:
            yield Cached(inner, until, calls)

    into = np.zeros((20, 100), "V1024")
    with (
        mock.patch.object(stored.store, "reader", half_cached),
        sizes(window=16 * BLOCK, straight_from=BLOCK if straight else 1 << 30),
    ):
        total = source.read([ReadRequest("a", (0, 0), (20, 100), into)])
    assert into.tobytes() == stored.arrays["a"].tobytes()
    assert sum(nbytes for _, _, nbytes in calls) == total
    assert all(nbytes <= 2 * BLOCK for way, _, nbytes in calls if way == "cached")
    assert all(begin + nbytes <= until for way, begin, nbytes in calls if way == "cached")
    # Less than a step is simply read.
    assert all(begin + nbytes > until for way, begin, nbytes in calls if way == "read" and nbytes >= 2 * BLOCK)


class Zeros:
    """A file of zeros."""

    size = 3 * BLOCK

    def __init__(self, cached: bool | None) -> None:
        self.is_cached = lambda begin, size: cached

    def read_cached(self, begin: int, buffer: Any) -> bool:
        return False

    def read_into(self, begin: int, buffer: Any) -> None:
        memoryview(buffer).cast("B")[:] = bytes(memoryview(buffer).nbytes)


@pytest.mark.parametrize(
    ("cached", "stays", "left"), [(True, False, 2), (False, False, 0), (None, False, 0), (True, True, 0)]
)
def test_a_thread_too_many_leaves_when_there_is_nothing_to_wait_for(cached, stays, left):
    file = readable_files.ReadableFile("file", 3 * BLOCK, lambda: contextlib.nullcontext(Zeros(cached)), None)
    reads = [read_plan.DirectRead(0, number * BLOCK, BLOCK, 0, 0) for number in range(3)]
    opened = readable_files.OpenFiles([file], [0, 0, 0])
    todo = iter(reads)
    job = reading._Job(opened, [file], [""], BLOCK, {}, fill_cache=False)
    assert job.read(todo, stays=stays) == (3 - left) * BLOCK
    assert len(list(todo)) == left


@pytest.mark.parametrize(("cached", "shared", "expected"), [(True, False, 3), (True, True, 1), (False, True, READERS)])
def test_what_is_cached_is_read_by_as_many_threads_as_there_are_processors(cached, shared, expected, monkeypatch):
    """Others would wait for a disk; here they would take the processors from those that read, or from other ranks."""
    monkeypatch.setattr(reading, "processors_of_a_rank", lambda *, shared: 1 if shared else 3)
    file = readable_files.ReadableFile("file", 3 * BLOCK, lambda: contextlib.nullcontext(Zeros(cached)), None)
    into = [np.empty(BLOCK, np.uint8) for _ in range(3)] * 2
    rows = [(0, n % 3 * BLOCK, BLOCK, array.ctypes.data, 0) for n, array in enumerate(into)]
    workers: list[int] = []
    monkeypatch.setattr(reading, "share_work", lambda _, each, __: workers.append(len(each)) or [0])
    monkeypatch.setattr(reading, "plan_reads", lambda *_: [read_plan.DirectRead(*row) for row in rows])
    with sizes(threaded=True):
        reading.read_all(read_plan.ByteRanges.of(rows), [], [""], [file], BLOCK, shared=shared)
    assert workers == [expected]


@given(
    rows=st.lists(st.tuples(st.integers(0, 30 * BLOCK), st.integers(1, 3 * BLOCK)), min_size=1, max_size=8),
    gap=st.sampled_from([0, BLOCK, 2 * BLOCK, 2 * BLOCK + 1]),
)
def test_runs_of_blocks_are_those_that_ranges_touch_and_small_gaps_between_them(rows, gap):
    rows = sorted(rows)
    first, end = rows[0][0] // BLOCK, -(-max(begin + nbytes for begin, nbytes in rows) // BLOCK) * BLOCK
    ranges = read_plan.ByteRanges.of([(0, begin, nbytes, 1, 0) for begin, nbytes in rows])
    read = read_plan.BufferedRead(0, first, end, ranges, [])
    touched = [
        any(at // BLOCK <= block <= (at + n - 1) // BLOCK for at, n in rows) for block in range(first, end // BLOCK)
    ]
    expected = list(touched)
    for low, high in read_plan.runs_of(~np.array(touched)):
        if (high - low) * BLOCK < gap:
            expected[low:high] = [True] * (high - low)
    with mock.patch.object(read_plan, "MERGE_GAP", gap):
        assert read.needed_runs(BLOCK) == read_plan.runs_of(np.array(expected))
        assert read.needed_runs(BLOCK, without=[0]) == read_plan.runs_of(np.array([False, *expected[1:]]))
