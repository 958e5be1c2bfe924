"""Regions of chunks, read in ranges: the right elements, no byte twice, and few requests."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._base.box_bytes import boxes_of_run
from holdfast._base.boxes import Box
from holdfast._base.crc import combined
from holdfast._formats import box_reads
from holdfast._formats.box_reads import ArrayPlace, ChunkRead, WantedRegion
from holdfast._formats.ranged_files import StreamRanges, read_with_crc
from holdfast.errors import DamagedCheckpointError
from tests.formats.regions import memory
from tests.properties import examples

MIB = 1 << 20


class CountingFile:
    """A file in memory that knows which of its bytes were read."""

    def __init__(self, content: bytes, cached: int | None = None) -> None:
        self.content = content
        self.size = len(content)
        self.reads: list[tuple[int, int]] = []
        if cached is not None:
            self.read_cached = lambda begin, buffer: self._read_cached(begin, buffer, cached)
            self.is_cached = lambda begin, size: begin + size <= cached

    def read_into(self, begin: int, buffer: Any) -> None:
        view = memoryview(buffer)
        assert begin + view.nbytes <= self.size
        self.reads.append((begin, begin + view.nbytes))
        view[:] = self.content[begin : begin + view.nbytes]

    def _read_cached(self, begin: int, buffer: Any, cached: int) -> bool:
        if begin + memoryview(buffer).nbytes > cached:
            return False
        self.read_into(begin, buffer)
        return True

    def counts(self) -> np.ndarray[Any, Any]:
        """How often each byte was read."""
        counts = np.zeros(self.size, int)
        for begin, end in self.reads:
            counts[begin:end] += 1
        return counts


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets, sizes = [], []
    for size in shape:
        first = draw(st.integers(0, size))
        offsets.append(first)
        sizes.append(draw(st.integers(0, size - first)))
    return Box(tuple(offsets), tuple(sizes))


@given(data=st.data(), gap=st.integers(0, 40), most=st.sampled_from([8, 16, 64, 1 << 20]))
@settings(max_examples=examples(300))
def test_any_regions_arrive_and_no_byte_is_read_twice(data: st.DataObject, gap: int, most: int) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=4), label="shape"))
    stored = np.arange(math.prod(shape), dtype="<u2").reshape(shape) + 1
    wanted = data.draw(st.lists(regions(shape), min_size=1, max_size=4), label="regions")
    places = [data.draw(memory(box.sizes, stored.dtype)) for box in wanted]
    file = CountingFile(b"before" + stored.tobytes() + b"after")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box_reads, "MERGE_GAP", gap)
        both = [WantedRegion(box, ArrayPlace(place)) for box, place in zip(wanted, places, strict=True)]
        read = ChunkRead(file, 6, shape, 2, both, most=most)
        stretches = list(read.reads())
        crc = 0
        for run in stretches:
            crc = combined(crc, read.read(run, summed=True), run.end - run.begin)

    needed = np.zeros(shape, bool)
    for box, place in zip(wanted, places, strict=True):
        where = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
        assert np.array_equal(place, stored[where])
        needed[where] = True
    counts = file.counts()[6:-5]
    assert counts.max(initial=0) <= 1
    assert counts.sum() == read.bytes_read
    assert all(run.end - run.begin <= most for run in stretches)
    is_needed = np.repeat(needed.reshape(-1), 2)
    assert counts[is_needed].all()
    assert longest_run(counts.astype(bool) & ~is_needed) <= gap
    if needed.any():
        first, last = np.flatnonzero(is_needed)[[0, -1]]
        assert not counts[:first].any()
        assert not counts[last + 1 :].any()
    assert read.is_whole == bool(counts.all())
    if read.is_whole:
        assert crc == zlib.crc32(stored.tobytes())


def longest_run(marks: np.ndarray[Any, Any]) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], marks.astype(int), [0]])))
    return int(max(edges[1::2] - edges[::2], default=0))


@given(shape=st.lists(st.integers(1, 5), max_size=4).map(tuple), data=st.data())
def test_a_run_of_elements_is_cut_into_boxes_that_tile_it(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = math.prod(shape)
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count))
    numbers = np.arange(count).reshape(shape)

    boxes = list(boxes_of_run(shape, begin, end))

    found = [
        number
        for box in boxes
        for number in numbers[
            tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
        ].reshape(-1)
    ]
    assert found == list(range(begin, end))
    assert len(boxes) <= 2 * len(shape) + 1


def test_rows_are_read_straight_into_their_memory_in_few_requests() -> None:
    stored = np.random.default_rng(0).integers(0, 255, (64, 256 << 10), np.uint8)
    file = CountingFile(stored.tobytes())
    place = np.empty((32, 256 << 10), np.uint8)
    read = ChunkRead(file, 0, stored.shape, 1, [WantedRegion(Box((16, 0), (32, 256 << 10)), ArrayPlace(place))])

    runs = list(read.reads())
    for run in runs:
        read.read(run, summed=False)

    assert [run.memory is not None for run in runs] == [True, True]
    assert file.reads == [(4 * MIB, 8 * MIB), (8 * MIB, 12 * MIB)]
    assert np.array_equal(place, stored[16:48])


def test_narrow_columns_of_wide_rows_are_read_one_by_one_and_those_of_narrow_rows_together() -> None:
    for width, most in ((1 << 20, 8), (1 << 10, 1)):
        file = CountingFile(bytes(8 * width))
        place = np.empty((8, 16), np.uint8)
        read = ChunkRead(file, 0, (8, width), 1, [WantedRegion(Box((0, 5), (8, 16)), ArrayPlace(place))])
        for run in read.reads():
            read.read(run, summed=False)
        assert len(file.reads) == most
        assert read.bytes_read == (8 * 16 if most == 8 else 7 * width + 16)


@given(cached=st.integers(0, 40), length=st.integers(0, 40))
def test_what_is_cached_is_summed_piece_by_piece_and_the_rest_is_one_request(cached: int, length: int) -> None:
    content = bytes(range(40))
    file = CountingFile(content, cached=cached)
    into = bytearray(length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast._formats.ranged_files.CACHED_READ_BYTES", 8)
        assert read_with_crc(file, 0, memoryview(into)) == zlib.crc32(content[:length])
    assert into == content[:length]
    assert file.counts().max() <= 1
    beyond = [read for read in file.reads if read[1] > cached]
    assert len(beyond) <= 1


def test_a_stream_that_gives_less_is_asked_again_and_one_that_ends_is_an_error() -> None:
    class Hesitant:
        def __init__(self) -> None:
            self.position = 0

        def seek(self, position: int, whence: int = 0) -> int:
            self.position = position if whence == 0 else 10
            return self.position

        def readinto(self, view: memoryview) -> int:
            count = min(3, len(view), 8 - self.position)
            view[:count] = bytes(range(self.position, self.position + count))
            self.position += count
            return count

    into = bytearray(7)
    StreamRanges(Hesitant(), "a/file").read_into(1, into)
    assert into == bytes(range(1, 8))
    with pytest.raises(DamagedCheckpointError, match="a/file is too short: it has 8 bytes, and at least 10 are needed"):
        StreamRanges(Hesitant(), "a/file").read_into(6, bytearray(4))
