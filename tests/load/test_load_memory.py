"""``holdfast.load`` and memory: tensors that share it, and how much of it a load takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
import holdfast.dcp
from holdfast._base.boxes import Box
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.source import NativeSource
from holdfast._load import filling
from holdfast._load.filling import Fill, Region, small_parts
from holdfast.errors import IncompleteLoadError, StateMismatchError
from tests.models import Tied
from tests.properties import examples


def saved(state: Any, path: Path) -> Path:
    holdfast.save(state, path / "saved")
    return path / "saved"


def test_tied_weights_are_stored_once_and_read_once(tmp_path):
    source, target = Tied(), Tied()
    report = holdfast.load({"model": target}, saved({"model": source}, tmp_path))
    assert torch.equal(target.embed.weight, source.embed.weight)
    assert target.head.weight is target.embed.weight
    assert report.elements == 15
    assert report.read == ["model.embed.weight", "model.head.weight"]


def test_tied_checkpoints_load_into_untied_states(tmp_path):
    source, target = Tied(), Tied(tie=False)
    report = holdfast.load({"model": target}, saved({"model": source}, tmp_path))
    assert torch.equal(target.embed.weight, source.embed.weight)
    assert torch.equal(target.head.weight, source.embed.weight)
    assert report.elements == 30


def test_tied_tensors_that_the_state_has_no_memory_for_get_one_piece_of_it(tmp_path):
    state: dict[str, Any] = {}
    report = holdfast.load(state, saved({"model": Tied()}, tmp_path))
    assert state["model"]["embed.weight"] is state["model"]["head.weight"]
    assert report.elements == 15


def test_tied_states_load_what_was_stored_twice_if_it_is_the_same(tmp_path):
    twice = Tied(tie=False)
    twice.head.weight.data.copy_(twice.embed.weight)
    target = Tied()
    report = holdfast.load({"model": target}, saved({"model": twice}, tmp_path))
    assert torch.equal(target.head.weight, twice.embed.weight)
    assert report.elements == 15


@pytest.mark.parametrize("meta", [False, True])
def test_tied_states_refuse_two_stored_tensors_that_differ(tmp_path, meta):
    path = saved({"model": Tied(tie=False)}, tmp_path)
    with torch.device("meta" if meta else "cpu"):
        target = Tied()
    before = None if meta else target.embed.weight.clone()
    with pytest.raises(StateMismatchError, match=r"is tied to 'model\.embed\.weight' in the state") as raised:
        holdfast.load({"model": target}, path)
    assert list(raised.value.kinds) == ["model.head.weight"]
    assert target.embed.weight.is_meta if meta else torch.equal(target.embed.weight, before)


@pytest.mark.parametrize("meta", [False, True])
def test_one_stored_name_is_enough_for_tied_weights(tmp_path, meta):
    """Files of Hugging Face have one of the names alone."""
    weight = torch.rand(5, 3)
    safetensors.torch.save_file({"embed.weight": weight}, tmp_path / "model.safetensors")
    with torch.device("meta" if meta else "cpu"):
        target = Tied()
    report = holdfast.load(target, tmp_path / "model.safetensors")
    assert torch.equal(target.head.weight, weight)
    assert target.head.weight is target.embed.weight
    assert report.missing == []
    assert (
        report.notes[0] == "'head.weight' is not stored; it is the same tensor as 'embed.weight' and was loaded with it"
    )
    with pytest.raises(StateMismatchError) as raised:
        holdfast.load(Tied(tie=False), tmp_path / "model.safetensors")
    assert raised.value.missing == ["head.weight"]


def test_the_bits_are_compared_when_tied_tensors_were_stored_twice(tmp_path):
    """Zeros of both signs are equal numbers, and not the same tensor."""
    path = saved({"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([-0.0, 1.0])}, tmp_path)
    tied = torch.zeros(2)
    with pytest.raises(StateMismatchError, match="tied"):
        holdfast.load({"a": tied, "b": tied}, path)
    nan = torch.tensor([float("nan")])
    path = saved({"a": nan, "b": nan.clone()}, tmp_path / "nan")
    tied = torch.zeros(1)
    holdfast.load({"a": tied, "b": tied}, path)
    assert tied.isnan().all()


@pytest.mark.parametrize("kind", ["torch", "numpy", "both"])
def test_overlapping_targets_get_what_fits_together_and_nothing_else(tmp_path, kind):
    def views(base: Any) -> dict[str, Any]:
        return {"whole": base, "part": base[2:5], "columns": base[:, 1:3]}

    content = torch.arange(24.0).reshape(6, 4)
    path = saved({key: view.clone() for key, view in views(content).items()}, tmp_path / "fits")
    base = torch.zeros(6, 4)
    state = views(base)
    if kind == "torch":
        holdfast.load(state, path)
        assert torch.equal(base, content)
    wrong = {key: view.clone() for key, view in views(content).items()}
    wrong["part"][0, 0] = -1
    path = saved(wrong, tmp_path / "wrong")
    base = torch.zeros(6, 4)
    state = views(base) if kind == "torch" else views(base.numpy())
    if kind == "both":
        state["whole"] = base
    with pytest.raises(StateMismatchError, match="shares memory with") as raised:
        holdfast.load(state, path, cast=True)
    assert "part" in raised.value.kinds or "whole" in raised.value.kinds
    assert base.sum() == 0


def test_targets_that_interleave_without_sharing_elements_are_read_once(tmp_path, monkeypatch):
    monkeypatch.delattr("holdfast._load.shared_memory.elements_in")  # for comparing what is stored for shared elements
    base = torch.zeros(6, 4)
    state = {"left": base[:, :2], "right": base[:, 2:], "again": torch.zeros(1)}
    path = saved({"left": torch.ones(6, 2), "right": torch.full((6, 2), 2.0), "again": torch.ones(1)}, tmp_path)
    holdfast.load(state, path)
    assert base.tolist() == [[1, 1, 2, 2]] * 6


def test_a_transform_into_memory_that_is_also_read_into_must_agree(tmp_path):
    path = saved({"a": torch.ones(3)}, tmp_path)
    shared = torch.zeros(3)
    with pytest.raises(StateMismatchError, match="is tied to"):
        holdfast.load({"a": shared, "b": shared}, path, transform={"b": lambda c, key: torch.zeros(3) + 2})
    assert shared.sum() == 0
    holdfast.load({"a": shared, "b": shared}, path, transform={"b": lambda c, key: c["a"][:]})
    assert shared.tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", ["as it is stored", "converted"])
def test_a_load_that_writes_less_than_the_state_has_fails(tmp_path, monkeypatch, kind):
    path = saved({"a": torch.ones(3), "b": torch.ones(4)}, tmp_path)
    whole = filling.read_regions

    def less(regions, source, *, dense, **options):
        return whole(regions[:-1], source, dense=dense.without([1])[0] if dense.keys else dense, **options)

    monkeypatch.setattr("holdfast._load.read_division.read_regions", less)
    state = {"a": torch.zeros(3), "b": torch.zeros(4)}
    if kind == "converted":
        state = {key: tensor.double() for key, tensor in state.items()}
    with pytest.raises(IncompleteLoadError, match=r"3 elements .* where the state has 7") as raised:
        holdfast.load(state, path, cast=True)
    assert (raised.value.expected, raised.value.found) == (7, 3)
    assert "partly loaded" in str(raised.value)


def test_a_checkpoint_that_does_not_cover_a_target_is_refused_before_anything_changes(tmp_path, monkeypatch):
    path = saved({"a": torch.ones(8)}, tmp_path)
    monkeypatch.setattr(NativeSource, "covered", lambda self, key: [Box((0,), (3,)), Box((5,), (3,))])
    target = torch.zeros(8, dtype=torch.float64)
    with pytest.raises(StateMismatchError) as raised:
        holdfast.load({"a": target}, path, cast=True)
    assert raised.value.uncovered.keys() == {"a"}
    assert "no chunk covers the region at offsets [3] of sizes [2]" in raised.value.uncovered["a"]
    assert target.sum() == 0


def test_a_target_of_which_a_part_would_not_be_filled_is_refused(tmp_path, monkeypatch):
    path = saved({"a": torch.ones(8)}, tmp_path)
    monkeypatch.setattr(
        "holdfast._load.planning.regions_of", lambda fill: [Region(fill, Box((0,), (3,)), fill.target[:3])]
    )
    with pytest.raises(StateMismatchError, match="of the 8 elements on rank 0, 3 would be filled"):
        holdfast.load({"a": torch.zeros(8, dtype=torch.float64)}, path, cast=True)


@given(sizes=st.lists(st.integers(1, 9), max_size=4), limit=st.integers(1, 300))
@settings(max_examples=examples(80))
def test_small_parts_tile_their_region_and_are_small(sizes, limit):
    shape = tuple(sizes)
    memory = np.zeros(shape, np.float32)
    ref = TensorRef("x", dtype_named("float32"), shape)
    parts = list(small_parts(Region(Fill("x", ref, memory), Box((0,) * len(shape), shape), memory), limit))
    for part in parts:
        place = [slice(at, at + size) for at, size in zip(part.box.offsets, part.box.sizes, strict=True)]
        inside = (*place, ...)
        assert part.memory.shape == part.box.sizes
        assert np.shares_memory(part.memory, memory[inside])
        part.memory[...] += 1
        assert part.memory.size * 4 <= max(limit, 4)
    assert (memory == 1).all()


@pytest.mark.parametrize("first", [False, True])
def test_chunks_that_are_converted_in_small_parts_are_read_once(tmp_path, first):
    content = torch.rand(500_000)
    holdfast.dcp.save({"a": content, "b": content}, checkpoint_id=tmp_path)
    state = {"a": torch.zeros(500_000, dtype=torch.float64), "b": torch.zeros(500_000, dtype=torch.bfloat16)}
    report = holdfast.load(state, tmp_path, cast=True, verify_first=first, memory_budget=256 << 10)
    assert torch.equal(state["a"], content.double())
    assert torch.equal(state["b"], content.bfloat16())
    assert 4_000_000 <= report.bytes_read < 4_020_000
    assert report.elements == 1_000_000


@pytest.mark.parametrize("form", ["native", "dcp", "torch"])
def test_arrays_without_dimensions_are_converted_too(tmp_path, form):
    stored = {"number": torch.tensor(2.5), "row": torch.arange(3.0)}
    path = tmp_path / form
    if form == "native":
        holdfast.save(stored, path)
    elif form == "dcp":
        holdfast.dcp.save(stored, checkpoint_id=path)
    else:
        torch.save(stored, path)
    state = {"number": np.zeros((), np.float64), "row": np.zeros(3, np.float64)[::-1]}
    report = holdfast.load(state, path, cast=True)
    assert (state["number"], state["row"].tolist()) == (2.5, [0, 1, 2])
    assert report.elements == 4


class Unusual(torch.Tensor):
    """A subclass that has its elements in memory as usual, but is not a plain tensor."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Unusual:
        return torch.Tensor._make_subclass(cls, data)


def test_tensors_that_bytes_cannot_be_read_into_directly_are_filled_through_host_memory(tmp_path):
    base = torch.zeros(7, 11, dtype=torch.complex64)
    state = {
        "subclass": Unusual(torch.zeros(9, 5)),
        "conjugate": base.conj(),
        "cast": torch.zeros(5, 7, dtype=torch.float16).t(),
        "scalar": torch.zeros((), dtype=torch.float64),
    }
    stored = {
        "subclass": torch.rand(9, 5),
        "conjugate": torch.rand(7, 11, dtype=torch.complex64),
        "cast": torch.rand(7, 5),
        "scalar": torch.tensor(0.5),
    }
    before = dict(state)
    report = holdfast.load(state, saved(stored, tmp_path), cast=["cast", "scalar"])
    assert all(state[key] is before[key] for key in state)
    assert torch.equal(torch.Tensor(state["subclass"]), stored["subclass"])
    assert torch.equal(state["conjugate"], stored["conjugate"])
    assert torch.equal(base, stored["conjugate"].conj())
    assert torch.equal(state["cast"], stored["cast"].half())
    assert state["scalar"].item() == 0.5
    assert report.elements == 45 + 77 + 35 + 1
