"""What a rank has of a tensor: a description for the others, and the bytes of every part of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast._base.boxes import Box
from holdfast._layout.descriptions import address_of, describe, memory_of
from holdfast.errors import UnsupportedTensorError
from tests.dcp.states import bits
from tests.save.random_states import Drawn, arrays, tensors


def held(value: object, *, stored_dtype: torch.dtype | None = None, compare: bool = False):
    return describe("key", value, stored_dtype=stored_dtype, compare=compare)


@given(tensors().map(lambda tensor: Drawn({"tensor": tensor})), st.data())
def test_every_box_of_a_plain_tensor_gives_its_bytes(drawn, data):
    tensor = drawn.state["tensor"]
    description, local = held(tensor)
    assert (description.key, description.shape, description.kind) == ("key", tuple(tensor.shape), "replicated")
    assert f"torch.{description.dtype}" == str(tensor.dtype)
    assert bool(description.boxes) == bool(tensor.numel())
    if not tensor.numel():
        return
    offsets = [data.draw(st.integers(0, size - 1)) for size in tensor.shape]
    sizes = [data.draw(st.integers(1, size - at)) for at, size in zip(offsets, tensor.shape, strict=True)]
    part = tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
    pieces = local.pieces(Box(tuple(offsets), tuple(sizes)), 16)
    assert b"".join(piece.tobytes() for piece in pieces) == bits(part)


@given(arrays())
def test_arrays_are_held_with_their_own_dtype(array):
    description, local = held(array)
    assert description.shape == array.shape
    assert (
        np.dtype(description.numpy if isinstance(description.numpy, str) else [tuple(row) for row in description.numpy])
        == array.dtype
    )
    pieces = [piece.tobytes() for box in description.boxes for piece in local.pieces(box, 16)]
    assert b"".join(pieces) == array.tobytes()


@given(tensors().map(lambda tensor: Drawn({"tensor": tensor})))
def test_digests_are_of_the_elements_and_not_of_the_memory(drawn):
    tensor = drawn.state["tensor"]
    copied = tensor.view(torch.uint8).clone().view(tensor.dtype) if tensor.dtype.itemsize == 1 else tensor.clone()
    copied = copied.resolve_conj() if copied.is_complex() else copied
    one, other = held(tensor, compare=True)[0], held(copied, compare=True)[0]
    assert one.digests == other.digests
    assert len(one.digests) == (1 if tensor.numel() else 0)
    assert held(tensor)[0].digests == ()


def test_digests_tell_elements_apart():
    zeros = [torch.tensor([0.0]), torch.tensor([-0.0]), torch.tensor([float("nan")]), torch.tensor([1.0])]
    assert len({held(zero, compare=True)[0].digests for zero in zeros}) == 4
    assert held(np.array([0.0]), compare=True)[0].digests != held(np.array([-0.0]), compare=True)[0].digests


def test_a_tensor_is_described_by_what_it_is_stored_as():
    assert held(torch.ones(2), stored_dtype=torch.bfloat16)[0].dtype == "bfloat16"


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(2).to_sparse(), torch.empty(2, device="meta"), torch.zeros([1] * 65), np.zeros(2, np.dtype([]))],
    ids=["sparse", "meta", "deep", "without bytes"],
)
def test_what_has_no_bytes_is_refused(tensor):
    with pytest.raises(UnsupportedTensorError, match="'key'"):
        held(tensor)


def test_memory_is_the_same_only_for_the_very_same_elements():
    base, numbers, array = torch.arange(6.0), torch.tensor([1 + 2j]), np.arange(4, dtype=np.int32)
    assert memory_of(base) == memory_of(base.view(6)) == memory_of(base.detach()) == memory_of(torch.nn.Parameter(base))
    assert memory_of(array) == memory_of(array[:])
    others = [
        base,
        base.view(2, 3),
        base.view(3, 2),
        base[:3],
        base.view(torch.int32),
        base[::2],
        base[1:],
        base.clone(),
    ]
    others += [numbers, numbers.conj(), numbers.imag, numbers.conj().imag, array, array.view(np.float32), array[::-1]]
    square = np.arange(4).reshape(2, 2)
    others += [square, square.T]
    assert len({memory_of(other) for other in others}) == len(others)
    assert memory_of(torch.empty(0)) is memory_of(np.empty(0)) is None
    assert address_of(base) == address_of(base[:2]) == base.data_ptr()
