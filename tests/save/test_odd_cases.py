"""What people do that is unusual: odd keys with patterns, odd places to load into, odd arguments."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
import holdfast.dcp
from holdfast.errors import StateMismatchError, UnsupportedTensorError, UnsupportedValueError
from tests.torches import dtypes
from tests.warm_python import warm_python

ODD = {"data": {(1, 2): torch.ones(1), "x": 5, None: 7, 2.5: 8}, "w": {"a.b": 1, "a": {"b": 2}}, "m": torch.ones(2)}


def saved(state: Any, path: Path, **options: Any) -> Path:
    holdfast.save(state, path / "saved", **options)
    return path / "saved"


def test_a_pattern_means_what_lies_below_also_if_its_keys_need_brackets(tmp_path):
    assert holdfast.open(saved(ODD, tmp_path / "1", include="data")).read() == {"data": ODD["data"]}
    assert holdfast.open(saved(ODD, tmp_path / "2", exclude=["data", "m"])).read() == {"w": ODD["w"]}
    everything = holdfast.open(saved(ODD, tmp_path / "3"))
    assert everything.read("data") == {"data": ODD["data"]}
    assert everything.read("w") == {"w": ODD["w"]}


def test_keys_in_brackets_are_excluded_allowed_and_unexpected_like_others(tmp_path):
    path = saved(ODD, tmp_path)
    blank = {(1, 2): torch.zeros(1), "x": 0, None: 0, 2.5: 0}
    state = {"data": dict(blank), "m": torch.zeros(2)}
    holdfast.load(state, path, exclude="data")
    assert state["data"] == blank
    holdfast.load(state, path, exclude='["data"][null]')
    assert state["data"] == {**ODD["data"], None: 0}
    with pytest.raises(StateMismatchError) as raised:
        holdfast.load({"data": {"x": 0}}, path)
    assert set(raised.value.unexpected) == {key for key in holdfast.open(path) if key.startswith('["data"]')}
    state = {"data": {**blank, (9, 9): 4}}
    assert holdfast.load(state, path, allow_missing="data").missing == ['["data"][{"$":"tuple","items":[9,9]}]']


@pytest.mark.parametrize(
    "choice", [{"include": []}, {"include": "modle.*"}, {"exclude": "*"}, {"include": re.compile("m.")}]
)
def test_a_save_of_nothing_is_refused(tmp_path, choice):
    with pytest.raises(ValueError, match="leave nothing of the state"):
        holdfast.save({"model": torch.ones(2), "step": 1}, tmp_path / "x", **choice)
    assert not (tmp_path / "x").exists()
    holdfast.save({}, tmp_path / "empty")
    assert holdfast.open(tmp_path / "empty").read() == {}


@pytest.mark.parametrize("kind", ["native", "dcp", "torch"])
def test_loaded_tensors_have_memory_whatever_the_default_device_is(tmp_path, kind):
    state = {"w": torch.arange(4.0), "n": {"c": torch.arange(3)}}
    path = tmp_path / "x"
    if kind == "native":
        holdfast.save(state, path)
    elif kind == "dcp":
        holdfast.dcp.save(state, checkpoint_id=path)
    else:
        torch.save(state, path)
    target: dict[str, Any] = {"w": None, "n": {}}
    with torch.device("meta"):
        holdfast.load(target, path)
        opened = holdfast.open(path).read()
    for found in (target, opened):
        assert found["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert found["n"]["c"].tolist() == [0, 1, 2]


def test_an_optimizer_is_filled_with_memory_whatever_the_default_device_is(tmp_path):
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = made()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    path = saved({"m": model, "o": optimizer}, tmp_path)
    model, optimizer = made()
    with torch.device("meta"):
        holdfast.load({"m": model, "o": optimizer}, path)
    assert optimizer.state_dict()["state"][0]["step"].item() == 1


def test_names_that_share_memory_are_compared_whatever_the_default_device_is(tmp_path):
    path = saved({"a": torch.arange(6.0), "b": torch.arange(4.0, 10.0)}, tmp_path)
    memory = torch.zeros(10)
    with torch.device("meta"):
        holdfast.load({"a": memory[:6], "b": memory[4:]}, path)
    assert memory.tolist() == list(range(10))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compile_", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(1, 2))])
def test_scripted_modules_are_modules(tmp_path, compile_):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    path = saved({"model": compile_(model)}, tmp_path)
    assert "model.0.weight" in holdfast.open(path)
    other = compile_(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval())
    holdfast.load({"model": other}, path)
    assert all(torch.equal(one, two) for one, two in zip(other.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("stored", [nn.Linear(2, 2), 3, [1, 2]])
def test_a_module_without_state_has_no_place_for_any(tmp_path, stored):
    path = saved({"m": stored, "n": torch.ones(1)}, tmp_path)
    other = torch.zeros(1)
    with pytest.raises(StateMismatchError) as raised:
        holdfast.load({"m": nn.ReLU(), "n": other}, path)
    assert raised.value.unexpected
    assert set(raised.value.unexpected) == {key for key in holdfast.open(path) if key.startswith("m")}
    assert other.item() == 0
    holdfast.load({"m": nn.ReLU(), "n": other}, path, allow_unexpected="m")
    assert other.item() == 1


def test_a_module_without_state_is_saved_and_loaded(tmp_path):
    path = saved({"m": nn.ReLU(), "n": 1}, tmp_path)
    assert holdfast.load({"m": nn.ReLU(), "n": 0}, path).unexpected == []


@pytest.mark.parametrize("shape", [(2, 3), (3,)])
def test_arrays_whose_elements_share_memory_are_not_filled(tmp_path, shape):
    path = saved({"a": np.arange(np.prod(shape), dtype="f4").reshape(shape)}, tmp_path)
    strides = {(2, 3): (0, 4), (3,): (2,)}[shape]
    shared = np.lib.stride_tricks.as_strided(np.zeros(8, "f4"), shape, strides)
    with pytest.raises(StateMismatchError, match="share memory"):
        holdfast.load({"a": shared}, path)
    assert not shared.any()


@pytest.mark.parametrize("steps", [(slice(None, None, -1), slice(None)), (slice(None, None, 2), slice(None, None, -2))])
def test_arrays_with_any_strides_are_filled(tmp_path, steps):
    base = np.zeros((4, 6), "f4")
    target = base[steps]
    wanted = np.arange(target.size, dtype="f4").reshape(target.shape)
    holdfast.load({"a": target}, saved({"a": wanted}, tmp_path))
    assert np.array_equal(target, wanted)


def test_arrays_of_elements_without_bytes_are_filled(tmp_path):
    holdfast.load({"a": np.zeros(3, "S0")}, saved({"a": np.zeros(3, "S0")}, tmp_path))


@pytest.mark.parametrize(
    "target",
    [
        np.zeros(3, "U3"),
        np.zeros(3, object),
        torch.zeros(3, dtype=torch.uint8).view(torch.uint4),
        *(torch.zeros(3, dtype=torch.uint8).view(dtype) for dtype in dtypes("float4_e2m1fn_x2")),
    ],
    ids=lambda target: str(target.dtype),
)
@pytest.mark.parametrize("transform", [False, True])
def test_a_cast_to_what_is_no_number_is_reported_before_anything_changes(tmp_path, target, transform):
    path = saved({"a": torch.tensor([1.0, 2.0, 1e10]), "b": torch.ones(1)}, tmp_path)
    other = torch.zeros(1)
    options = {"transform": {"a": lambda checkpoint, key: checkpoint[key][:]}} if transform else {}
    with pytest.raises(StateMismatchError) as raised:
        holdfast.load({"b": other, "a": target}, path, cast=True, **options)
    assert list(raised.value.dtypes) == ["a"]
    assert other.item() == 0


def test_a_cast_of_everything_leaves_complex_numbers_complex(tmp_path):
    stored = {"c": torch.tensor([1 + 2j]), "f": torch.ones(1), "i": torch.ones(1, dtype=torch.int64)}
    path = saved(stored, tmp_path)
    state: dict[str, Any] = {"c": None, "f": None, "i": None}
    report = holdfast.load(state, path, cast={"*": "float16"})
    assert [state[key].dtype for key in "cfi"] == [torch.complex64, torch.float16, torch.int64]
    assert state["c"].item() == 1 + 2j
    assert list(report.cast) == ["f"]
    holdfast.load(state := {"c": None}, path, cast={"c": "complex128"})
    assert state["c"].dtype == torch.complex128


@pytest.mark.parametrize("stored", [torch.tensor([1 + 2j]), np.array([1 + 2j], ">c8")], ids=["torch", "numpy"])
@pytest.mark.parametrize("target", [torch.zeros(1), torch.zeros(1, dtype=torch.bool), np.zeros(1)], ids=str)
@pytest.mark.parametrize("cast", [True, False])
def test_no_cast_takes_the_imaginary_parts_away(tmp_path, stored, target, cast):
    path = saved({"c": stored}, tmp_path)
    for options in ({}, {"transform": {"c": lambda checkpoint, key: torch.tensor([1 + 2j])}}):
        with pytest.raises(StateMismatchError, match="imaginary parts would be lost") as raised:
            holdfast.load({"c": target}, path, cast=cast, **options)
        assert list(raised.value.kinds) == ["c"]
        assert not target.any()


def test_the_real_parts_can_be_asked_for(tmp_path):
    path = saved({"c": torch.tensor([1 + 2j])}, tmp_path)
    holdfast.load(
        state := {"c": torch.zeros(1)}, path, transform={"c": lambda checkpoint, key: checkpoint[key][:].real}
    )
    assert state["c"].tolist() == [1]
    holdfast.load(state := {"c": torch.zeros(1, dtype=torch.complex128)}, path, cast=True)
    assert state["c"].tolist() == [1 + 2j]


@pytest.mark.parametrize("metadata", [{1: 2, "1": 3}, {"a": {None: 1}}, {"a": [{2.5: 1}]}])
def test_metadata_whose_keys_json_would_change_is_refused(tmp_path, metadata):
    with pytest.raises(ValueError, match="is not a str"):
        holdfast.save({"a": 1}, tmp_path / "x", metadata=metadata)


@pytest.mark.parametrize(
    ("verb", "options", "message"),
    [
        (holdfast.save, {"metadata": [1]}, "metadata must be a dict"),
        (holdfast.save, {"cast": "bfloat16"}, "cast takes patterns with the dtype for each"),
        (holdfast.load, {"rename": "x"}, "rename takes a mapping"),
        (holdfast.load, {"rename": {"a": 3}}, "which is not a str"),
        (holdfast.load, {"transform": "x"}, "transform takes keys of the state"),
    ],
)
def test_arguments_of_other_types_are_reported(tmp_path, verb, options, message):
    path = saved({"a": 1}, tmp_path)
    with pytest.raises(TypeError, match=message):
        verb({"a": 2}, path, **options)


def test_what_lies_far_too_deep_is_refused_like_what_lies_too_deep(tmp_path):
    state: Any = torch.ones(1)
    for _ in range(5000):
        state = [state]
    with pytest.raises(UnsupportedValueError, match="128 containers"):
        holdfast.save({"deep": state}, tmp_path / "x")


def test_counts_stay_what_they_are_beside_live_objects(tmp_path):
    path = saved({"c": Counter({"n": 2, "model": nn.Linear(1, 1)})}, tmp_path)
    assert holdfast.open(path)["c.n"] == 2


def test_an_empty_dict_that_is_stored_has_a_place_in_any_dict(tmp_path):
    path = saved({"d": {}, "n": 1}, tmp_path)
    with pytest.raises(StateMismatchError) as raised:
        holdfast.load({"d": {"a": 1}, "n": 0}, path)
    assert raised.value.missing == ["d.a"]
    assert raised.value.unexpected == []


def test_a_key_that_was_renamed_away_is_not_what_may_be_meant(tmp_path):
    path = saved({"model": {"weight": torch.ones(1)}}, tmp_path)
    with pytest.raises(StateMismatchError) as raised:
        holdfast.load({"model": {"weight": torch.ones(1)}, "other": {}}, path, rename={"model": "other"})
    assert "did you mean" not in str(raised.value)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors of this Python take no notes")
def test_an_error_of_a_live_object_tells_which_one_it_is(tmp_path):
    class Fragile:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise RuntimeError("no")

    path = saved({"part": {"fragile": Fragile()}}, tmp_path)
    with pytest.raises(RuntimeError, match="no") as raised:
        holdfast.load({"part": {"fragile": Fragile()}}, path)
    assert "Fragile at 'part.fragile'" in raised.value.__notes__[0]


def test_a_transform_may_make_an_array_without_dimensions(tmp_path):
    holdfast.save({"scale": np.array(3.0)}, tmp_path / "x")
    state = {"scale": np.array(0.0)}
    holdfast.load(state, tmp_path / "x", transform={"scale": lambda checkpoint, key: np.array(5.0)})
    assert state["scale"] == 5.0


@pytest.mark.parametrize("left", [0, 16])
@pytest.mark.parametrize("form", [lambda tensor: tensor, lambda tensor: tensor.view(10, 100).T, nn.Parameter])
def test_tensors_whose_memory_was_given_back_are_neither_saved_nor_filled(tmp_path, form, left):
    whole, tensor = form(torch.ones(1000)), form(torch.zeros(1000))
    holdfast.save({"beside": torch.ones(3), "t": whole}, tmp_path / "whole")
    tensor.untyped_storage().resize_(left)
    with pytest.raises(UnsupportedTensorError, match=f"'t' is a tensor whose memory was given back.* {left} bytes"):
        holdfast.save({"t": tensor}, tmp_path / "saved")
    beside = torch.zeros(3)
    with pytest.raises(
        StateMismatchError, match=r"'t' is a tensor whose memory was given back(?s:.*)Nothing was changed"
    ):
        holdfast.load({"beside": beside, "t": tensor}, tmp_path / "whole")
    assert not beside.any()


@pytest.mark.parametrize(
    "make", [torch._efficientzerotensor, lambda size: torch._to_functional_tensor(torch.ones(size))]
)
def test_tensors_that_never_had_memory_are_neither_saved_nor_filled(tmp_path, make):
    with pytest.raises(UnsupportedTensorError, match="'t' is a tensor without memory of its own"):
        holdfast.save({"t": make(100)}, tmp_path / "saved")
    holdfast.save({"t": torch.ones(100)}, tmp_path / "whole")
    with pytest.raises(StateMismatchError, match="'t' is a tensor without memory of its own"):
        holdfast.load({"t": make(100)}, tmp_path / "whole")


def test_what_runs_when_python_ends_can_save_and_load(tmp_path):
    """There are no more threads to be had by then."""
    program = """
import atexit, sys
import torch
import holdfast

@atexit.register
def save_and_load():
    state = {"t": torch.zeros(9 << 20)}
    holdfast.save({"t": torch.ones(9 << 20)}, sys.argv[1])
    holdfast.load(state, sys.argv[1])
    print(bool(state["t"].all()))
"""
    command = [*warm_python(), "-c", program, str(tmp_path / "saved")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == "True\n", ended.stderr


def test_a_tensor_that_loses_its_memory_to_a_hook_is_not_passed_over(tmp_path):
    class Greedy(nn.Linear):
        """Frees what it does not need while it is asked for its state."""

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            tensor.untyped_storage().resize_(0)
            return super().state_dict(*args, **kwargs)

    holdfast.save({"first": torch.ones(2), "t": torch.ones(3), "greedy": nn.Linear(2, 2)}, tmp_path / "saved")
    first, tensor = torch.zeros(2), torch.zeros(3)
    with pytest.raises(UnsupportedTensorError, match="'t' has lost its memory"):
        holdfast.load({"first": first, "t": tensor, "greedy": Greedy(2, 2)}, tmp_path / "saved")
    assert not first.any()
