"""Types that numpy lacks come out as the very numbers that torch takes them for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.small_floats import widened

EIGHT_BITS = [
    name
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
]


def ref(name: str) -> TensorRef:
    return TensorRef("key", dtype_named(name), (1,))


def assert_same_numbers(found: np.ndarray, expected: np.ndarray) -> None:
    """To the bit, signs of zeros included; but there are many ways to be no number."""
    assert found.dtype == expected.dtype == np.float32
    no_numbers = np.isnan(expected)
    assert np.array_equal(np.isnan(found), no_numbers)
    assert np.array_equal(found[~no_numbers].view("u4"), expected[~no_numbers].view("u4"))


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_all_256_patterns_of_eight_bits(name):
    bits = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(bits.copy()).view(getattr(torch, name)).to(torch.float32).numpy()
    assert_same_numbers(widened(bits, ref(name)), expected)


def test_all_65536_patterns_of_bfloat16():
    bits = np.arange(65536, dtype="<u2")
    expected = torch.from_numpy(bits.view("<i2").copy()).view(torch.bfloat16).to(torch.float32).numpy()
    found = widened(bits, ref("bfloat16"))
    assert np.array_equal(found.view("u4"), expected.view("u4"))


@pytest.mark.parametrize("name", ["bfloat16", *EIGHT_BITS])
def test_shapes_are_kept(name):
    carrier = dtype_named(name).carrier
    assert widened(np.zeros((2, 3), carrier), ref(name)).shape == (2, 3)
    assert widened(np.zeros((), carrier), ref(name)).shape == ()


@pytest.mark.parametrize("name", ["complex32", "uint4", "raw3", "float4_e2m1fn_x2"])
def test_what_no_float32_holds_is_refused_by_key_and_type(name):
    with pytest.raises(TypeError, match=f"'key' has elements of {name}"):
        widened(np.zeros(1, np.uint8), ref(name))
