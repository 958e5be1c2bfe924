"""Values that are not tensors: exact round trips, torch in both directions, and nothing that runs by itself."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import io
import pathlib
import random
import threading
import types
import uuid
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._formats.archives.values import decode_value, encode_value, needs_pickle
from holdfast._formats.dcp.archive import read_directory
from holdfast.errors import DamagedCheckpointError, HoldfastError, RefusedPickleError
from tests.formats.dcp.blobs import entries_of, torch_blob, zipped
from tests.properties import examples

UTC = datetime.timezone.utc
EAST = datetime.timezone(datetime.timedelta(hours=5, minutes=30), "east")

VALUES: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, 255, 256, 65535, 65536, -1, 1 << 31, -(1 << 31) - 1, 1 << 63, -(1 << 200)],
    "floats": [0.0, -0.0, 1e-3, float("inf"), 2.0**-1074],
    "texts": ["", "a", "ü€😀", "x" * 1000, "\ud800"],
    "bytes": [b"", b"\x00\xff", bytes(range(256)), bytearray(b""), bytearray(b"\xff\x00")],
    "complex": 1.5 - 2j,
    "nested": {"a": [1, (2, {3: [4, None]})], 5: {"b": ()}, (1, "x"): [[]], None: 1.0, 2.5: "half"},
    "sets": [set(), {1, "a", (2,)}, frozenset(), frozenset([frozenset([1]), 2])],
    "slice and range": [slice(1, None, 2), range(3, 90, 4), range(0), Ellipsis, NotImplemented],
    "types": [int, float, str, list, dict, type(None), bool, tuple, set, bytes],
    "ordered": OrderedDict([("b", 1), ("a", OrderedDict())]),
    "default of list": defaultdict(list, {"a": [1]}),
    "default of int": defaultdict(int, {(1, 2): 3}),
    "default of nothing": defaultdict(None, {1: 2}),
    "counter": Counter("abracadabra"),
    "deques": [deque([1, 2, 3], 2), deque(), deque(["x"])],
    "datetimes": [
        datetime.datetime(2024, 2, 29, 23, 59, 59, 999999),
        datetime.datetime(1, 1, 1, tzinfo=UTC),
        datetime.datetime(2024, 10, 27, 2, 30, tzinfo=EAST),
    ],
    "dates": [datetime.date(9999, 12, 31), datetime.time(1, 2, 3, 4), datetime.time(0, 0, tzinfo=UTC)],
    "spans": [datetime.timedelta(-1, 5, 7), datetime.timedelta.max, UTC, EAST],
    "decimals": [decimal.Decimal("1.50"), decimal.Decimal("-Infinity"), decimal.Decimal("1e-400")],
    "fractions": [fractions.Fraction(-1, 3), fractions.Fraction(7)],
    "uuids": [uuid.UUID(int=5), uuid.uuid4(), uuid.uuid1()],
    "paths": [pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("C:/x"), pathlib.Path("a/b"), pathlib.Path()],
    "torch types": [torch.Size([1, 0, 3]), torch.Size([]), torch.float8_e4m3fn, torch.bool, torch.strided],
    "devices": [torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")],
    "random state": random.Random(3).getstate(),
    "param group": {"lr": 1e-3, "betas": (0.9, 0.95), "params": list(range(500)), "foreach": None, "fused": False},
}

ARRAYS: dict[str, Any] = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big endian": np.arange(3, dtype=">i4"),
    "empty": np.zeros((0, 3), np.int8),
    "zero-d": np.array(5, np.uint64),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j], np.complex64),
    "half": np.array([1.5], np.float16),
    "text": np.array(["ab", "ü"]),
    "octets": np.array([b"ab", b""]),
    "times": np.array(["2024-01-01", "NaT"], "M8[ns]"),
    "spans": np.array([1, 2], "m8[15m]"),
    "view": np.arange(10)[::3],
    "scalar float": np.float64(1.5),
    "scalar int": np.int16(-3),
    "scalar bool": np.bool_(True),
    "scalar text": np.str_("abc"),
    "scalar time": np.datetime64("2024-01-01T00:00"),
    "dtype": np.dtype("<f8"),
    "dtype of times": np.dtype("M8[25s]"),
    "dtype without a unit": np.dtype("m8"),
}


def decode(blob: bytes, **options: Any) -> Any:
    return decode_value(blob, source="file", key="key", **options)


def same(left: Any, right: Any) -> bool:
    """Equality of types, contents and order all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right) and left.requires_grad == right.requires_grad
    if isinstance(left, dict):
        return (
            len(left) == len(right)
            and getattr(left, "default_factory", None) is getattr(right, "default_factory", None)
            and all(map(same, left.keys(), right.keys()))
            and all(map(same, left.values(), right.values()))
        )
    if isinstance(left, (list, tuple, deque)):
        return (
            len(left) == len(right)
            and getattr(left, "maxlen", 0) == getattr(right, "maxlen", 0)
            and all(map(same, left, right))
        )
    if isinstance(left, (set, frozenset)):
        return left == right and {type(item) for item in left} == {type(item) for item in right}
    if isinstance(left, (datetime.datetime, datetime.time)):
        return (left, left.fold, left.tzname()) == (right, right.fold, right.tzname())
    if isinstance(left, uuid.UUID):
        return (left, left.is_safe) == (right, right.is_safe)
    return repr(left) == repr(right)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("writer", [encode_value, torch_blob])
