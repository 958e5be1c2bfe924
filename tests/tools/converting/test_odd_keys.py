"""Keys that few programs have: what a format can hold goes there, and what it cannot is refused with a way out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import holdfast
from holdfast.errors import UnsupportedTensorError, UnsupportedValueError
from tests.exact import assert_same

ODD = ["", "[a", "[0]", "a\ud800", "\ud83d", "a\0b"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage is")


@pytest.mark.parametrize("key", ODD, ids=ascii)
def test_dcp_holds_any_text_as_a_key_whatever_is_below_it(tmp_path: Path, key: str) -> None:
    state = {key: {0: torch.ones(2), "steps": {1: 5}, "list": [torch.zeros(1)], 1.5: "x"}, "other": 3}
    holdfast.save(state, tmp_path / "native")
    report = holdfast.convert(tmp_path / "native", tmp_path / "dcp", to="dcp")
    found = {key: {"0": torch.ones(2), "steps": {"1": 5}, "list": [torch.zeros(1)], "1.5": "x"}, "other": 3}
    assert_same(holdfast.open(tmp_path / "dcp").read(), found)
    assert report
    loaded: dict[str, Any] = {key: {"0": torch.zeros(2)}}
    stock.load(loaded, checkpoint_id=tmp_path / "dcp")
    assert loaded[key]["0"].tolist() == [1, 1]


@pytest.mark.parametrize("key", ["", "[a", "[0]", "a\0b"], ids=ascii)
@pytest.mark.parametrize("rename", [None, lambda key: key], ids=["as it is", "by a function that keeps it"])
def test_safetensors_hold_any_valid_text_as_a_name_and_the_empty_one_too(tmp_path: Path, key: str, rename: Any) -> None:
    holdfast.save({key: torch.ones(2)}, tmp_path / "native")
    holdfast.convert(tmp_path / "native", tmp_path / "x.safetensors", to="safetensors", rename=rename)
    assert_same(holdfast.open(tmp_path / "x.safetensors").read(), {key: torch.ones(2)})
    holdfast.convert(tmp_path / "x.safetensors", tmp_path / "again", to="native", rename=rename)
    assert_same(holdfast.open(tmp_path / "again").read(), {key: torch.ones(2)})


@pytest.mark.parametrize("to", ["safetensors", "native"])
def test_a_rename_to_nothing_is_refused_and_called_so(tmp_path: Path, to: str) -> None:
    holdfast.save({"a": torch.ones(2)}, tmp_path / "saved")
    with pytest.raises(TypeError, match="rename gives 'a' an empty"):
        holdfast.convert(tmp_path / "saved", tmp_path / "x", to=to, rename=lambda key: "")


@pytest.mark.parametrize("key", ["a\ud800", "__metadata__"], ids=ascii)
def test_a_name_that_safetensors_cannot_hold_is_refused_and_the_advice_works(tmp_path: Path, key: str) -> None:
    holdfast.save({key: torch.ones(2)}, tmp_path / "native")
    with pytest.raises(UnsupportedTensorError, match=r"rename it\nOr exclude") as caught:
        holdfast.convert(tmp_path / "native", tmp_path / "x.safetensors", to="safetensors")
    assert caught.value.key == key
    assert f"'{key}'" in str(caught.value)
    holdfast.convert(tmp_path / "native", tmp_path / "x.safetensors", to="safetensors", rename={key: "b"})
    assert_same(holdfast.open(tmp_path / "x.safetensors").read(), {"b": torch.ones(2)})


@pytest.mark.parametrize("key", ["a", "[a", "a\ud800"], ids=ascii)
@pytest.mark.parametrize("inner", [{"b.c": 1, "b": {"c": 2}}, {1: 1, "1": 2}], ids=str)
def test_keys_that_dcp_cannot_tell_apart_are_named_as_rename_takes_them(tmp_path: Path, key: str, inner: Any) -> None:
    holdfast.save({key: inner}, tmp_path / "native")
    with pytest.raises(UnsupportedValueError, match="Rename one of each") as caught:
        holdfast.convert(tmp_path / "native", tmp_path / "dcp", to="dcp")
    (named,) = re.findall(r"is the key of '(.*)' and of '.*'\n", str(caught.value))
    holdfast.convert(tmp_path / "native", tmp_path / "dcp", to="dcp", rename={named: "moved"})
    assert holdfast.open(tmp_path / "dcp")["moved"] == 1


NAN, ANOTHER = float("nan"), float("nan")


@pytest.mark.parametrize(
    "held", [{NAN: 1, ANOTHER: 2}, {NAN: torch.ones(2), ANOTHER: torch.zeros(2)}, {(1, NAN): {}, (1, ANOTHER): [3]}]
)
def test_two_keys_that_would_be_stored_as_one_are_refused(tmp_path: Path, held: Any) -> None:
    with pytest.raises(UnsupportedValueError, match="one of the two values would be lost") as caught:
        holdfast.save({"before": 1, "d": held}, tmp_path / "native")
    assert caught.value.key.startswith('["d"]')
    assert len(caught.value.keys) == 1
    assert not (tmp_path / "native").exists()


def test_one_nan_is_a_key_like_any_other(tmp_path: Path) -> None:
    holdfast.save({"d": {NAN: torch.ones(2), 1.5: 2}, "set": {NAN, ANOTHER}}, tmp_path / "native")
    found = holdfast.open(tmp_path / "native").read()
    assert [key != key for key in found["d"]] == [True, False]
    assert len(found["set"]) == 2


def test_a_torch_file_with_two_nans_as_keys_of_tensors_is_refused_and_not_mixed_up(tmp_path: Path) -> None:
    torch.save({"d": {NAN: torch.ones(2), ANOTHER: torch.zeros(2)}}, tmp_path / "x.pt")
    with pytest.raises(UnsupportedValueError, match="cannot be told apart") as caught:
        holdfast.open(tmp_path / "x.pt")
    assert str(tmp_path / "x.pt") in str(caught.value)
    tied = torch.ones(2)
    torch.save({"d": {NAN: tied, ANOTHER: tied}}, tmp_path / "tied.pt")
    assert [value.tolist() for value in holdfast.open(tmp_path / "tied.pt").read()["d"].values()] == [[1, 1]] * 2
