"""Which tensors are filled byte by byte, all at once, and which have to be looked at one by one."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.refs import TensorRef
from holdfast._load import filling
from holdfast._load.filling import DenseFills, sharing


def ref(dtype: str, *shape: int) -> TensorRef:
    return TensorRef("stored", dtype_named(dtype), shape)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are not final, says torch
        return torch.nested.nested_tensor([torch.zeros(3), torch.zeros(3)])


def without_memory(nbytes: int) -> torch.Tensor:
    """Its storage was made smaller, as is done to save memory for a while."""
    tensor = torch.zeros(9)[1:7].view(2, 3)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


SPECIAL = {
    "another dtype": (torch.zeros(2, 3), ref("float64", 2, 3)),
    "another shape": (torch.zeros(2, 3), ref("float32", 3, 2)),
    "no elements": (torch.zeros(0, 3), ref("float32", 0, 3)),
    "columns first": (torch.zeros(3, 2).T, ref("float32", 2, 3)),
    "with gaps": (torch.zeros(2, 6)[:, ::2], ref("float32", 2, 3)),
    "one element many times": (torch.zeros(1).expand(4), ref("float32", 4)),
    "on the meta device": (torch.empty(2, 3, device="meta"), ref("float32", 2, 3)),
    "sparse": (torch.zeros(2, 3).to_sparse(), ref("float32", 2, 3)),
    "nested": (nested(), ref("float32", 2, 3)),
    "negated when read": (torch._neg_view(torch.zeros(2)), ref("float32", 2)),
    "conjugated when read": (torch.zeros(2, dtype=torch.complex64).conj(), ref("complex64", 2)),
    "has no memory": (without_memory(0), ref("float32", 2, 3)),
    "has too little memory": (without_memory(27), ref("float32", 2, 3)),
    "was a numpy array": (torch.zeros(2), TensorRef("stored", dtype_named("float32"), (2,), numpy="<f4")),
}


if torch.backends.mkldnn.is_available():
    SPECIAL["in an order of its own"] = (torch.zeros(2, 3).to_mkldnn(), ref("float32", 2, 3))


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_special_about_a_tensor_is_noticed(kind):
    target, stored = SPECIAL[kind]
    assert not DenseFills().take("key", stored, target)


@pytest.mark.parametrize(
    "target", [torch.zeros(2, 3), torch.nn.Parameter(torch.zeros(2, 3)), torch.zeros(9)[1:7].view(2, 3)]
)
def test_an_ordinary_tensor_is_taken(target):
    fills = DenseFills()
    assert fills.take("key", ref("float32", 2, 3), target)
    assert fills.reads.keys == ["stored"]
    assert fills.reads.addresses.tolist() == [target.data_ptr()]
    assert fills.reads.nbytes.tolist() == [24]
    assert fills.elements == 6


spans = st.tuples(st.integers(0, 60), st.integers(1, 8)).map(lambda span: (span[0], span[0] + span[1]))


@given(st.lists(spans, max_size=12), st.lists(spans, max_size=4))
def test_memory_that_is_shared_with_anything_is_found(own, others):
    every = [*own, *others]
    expected = [
        at
        for at, (low, high) in enumerate(own)
        if any(begin < high and low < end for other, (begin, end) in enumerate(every) if other != at)
    ]
    columns = np.array(own, np.int64).reshape(-1, 2)
    assert sharing(columns[:, 0], columns[:, 1], others) == expected


class Point(NamedTuple):
    where: torch.Tensor
    step: int


def test_containers_that_are_made_anew_keep_their_tensors(tmp_path):
    holdfast.register_type(Point)
    holdfast.save({"point": Point(torch.ones(2), 5)}, tmp_path / "a")
    where = torch.zeros(2)
    state = {"point": Point(where, 0)}
    holdfast.load(state, tmp_path / "a")
    assert state["point"].where is where
    assert (where.tolist(), state["point"].step) == ([1, 1], 5)


def test_memory_that_does_not_suit_the_processor_is_copied_before_it_is_converted(monkeypatch):
    seen = []
    whole = filling.elements_of
    monkeypatch.setattr(
        filling, "elements_of", lambda array, ref: seen.append(array.flags.aligned) or whole(array, ref)
    )
    target = torch.zeros(3, dtype=torch.float64)
    stored = np.frombuffer(b"x" + np.array([1, 2, 3], "<f4").tobytes(), np.uint8)[1:].view("<u4")
    assert not stored.flags.aligned
    filling.Converted(target, ref("float32", 3))[...] = stored
    assert target.tolist() == [1, 2, 3]
    assert seen == [True]


def test_autograd_notices_that_tensors_were_filled(tmp_path):
    holdfast.save({"w": torch.ones(3), "x": torch.ones(3)}, tmp_path / "a")
    target = torch.zeros(3)
    with torch.inference_mode():
        inference = torch.zeros(3)
    holdfast.load({"w": target, "x": inference}, tmp_path / "a")
    assert target._version == 1
    assert inference.tolist() == [1, 1, 1]


def test_a_tensor_for_inference_is_converted_also_by_other_threads(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast._formats.native.reading.SEVERAL_READERS_FROM", 0)
    content = torch.arange(2_000_000.0)
    holdfast.save({"w": content, "x": content}, tmp_path / "a")
    with torch.inference_mode():
        state = {key: torch.zeros(2_000_000, dtype=torch.float64) for key in "wx"}
        holdfast.load(state, tmp_path / "a", cast=True)
    assert all(torch.equal(state[key].clone(), content.double()) for key in "wx")


def test_tensors_that_are_written_lazily_get_memory_of_their_own(tmp_path):
    """A lazy clone has the memory of its original until something is written to it."""
    holdfast.save({"w": torch.ones(3)}, tmp_path / "a")
    original = torch.zeros(3)
    clone = torch._lazy_clone(original)
    holdfast.load({"w": clone}, tmp_path / "a")
    assert (original.tolist(), clone.tolist()) == ([0, 0, 0], [1, 1, 1])
