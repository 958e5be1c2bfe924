"""Casts without torch give the bits that torch gives."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.torch_elements import as_array, as_tensor, torch_dtype
from holdfast._tools.converting.casts import WITHOUT_TORCH, cast_elements, floating_dtype

PAIRS = list(itertools.permutations(sorted(WITHOUT_TORCH), 2))


def assert_as_torch(bits: np.ndarray, stored: str, dtype: str) -> None:
    before, after = dtype_named(stored), dtype_named(dtype)
    tensor = as_tensor(bits.copy(), torch_dtype(before))
    expected = tensor.to(torch_dtype(after))
    found = cast_elements(bits, before, after)
    is_number = ~torch.isnan(expected).numpy()
    assert np.array_equal(found[is_number], as_array(expected)[is_number])
    as_found = as_tensor(found, torch_dtype(after))
    assert torch.isnan(as_found).numpy().tolist() == (~is_number).tolist()  # what is no number stays none


@pytest.mark.parametrize(("stored", "dtype"), [pair for pair in PAIRS if dtype_named(pair[0]).itemsize == 2])
def test_all_numbers_of_16_bits(stored, dtype):
    assert_as_torch(np.arange(1 << 16).astype("<u2"), stored, dtype)


@pytest.mark.parametrize(("stored", "dtype"), PAIRS)
@given(numbers=st.lists(st.floats(), min_size=1), seed=st.integers(0, 9))
def test_any_numbers(stored, dtype, numbers, seed):
    before = dtype_named(stored)
    random = np.random.default_rng(seed).integers(0, 256, 64 * before.itemsize, np.uint8).view(before.carrier)
    given_ = torch.tensor(numbers, dtype=torch.float64).to(torch_dtype(before))
    assert_as_torch(np.concatenate([random, as_array(given_)]), stored, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("nudge", [-(2.0**-40), 0.0, 2.0**-40])
def test_numbers_about_the_middle_between_two(dtype, nudge):
    small = dtype_named(dtype)
    every = as_tensor(np.arange(1 << 16).astype("<u2"), torch_dtype(small)).to(torch.float64).numpy()
    with np.errstate(all="ignore"):
        middle = (every + np.roll(every, -1)) / 2 * (1 + nudge)  # neighbours in bits are neighbours among numbers
    assert_as_torch(middle.view("<u8"), "float64", dtype)
    with np.errstate(all="ignore"):
        assert_as_torch(middle.astype(np.float32).view("<u4"), "float32", dtype)


def test_eight_bits_go_through_torch():
    numbers = torch.tensor([1.0, -2.0, 0.3])
    found = cast_elements(as_array(numbers), dtype_named("float32"), dtype_named("float8_e4m3fn"))
    assert found.tolist() == as_array(numbers.to(torch.float8_e4m3fn)).tolist()


@pytest.mark.parametrize("wish", ["int8", "float4_e2m1fn_x2", torch.complex64, "nonsense", 7])
def test_what_is_no_floating_point_type_is_refused(wish):
    with pytest.raises(ValueError, match="floating point"):
        floating_dtype(wish)
