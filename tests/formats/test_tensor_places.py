"""Filling a tensor with stored elements: every dtype, bit by bit, or an error that names the key."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast._base.tuning import SMALL_TENSOR
from holdfast._dcp.destinations import resolve_target
from holdfast._formats.dcp.metadata import MetadataIndex
from holdfast._formats.dcp.plan import LoadItemType, ReadItem
from holdfast._formats.safetensors.torch_dtypes import BY_NAME
from holdfast._formats.tensor_places import TensorPlace, fill, narrowed
from holdfast.errors import HoldfastError
from tests.torches import dtypes

NARROW_INTEGERS = dtypes("int4", "uint4", "int1", "uint7")


@pytest.mark.parametrize("dtype", [*BY_NAME.values(), *NARROW_INTEGERS], ids=str)
def test_every_dtype_is_copied_bit_by_bit(dtype: torch.dtype) -> None:
    """NaNs keep their payload, and dtypes that torch has no copy for are filled too."""
    content = torch.arange(12 * dtype.itemsize, dtype=torch.uint8)
    if dtype == torch.bool:
        content %= 2
    stored = content.view(dtype).view(3, 4)
    memory = torch.zeros(24 * dtype.itemsize, dtype=torch.uint8)

    fill(memory.view(dtype).view(4, 6)[1:, 1:5], stored, "w")

    element = memory.view(4, 6, dtype.itemsize)
    assert torch.equal(element[1:, 1:5].flatten(), content)
    assert element.count_nonzero() == content.count_nonzero()  # nothing beside was touched


def test_other_dtypes_are_converted() -> None:
    target = torch.zeros(2, dtype=torch.bfloat16)
    fill(target, torch.tensor([1, 2]), "w")
    assert target.tolist() == [1, 2]


def quantized(scale: float, *values: float) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.tensor(values, dtype=torch.float32), scale, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*")
def test_integers_do_not_come_without_their_scale() -> None:
    target = quantized(0.5, 1, 2)
    with pytest.raises(HoldfastError, match=r"'w' cannot be filled.*scale 0\.25.*scale 0\.5"):
        fill(target, quantized(0.25, 3, 4), "w")
    assert target.dequantize().tolist() == [1, 2]

    fill(target, quantized(0.5, 3, 4), "w")
    assert target.dequantize().tolist() == [3, 4]


def test_what_torch_cannot_copy_is_an_error_with_the_key() -> None:
    with pytest.raises(HoldfastError, match=r"'w' cannot be filled.*Load into"):
        fill(torch.zeros(2), torch.zeros(3), "w")


def test_a_target_must_be_of_the_size_that_the_plan_says() -> None:
    class Planner:
        def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
            return torch.zeros(2, requires_grad=True)

    def target(length: int) -> torch.Tensor:
        index, zero = MetadataIndex("w", [0]), torch.Size([0])
        item = ReadItem(LoadItemType.TENSOR, index, zero, index, zero, torch.Size([length]))
        planner: Any = Planner()
        return resolve_target(item, planner)

    assert not target(2).requires_grad
    with pytest.raises(HoldfastError, match=r"'w'.*\[2\].*\[3\].*change the plan"):
        target(3)


def test_a_part_shares_the_memory_of_the_whole() -> None:
    whole = torch.zeros(3, 4)
    narrowed(whole, (1, 2), (2, 1)).fill_(1)
    assert whole.nonzero().tolist() == [[1, 2], [2, 2]]


def content_of(number: int) -> memoryview:
    return memoryview(bytearray(range(number)))


@pytest.mark.parametrize("dtype", [*BY_NAME.values(), *NARROW_INTEGERS], ids=str)
def test_a_small_tensor_takes_bytes_as_they_are_stored(dtype: torch.dtype) -> None:
    memory = torch.zeros(20 * dtype.itemsize, dtype=torch.uint8)
    target = memory.view(dtype)[4:16].view(3, 4)

    assert TensorPlace(target, dtype, "w").take_small(content_of(12 * dtype.itemsize))

    begin, end = 4 * dtype.itemsize, 16 * dtype.itemsize
    assert memory[begin:end].tolist() == list(range(end - begin))
    assert memory.count_nonzero() == end - begin - 1  # nothing beside was touched


@pytest.mark.parametrize(
    ("target", "stored", "nbytes"),
    [
        (torch.zeros(3, 4).T, torch.float32, 48),
        (torch.zeros(6)[::2], torch.float32, 12),
        (torch.zeros(3), torch.int32, 12),
        (torch.zeros(3), torch.float32, 8),
        (torch.zeros(3), torch.float32, 16),
        (torch.zeros(3, dtype=torch.complex64).conj(), torch.complex64, 24),
        (torch.zeros(3, dtype=torch.complex64).conj().imag, torch.float32, 12),
        (torch.zeros(3, device="meta"), torch.float32, 12),
        (torch.zeros(SMALL_TENSOR + 1, dtype=torch.uint8), torch.uint8, SMALL_TENSOR + 1),
        (torch.zeros(3).to_sparse(), torch.float32, 12),
    ],
)
def test_other_tensors_are_left_to_the_general_way(target: torch.Tensor, stored: torch.dtype, nbytes: int) -> None:
    content = memoryview(bytearray(b"\1" * nbytes))

    assert not TensorPlace(target, stored, "w").take_small(content)
    if not target.is_meta:
        assert not target.to_dense().count_nonzero()


def test_a_tensor_whose_memory_was_given_back_takes_no_bytes() -> None:
    target = torch.zeros(3)
    target.untyped_storage().resize_(0)

    assert not TensorPlace(target, torch.float32, "w").take_small(content_of(12))
