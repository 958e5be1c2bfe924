"""Whatever is saved comes back exactly: types, keys, order, ties, dtypes and bits. And saving changes nothing."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import holdfast
from tests.properties import examples
from tests.save.random_states import (
    TORCH_DTYPES,
    Drawn,
    blank_copy,
    difference,
    states,
    tensors,
    tied_places,
    ties_are_kept,
)

numbers = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(states())
def test_any_state_comes_back_exactly(folder, drawn):
    state = drawn.state
    path = folder / str(next(numbers))
    holdfast.save(state, path)
    with holdfast.open(path) as checkpoint:
        found = checkpoint.read()
    assert difference(found, state) is None
    assert ties_are_kept(found, state)
    untouched = dict.fromkeys(state)
    holdfast.load(untouched, path)
    assert difference(untouched, state) is None


@settings(max_examples=examples(70), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(states())
def test_any_state_loads_into_blank_memory_of_the_same_form(folder, drawn):
    state = drawn.state
    path = folder / str(next(numbers))
    holdfast.save(state, path)
    fresh = blank_copy(state, {})
    holdfast.load(fresh, path)
    assert difference(fresh, state) is None
    assert ties_are_kept(fresh, state)


@settings(max_examples=examples(30))
@given(tensors().map(lambda tensor: Drawn({"tensor": tensor})))
def test_files_hold_every_tensor_under_its_key_for_safetensors_to_read(folder, drawn):
    """Not only our own reader finds the bytes."""
    from safetensors import safe_open

    tensor = drawn.state["tensor"]

    path = folder / str(next(numbers))
    holdfast.save({"some": {"key": tensor}}, path)
    data = sorted(path.glob("data-*.safetensors"))
    assert len(data) == (1 if tensor.numel() else 0)
    for file in data:
        with safe_open(file, "pt") as opened:
            found = opened.get_tensor("some.key")
        plain = tensor.resolve_conj()
        if plain.dtype.itemsize == 1:
            plain, found = plain.view(torch.uint8), found.view(torch.uint8)
        assert plain.contiguous().flatten().view(torch.uint8).tolist() == found.flatten().view(torch.uint8).tolist()


def test_all_dtypes_of_torch_take_part():
    names = {str(dtype) for dtype in TORCH_DTYPES}
    assert {"torch.bfloat16", "torch.complex32", "torch.float8_e5m2", "torch.uint4", "torch.bool"} <= names
    assert len(names) >= 27


ROOTS = {
    "a model": torch.nn.Linear(2, 3),
    "a tensor": torch.arange(3),
    "a single element": torch.tensor(5.0),
    "an array": np.arange(3),
    "a list": [torch.arange(2), 1, "x"],
    "a tuple": (1, (2, torch.arange(2))),
    "a number": 7,
    "nothing": None,
    "an empty dict": {},
    "an empty list": [],
}


@pytest.mark.parametrize("name", ROOTS)
def test_a_state_may_be_anything(tmp_path, name):
    holdfast.save(ROOTS[name], tmp_path / "x")
    expected = dict(ROOTS[name].state_dict()) if name == "a model" else ROOTS[name]
    assert difference(holdfast.open(tmp_path / "x").read(), expected) is None


def test_views_that_only_overlap_are_not_tied(tmp_path):
    base = torch.arange(6.0)
    complex_base = torch.tensor([1 + 2j, 3 - 1j])
    array = np.arange(4, dtype=np.int32)
    state = {
        "base": base,
        "same": base.view(6),
        "matrix": base.view(2, 3),
        "front": base[:3],
        "other type": base.view(torch.int32),
        "numbers": complex_base,
        "conjugates": complex_base.conj(),
        "negated": complex_base.conj().imag,
        "imaginary": complex_base.imag,
        "array": array,
        "array again": array[:],
        "array as floats": array.view(np.float32),
        "reversed": array[::-1],
        "of torch": torch.from_numpy(array),
    }
    holdfast.save(state, tmp_path / "x")
    found = holdfast.open(tmp_path / "x").read()
    assert difference(found, state) is None
    assert tied_places(found) == {
        frozenset({"state['base']", "state['same']"}),
        frozenset({"state['array']", "state['array again']"}),
    }


def test_tied_tensors_are_stored_once(tmp_path):
    weight = torch.randn(1000)
    saved = holdfast.save({"one": weight, "two": weight, "own": holdfast.PerRank([weight, weight])}, tmp_path / "x")
    assert saved.tensor_count == 2
    assert saved.bytes_written < 3 * 4000 + 5000


def test_a_cast_of_one_name_unties_it(tmp_path):
    weight = torch.randn(10)
    holdfast.save({"a": weight, "b": weight, "c": weight}, tmp_path / "x", cast={"a": "float16"})
    found = holdfast.open(tmp_path / "x").read()
    assert (found["a"].dtype, found["b"].dtype) == (torch.float16, torch.float32)
    assert found["b"] is found["c"]


def test_saving_changes_nothing(tmp_path):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW([*model.parameters()], lr=0.1, amsgrad=True)
    fresh = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = {
        "model": model,
        "optimizer": optimizer,
        "fresh": fresh,
        "scheduler": scheduler,
        "rng": holdfast.RngState(),
        "needs grad": torch.randn(3, requires_grad=True),
        "table": {"steps": [1, 2], "array": np.arange(3)},
    }

    def snapshot():
        return copy.deepcopy(
            [
                model.state_dict(),
                [parameter.requires_grad for parameter in model.parameters()],
                [parameter.grad for parameter in model.parameters()],
                model.training,
                optimizer.state_dict(),
                fresh.state_dict(),
                scheduler.state_dict(),
                state["needs grad"].detach(),
                state["needs grad"].requires_grad,
                state["table"],
                list(state),
                torch.get_rng_state(),
                np.random.get_state(legacy=False),
            ]
        )

    before = snapshot()
    identities = [id(part) for part in [*state.values(), *model.parameters(), *optimizer.state.values()]]
    holdfast.save(state, tmp_path / "x", cast={"model": "bfloat16"}, exclude="table.steps")
    assert difference(snapshot(), before) is None
    assert identities == [id(part) for part in [*state.values(), *model.parameters(), *optimizer.state.values()]]
    assert fresh.state_dict()["state"] == {}
    assert list(holdfast.open(tmp_path / "x").read("fresh")["fresh"]["state"]) == []


def test_what_is_stored_is_what_was_there_during_the_save(tmp_path):
    weight = torch.zeros(10)
    holdfast.save({"w": weight}, tmp_path / "x")
    weight.add_(1)
    assert holdfast.open(tmp_path / "x").read()["w"].sum() == 0
