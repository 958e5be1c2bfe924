"""Regions of tensors are read right, wherever they lie, in few and small reads."""

from __future__ import annotations

import io
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast._base.box_bytes import readable_parts, row_major_strides
from holdfast._base.boxes import Box
from holdfast._formats.tensor_places import narrowed, read_region
from holdfast.errors import DamagedCheckpointError, HoldfastError


class Counting(io.BytesIO):
    """Notes every read as place and length."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.reads: list[tuple[int, int]] = []

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self.reads.append((self.tell(), buffer.nbytes))
        return super().readinto(buffer)


@st.composite
def regions(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True))
    return shape, Box(offsets, sizes)


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape).to(dtype)


@given(regions(), st.integers(1, 200), st.integers(0, 100))
@example(((), Box((), ())), 1, 0)
@example(((2, 2, 6), Box((0, 0, 1), (2, 2, 3))), 30, 8)
def test_parts_tile_the_region_in_order_within_the_bounds(
    region: tuple[tuple[int, ...], Box], most: int, gap: int
) -> None:
    shape, box = region
    full = numbered(shape)
    wanted = narrowed(full, box.offsets, box.sizes).flatten().tolist()

    parts = list(readable_parts(shape, box, 4, most=most, gap=gap))

    found = []
    for part in parts:
        cells = narrowed(full, part.offsets, part.sizes).flatten().tolist()
        found += cells
        steps = [4 * (after - before) - 4 for before, after in pairwise(cells)]
        assert max(steps, default=0) <= gap
        assert len(cells) == 1 or 4 * (cells[-1] - cells[0]) + 4 <= most
    assert sorted(found) == wanted
    assert found == wanted, "each part is after the one before"


@given(regions(), st.sampled_from([torch.int32, torch.uint8, torch.bool, torch.complex64, torch.bfloat16]), st.data())
def test_a_region_arrives_whatever_the_target_looks_like(
    region: tuple[tuple[int, ...], Box], dtype: torch.dtype, data: st.DataObject
) -> None:
    shape, box = region
    full = numbered(shape, dtype)
    stream = io.BytesIO(b"head" + full.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    target = torch.zeros(box.sizes, dtype=dtype)
    if box.sizes and data.draw(st.booleans()):
        target = torch.zeros([*box.sizes, 2], dtype=dtype)[..., 1]  # not contiguous

    read_region(stream, 4, shape, dtype, box, target, source="file", key="x")

    assert torch.equal(target, narrowed(full, box.offsets, box.sizes))


def test_rows_are_read_in_place_and_nothing_else_is_read() -> None:
    full = numbered((1000, 100))
    stream = Counting(full.numpy().tobytes())
    target = torch.zeros(10, 100, dtype=torch.int32)

    read_region(stream, 0, full.shape, torch.int32, Box((500, 0), (10, 100)), target, source="file", key="x")

    assert stream.reads == [(500 * 400, 10 * 400)]
    assert torch.equal(target, full[500:510])


def test_narrow_columns_of_wide_rows_are_read_run_by_run() -> None:
    full = numbered((8, 1 << 18), torch.uint8)
    stream = Counting(full.numpy().tobytes())
    target = torch.zeros(8, 100, dtype=torch.uint8)

    read_region(stream, 0, full.shape, torch.uint8, Box((0, 7), (8, 100)), target, source="file", key="x")

    assert [length for _, length in stream.reads] == [100] * 8
    assert torch.equal(target, full[:, 7:107])


def test_columns_of_narrow_rows_are_read_together() -> None:
    full = numbered((4096, 16))
    stream = Counting(full.numpy().tobytes())
    target = torch.zeros(4096, 1, dtype=torch.int32)

    read_region(stream, 0, full.shape, torch.int32, Box((0, 3), (4096, 1)), target, source="file", key="x")

    assert len(stream.reads) == 1
    assert torch.equal(target, full[:, 3:4])


def test_a_conversion_never_needs_more_than_a_buffer() -> None:
    full = torch.zeros(3 << 20)
    stream = Counting(full.numpy().tobytes())

    target = torch.ones(3 << 20, dtype=torch.float64)
    read_region(stream, 0, full.shape, torch.float32, Box((0,), (3 << 20,)), target, source="file", key="x")

    assert max(length for _, length in stream.reads) <= 8 << 20
    assert target.count_nonzero() == 0


def test_a_file_that_ends_too_early_is_named() -> None:
    with pytest.raises(DamagedCheckpointError, match=r"some/file ends too early: 'x' needs 16 bytes") as refused:
        read_region(
            io.BytesIO(b"12345678"),
            0,
            (4,),
            torch.int32,
            Box((0,), (4,)),
            torch.zeros(4, dtype=torch.int32),
            source="some/file",
            key="x",
        )
    assert (refused.value.file, refused.value.key, refused.value.found) == ("some/file", "x", 8)


def test_short_reads_go_on() -> None:
    class Slow(io.BytesIO):
        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            return super().readinto(buffer[:3])

    target = torch.zeros(4, dtype=torch.int32)
    read_region(
        Slow(numbered((4,)).numpy().tobytes()), 0, (4,), torch.int32, Box((0,), (4,)), target, source="", key=""
    )

    assert target.tolist() == [0, 1, 2, 3]


def test_a_target_that_cannot_be_filled_is_named() -> None:
    target = torch.zeros(1, dtype=torch.int32).expand(4)
    with pytest.raises(HoldfastError, match="'x' cannot be filled"):
        read_region(io.BytesIO(bytes(16)), 0, (4,), torch.int32, Box((0,), (4,)), target, source="file", key="x")


def test_buffers_are_in_host_memory_whatever_the_default_device() -> None:
    whole, target = numbered((4, 6)), torch.zeros(6, 4, dtype=torch.int32).T
    stream = io.BytesIO(whole.numpy().tobytes())

    with torch.device("meta"):
        read_region(stream, 0, (4, 6), torch.int32, Box((0, 0), (4, 6)), target, source="f", key="k")

    assert torch.equal(target, whole)


def test_strides_are_those_of_torch() -> None:
    assert row_major_strides((2, 3, 4), 2) == tuple(2 * step for step in torch.empty(2, 3, 4).stride())
