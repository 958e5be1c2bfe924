"""What does not fit between a checkpoint and a state: reported all at once, with what may have been meant."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._dcp.load_planner import DefaultLoadPlanner, create_default_local_load_plan
from holdfast._dcp.load_problems import LoadProblems, unloaded_under
from holdfast._formats.dcp.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast.errors import StateMismatchError
from tests.properties import examples


def stored(size=(2, 3), dtype=torch.float32, chunks=None) -> TensorStorageMetadata:
    boxes = chunks if chunks is not None else [([0] * len(size), size)]
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        torch.Size(size),
        [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes],
    )


def checkpoint(**entries) -> Metadata:
    return Metadata({key.replace("__", "."): entry for key, entry in entries.items()})


def plan(state, metadata, *, strict=True):
    return create_default_local_load_plan(state, metadata, strict)


def mismatch(state, metadata) -> StateMismatchError:
    with pytest.raises(StateMismatchError) as error:
        plan(state, metadata)
    return error.value


# --- everything at once ------------------------------------------------------------------------------------------


def test_all_that_does_not_fit_is_reported_in_one_message_with_fields():
    metadata = checkpoint(
        layer__weight=stored(),
        shape=stored((2, 3)),
        dtype=stored(dtype=torch.float32),
        hole=stored((4,), chunks=[([0], [1]), ([3], [1])]),
        value=BytesStorageMetadata(),
        tensor=stored((5,)),
        fine=stored(),
    )
    error = mismatch(
        {
            "layer.wieght": torch.zeros(2, 3),
            "nowhere": torch.zeros(1),
            "shape": torch.zeros(3, 2),
            "dtype": torch.zeros(2, 3, dtype=torch.int64),
            "hole": torch.zeros(4),
            "value": torch.zeros(2),
            "tensor": "a string",
            "fine": torch.zeros(2, 3),
        },
        metadata,
    )
    assert list(error.missing) == ["layer.wieght", "nowhere"]
    assert error.shapes == {"shape": (torch.Size([2, 3]), torch.Size([3, 2]))}
    assert error.dtypes == {"dtype": (torch.float32, torch.int64)}
    assert error.kinds.keys() == {"value", "tensor"}
    assert error.uncovered.keys() == {"hole"}
    text = str(error)
    assert "(7 problems)" in text
    assert "Missing key in checkpoint state_dict: layer.wieght. (did you mean 'layer.weight'?)" in text
    assert "Missing key in checkpoint state_dict: nowhere." in text
    assert "Size mismatch between saved torch.Size([2, 3]) and current: torch.Size([3, 2]) for shape" in text
    assert "'dtype' is torch.float32 in the checkpoint and torch.int64 in the state" in text
    assert "'hole': no chunk covers the region at offsets [1] of sizes [2]" in text
    assert "'value' is a tensor in the state but a plain value in the checkpoint" in text
    assert "'tensor' is a str in the state but a tensor of size [5] in the checkpoint" in text
    assert "fine" not in text
    assert text.endswith("Nothing was changed.")


KEYS = [f"layer{n}.weight" for n in range(6)]
STATES = ["fits", "missing", "shape", "dtype", "kind"]


@settings(max_examples=examples(60))
@given(st.lists(st.sampled_from(STATES), min_size=6, max_size=6))
def test_every_problem_of_every_key_is_reported_and_nothing_else(fates):
    tensors = {
        "fits": torch.zeros(2),
        "missing": torch.zeros(2),
        "shape": torch.zeros(3),
        "dtype": torch.zeros(2, dtype=torch.int8),
        "kind": "text",
    }
    metadata = Metadata({key: stored((2,)) for key, fate in zip(KEYS, fates, strict=True) if fate != "missing"})
    state = {key: tensors[fate] for key, fate in zip(KEYS, fates, strict=True)}

    def fated(fate):
        return [key for key, its in zip(KEYS, fates, strict=True) if its == fate]

    if set(fates) == {"fits"}:
        assert len(plan(state, metadata).items) == len(KEYS)
        return
    error = mismatch(state, metadata)
    assert list(error.missing) == fated("missing")
    assert list(error.shapes) == fated("shape")
    assert list(error.dtypes) == fated("dtype")
    assert list(error.kinds) == fated("kind")
    lines = str(error).splitlines()[1:-1]
    assert len(lines) == len(KEYS) - len(fated("fits"))


def test_a_long_list_of_problems_is_cut_in_the_text_but_not_in_the_fields():
    error = mismatch({f"key{n}": torch.zeros(1) for n in range(100)}, Metadata({}))
    assert len(error.missing) == 100
    assert "(100 problems)" in str(error)
    assert "and 70 more" in str(error)
    assert len(str(error).splitlines()) == 33


def test_keys_that_are_missing_are_no_problem_for_a_partial_load():
    planned = plan({"here": torch.zeros(2), "gone": torch.zeros(2)}, checkpoint(here=stored((2,))), strict=False)
    assert [item.dest_index.fqn for item in planned.items] == ["here"]


# --- regions that no chunk covers --------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    gone=st.sets(st.integers(0, 26), max_size=3),
)
def test_a_tensor_with_any_cell_uncovered_is_refused_and_one_without_is_not(shape, gone):
    cells = list(itertools.product(*(range(size) for size in shape)))
    kept = [cell for number, cell in enumerate(cells) if number not in gone]
    metadata = checkpoint(t=stored(shape, chunks=[(cell, [1] * len(shape)) for cell in kept]))
    state = {"t": torch.zeros(shape)}
    if len(kept) == len(cells):
        assert len(plan(state, metadata).items) == len(cells)
        return
    error = mismatch(state, metadata)
    assert error.uncovered.keys() == {"t"}
    assert f"the checkpoint has {len(kept)} chunk(s) of a tensor of shape {shape}" in error.uncovered["t"]


# --- near misses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "there"),
    [
        ("model.layer.wieght", "model.layer.weight"),
        ("model.layers.0.weight", "model.layer.0.weight"),
        ("module.layer.weight", "layer.weight"),
        ("layer.weight", "module.layer.weight"),
        ("model.layer.weight", "model._orig_mod.layer.weight"),
        ("model._orig_mod.module.layer.weight", "model.layer.weight"),
        ("model.0.weight", "model.module.0._fsdp_wrapped_module.weight"),
        ("model.0._checkpoint_wrapped_module.weight", "model.0.weight"),
    ],
)
def test_a_key_that_is_nearly_there_is_suggested(asked, there):
    metadata = Metadata({"optimizer.state": stored(), there: stored(), "step": BytesStorageMetadata()})
    assert f"{asked}. (did you mean '{there}'?)" in str(mismatch({asked: torch.zeros(2, 3)}, metadata))


def test_what_only_a_wrapper_added_is_preferred_over_what_looks_alike():
    metadata = Metadata({"layer.weighs": stored(), "_orig_mod.layer.weight": stored()})
    assert "did you mean '_orig_mod.layer.weight'?" in str(mismatch({"layer.weight": torch.zeros(2, 3)}, metadata))


def test_nothing_is_suggested_for_a_key_that_resembles_none():
    metadata = Metadata({"model.layer.weight": stored()})
    assert "did you mean" not in str(mismatch({"zzz": torch.zeros(1)}, metadata))
    assert "did you mean" not in str(mismatch({"zzz": torch.zeros(1)}, Metadata({})))


# --- dtypes ------------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64]
every_pair = pytest.mark.parametrize(("saved", "current"), list(itertools.permutations(DTYPES, 2)))


def noted(saved, current) -> LoadProblems:
    problems = LoadProblems([])
    problems.note_dtype("w", saved, current)
    return problems


@every_pair
def test_a_conversion_is_allowed_with_a_warning_exactly_if_torch_calls_it_safe(saved, current):
    problems = noted(saved, current)
    if torch.can_cast(saved, current):
        with pytest.warns(UserWarning, match=f"'w' is {saved} in the checkpoint and {current} in the state") as caught:
            problems.raise_or_warn("warn")
        assert len(caught) == 1
        assert "HOLDFAST_DTYPE_CHANGE" in str(caught[0].message)
    else:
        with pytest.raises(StateMismatchError, match=r"values would be destroyed") as error:
            problems.raise_or_warn("warn")
        assert error.value.dtypes == {"w": (saved, current)}


@every_pair
def test_every_conversion_is_an_error_or_passes_in_silence_if_asked_to(saved, current):
    with pytest.raises(StateMismatchError, match=f"is {saved} in the checkpoint and {current} in"):
        noted(saved, current).raise_or_warn("error")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        noted(saved, current).raise_or_warn("ignore")


def test_one_warning_lists_all_conversions():
    metadata = checkpoint(a=stored(), b=stored(), c=stored())
    state = {key: torch.zeros(2, 3, dtype=torch.bfloat16) for key in "ab"} | {"c": torch.zeros(2, 3)}
    with pytest.warns(UserWarning, match=r"2 tensor\(s\) are converted") as caught:
        plan(state, metadata)
    assert len(caught) == 1
    assert "'a' is" in str(caught[0].message)
    assert "'b' is" in str(caught[0].message)
    assert "'c' is" not in str(caught[0].message)


def test_conversions_that_are_allowed_are_not_listed_among_the_problems():
    metadata = checkpoint(a=stored(), b=stored())
    state = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(2, 3, dtype=torch.int8)}
    error = mismatch(state, metadata)
    assert error.dtypes.keys() == {"b"}


def test_a_planner_has_the_last_word_on_dtype_changes():
    metadata = checkpoint(a=stored())

    def planned(**options):
        planner = DefaultLoadPlanner(**options)
        planner.set_up_planner({"a": torch.zeros(2, 3, dtype=torch.bfloat16)}, metadata, is_coordinator=True)
        return planner.create_local_plan()

    with pytest.raises(StateMismatchError):
        planned(dtype_change="error")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(planned(dtype_change="ignore").items) == 1


def test_no_problem_is_no_error():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LoadProblems(["a"]).raise_or_warn("error")


# --- what stays behind -------------------------------------------------------------------------------------------


def test_stored_keys_below_an_asked_for_key_that_have_no_place_are_listed():
    entries = {"optim.state.0.exp_avg": stored(), "optim.lr": BytesStorageMetadata(), "model.w": stored()}
    paths = {
        "optim.state.0.exp_avg": ("optim", "state", "0", "exp_avg"),
        "optim.lr": ("optim", "lr"),
        "model.w": ("model", "w"),
    }
    metadata = Metadata(entries, planner_data=paths)
    assert unloaded_under(["optim"], ["optim.lr"], metadata) == ["optim.state.0.exp_avg"]
    assert unloaded_under(["optim", "model"], entries, metadata) == []
    assert unloaded_under(["model"], [], metadata) == ["model.w"]
    assert unloaded_under([0], [], metadata) == []
    assert unloaded_under(["optim"], [], Metadata(entries)) == []


def test_top_level_keys_are_matched_as_they_are_stored():
    metadata = Metadata({"0.w": stored()}, planner_data={"0.w": ("0", "w")})
    assert unloaded_under([0], [], metadata) == ["0.w"]
