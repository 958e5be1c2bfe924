"""Elements as bytes in row-major order, whatever they lie like in memory, in pieces of bounded size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast._formats.tensor_bytes import array_pieces, tensor_pieces
from tests.dcp.states import bits
from tests.save.random_states import Drawn, arrays, tensors


def joined(pieces) -> bytes:
    return b"".join(piece.tobytes() for piece in pieces)


@given(tensors().map(lambda tensor: Drawn({"tensor": tensor})), st.integers(1, 70))
def test_pieces_of_any_tensor_are_its_bytes(drawn, largest):
    tensor = drawn.state["tensor"]
    pieces = list(tensor_pieces(tensor, largest))
    assert joined(pieces) == (bits(tensor) if tensor.numel() else b"")
    if not tensor.is_contiguous() or tensor.is_conj():
        assert all(piece.nbytes <= max(largest, tensor.element_size()) for piece in pieces)
    assert all(piece.nbytes for piece in pieces)


@given(arrays(), st.integers(1, 70))
def test_pieces_of_any_array_are_its_bytes(array, largest):
    pieces = list(array_pieces(array, largest))
    assert joined(pieces) == array.tobytes()
    if not array.flags.c_contiguous:
        assert all(piece.nbytes <= max(largest, array.itemsize) for piece in pieces)


INNER = np.dtype([("flag", "u1"), ("number", "<i4")], align=True)
GAPS = np.dtype([("a", "u1"), ("b", "<f8"), ("inner", INNER), ("pair", INNER, (2,)), ("c", "S3")], align=True)


@given(st.integers(0, 255), st.integers(0, 255), st.integers(1, 400), st.booleans())
def test_bytes_between_the_fields_of_a_structure_do_not_count(one, other, largest, transposed):
    def filled(byte: int) -> np.ndarray:
        array = np.full(6 * GAPS.itemsize, byte, np.uint8).view(GAPS).reshape(2, 3)
        array["a"], array["b"], array["c"] = 7, np.arange(6).reshape(2, 3), b"xyz"
        for part in (array["inner"], array["pair"]):
            part["flag"], part["number"] = 1, -1
        return array.T if transposed else array

    found = joined(array_pieces(filled(one), largest))
    assert found == joined(array_pieces(filled(other), largest))
    shape = (3, 2) if transposed else (2, 3)
    assert np.array_equal(np.frombuffer(found, GAPS).reshape(shape), filled(0))


@given(st.lists(st.integers(0, 6), max_size=3), st.integers(1, 100), st.booleans())
def test_pieces_are_cast(shape, largest, transposed):
    tensor = torch.randn(shape, dtype=torch.float64)
    tensor = tensor.T if transposed and tensor.dim() == 2 else tensor
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        pieces = list(tensor_pieces(tensor, largest, dtype))
        assert joined(pieces) == (bits(tensor.to(dtype)) if tensor.numel() else b"")


def test_what_lies_ready_is_not_copied():
    tensor = torch.arange(6.0)
    (piece,) = tensor_pieces(tensor, 4)
    tensor[0] = 7
    assert piece.view(np.float32)[0] == 7
    array = np.arange(6)
    (piece,) = array_pieces(array, 4)
    array[0] = 7
    assert piece.view(array.dtype)[0] == 7


@pytest.mark.parametrize("needs_grad", [True, False])
def test_gradients_do_not_matter(needs_grad):
    parameter = torch.nn.Parameter(torch.ones(2, 3), requires_grad=needs_grad)
    assert joined(tensor_pieces(parameter)) == bits(parameter)
    assert joined(tensor_pieces(parameter.T, 4, torch.float16)) == bits(parameter.detach().T.half())
    assert parameter.requires_grad is needs_grad