def test_values_come_back_exactly_whoever_wrote_them(name: str, writer: Any) -> None:
    assert same(decode(writer(VALUES[name])), VALUES[name])


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("writer", [encode_value, torch_blob])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_numpy_arrays_scalars_and_dtypes_come_back_exactly(name: str, writer: Any, protocol: int) -> None:
    value = {"one": ARRAYS[name], "two": [ARRAYS[name]]}
    blob = writer(value) if writer is encode_value else torch_blob(value, pickle_protocol=protocol)
    assert same(decode(blob), value)


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_the_module_names_of_numpy_1_and_2_are_known(module: bytes) -> None:
    value = [np.arange(3), np.float32(2)]
    entries = entries_of(torch_blob(value))
    for old in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
        entries["data.pkl"] = entries["data.pkl"].replace(b"c" + old, b"c" + module)
    assert same(decode(zipped(entries)), value)


@pytest.mark.parametrize("name", VALUES)
def test_torch_loads_what_we_wrote(name: str) -> None:
    assert same(torch.load(io.BytesIO(encode_value(VALUES[name])), weights_only=False), VALUES[name])


@pytest.mark.parametrize("name", VALUES)
def test_values_without_tensors_are_archives_of_our_own_that_every_zip_reader_accepts(name: str) -> None:
    blob = encode_value(VALUES[name])
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        assert archive.testzip() is None
        assert sorted(archive.namelist()) == ["archive/byteorder", "archive/data.pkl", "archive/version"]
    assert entries_of(blob)["data.pkl"] == entries_of(torch_blob(VALUES[name]))["data.pkl"]


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.complex_numbers(allow_nan=False)
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.uuids()
    | st.datetimes(timezones=st.none() | st.just(UTC), allow_imaginary=False).map(lambda time: time.replace(fold=0))
    | st.dates()
    | st.timedeltas()
    | st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([2])])
)
KEYS = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
NESTED = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner, inner, inner)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.sets(KEYS, max_size=3)
        | st.builds(deque, st.lists(inner, max_size=3), st.none() | st.just(5))
    ),
    max_leaves=20,
)


@given(NESTED)
@settings(max_examples=examples(150))
def test_any_nested_value_comes_back_exactly(value: Any) -> None:
    blob = encode_value(value)
    assert same(decode(blob), value)
    assert needs_pickle(blob) is None


def test_the_second_of_two_equal_hours_stays_the_second_where_the_protocol_tells() -> None:
    value = [datetime.datetime(2024, 10, 27, 2, 30, fold=1), datetime.time(2, 30, tzinfo=UTC, fold=1)]
    assert same(decode(torch_blob(value, pickle_protocol=4)), value)


# Structure


def test_shared_parts_and_cycles_survive() -> None:
    shared = {"x": 1}
    ring: list[Any] = [shared, (shared,)]
    ring.append(ring)
    back = decode(encode_value({"a": ring, "b": shared, "od": OrderedDict(me=shared)}))
    assert back["a"][0] is back["b"] is back["a"][1][0] is back["od"]["me"]
    assert back["a"][2] is back["a"]


def test_a_module_state_dict_keeps_its_attribute() -> None:
    states = torch.nn.Linear(2, 2).state_dict()
    plain = OrderedDict(version=1)
    plain._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    assert decode(encode_value(plain))._metadata == plain._metadata  # type: ignore[attr-defined]
    assert decode(encode_value((states,)))[0]._metadata == states._metadata


# Tensors inside values


