"""Dtypes of torch and their names in safetensors files, compared with what the reference library does."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from holdfast._formats.safetensors.dtypes import BITS, IN_MEMORY
from holdfast._formats.safetensors.header import read_header
from holdfast._formats.safetensors.torch_dtypes import BY_NAME, to_safetensors, to_torch
from holdfast.errors import UnsupportedTensorError
from tests.torches import dtypes


@pytest.mark.parametrize("name", BY_NAME)
def test_a_dtype_is_called_what_the_library_calls_it(name: str, tmp_path: Path) -> None:
    dtype = BY_NAME[name]
    tensor = torch.zeros(2, 4 * dtype.itemsize, dtype=torch.uint8).view(dtype)

    content = save({"x": tensor})

    stored = read_header(io.BytesIO(content), "file").tensors["x"]
    assert to_safetensors("x", dtype, tensor.shape) == (stored.dtype, stored.shape)
    assert to_torch("x", stored.dtype, stored.shape, "file") == (dtype, tuple(tensor.shape))
    (tmp_path / "file").write_bytes(content)
    assert load_file(tmp_path / "file")["x"].dtype == dtype


def test_all_element_types_but_those_without_a_dtype_are_known() -> None:
    lacking = {name for name, called in IN_MEMORY.items() if not hasattr(torch, called)}  # in older versions of torch
    assert lacking <= {"F4", "F8_E8M0"}
    assert BITS.keys() - BY_NAME.keys() == {"F6_E2M3", "F6_E3M2"} | lacking
    for name in lacking:
        with pytest.raises(UnsupportedTensorError, match=f"'key'.*{name}.*newer torch"):
            to_torch("key", name, (2,), "file")


@pytest.mark.parametrize("dtype", [torch.complex128, torch.quint8, torch.complex32])
def test_a_dtype_that_files_cannot_hold_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedTensorError, match=f"'key'.*{dtype}") as refused:
        to_safetensors("key", dtype, (1,))
    assert refused.value.key == "key"


def test_pairs_of_four_bit_floats_need_a_dimension_of_pairs() -> None:
    for dtype in dtypes("float4_e2m1fn_x2"):
        with pytest.raises(UnsupportedTensorError):
            to_safetensors("key", dtype, ())
    with pytest.raises(UnsupportedTensorError):
        to_torch("key", "F4", (3,), "file")


def test_an_element_type_without_a_dtype_is_refused_with_its_name() -> None:
    with pytest.raises(UnsupportedTensorError, match=r"some/file: 'key'.*F6_E2M3"):
        to_torch("key", "F6_E2M3", (4,), "some/file")
