"""What is typed to name a part of a tensor means what it means in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast._tools.inspecting.elements import parse_key_slice, parsed
from tests.properties import examples

ARRAY = np.arange(5 * 6 * 7).reshape(5, 6, 7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> holdfast.Checkpoint:
    path = tmp_path_factory.mktemp("slices") / "c"
    holdfast.save({"model": {"w": torch.from_numpy(ARRAY)}}, path)
    return holdfast.open(path)


numbers = st.integers(-8, 8)
limits = st.one_of(st.none(), numbers)
positive = st.one_of(st.none(), st.integers(1, 4), st.integers(-4, -1))


@st.composite
def slices(draw: st.DrawFn) -> str:
    parts = [
        draw(st.one_of(numbers.map(str), st.builds(_written, limits, limits, positive)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    if draw(st.booleans()) and len(parts) < 3:
        parts.insert(draw(st.integers(0, len(parts))), "...")
    return draw(st.sampled_from([",", ", ", " , "])).join(parts)


def _written(start: int | None, stop: int | None, step: int | None) -> str:
    text = ":".join("" if limit is None else str(limit) for limit in (start, stop))
    return text if step is None else f"{text}:{step}"


@given(text=slices())
@settings(max_examples=examples(200))
def test_parts_are_those_of_numpy(checkpoint: holdfast.Checkpoint, text: str) -> None:
    key, part = parse_key_slice(f"model.w[{text}]", checkpoint)
    assert key == "model.w"
    python: Any = eval(f"np.s_[{text}]", {"np": np})  # noqa: S307 - made above
    try:
        wanted = ARRAY[python]
    except IndexError:
        with pytest.raises(IndexError):
            checkpoint[key].numpy(part)
        return
    assert np.array_equal(checkpoint[key].numpy(part), wanted)


def test_a_key_that_ends_in_brackets_is_that_key() -> None:
    keys = {"w", "w[0]", '["a.b"]', '["a"]["b"]', '["a"][3]'}

    assert parse_key_slice("w[0]", keys) == ("w[0]", None)
    assert parse_key_slice("w[1]", keys) == ("w", (1,))
    assert parse_key_slice("w[0][1]", keys) == ("w[0]", (1,))
    assert parse_key_slice('["a.b"]', keys) == ('["a.b"]', None)
    assert parse_key_slice('["a.b"][0:2]', keys) == ('["a.b"]', (slice(0, 2),))
    assert parse_key_slice('["a"][3]', keys) == ('["a"][3]', None)
    assert parse_key_slice('["a"][3][1,]', keys) == ('["a"][3]', (1,))
    assert parse_key_slice("nothing", keys) == ("nothing", None)
    assert parse_key_slice('["x.y"]', keys) == ('["x.y"]', None)  # for whoever looks it up to complain


@pytest.mark.parametrize("inside", ["", "a", "1.5", "0:1:0", "1:2:3:4", "None", "1 2", "__import__('os')", "[0]"])
def test_what_makes_no_sense_is_refused(inside: str) -> None:
    assert parsed(inside) is None
    with pytest.raises(ValueError, match="there is no such part as"):
        parse_key_slice(f"w[{inside}]", {"w", "w["})