def test_tensors_and_parameters_inside_values_come_back() -> None:
    value = (
        torch.arange(6.0).reshape(2, 3).t(),
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(2, requires_grad=True),
        {"rng": torch.get_rng_state(), "fp8": torch.ones(3).to(torch.float8_e5m2).view(torch.uint8)},
        torch.tensor(3, dtype=torch.uint16),
        torch.zeros(0, 4),
    )
    back = decode(encode_value(value))
    assert same(back, value)
    assert back[0].stride() == value[0].stride()
    assert torch.load(io.BytesIO(encode_value(value)), weights_only=True)[0].equal(value[0])
    assert needs_pickle(encode_value(value)) is None


def test_tensors_that_share_a_storage_share_it_again_and_may_be_written_to() -> None:
    base = torch.zeros(4)
    left, right, odd = decode(encode_value((base[:2], base[1:], base)))
    right[0] = 7
    assert left[1] == 7
    assert odd[1] == 7


def test_attributes_of_a_tensor_come_back() -> None:
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    tensor.note = ["mine"]  # type: ignore[attr-defined]
    parameter.layer = 3  # type: ignore[attr-defined]
    back = decode(encode_value([tensor, parameter]))
    assert back[0].note == ["mine"]
    assert back[1].layer == 3
    assert type(back[1]) is torch.nn.Parameter


def test_storages_as_values_come_back() -> None:
    value = [torch.arange(3.0).untyped_storage(), torch.tensor([1, 2]).storage()]
    untyped, typed = decode(encode_value(value))
    assert bytes(untyped) == bytes(value[0])
    assert typed.dtype == torch.int64
    assert list(typed) == [1, 2]


def test_a_tensor_of_a_device_that_is_not_here_comes_back_on_the_cpu() -> None:
    entries = entries_of(torch_blob((torch.arange(3),)))
    entries["data.pkl"] = entries["data.pkl"].replace(b"X\x03\x00\x00\x00cpu", b"X\x07\x00\x00\x00cuda:77")
    back = decode(zipped(entries))
    assert back[0].device.type == "cpu"
    assert back[0].equal(torch.arange(3))


# What needs an opt-in


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Config:
    name: str
    sizes: list[int]


@dataclass(frozen=True)
class Frozen:
    __slots__ = ("a",)
    a: int


class Outer:
    class Inner:
        def __init__(self, value: int) -> None:
            self.value = value


class Listing(list[int]):
    pass


class OwnState:
    def __init__(self) -> None:
        self.restored_from: Any = None

    def __getstate__(self) -> Any:
        return {"k": 1}

    def __setstate__(self, state: Any) -> None:
        self.restored_from = state


class OldStyle:
    def __reduce__(self) -> Any:
        return super().__reduce__()


def double(number: int) -> int:
    return 2 * number


class MadeByFunction:
    def __reduce__(self) -> Any:
        return double, (21,)


CUSTOM: dict[str, tuple[Any, list[Any]]] = {
    "enum": (Color.RED, [Color]),
    "flag": (Level.LOW | Level.HIGH, [Level]),
    "named tuple": (Point(1, 2), [Point]),
    "dataclass": (Config("a", [1]), [Config]),
    "namespace": (types.SimpleNamespace(a=1), [types.SimpleNamespace]),
}


@pytest.mark.parametrize("name", CUSTOM)
def test_other_classes_are_refused_by_name_unless_declared_safe(name: str) -> None:
    value, classes = CUSTOM[name]
    for blob in (encode_value({"v": [value]}), torch_blob({"v": [value]})):
        full_name = f"{classes[0].__module__}.{classes[0].__qualname__}"
        with pytest.raises(RefusedPickleError) as caught:
            decode(blob)
        assert (caught.value.key, caught.value.global_name) == ("key", full_name)
        assert needs_pickle(blob) == full_name
        with torch.serialization.safe_globals(classes):
            assert decode(blob) == {"v": [value]}
            assert needs_pickle(blob) is None
        assert decode(blob, allow_pickle=True) == {"v": [value]}


def test_names_can_be_declared_safe_together_with_another_object() -> None:
    blob = encode_value(Config("a", [1]))
    renamed = blob_with(blob, b"\nConfig\n", b"\nOldConfig\n")
    with torch.serialization.safe_globals([(Config, f"{Config.__module__}.OldConfig")]):
        assert decode(renamed) == Config("a", [1])
    with pytest.raises(RefusedPickleError, match="OldConfig"):
        decode(renamed)


def blob_with(blob: bytes, old: bytes, new: bytes) -> bytes:
    entries = entries_of(blob)
    entries["data.pkl"] = entries["data.pkl"].replace(old, new)
    return zipped(entries)


