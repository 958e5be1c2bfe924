"""Element types have torch's names and sizes, and numpy elements of the same size carry them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast._formats.native.dtypes import DType, dtype_named, name_of
from tests.golden.contents import DTYPES, DTYPES_HERE


@pytest.mark.parametrize("name", DTYPES_HERE)
def test_every_type_of_torch_has_the_same_size_here(name):
    theirs = getattr(torch, name)
    ours = dtype_named(name)
    assert ours.itemsize == torch.empty(3, dtype=theirs).element_size() == ours.carrier.itemsize
    assert ours == theirs
    assert hash(ours) == hash(DType(name))
    assert name_of(theirs) == name
    assert ours.shape_in_file((2, 3))[:2] == (2, 3)


@pytest.mark.parametrize("name", ["bool", "uint16", "int64", "float16", "float64", "complex64", "complex128"])
def test_types_that_numpy_has_are_equal_to_its_own(name):
    assert dtype_named(name).numpy == np.dtype(name)
    assert dtype_named(name) == np.dtype(name)
    assert dtype_named(name) == name == str(dtype_named(name))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "complex32", "uint4", "raw7"])
def test_types_that_numpy_lacks_have_no_numpy_type(name):
    assert dtype_named(name).numpy is None


def test_types_are_different_from_each_other_and_from_other_things():
    assert len({dtype_named(name) for name in DTYPES}) == len(DTYPES)
    assert dtype_named("float32") != torch.float64
    assert dtype_named("float32") != 4
    assert dtype_named("float32") != None  # noqa: E711 - what a caller may do
    assert dtype_named("float32") != np.object_


def test_types_without_a_name_in_safetensors_files_are_bytes_there_with_one_more_dimension():
    assert dtype_named("complex64").stored_as == "U8"
    assert dtype_named("complex64").shape_in_file((2, 3)) == (2, 3, 8)
    assert dtype_named("float8_e8m0fnu").shape_in_file((2, 3)) == (2, 3)
    assert dtype_named("uint8").shape_in_file(()) == ()
    assert dtype_named("raw12").shape_in_file(()) == (12,)


@pytest.mark.parametrize("size", [1, 3, 12, 1 << 20])
def test_raw_elements_are_of_the_size_in_their_name(size):
    assert dtype_named(f"raw{size}").itemsize == dtype_named(f"raw{size}").carrier.itemsize == size


@pytest.mark.parametrize("name", ["", "float", "raw", "raw0", "raw01", "raw-1", "raw1048577", "int0", "uint8\n"])
def test_there_are_no_others(name):
    with pytest.raises(ValueError, match="no element type"):
        dtype_named(name)
