"""Typed values: what goes in comes out, type for type and bit for bit, and nothing that a file says is trusted."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import itertools
import json
import pathlib
import pickle
import struct
import subprocess
import sys
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast._formats.native.refs import PerRankValues, PickledValue, UnknownValue, UnregisteredValue
from holdfast._formats.native.values import Encoder, decode, leaves, numpy_dtype_from, register_type
from holdfast.errors import DamagedCheckpointError, UnreadablePickleError, UnsupportedValueError
from tests.properties import examples

Point = register_type(collections.namedtuple("Point", ["x", "y"]))


@register_type
class Color(enum.Enum):
    RED = 1
    BLUE = "b"


@register_type
@dataclasses.dataclass(frozen=True)
class Config:
    rate: Any
    name: Any = "x"


class Opaque:
    def __init__(self, content: int) -> None:
        self.content = content


class Bag:
    """Gives every tensor a key of its own, and gives it back."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self.paths: dict[str, Any] = {}

    def take(self, path: tuple[Any, ...], tensor: Any) -> str:
        key = f"tensor {len(self.tensors)}"
        self.tensors[key], self.paths[key] = tensor, path
        return key


def encode(state: Any, **options: Any) -> Any:
    return Encoder(Bag().take, **options).encode(state)


def round_trip(state: Any, **options: Any) -> Any:
    """Through the bytes of a file, as a strict JSON parser reads them."""
    bag = Bag()
    stored = Encoder(bag.take, **options).encode(state)
    text = json.dumps(stored, ensure_ascii=False, allow_nan=False).encode("utf-8")
    return decode(json.loads(text), bag.tensors.__getitem__, **options)


