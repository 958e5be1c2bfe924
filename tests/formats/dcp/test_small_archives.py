"""Small tensors are written together, and nobody who reads the file can tell."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._base.tuning import CACHED_WRITE_BYTES, SMALL_TENSOR
from holdfast._formats.dcp.blobs import BlobWriter, WrittenElements, write_blob
from holdfast._formats.dcp.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from holdfast._formats.dcp.plan import TensorWriteData, WriteItem, WriteItemType
from holdfast._formats.dcp.transforms import WriterTransforms
from holdfast.errors import HoldfastError
from tests.formats.dcp.blobs import PLAIN_DTYPES, of_bytes
from tests.properties import examples

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

NO_TRANSFORMS = WriterTransforms(None)


def item_for(data: torch.Tensor | io.BytesIO) -> WriteItem:
    if isinstance(data, io.BytesIO):
        return WriteItem(MetadataIndex("value"), WriteItemType.BYTE_IO)
    chunk = ChunkStorageMetadata(torch.Size([0] * data.dim()), data.size())
    described = TensorWriteData(chunk, TensorProperties(data.dtype), data.size())
    return WriteItem(MetadataIndex("tensor", chunk.offsets), WriteItemType.TENSOR, tensor_data=described)


class Writes(io.BytesIO):
    """A file that counts how often it is written to."""

    count = 0

    def write(self, data: Any, /) -> int:
        self.count += 1
        return super().write(data)


def together(data: list[Any], stream: io.BytesIO) -> list[Any]:
    writer = BlobWriter(stream, NO_TRANSFORMS)
    blobs = [writer.write(item_for(each), each) for each in data]
    writer.finish()
    return blobs


def one_by_one(data: list[Any], stream: io.BytesIO) -> list[Any]:
    return [write_blob(stream, item_for(each), each, NO_TRANSFORMS) for each in data]


tensors = st.builds(
    of_bytes,
    st.sampled_from(list(PLAIN_DTYPES.values())),
    st.lists(st.integers(0, 5), max_size=4),
)
odd = st.sampled_from(
    [
        torch.arange(24.0).view(4, 6).T,
        torch.arange(24.0)[5:9],
        torch.zeros(SMALL_TENSOR + 1, dtype=torch.uint8),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.ones(2)),
        io.BytesIO(b"a value"),
    ]
)


@given(st.lists(tensors | odd, max_size=12))
@settings(max_examples=examples(150), deadline=None)
def test_files_are_the_same_as_of_blobs_that_are_written_one_by_one(data) -> None:
    expected, found = io.BytesIO(), io.BytesIO()

    assert together(data, found) == one_by_one(data, expected)
    assert found.getvalue() == expected.getvalue()


def test_a_thousand_small_tensors_take_a_few_writes() -> None:
    stream = Writes()
    data = [torch.full((256,), float(number)) for number in range(1000)]
    blobs = together(data, stream)

    total = sum(blob.length for blob in blobs)
    assert len(stream.getvalue()) == total
    assert stream.count == -(-total // (CACHED_WRITE_BYTES // blobs[0].length * blobs[0].length))


def test_a_tensor_may_change_once_it_is_taken() -> None:
    stream, value = io.BytesIO(), torch.ones(8)
    writer = BlobWriter(stream, NO_TRANSFORMS)
    writer.write(item_for(value), value)
    value.zero_()
    writer.finish()

    stream.seek(0)
    assert torch.equal(torch.load(stream), torch.ones(8))


def test_a_planner_that_changes_shapes_is_noticed_for_small_tensors_too() -> None:
    with pytest.raises(HoldfastError, match="plan says"):
        BlobWriter(io.BytesIO(), NO_TRANSFORMS).write(item_for(torch.ones(3)), torch.ones(4))


def test_elements_that_are_not_in_memory_are_asked_for() -> None:
    class Elsewhere(WrittenElements):
        def of(self, view: torch.Tensor) -> torch.Tensor:
            return torch.full_like(view, 7)

    stream = io.BytesIO()
    writer = BlobWriter(stream, NO_TRANSFORMS, Elsewhere())
    writer.write(item_for(torch.zeros(3)), torch.zeros(3))
    writer.finish()

    stream.seek(0)
    assert torch.load(stream).tolist() == [7, 7, 7]
