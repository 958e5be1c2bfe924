"""The lines of a record that describe tensors: read by what they have in common, and never otherwise than as JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast._base.json_objects import parse_json_object
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.refs import TensorRef, TensorRefs
from holdfast._formats.native.stored_parts import Places
from holdfast._formats.native.tensor_rows import TensorRows, parse_record, tensor_lines, tensors_from
from holdfast.errors import DamagedCheckpointError

REST = ',"dtype":"float32","shape":[2],"kind":"replicated"}'


def text_of(*rows: str, before: str = "", after: str = '"tree":{}') -> bytes:
    return ('{"format":"x",' + before + '\n"tensors":[\n' + ",\n".join(rows) + "],\n" + after + "}\n").encode()


def in_full(members: dict) -> dict:
    """With the rows one by one, as JSON has them."""
    rows = members["tensors"]
    if isinstance(rows, TensorRows):
        every = zip(rows.keys, rows.kinds.tolist(), strict=True)
        members = {**members, "tensors": [{"key": key, **rows.members[kind]} for key, kind in every]}
    return members


@given(st.lists(st.text(max_size=6), min_size=1, max_size=6, unique=True), st.integers(0, 3))
@example(['a","dtype":"int8', "b"], 0)
@example(["a\\", 'b",', "c\n"], 0)
def test_what_was_written_is_read_whatever_the_keys_are(keys, divided):
    refs = [TensorRef(key, dtype_named("float32"), (2,) * (number % 3)) for number, key in enumerate(keys)]
    places = Places((), [number % (divided + 1) for number in range(len(refs))], [0] * len(refs))
    data = text_of(*tensor_lines(TensorRefs.of(refs), places))
    assert in_full(parse_record(data, "source")) == parse_json_object(data, "source")
    rows = parse_record(data, "source")["tensors"]
    assert list(tensors_from(rows if isinstance(rows, TensorRows) else TensorRows.of(rows), "source")) == refs


@pytest.mark.parametrize(
    "data",
    {
        "a list of the same name elsewhere": text_of(
            '{"key":"a"' + REST, before='"metadata":{', after='"b":1},"tensors":[]'
        ),
        "the same among others": text_of('{"key":"a"' + REST, before='"metadata":{', after='"b":1},"tensors":[1]'),
        "another order": text_of('{"dtype":"float32","key":"a"}'),
        "spaces": text_of('{ "key": "a"' + REST),
        "a list in a row": text_of('{"key":"a","numpy":[{"b":\n"c"}],\n"d":1}'),
        "no tensors": text_of(),
        "not ASCII": text_of('{"key":"ä"' + REST),
    }.values(),
)
def test_other_forms_are_read_as_json(data):
    assert in_full(parse_record(data, "source")) == parse_json_object(data, "source")


@pytest.mark.parametrize(
    "data",
    {
        "a key twice in a row": text_of('{"key":"a","key":"b"' + REST),
        "a member twice in a row": text_of('{"key":"a","kind":"sharded"' + REST),
        "tensors twice": text_of('{"key":"a"' + REST, before='"tensors":[],'),
        "a control character": text_of('{"key":"a\x01"' + REST),
        "a quote too many": text_of('{"key":"a"b"' + REST),
        "an escape that is none": text_of('{"key":"\\x"' + REST),
        "a row that goes on": text_of('{"key":"a"' + REST + "}"),
        "two rows in a line": text_of('{"key":"a"' + REST + ',{"key":"b"' + REST + "x"),
        "not a number": text_of('{"key":"a"' + REST, before='"metadata":NaN,'),
        "not a number afterwards": text_of('{"key":"a"' + REST, after='"tree":NaN'),
    }.values(),
)
def test_what_json_refuses_is_refused(data):
    with pytest.raises(DamagedCheckpointError):
        parse_json_object(data, "source")
    with pytest.raises(DamagedCheckpointError):
        parse_record(data, "source")


def test_rows_that_say_the_same_are_looked_at_once():
    rows = parse_record(text_of(*(json.dumps({"key": f"t{n}"})[:-1] + REST for n in range(5))), "source")["tensors"]
    assert not isinstance(rows, TensorRows)  # json.dumps puts a space there
    rows = parse_record(text_of(*(f'{{"key":"t{n}"' + REST for n in range(5))), "source")["tensors"]
    assert len(rows.members) == 1
    assert rows.keys == [f"t{n}" for n in range(5)]