def fingerprint(value: Any) -> Any:
    """What makes two values the same: types, bits, and order where there is one. Written without our own code."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("<d", value)
    if kind is complex:
        return kind, struct.pack("<dd", value.real, value.imag)
    if kind in (list, tuple, Point, torch.Size):
        return kind, [fingerprint(item) for item in value]
    if kind is collections.deque:
        return kind, [fingerprint(item) for item in value], value.maxlen
    if kind in (set, frozenset):
        return kind, sorted(repr(fingerprint(item)) for item in value)
    if kind in (dict, collections.OrderedDict, collections.Counter, collections.defaultdict):
        pairs = [(fingerprint(key), fingerprint(item)) for key, item in value.items()]
        return kind, pairs, getattr(value, "default_factory", None)
    if kind is slice:
        return kind, fingerprint([value.start, value.stop, value.step])
    if kind is Config:
        return kind, fingerprint([value.rate, value.name])
    if kind is PerRankValues:
        return kind, fingerprint(list(value.ranks))
    if isinstance(value, (np.str_, np.bytes_)):
        return kind, [*value]
    if isinstance(value, (np.generic, np.ndarray)):
        return kind, value.dtype, value.shape, value.tobytes()
    if isinstance(value, (datetime.datetime, datetime.time)):
        return kind, value.isoformat(), value.fold, value.tzinfo
    if kind is decimal.Decimal:
        return kind, value.as_tuple()
    if isinstance(value, torch.Tensor):
        return kind, id(value)
    return kind, value


any_text = st.text(st.characters(exclude_categories=()), max_size=6)  # lone surrogates included
any_float = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
any_float |= st.sampled_from([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 5e-324, 1.5])
any_int = st.integers(-(2**70), 2**70) | st.sampled_from([2**2048, -(2**2048), 2**2048 - 1])
zones = st.none() | st.integers(-86_399, 86_399).map(lambda s: datetime.timezone(datetime.timedelta(seconds=s)))
STRUCTURE = [("a", "<i2"), ("b", "<f8", (2,)), ("c", [("d", "|S3")])]
SIMPLE = ["?", "b", "u1", "<i2", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16", "<M8[ns]", "<m8[25s]", "|V5"]
scalar_dtypes = st.sampled_from([*SIMPLE, STRUCTURE]).map(np.dtype)
numpy_scalars = scalar_dtypes.flatmap(
    lambda dtype: st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize).map(
        lambda content: np.frombuffer(content, dtype)[0]
    )
)
numpy_arrays = st.tuples(scalar_dtypes, st.lists(st.integers(0, 3), max_size=3)).map(
    lambda made: (
        np.arange(int(np.prod(made[1])) * made[0].itemsize, dtype="u1").view(made[0]).reshape(made[1])
        if np.prod(made[1])
        else np.zeros(made[1], made[0])
    )
)
keys_and_values = st.one_of(
    st.none(),
    st.booleans(),
    any_int,
    any_float,
    any_text,
    st.binary(max_size=5),
    st.complex_numbers(allow_nan=True),
    st.builds(range, st.integers(), st.integers(), st.integers(1, 9)),
    st.datetimes(timezones=zones),
    st.dates(),
    st.times(timezones=zones),
    st.timedeltas(),
    st.decimals(allow_nan=False) | st.sampled_from([decimal.Decimal("-0E+7"), decimal.Decimal("1e999999999")]),
    st.fractions(),
    st.uuids(),
    any_text.map(lambda text: pathlib.Path("dir") / text.replace("\0", "")),
    st.sampled_from([pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("c:\\d"), Color.RED, Color.BLUE]),
    st.sampled_from([torch.float32, torch.float8_e4m3fn, torch.device("cuda:1"), torch.device("cpu"), torch.strided]),
    st.sampled_from([torch.channels_last, torch.Size([]), torch.Size([2, 3]), np.dtype("<M8[D]"), np.dtype(">f4")]),
    st.sampled_from([np.str_("a\0"), np.str_(""), np.str_("\ud800"), np.bytes_(b"b\0\0"), np.bytes_(b"")]),
    numpy_scalars.filter(lambda scalar: scalar.dtype.kind != "V"),
)
keys = st.recursive(
    keys_and_values,
    lambda inner: (
        st.lists(inner, max_size=2).map(tuple)
        | st.frozensets(inner, max_size=2)
        | st.builds(Point, inner, inner)
        | st.builds(Config, inner, inner)
    ),
    max_leaves=3,
)
closed_values = keys | numpy_scalars | numpy_arrays | st.binary(max_size=3).map(bytearray)
dicts = st.sampled_from(
    [dict, collections.OrderedDict, collections.Counter, lambda content: collections.defaultdict(list, content)]
)


def dict_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def make(kind: Any, content: dict[Any, Any]) -> Any:
        made = kind({})
        dict.update(made, content)
        return made

    names = st.dictionaries(any_text | st.just("$"), inner, max_size=3)
    return st.builds(make, dicts, names | st.dictionaries(keys, inner, max_size=3))


states = st.recursive(
    keys_and_values
    | numpy_scalars
    | numpy_arrays
    | st.builds(lambda: torch.zeros(2))
    | st.sets(keys, max_size=3)
    | st.builds(slice, closed_values, closed_values, closed_values)
    | st.lists(closed_values, max_size=3).map(lambda items: collections.deque(items, 3))
    | st.lists(closed_values, max_size=3).map(collections.deque),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | dict_of(inner)
        | st.builds(Point, inner, inner)
        | st.builds(Config, inner, inner)
        | st.lists(inner, max_size=2).map(lambda ranks: PerRankValues(tuple(ranks)))
    ),
    max_leaves=8,
)


@settings(
    max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(states)
def test_any_state_comes_back_with_the_same_types_bits_and_order(state):
    assert fingerprint(round_trip(state)) == fingerprint(state)


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow])
@given(states)
def test_what_was_read_is_stored_in_the_same_way_again(state):
    assert json.dumps(encode(round_trip(state))) == json.dumps(encode(state))


def test_plain_data_is_plain_json():
    state = {"a": [1, 0.5, True, None, "ü"], "b": {"c": {}}, "d": []}

    assert json.dumps(encode(state)) == json.dumps(state)


def test_a_negative_zero_and_the_payload_of_a_nan_survive():
    payload = struct.unpack("<d", bytes.fromhex("efbeadde0000f8ff"))[0]

    zero, nan = round_trip([-0.0, payload])

    assert struct.pack("<d", zero) == struct.pack("<d", -0.0)
    assert struct.pack("<d", nan).hex() == "efbeadde0000f8ff"
    assert encode(payload) == {"$": "float", "bits": "fff80000deadbeef"}


def test_two_halves_of_a_surrogate_pair_stay_two_characters():
    # JSON parsers join the escapes \ud83d\ude00 to one character.
    halves = "\ud83d" + "\ude00"

    assert round_trip([halves, {halves: 1}, "\U0001f600"]) == [halves, {halves: 1}, "\U0001f600"]


def test_an_int_of_more_digits_than_python_parses_comes_back():
    assert round_trip([10**5000, -(10**5000)]) == [10**5000, -(10**5000)]


def test_a_dict_with_a_dollar_key_is_not_taken_for_a_typed_value():
    state = {"$": "tuple", "items": [1, 2]}

    assert round_trip(state) == state


def test_the_order_of_dicts_is_kept():
    state = {"b": 1, "a": 2, 3: 4, None: 5, "A": 6}

    assert list(round_trip(state)) == ["b", "a", 3, None, "A"]


@pytest.mark.parametrize("text", ["'abcdefgh'", "(i, str(i)) for i in range(30)"])
def test_equal_sets_are_stored_in_the_same_way_by_all_processes(text):
    program = (
        "import json; from holdfast._formats.native.values import Encoder\n"
        f"print(json.dumps(Encoder(None).encode([set({text}), frozenset([frozenset({text}), 1])])))"
    )

    stored = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2", "3")
    }

    assert len(stored) == 1


def test_tensors_and_arrays_are_handed_over_with_their_paths():
    bag = Bag()
    state = {"a": [torch.ones(1), (np.ones(2),)], 5: Point(torch.ones(1), 1), "c": Config(torch.ones(1)), "d": None}
    state["d"] = PerRankValues((torch.ones(1), np.zeros(1)))

    Encoder(bag.take).encode(state)

    assert list(bag.paths.values()) == [("a", 0), ("a", 1, 0), (5, "x"), ("c", "rate"), ("d", 0), ("d", 1)]
    assert bag.tensors["tensor 0"] is state["a"][0]


def test_tensors_behind_sets_and_keys_are_still_handed_over():
    tensor = torch.ones(1)
    state = [{1}, {(2,): tensor}, collections.deque([3]), slice(4), tensor]

    assert fingerprint(round_trip(state)) == fingerprint(state)


def test_a_path_begins_where_the_state_lies():
    bag = Bag()

    Encoder(bag.take).encode({"w": torch.ones(1)}, ("model", 0))

    assert list(bag.paths.values()) == [("model", 0, "w")]


def test_tensors_without_a_given_key_get_the_key_of_their_path():
    state = {"a.b": torch.ones(1), "a": {"b": 1, "c": torch.ones(1)}}

    stored = Encoder(lambda path, tensor: None).encode(state)

    assert stored["a.b"] == {"$": "tensor", "key": '["a.b"]'}
    assert stored["a"]["c"] == {"$": "tensor", "key": "a.c"}
    below = Encoder(lambda path, tensor: None).encode(state, ("m",))
    assert below["a.b"]["key"] == '["m"]["a.b"]'
    assert below["a"]["c"]["key"] == "m.a.c"


def test_subclasses_of_tensors_are_tensors():
    bag = Bag()

    Encoder(bag.take).encode([torch.nn.Parameter(torch.ones(1)), torch.nn.Buffer(torch.ones(1))])

    assert len(bag.tensors) == 2


def test_an_error_of_the_caller_passes_and_the_encoder_can_be_used_again():
    def take(path, tensor):
        raise OSError("disk full")

    encoder = Encoder(take)
    inner = [[torch.ones(1)]]
    for _ in range(2):
        with pytest.raises(OSError, match="disk full"):
            encoder.encode(inner)

    assert encoder.encode([[1]]) == [[1]]


class Text(str):
    pass


class Number(int):
    pass


class Table(dict):
    pass


class Unregistered(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class Plain:
    a: int = 1


class Float64(np.float64):
    pass


class Zone(datetime.tzinfo):
    def utcoffset(self, moment):
        return datetime.timedelta(0)


REFUSED = {
    "a class": Opaque(1),
    "a type": int,
    "a function": len,
    "a subclass of str": Text("a"),
    "a subclass of int": Number(1),
    "a subclass of dict": Table(a=1),
    "a subclass of a numpy scalar": Float64(1),
    "an unregistered enum": Unregistered.ONE,
    "an unregistered dataclass": Plain(),
    "a dict with a lambda": collections.defaultdict(lambda: 1),
    "a time zone with a name": datetime.datetime(2026, 1, 1, tzinfo=Zone()),
    "an offset with a name": datetime.time(1, tzinfo=datetime.timezone(datetime.timedelta(0), "here")),
    "an array of objects": np.array([{}, []], dtype=object),
    "an array of objects in fields": np.zeros(2, [("a", "O")]),
    "a masked array": np.ma.masked_array([1, 2], [True, False]),
    "a recarray": np.rec.array([(1,)], dtype=[("a", "i4")]),
    "a long double": np.longdouble(1),
    "an array of long doubles": np.zeros(2, np.clongdouble),
    "fields that overlap": np.zeros(1, np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 0]})),
    "a numpy record": np.rec.array([(1,)], dtype=[("a", "i4")])[0],
    "a tensor in a deque": collections.deque([torch.ones(1)]),
    "a tensor in a set": {torch.ones(1)},
    "a tensor as a key": {torch.ones(1): 1},
    "a tensor in a slice": slice(torch.tensor(1)),
    "a fraction of a million digits": fractions.Fraction(1 << 70000, 3),
    "a pickle of another save": PickledValue(b"."),
    "a generator": (n for n in "ab"),
    "a memoryview": memoryview(b"a"),
    "Ellipsis": ...,
    "a value per rank in a deque": collections.deque([PerRankValues((1,))]),
    "an unknown value with a tensor": UnknownValue("new", {"$": "new", "a": [{"$": "tensor", "key": "k"}]}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_come_back_as_something_else_is_refused(what):
    with pytest.raises(UnsupportedValueError, match="there") as caught:
        encode({"here": {"fine": 1, "there": REFUSED[what]}})

    assert caught.value.key.startswith("here.there") or caught.value.key.startswith('["here"]["there"]')


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="numpy 1 has no such arrays")
def test_arrays_of_texts_of_any_length_are_refused():
    with pytest.raises(UnsupportedValueError):
        encode(np.array(["a"], dtype=np.dtypes.StringDType()))


def test_all_that_is_refused_is_named_in_one_error():
    state = {"a": [1, Opaque(1)], "b": {5: Opaque(2)}, "c": {"d": Plain()}, "fine": 1}

    with pytest.raises(UnsupportedValueError) as caught:
        encode(state)

    assert caught.value.key == "a.1"
    assert caught.value.keys == ["a.1", "b.5", "c.d"]
    assert "a.1" in str(caught.value)
    assert "put @holdfast.register_type above the class" in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).keys == caught.value.keys


def test_a_key_that_is_refused_is_named_by_its_type():
    with pytest.raises(UnsupportedValueError) as caught:
        encode({"a": {lambda: 1: 2}})

    assert caught.value.key == '["a"][<builtins.function>]'


def test_a_thousand_refused_values_make_a_short_message():
    with pytest.raises(UnsupportedValueError, match="and 980 more") as caught:
        encode([Opaque(n) for n in range(1000)])

    assert len(caught.value.keys) == 1000
    assert len(str(caught.value)) < 5000


def test_a_state_that_contains_itself_is_refused_with_the_place():
    inner: list[Any] = []
    inner.extend([inner, inner, {"again": inner}])

    with pytest.raises(UnsupportedValueError, match="contains itself") as caught:
        encode({"a": inner})

    assert caught.value.keys == ["a.0", "a.1", "a.2.again"]


def test_the_same_list_twice_is_no_cycle():
    shared = [1]

    assert round_trip([shared, {"a": shared}]) == [[1], {"a": [1]}]


NESTINGS = {
    "list": lambda inner: [inner],
    "object": lambda inner: {"a": inner},
    "dict": lambda inner: {1: inner},
    "tuple": lambda inner: (inner,),
    "frozenset": lambda inner: frozenset([inner]),
    "deque": lambda inner: collections.deque([inner]),
    "namedtuple": lambda inner: Point(inner, 1),
    "dataclass": lambda inner: Config(inner),
    "ranks": lambda inner: PerRankValues((inner,)),
    "slice": lambda inner: slice(inner),
}


def nested(wrap: Any, depth: int) -> Any:
    value: Any = ()
    for _ in range(depth - 1):
        value = wrap(value)
    return value


@pytest.mark.parametrize("kind", NESTINGS)
def test_what_is_as_deep_as_allowed_can_be_read_and_what_is_deeper_is_refused(kind):
    deepest = nested(NESTINGS[kind], 128)

    again = encode(round_trip(deepest))

    assert again == encode(deepest)
    assert list(leaves(again))
    with pytest.raises(UnsupportedValueError, match="128 containers"):
        encode(nested(NESTINGS[kind], 129))


def test_an_empty_dict_in_the_deepest_place_can_be_read():
    state: Any = {}
    for _ in range(127):
        state = [state]

    assert round_trip(state) == state
    with pytest.raises(UnsupportedValueError):
        encode([state])


# Pickles


def test_a_pickle_is_stored_and_loaded_only_where_it_was_allowed():
    stored = encode({"a": Opaque(7)}, allow_pickle=True)

    assert decode(stored, str, allow_pickle=True)["a"].content == 7
    left = decode(stored, str)["a"]
    assert isinstance(left, PickledValue)
    assert pickle.loads(left.data).content == 7
    assert encode({"a": left}, allow_pickle=True) == stored


def test_listed_types_are_not_pickled_even_if_that_is_allowed():
    assert encode((1, {2}), allow_pickle=True) == encode((1, {2}))


def test_what_cannot_even_be_pickled_is_refused():
    with pytest.raises(UnsupportedValueError, match="cannot be pickled either"):
        encode(lambda: 1, allow_pickle=True)


def test_a_pickle_that_fails_is_named():
    with pytest.raises(UnreadablePickleError, match="'a'") as caught:
        decode({"a": {"$": "pickle", "base64": "Li4u"}}, str, allow_pickle=True)

    assert caught.value.key == "a"


def test_reading_runs_no_code_of_a_pickle(tmp_path):
    class Attack:
        def __reduce__(self):
            return pathlib.Path.touch, (tmp_path / "ran",)

    stored = encode(Attack(), allow_pickle=True)

    assert isinstance(decode(stored, str), PickledValue)
    assert not (tmp_path / "ran").exists()


# Values that cannot be made here


def test_a_value_of_a_later_version_is_kept_as_it_is_stored():
    stored = {"$": "quaternion", "parts": [1, 2, 3, 4]}

    found = decode({"a": stored}, str)["a"]

    assert found == UnknownValue("quaternion", stored)
    assert encode(found) == stored


@pytest.mark.parametrize("stored", [{"$": "torch.dtype", "name": "float3"}, {"$": "torch.device", "name": "abacus:0"}])
def test_values_that_this_torch_does_not_know_are_kept(stored):
    assert decode({"a": stored}, str)["a"] == UnknownValue(stored["$"], stored)
    assert encode(decode(stored, str)) == stored


def test_unregistered_and_unknown_values_can_be_keys_of_dicts():
    pairs = [
        [{"$": "enum", "type": "gone:E", "name": "A"}, 1],
        [{"$": "enum", "type": "gone:E", "name": "B"}, 2],
        [{"$": "dataclass", "type": "gone:D", "fields": {"a": [1]}}, 3],
        [{"$": "new", "b": [2]}, 4],
        [{"$": "pickle", "base64": "Li4u"}, 5],
    ]
    stored = {"$": "dict", "items": pairs}

    state = decode(stored, str)

    assert (
        state[UnregisteredValue("enum", "gone:E", {"name": "A"})] == 1
        if False
        else list(state.values()) == [1, 2, 3, 4, 5]
    )
    assert encode(state, allow_pickle=True) == stored
    assert len({leaf.key for leaf in leaves(stored)}) == 5


# Hostile files


def damaged(stored: Any) -> DamagedCheckpointError:
    with pytest.raises(DamagedCheckpointError) as caught:
        decode({"a": [stored]}, str)
    assert caught.value.file == "holdfast.json"
    return caught.value


DAMAGED = [
    {"$": 1},
    {"$": None},
    {"$": ["tensor"]},
    {"$": "tensor"},
    {"$": "tensor", "key": 1},
    {"$": "tuple"},
    {"$": "tuple", "items": {}},
    {"$": "dict", "items": [[1]]},
    {"$": "dict", "items": [[1, 2, 3]]},
    {"$": "dict", "items": ["ab"]},
    {"$": "dict", "items": [[[], 1]]},
    {"$": "dict", "items": [[1, 2], [1, 3]]},
    {"$": "dict", "items": [[1, 2], [True, 3]]},
    {"$": "dict", "items": [[{"$": "tensor", "key": "k"}, 1]]},
    {"$": "set", "items": [1, 1.0]},
    {"$": "set", "items": [[]]},
    {"$": "set", "items": [{"$": "tensor", "key": "k"}]},
    {"$": "set", "items": [{"$": "Decimal", "text": "sNaN"}]},
    {"$": "deque", "items": [1, 2], "maxlen": 1},
    {"$": "deque", "items": [], "maxlen": -1},
    {"$": "deque", "items": [], "maxlen": 1 << 64},
    {"$": "deque", "items": [], "maxlen": True},
    {"$": "deque", "items": [{"$": "per_rank", "ranks": [1]}], "maxlen": None},
    {"$": "defaultdict", "items": [], "factory": "exec"},
    {"$": "defaultdict", "items": [], "factory": ["list"]},
    {"$": "float", "bits": "7ff"},
    {"$": "float", "bits": "7FF0000000000000"},
    {"$": "float", "bits": 1},
    {"$": "int", "hex": "0x1"},
    {"$": "int", "hex": ""},
    {"$": "int", "hex": "1_0"},
    {"$": "int", "hex": "\u0661"},
    {"$": "str", "base64": "/w=="},
    {"$": "complex", "real": 1, "imag": 0.0},
    {"$": "complex", "real": 1.0},
    {"$": "bytes", "base64": "a"},
    {"$": "bytes", "base64": "YQ==\n"},
    {"$": "bytes", "base64": "\ud800"},
    {"$": "bytes", "base64": None},
    {"$": "range", "start": 0, "stop": 1, "step": 0},
    {"$": "range", "start": 0.0, "stop": 1, "step": 1},
    {"$": "slice", "start": 0, "stop": 1},
    {"$": "slice", "start": {"$": "tensor", "key": "k"}, "stop": 1, "step": None},
    {"$": "datetime", "iso": "yesterday"},
    {"$": "datetime", "iso": "2026-01-01"},
    {"$": "datetime", "iso": "2026-01-01T00:00:00", "fold": 2},
    {"$": "datetime", "iso": "2026-01-01T00:00:00", "fold": 10**40},
    {"$": "date", "iso": "20260101"},
    {"$": "time", "iso": "25:00:00"},
    {"$": "timedelta", "days": 10**30, "seconds": 0, "microseconds": 0},
    {"$": "timedelta", "days": 0, "seconds": -1, "microseconds": 0},
    {"$": "timedelta", "days": 0.5, "seconds": 0, "microseconds": 0},
    {"$": "Decimal", "text": "one"},
    {"$": "Decimal", "text": "1e999999999999999999999"},
    {"$": "Decimal", "text": " 1"},
    {"$": "Fraction", "numerator": 1, "denominator": 0},
    {"$": "Fraction", "numerator": 1, "denominator": -2},
    {"$": "Fraction", "numerator": {"$": "int", "hex": "f" * 100_000}, "denominator": 3},
    {"$": "Fraction", "text": "1e999999999"},
    {"$": "UUID", "text": "1"},
    {"$": "UUID", "text": "{12345678-1234-5678-1234-567812345678}"},
    {"$": "Path", "text": 1},
    {"$": "Path", "text": {"$": "int", "hex": "1"}},
    {"$": "torch.Size", "items": [1.0]},
    {"$": "torch.Size", "items": [1 << 64]},
    {"$": "torch.Size", "items": "12"},
    {"$": "torch.device", "name": "cpu; rm -rf /"},
    {"$": "torch.dtype", "name": 1},
    {"$": "numpy.dtype", "numpy": "O"},
    {"$": "numpy.dtype", "numpy": "|O8"},
    {"$": "numpy.dtype", "numpy": "i4,i4"},
    {"$": "numpy.dtype", "numpy": "<M8[0s]"},
    {"$": "numpy.dtype", "numpy": [["a", "|O8"]]},
    {"$": "numpy.dtype", "numpy": [["a"]]},
    {"$": "numpy.dtype", "numpy": [["a", "<i4", [-1]]]},
    {"$": "numpy.dtype", "numpy": [["a", "<i4", [10**3000] * 64]]},
    {"$": "numpy.scalar", "numpy": "<i4", "base64": "AA=="},
    {"$": "numpy.scalar", "numpy": "|V999999999", "base64": ""},
    {"$": "numpy.scalar", "numpy": "<U1", "base64": "/////w=="},
    {"$": "numpy.array", "numpy": "<i4", "shape": [2], "base64": "AA=="},
    {"$": "numpy.array", "numpy": "<i4", "shape": [10**30], "base64": "AA=="},
    {"$": "numpy.array", "numpy": "<i4", "shape": [10**18] * 64, "base64": "AA=="},
    {"$": "numpy.array", "numpy": "<i4", "shape": [0, 1 << 62, 1 << 62], "base64": ""},
    {"$": "numpy.array", "numpy": "<i4", "shape": [0] * 65, "base64": ""},
    {"$": "enum", "type": 1, "name": "A"},
    {"$": "enum", "type": "a:B", "name": 1},
    {"$": "dataclass", "type": "a:B", "fields": []},
    {"$": "namedtuple", "type": "a:B"},
    {"$": "per_rank", "ranks": {}},
    {"$": "pickle", "base64": 5},
]


@pytest.mark.parametrize("stored", DAMAGED, ids=lambda stored: json.dumps(stored)[:60])
def test_what_nobody_can_have_stored_is_damage(stored):
    assert damaged(stored).key.startswith("a.0")


def test_a_numpy_dtype_of_a_tensor_entry_is_a_dtype_or_damage_or_unknown():
    assert numpy_dtype_from([["a", "<i4", [2]]]) == np.dtype([("a", "<i4", (2,))])
    for stored in ("O", "i4,i4", None, [["a"]]):
        with pytest.raises(DamagedCheckpointError):
            numpy_dtype_from(stored)
    with pytest.raises(UnsupportedValueError, match="<i3"):
        numpy_dtype_from("<i3")


def test_a_set_is_not_json():
    assert "JSON has no set" in str(damaged({1}))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: [inner],
        lambda inner: {"a": inner},
        lambda inner: {"$": "tuple", "items": [inner]},
        lambda inner: {"$": "dict", "items": [[1, inner]]},
        lambda inner: {"$": "dict", "items": [[inner, 1]]},
        lambda inner: {"$": "frozenset", "items": [inner]},
        lambda inner: {"$": "slice", "start": inner, "stop": 1, "step": 1},
        lambda inner: {"$": "dataclass", "type": "a:B", "fields": {"a": inner}},
        lambda inner: {"$": "per_rank", "ranks": [inner]},
        lambda inner: {"$": "numpy.dtype", "numpy": [["a", inner]]},
    ],
)
def test_absurd_depth_ends_in_an_error_and_not_in_a_crash(wrap):
    stored: Any = 1
    for _ in range(100_000):
        stored = wrap(stored)

    with pytest.raises(DamagedCheckpointError):
        decode(stored, str)
    try:
        list(leaves(stored))
    except DamagedCheckpointError:
        pass  # some of these are leaves, which are not looked into


def test_keys_that_were_chosen_to_collide_are_refused_before_they_take_time():
    prime = sys.hash_info.modulus
    pairs = [[prime * n, 0] for n in range(1, 200_000)]

    assert "slow" in str(damaged({"$": "dict", "items": pairs}))
    assert "slow" in str(damaged({"$": "set", "items": [pair[0] for pair in pairs]}))


def test_a_decimal_with_a_giant_exponent_is_only_a_small_object():
    stored = {"$": "set", "items": [{"$": "Decimal", "text": "1E+999999999"}, {"$": "Decimal", "text": "1E+999999998"}]}

    assert len(decode(stored, str)) == 2


def test_no_name_in_a_file_imports_anything():
    stored = [
        {"$": "enum", "type": "antigravity:Geohash", "name": "A"},
        {"$": "dataclass", "type": "this:C", "fields": {}},
        {"$": "torch.dtype", "name": "onnx"},
        {"$": "torch.layout", "name": "load"},
    ]
    before = set(sys.modules)

    found = decode(stored, str)

    assert [type(value) for value in found] == [UnregisteredValue, UnregisteredValue, UnknownValue, UnknownValue]
    assert set(sys.modules) == before


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text | st.sampled_from(["<f4", "YQ==", "A", "tuple"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(any_text, inner, max_size=3)
        | st.fixed_dictionaries(
            {"$": st.sampled_from(sorted({stored["$"] for stored in DAMAGED if isinstance(stored["$"], str)}))},
            optional=dict.fromkeys(sorted(set(itertools.chain.from_iterable(DAMAGED)) - {"$"}), inner),
        )
    ),
    max_leaves=12,
)


@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.too_slow])
@given(json_values)
def test_any_json_is_read_or_is_damage(stored):
    try:
        state = decode(stored, lambda key: torch.zeros(1))
        list(leaves(stored))
    except DamagedCheckpointError:
        return
    try:
        encode(state)  # what can be read can be looked at
    except UnsupportedValueError:
        pass


# Without torch


def test_all_of_it_works_where_torch_is_not_installed():
    program = """
