"""Patterns choose the keys that they describe, and all below."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._base.patterns import Choice, Chooser, Selection


@pytest.mark.parametrize(
    ("pattern", "key", "expected"),
    [
        ("model", "model", True),
        ("model", "model.weight", True),
        ("model", "models", False),
        ("model.*", "model", False),
        ("model.*", "model.layers.0.bias", True),
        ("*.bias", "model.layers.0.bias", True),
        ("*.bias", "model.bias.extra", True),
        ("*.bias", "bias", False),
        ("layer?", "layer1.weight", True),
        ("layer[12]", "layer3", False),
        ("a.b", "a-b", False),
        ("a\nb", "a\nb.c", True),
        ("*", "anything\nat all", True),
        ("", "", True),
        ("data", '["data"][null]', True),
        ("data", '["data.x"]["y"]', True),
        ("data", '["database"][null]', False),
        ("data.null", '["data"][null]', True),
        ("*.2.5", '["data"][2.5]', True),
        ("data.1.a", '["data"][1]["a"]', True),
        ('["data"]', '["data"][null]', True),
        ('["data"][null]', '["data"][null]', True),
        ('["data"][null]', '["data"][true]', False),
        ("a[1]", "a[1].b", True),
        ("[a", "[a", True),
        (re.compile("model"), "model.weight", False),
        (re.compile(r"model\..*"), "model.weight", True),
        (re.compile("weight"), "model.weight", False),
        (len, "x", True),
        (len, "", False),
        ([], "model", False),
        (["a", re.compile("b"), lambda key: key == "c"], "c", True),
        ((name for name in ("a", "b")), "b", True),
    ],
)
def test_a_pattern_chooses_a_key(pattern, key, expected):
    chosen = Chooser(pattern)
    assert chosen(key) is expected
    assert chosen(key) is expected


@given(st.text(), st.text())
def test_a_text_without_wildcards_chooses_itself_and_what_is_below(name, rest):
    escaped = re.sub(r"([*?\[])", r"[\1]", name)
    assert Chooser(escaped)(name)
    assert Chooser(escaped)(f"{name}.{rest}")
    assert Chooser(escaped)(name + rest) == (rest == "" or rest.startswith("."))


@pytest.mark.parametrize("wrong", [5, None, [1], object(), b"model"])
def test_what_is_no_pattern_is_reported(wrong):
    with pytest.raises(TypeError, match="does not say which keys are meant"):
        Chooser(wrong)


def test_a_selection_is_what_is_included_and_not_excluded():
    assert Selection(None, None).is_everything
    assert not Selection("*", None).is_everything
    assert not Selection(None, []).is_everything
    selection = Selection(["a", "b"], "*.x")
    assert [selection(key) for key in ("a", "a.x", "b.y", "c")] == [True, False, True, False]
    assert Selection(None, "a")("b")
    assert not Selection([], None)("b")


def test_the_first_pattern_that_fits_has_the_value():
    choice = Choice({"a.*": 1, re.compile("a.b"): 2, "b": 0})
    assert [choice(key) for key in ("a.b", "b", "c")] == [1, 0, None]
    assert choice
    assert not Choice(None)
    assert not Choice({})
