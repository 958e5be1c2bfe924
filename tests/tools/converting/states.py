"""Any states that all formats with values can hold."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint16)
NAMES = st.text("abc0_ é", min_size=1, max_size=4)


def tensors() -> st.SearchStrategy[torch.Tensor]:
    """Of all kinds of shapes, also without dimensions and without elements, some larger than a piece."""
    shapes = st.one_of(st.lists(st.integers(0, 5), max_size=3), st.sampled_from([[70_000], [37, 1009], [2, 0, 3]]))
    return st.builds(_tensor, shapes, st.sampled_from(DTYPES), st.integers(0, 255))


def _tensor(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    data = (torch.arange(count, dtype=torch.int64) * 37 + seed).to(torch.uint8)
    if dtype == torch.bool:
        data &= 1
    return data.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def values() -> st.SearchStrategy[Any]:
    plain = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 70), 1 << 70),
        st.floats(),
        st.text(max_size=5),
        st.binary(min_size=1, max_size=5),  # torch.load refuses b"" of its own torch.save
    )
    return st.one_of(plain, st.lists(plain, max_size=3), st.tuples(plain, plain))


def states(*, names: st.SearchStrategy[Any] = NAMES) -> st.SearchStrategy[dict[str, Any]]:
    """Nested dicts and lists with at least one tensor."""
    leaves = st.one_of(tensors(), values())
    nested = st.recursive(
        leaves,
        lambda inner: st.one_of(st.dictionaries(names, inner, max_size=3), st.lists(inner, min_size=1, max_size=3)),
        max_leaves=6,
    )
    return st.builds(
        lambda state, tensor: {**state, "tensor": tensor}, st.dictionaries(NAMES, nested, max_size=4), tensors()
    )