@pytest.mark.parametrize("protocol", [2, 4])
def test_classes_declared_safe_are_made_in_all_the_ways_pickle_makes_them(protocol: int) -> None:
    slotted, own, listing, inner = Frozen(3), OwnState(), Listing([1, 2]), Outer.Inner(5)
    listing.extra = "x"  # type: ignore[attr-defined]
    value = [slotted, own, listing, inner, OldStyle(), MadeByFunction(), defaultdict(Config), [Color.BLUE]]
    blob = torch_blob(value, pickle_protocol=protocol)
    allowed = [Frozen, OwnState, Listing, Outer, Outer.Inner, OldStyle, double, Config, Color]
    with torch.serialization.safe_globals(allowed):
        back = decode(blob)
    assert back[0] == slotted
    assert back[1].restored_from == {"k": 1}
    assert (back[2], back[2].extra, type(back[2])) == ([1, 2], "x", Listing)
    assert (type(back[3]), back[3].value) == (Outer.Inner, 5)
    assert type(back[4]) is OldStyle
    assert back[5] == 42
    assert back[6].default_factory is Config
    assert back[7][0] is Color.BLUE


def test_an_array_of_objects_is_refused() -> None:
    blob = encode_value(np.array([{"a": 1}], object))
    with pytest.raises(RefusedPickleError, match=r"numpy\.dtype\('O8'\)"):
        decode(blob)
    assert needs_pickle(blob) == "numpy.dtype('O8')"
    assert decode(blob, allow_pickle=True)[0] == {"a": 1}


def test_a_structured_dtype_is_refused() -> None:
    with pytest.raises(RefusedPickleError, match=r"numpy\.dtype"):
        decode(encode_value(np.zeros(2, [("a", "i4")])))


def test_what_cannot_be_pickled_is_an_error_of_the_save() -> None:
    with pytest.raises(TypeError, match="lock"):
        encode_value({"lock": threading.Lock()})


@pytest.mark.parametrize("name", VALUES)
def test_plain_values_need_no_pickle(name: str) -> None:
    assert needs_pickle(encode_value(VALUES[name])) is None
    assert needs_pickle(torch_blob(VALUES[name])) is None


def test_bytes_of_a_custom_planner_are_not_judged() -> None:
    assert needs_pickle(b"my own format, with a c in it") is None
    assert needs_pickle(b"") is None


# Damage


def test_a_blob_that_was_cut_off_anywhere_is_damaged() -> None:
    for blob in (encode_value({"a": [1.5, "x"]}), torch_blob({"a": [1.5, "x"]})):
        for length in range(len(blob)):
            with pytest.raises(DamagedCheckpointError) as caught:
                decode(blob[:length])
            assert (caught.value.file, caught.value.key) == ("file", "key")


@pytest.mark.parametrize("value", [{"a": [1.5, "x"]}, (torch.tensor([1.0, 2.0]), 3)])
def test_every_flipped_bit_is_noticed_or_without_effect(value: Any) -> None:
    blob = encode_value(value)
    for position in range(len(blob)):
        for bit in range(8):
            damaged = bytearray(blob)
            damaged[position] ^= 1 << bit
            try:
                found = decode(bytes(damaged))
            except DamagedCheckpointError:
                continue
            assert same(found, value)


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_a_wrong_crc_is_noticed_before_anything_is_unpickled(allow_pickle: bool) -> None:
    blob = bytearray(encode_value({"a": 1, "b": Config("a", [])}))
    entry = read_directory(lambda o, n: bytes(blob[o : o + n]), len(blob), source="file")["data.pkl"]
    blob[entry.offset + 3] ^= 1
    with pytest.raises(DamagedCheckpointError, match=r"CRC-32 of data\.pkl"):
        decode(bytes(blob), allow_pickle=allow_pickle)


def test_random_damage_gives_a_value_or_one_of_our_errors() -> None:
    chooser = random.Random(2)
    value = {"a": [1.5, "x", torch.ones(2), np.arange(3), OrderedDict(b=datetime.date(2024, 1, 1))]}
    pickled = entries_of(torch_blob(value))
    for _ in range(500):
        data = pickled["data.pkl"]
        start = chooser.randrange(len(data))
        junk = chooser.randbytes(chooser.randrange(1, 6))
        damaged = data[:start] + junk + data[start + chooser.randrange(6) :]
        try:
            decode(zipped({**pickled, "data.pkl": damaged}))
        except HoldfastError:
            pass
