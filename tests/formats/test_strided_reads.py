"""Regions of arrays that lie in a file in any order, compared with what torch sees in memory."""

from __future__ import annotations

import io

import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast._base.boxes import Box
from holdfast._base.crc import crc32
from holdfast._formats.ranged_files import StreamRanges
from holdfast._formats.tensor_places import StridedArray, arrangement_of, narrowed

DTYPES = [torch.int32, torch.int8, torch.complex128, torch.bfloat16, torch.bool]


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A storage with different elements, and a view of it that was turned, sliced and stepped over."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    storage = torch.arange(max(1, torch.Size(shape).numel())).to(dtype)
    view = storage.view(shape)
    for dim, size in enumerate(shape):
        start = draw(st.integers(0, size - 1))
        step = draw(st.sampled_from([step for step in range(1, 4) if size % step == 0]))
        view = view[(slice(None),) * dim + (slice(start, draw(st.integers(start + 1, size)), step),)]
    return storage, view.permute(draw(st.permutations(range(len(shape)))))


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True)]
    return Box(tuple(offsets), tuple(sizes))


@given(st.data(), views(), st.integers(0, 9))
def test_any_region_of_any_view_is_what_memory_holds(
    data: st.DataObject, made: tuple[torch.Tensor, torch.Tensor], ahead: int
) -> None:
    storage, view = made
    content = bytes(ahead) + storage.view(torch.uint8).numpy().tobytes()
    arrangement = arrangement_of(view.shape, view.stride())
    assert arrangement is not None
    assert arrangement.is_row_major(view.shape) == view.is_contiguous()
    region = data.draw(regions(tuple(view.shape)))
    position = ahead + view.storage_offset() * view.dtype.itemsize

    found = torch.zeros(region.sizes, dtype=view.dtype)
    array = StridedArray(StreamRanges(io.BytesIO(content), "a test"), position, view.dtype, arrangement)
    array.read(region, found, "w")

    assert torch.equal(found, narrowed(view, *region))


def test_rows_are_summed_up_behind_what_was_read_before() -> None:
    content = bytes(range(48))
    array = StridedArray(StreamRanges(io.BytesIO(content), "a test"), 0, torch.int32, arrangement_of((3, 4), (4, 1)))
    rows = torch.zeros(3, 4, dtype=torch.int32)

    crc = array.read(Box((0, 0), (2, 4)), rows[:2], "w", summed=True)
    crc = array.read(Box((2, 0), (1, 4)), rows[2:], "w", summed=True, crc=crc)

    assert crc == crc32(content)


def test_elements_that_are_in_several_places_are_not_arranged() -> None:
    for sizes, strides in [((3, 4), (0, 1)), ((3, 4), (2, 1)), ((3, 4), (5, 2)), ((2,), (0,))]:
        assert arrangement_of(sizes, strides) is None