import sys
sys.modules["torch"] = None
import collections, json
import numpy as np
from holdfast._formats.native.refs import UnknownValue
from holdfast._formats.native.values import Encoder, decode, register_type, key_of, keys_of, leaves

taken = {}
def take(path, array):
    taken[key_of(path)] = array
    return key_of(path)

state = {"w": np.arange(3.0), "t": (1, np.float32(2)), "c": collections.Counter("aab"), "s": {1, 2}}
stored = json.loads(json.dumps(Encoder(take).encode(state)))
again = decode(stored, taken.__getitem__)
assert again["w"] is state["w"] and again["t"] == (1, 2) and type(again["t"][1]) is np.float32, again
assert again["c"] == state["c"] and type(again["c"]) is collections.Counter and again["s"] == {1, 2}
assert [leaf.key for leaf in leaves(stored)] == ["w", "t", "c.a", "c.b", "s"], list(leaves(stored))
of_torch = [{"$": "torch.dtype", "name": "float32"}, {"$": "torch.Size", "items": [1]}]
for stored in [*of_torch, {"$": "torch.device", "name": "cpu"}]:
    value = decode(stored, None)
    assert value == UnknownValue(stored["$"], stored), value
    assert Encoder(None).encode(value) == stored
assert sys.modules["torch"] is None
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_importing_and_plain_values_do_not_load_torch():
    program = (
        "import sys; from holdfast._formats.native.values import Encoder, decode\n"
        "decode(Encoder(None).encode({'a': (1, {2})}), None)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_uuid_and_paths_come_back_as_what_they_were():
    state = [uuid.UUID(int=5), pathlib.Path("/tmp/\udcff"), pathlib.PureWindowsPath("c:\\a")]

    assert fingerprint(round_trip(state)) == fingerprint(state)
