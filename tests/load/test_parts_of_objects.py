"""Dataclasses and named tuples of which ``include`` and ``exclude`` leave some fields."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

import holdfast
from holdfast._formats.native import registered_types as registry
from holdfast._formats.native.refs import UnregisteredValue
from holdfast.errors import StateMismatchError, UnsupportedValueError


@dataclasses.dataclass
class Progress:
    a: Any
    b: Any


class Span(NamedTuple):
    a: Any
    b: Any


@pytest.fixture
def _registered(monkeypatch):
    """For one test."""
    monkeypatch.setattr(registry, "_by_name", dict(registry._by_name))
    monkeypatch.setattr(registry, "_by_class", dict(registry._by_class))
    holdfast.register_type(Progress)
    holdfast.register_type(Span)


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("cls", [Progress, Span])
@pytest.mark.parametrize("options", [{"include": "p.a"}, {"exclude": "p.b"}])
@pytest.mark.filterwarnings("ignore:.*UnregisteredValue")
def test_fields_that_are_not_wanted_are_not_stored(tmp_path, cls, options):
    holdfast.save({"p": cls(torch.ones(1), "secret")}, tmp_path / "x", **options)
    assert list(holdfast.open(tmp_path / "x")) == ["p.a"]
    assert not any(b"secret" in file.read_bytes() for file in (tmp_path / "x").rglob("*") if file.is_file())
    part = holdfast.open(tmp_path / "x").read()["p"]
    assert isinstance(part, UnregisteredValue)
    assert part.fields == {"a": torch.ones(1)}
    state = {"p": cls(torch.zeros(1), "kept")}
    report = holdfast.load(state, tmp_path / "x", allow_missing="p.b")
    assert (state["p"], report.missing) == (cls(torch.ones(1), "kept"), ["p.b"])
    with pytest.raises(StateMismatchError, match="of which only some fields are stored"):
        holdfast.load({"p": None}, tmp_path / "x")


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("cls", [Progress, Span])
def test_fields_that_are_not_wanted_are_not_loaded(tmp_path, cls):
    holdfast.save({"p": cls(1, 2), "list": [torch.ones(1), cls(3, 4)]}, tmp_path / "x")
    state = {"p": cls(0, 0), "list": [torch.zeros(1), cls(0, 0)]}
    holdfast.load(state, tmp_path / "x", include=["p.a", "list.1.b"])
    assert state == {"p": cls(1, 0), "list": [torch.zeros(1), cls(0, 4)]}
    with pytest.raises(StateMismatchError, match="of which only some fields are stored or to be loaded") as raised:
        holdfast.load({"p": None}, tmp_path / "x", include="p.a")
    assert list(raised.value.kinds) == ["p"]
    assert holdfast.open(tmp_path / "x").read("p.a")["p"].fields == {"a": 1}
    assert holdfast.open(tmp_path / "x").read("p") == {"p": cls(1, 2)}


@pytest.mark.parametrize("cls", [Progress, Span])
@pytest.mark.parametrize("allow_pickle", [False, True])
def test_a_part_of_an_object_takes_a_registered_class(tmp_path, cls, allow_pickle):
    with pytest.raises(UnsupportedValueError, match=r"only some fields of 'p' .* @holdfast.register_type") as raised:
        holdfast.save({"p": cls(1, 2)}, tmp_path / "x", exclude="p.b", allow_pickle=allow_pickle)
    assert raised.value.keys == ["p"]
    assert not (tmp_path / "x").exists()
