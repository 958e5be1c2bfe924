"""Malicious values: the same programs in the place of values, and data types fed with what they cannot digest."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from holdfast._formats.archives.values import decode_value, needs_pickle
from holdfast.errors import DamagedCheckpointError, RefusedPickleError
from tests.attacks.forging import (
    CODE,
    HARMFUL,
    Bait,
    assert_refused,
    bait,  # noqa: F401  # a fixture
    call,
    data,
    name,
    pickled,
    stacked_name,
    text,
)
from tests.formats.dcp.blobs import entries_of, torch_blob, zipped

MULTIARRAY = "numpy.core.multiarray"


def blob_of(program: bytes, protocol: int = 2) -> bytes:
    """An archive whose CRCs are all right: an attacker can compute them too."""
    return zipped({"data.pkl": pickled(program, protocol), "version": b"3\n", "byteorder": b"little"})


def read(program: bytes, protocol: int = 2) -> Any:
    return decode_value(blob_of(program, protocol), source="file", key="key")


@pytest.mark.parametrize("attack", CODE)
def test_code_is_refused_by_name_and_does_not_run(attack: str, bait: Bait) -> None:  # noqa: F811
    for program in (CODE[attack](bait), b"](" + CODE[attack](bait) + b"e", CODE[attack](bait) + b"0N"):
        error = assert_refused(RefusedPickleError, lambda program=program: read(program, 4), bait)
        assert isinstance(error, RefusedPickleError)
        assert error.key == "key"
        assert "allow_pickle=True" in str(error)
        assert needs_pickle(blob_of(program, 4)) == error.global_name
    bait.assert_untouched()


@pytest.mark.parametrize("attack", HARMFUL)
def test_misuse_of_what_is_allowed_is_damage(attack: str) -> None:
    before = dict(vars(OrderedDict))
    assert_refused(DamagedCheckpointError, lambda: read(HARMFUL[attack], 4))
    assert dict(vars(OrderedDict)) == before


def test_without_an_opt_in_torchs_own_unpickler_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load was called"))
    with pytest.raises(RefusedPickleError):
        read(name("os", "system"))


# Data types with hostile arguments

FORGED: dict[str, bytes] = {
    "bytearray of a size": call(name("builtins", "bytearray"), data(1 << 40)),
    "range of texts": call(name("builtins", "range"), data("a")),
    "range without step": call(name("builtins", "range"), data(0), data(1), data(0)),
    "set of a text": call(name("builtins", "set"), data("abc")),
    "set of lists": call(name("builtins", "set"), data([[1]])),
    "set of bottomless tuples": call(name("builtins", "frozenset"), b"](" + b")" + b"\x85" * 200_000 + b"e"),
    "set of endless tuples": call(name("builtins", "frozenset"), b"](" + b")" + b"2\x86" * 64 + b"e"),
    "complex of texts": call(name("builtins", "complex"), data("1"), data("j")),
    "slice with too much": call(name("builtins", "slice"), *[data(1)] * 4),
    "counter of a text": call(name("collections", "Counter"), data("abc")),
    "deque of a text": call(name("collections", "deque"), data("abc")),
    "deque of a negative size": call(name("collections", "deque"), data([]), data(-1)),
    "deque of a text as size": call(name("collections", "deque"), data([]), data("5")),
    "ordered dictionary of pairs that are none": call(name("collections", "OrderedDict"), data([1, 2])),
    "method of a dictionary replaced": call(name("collections", "OrderedDict")) + data({"items": 1}) + b"b",
    "class of a dictionary replaced": call(name("collections", "OrderedDict")) + data({"__class__": 1}) + b"b",
    "state of a default dictionary": call(name("collections", "defaultdict"), b"N") + data({"a": 1}) + b"b",
    "date in month 13": call(name("datetime", "date"), data(b"\x07\xe8\x0d\x01")),
    "date of 4 numbers": call(name("datetime", "date"), *map(data, (2024, 1, 1, 1))),
    "datetime at 25 o'clock": call(name("datetime", "datetime"), data(b"\x07\xe8\x01\x01\x19\x00\x00\x00\x00\x00")),
    "datetime on the 255th": call(name("datetime", "datetime"), data(b"\x07\xe8\x01\xff\x01\x00\x00\x00\x00\x00")),
    "datetime too short": call(name("datetime", "datetime"), data(b"\x07\xe8\x01")),
    "datetime in a zone that is text": call(
        name("datetime", "datetime"), data(bytes([7, 232, 1, 1] + [0] * 6)), data("x")
    ),
    "time at 99 o'clock": call(name("datetime", "time"), data(b"\x63\x00\x00\x00\x00\x00")),
    "timedelta too long": call(name("datetime", "timedelta"), data(1 << 70)),
    "timezone of a number": call(name("datetime", "timezone"), data(3)),
    "timezone too far": call(name("datetime", "timezone"), call(name("datetime", "timedelta"), data(9))),
    "decimal of a tuple": call(name("decimal", "Decimal"), data((0, (1,), 1 << 60))),
    "decimal of nonsense": call(name("decimal", "Decimal"), data("one")),
    "fraction of a billion digits": call(name("fractions", "Fraction"), data("1e999999999")),
    "fraction over zero": call(name("fractions", "Fraction"), data(1), data(0)),
    "fraction of a float": call(name("fractions", "Fraction"), data(1.5)),
    "uuid too large": name("uuid", "UUID") + b")\x81" + data({"int": 1 << 128}) + b"b",
    "uuid of a text": name("uuid", "UUID") + b")\x81" + data({"int": "1"}) + b"b",
    "uuid without a state": name("uuid", "UUID") + b")\x81",
    "uuid of nothing": name("uuid", "UUID") + b")\x81" + data({}) + b"b",
    "path of numbers": call(name("pathlib", "PosixPath"), data(1)),
    "path with a state": call(name("pathlib", "PurePosixPath"), data("a")) + data({"_raw_paths": 1}) + b"b",
    "size of a number": call(name("torch", "Size"), data(1 << 40)),
    "size of texts": call(name("torch", "Size"), data(("a",))),
    "device that does not exist": call(name("torch", "device"), data("quantum")),
    "device of a number": call(name("torch", "device"), data(0)),
    "layout that does not exist": call(name("torch.serialization", "_get_layout"), data("torch.os")),
    "an unfinished uuid twice": name("uuid", "UUID") + b")\x812" + data({"int": 1}) + b"b",
}


@pytest.mark.parametrize("attack", FORGED)
def test_data_types_with_impossible_arguments_are_damage(attack: str) -> None:
    assert_refused(DamagedCheckpointError, lambda: read(FORGED[attack]))


MORE_THAN_ALLOWED: dict[str, tuple[bytes, str]] = {
    "bytes of a size": (call(name("builtins", "bytes"), data(1 << 40)), "builtins.bytes"),
    "encoding by a codec with side effects": (
        call(name("_codecs", "encode"), data("x"), data("punycode")),
        "_codecs.encode",
    ),
    "a bytearray by another codec": (
        call(name("builtins", "bytearray"), data("x"), data("idna")),
        "_codecs.encode",
    ),
    "the type of a value": (call(name("builtins", "type"), data("x")), "builtins.type"),
    "a new class": (call(name("builtins", "type"), data("X"), b")", b"}"), ""),
    "attribute of a class": (
        call(name("builtins", "getattr"), name("builtins", "int"), data("__subclasses__")),
        "builtins.getattr",
    ),
    "attribute of a value": (call(name("builtins", "getattr"), data([]), data("append")), "builtins.getattr"),
    "default factory that is no type": (
        call(name("collections", "defaultdict"), data("list")),
        "collections.defaultdict",
    ),
    "default factory that calls": (
        call(name("collections", "defaultdict"), name("builtins", "range")),
        "collections.defaultdict",
    ),
    "an object of any class": (
        call(name("copyreg", "__newobj__"), name("collections", "deque")),
        "copyreg.__newobj__",
    ),
    "an object by reconstruction": (
        call(name("copy_reg", "_reconstructor"), name("builtins", "int"), name("builtins", "object"), b"N"),
        "copyreg._reconstructor",
    ),
}


@pytest.mark.parametrize("attack", MORE_THAN_ALLOWED)
def test_known_names_do_no_more_than_data_needs(attack: str) -> None:
    program, refused_name = MORE_THAN_ALLOWED[attack]
    if not refused_name:
        assert_refused(DamagedCheckpointError, lambda: read(program))
        return
    error = assert_refused(RefusedPickleError, lambda: read(program))
    assert isinstance(error, RefusedPickleError)
    assert error.global_name == refused_name


# numpy


def dtype(code: str, *state: Any) -> bytes:
    forged = state or (3, "<", None, None, None, -1, -1, 0)
    return call(name("numpy", "dtype"), data(code), data(False), data(True)) + data(forged) + b"b"


def array(dtype_push: bytes, shape: tuple[int, ...], content: bytes) -> bytes:
    start = call(name(MULTIARRAY, "_reconstruct"), name("numpy", "ndarray"), data((0,)), data(b"b"))
    return start + b"(K\x01" + data(shape) + dtype_push + b"\x89" + data(content) + b"tb"


def test_the_forged_arrays_are_good_ones_apart_from_what_is_forged() -> None:
    assert np.array_equal(read(array(dtype("i4"), (2,), bytes([1, 0, 0, 0, 2, 0, 0, 0])), 4), np.array([1, 2], "<i4"))


@pytest.mark.parametrize(
    "state",
    [
        (3, "<", None, None, None, 1 << 30, 1, 0),  # a forged element size reads beyond the buffer
        (3, "<", None, None, None, -1, -1, 63),  # forged flags turn numbers into object pointers
        (3, "<", None, None, None, 0, 0, 27),
    ],
)
def test_forged_sizes_and_flags_of_a_dtype_are_not_believed(state: tuple[Any, ...]) -> None:
    made = read(dtype("i4", *state), 4)
    assert made == np.dtype("<i4")
    assert (made.itemsize, made.hasobject, made.flags) == (4, False, np.dtype("<i4").flags)
    assert np.dtype("i4").itemsize == 4


NUMPY_DAMAGE: dict[str, bytes] = {
    "a dtype with fields": dtype("i4", 3, "<", None, ("a",), {"a": 1}, 4, 1, 0),
    "a dtype with a base": dtype("i4", 3, "<", (1, 2), None, None, 4, 1, 0),
    "a dtype of no order": dtype("i4", 3, "@", None, None, None, -1, -1, 0),
    "a dtype of a short state": dtype("i4", 3, "<"),
    "a dtype with a forged unit": dtype("M8", 4, "<", None, None, None, -1, -1, 0, (None, (b"s]; import os", 1, 1, 1))),
    "a dtype with a negative unit": dtype("M8", 4, "<", None, None, None, -1, -1, 0, (None, (b"s", -1, 1, 1))),
    "a dtype finished twice": dtype("i4") + data((3, "<", None, None, None, 99, 1, 0)) + b"b",
    "more elements than bytes": array(dtype("i8"), (1 << 40,), b"12345678"),
    "fewer elements than bytes": array(dtype("i8"), (1,), b"1234567890123456"),
    "a negative shape": array(dtype("i8"), (-1, -1), b"12345678"),
    "a shape of 2**64 elements": array(dtype("i8"), (1 << 32, 1 << 32), b"12345678"),
    "a shape that is no tuple": array(dtype("i8"), 1, b"12345678"),  # type: ignore[arg-type]
    "an array without a dtype": array(data("i8"), (1,), b"12345678"),
    "an array of a list": call(name(MULTIARRAY, "_reconstruct"), name("numpy", "ndarray"), data((0,)), data(b"b"))
    + b"(K\x01"
    + data((1,))
    + dtype("i8")
    + b"\x89"
    + data([1])
    + b"tb",
    "a state for a finished array": array(dtype("i8"), (1,), b"12345678")
    + b"(K\x01"
    + data((9,))
    + dtype("i8")
    + b"\x89"
    + data(b"")
    + b"tb",
    "an unfinished array": call(name(MULTIARRAY, "_reconstruct"), name("numpy", "ndarray"), data((0,)), data(b"b")),
    "a scalar of too many bytes": call(name(MULTIARRAY, "scalar"), dtype("i8"), data(b"123456789")),
    "a scalar of nothing": call(name(MULTIARRAY, "scalar"), dtype("i8"), data(b"")),
    "a scalar of a text": call(name(MULTIARRAY, "scalar"), dtype("i8"), data("12345678")),
    "an array made by its class": call(name("numpy", "ndarray"), data((1 << 40,))),
    "an array made by new": name("numpy", "ndarray") + data(((1 << 40,),)) + b"\x81",
    "a dtype made by new": name("numpy", "dtype") + data(("O",)) + b"\x81",
}


@pytest.mark.parametrize("attack", NUMPY_DAMAGE)
def test_forged_arrays_are_damage(attack: str) -> None:
    assert_refused(DamagedCheckpointError, lambda: read(NUMPY_DAMAGE[attack], 4))


NUMPY_REFUSED: dict[str, bytes] = {
    "objects": dtype("O8", 3, "|", None, None, None, -1, -1, 63),
    "raw memory": dtype("V8"),
    "texts of a terabyte": dtype("U999999999999"),
    "a list of fields": dtype("i4,O"),
    "a python expression": dtype("f8; import os"),
    "a subclass of array": call(name(MULTIARRAY, "_reconstruct"), name("builtins", "list"), data((0,)), data(b"b")),
    "an array of a large start": call(
        name(MULTIARRAY, "_reconstruct"), name("numpy", "ndarray"), data((1 << 40,)), data(b"b")
    ),
    "another class of numpy": name("numpy", "memmap"),
    "a function of numpy": name("numpy", "load"),
    "a function that runs code": stacked_name("numpy.testing._private.utils", "runstring"),
    "a generator": call(name("numpy.random._pickle", "__bit_generator_ctor"), data("MT19937")),
}


@pytest.mark.parametrize("attack", NUMPY_REFUSED)
def test_other_things_of_numpy_are_refused(attack: str) -> None:
    error = assert_refused(RefusedPickleError, lambda: read(NUMPY_REFUSED[attack], 4))
    assert "numpy" in str(error)


# Classes that the user declared safe


@dataclass
class Declared:
    size: int = 1


@dataclass
class NotDeclared:
    size: int = 1


OWN = Declared.__module__


@pytest.mark.parametrize(
    "program",
    [
        name(OWN, "Declared") + b"N" + data({"size": 666}) + b"\x86b",
        name(OWN, "Declared") + data({"size": 666}) + b"b",
        name(OWN, "Declared") + data("size") + data(666) + b"s",
        name(OWN, "Declared") + b")\x81" + data({"__class__": 1}) + b"b",
        name(OWN, "Declared") + b")\x81" + b"N" + data({"__dict__": {}}) + b"\x86b",
        name(OWN, "Declared") + b")\x81" + data([("size", 1)]) + b"b",
        name(OWN, "Declared") + b")\x81K\x01a",
    ],
)
def test_a_class_declared_safe_cannot_be_changed_by_a_file(program: bytes) -> None:
    before = dict(vars(Declared))
    with torch.serialization.safe_globals([Declared]):
        assert_refused(DamagedCheckpointError, lambda: read(program))
    assert dict(vars(Declared)) == before
    assert Declared().size == 1


@pytest.mark.parametrize("attribute", ["__init__", "__dict__", "__class__", "__subclasses__", "size", "missing"])
def test_the_attributes_of_a_class_declared_safe_are_not_reachable(attribute: str) -> None:
    program = call(name("builtins", "getattr"), name(OWN, "Declared"), data(attribute))
    with torch.serialization.safe_globals([Declared]):
        assert_refused(RefusedPickleError, lambda: read(program))


def test_one_class_declared_safe_does_not_open_its_module() -> None:
    with torch.serialization.safe_globals([Declared]):
        assert read(call(name(OWN, "Declared"), data(3))) == Declared(3)
        error = assert_refused(RefusedPickleError, lambda: read(call(name(OWN, "NotDeclared"), data(3))))
    assert isinstance(error, RefusedPickleError)
    assert error.global_name == f"{OWN}.NotDeclared"


# Tensors inside values


def test_a_tensor_inside_a_value_that_reaches_beyond_its_storage_is_damage() -> None:
    entries = entries_of(torch_blob((torch.arange(4),)))
    forged = entries["data.pkl"].replace(b"K\x04\x85", b"M\xff\xff\x85")
    assert forged != entries["data.pkl"]
    blob = zipped({**entries, "data.pkl": forged})
    assert_refused(DamagedCheckpointError, lambda: decode_value(blob, source="file", key="key"))


def test_a_reference_to_another_archive_entry_is_damage() -> None:
    entries = entries_of(torch_blob((torch.arange(4),)))
    for key in ("1", "../data.pkl", "/etc/passwd", ""):
        forged = entries["data.pkl"].replace(text("0"), text(key))
        blob = zipped({**entries, "data.pkl": forged})
        assert_refused(DamagedCheckpointError, lambda blob=blob: decode_value(blob, source="file", key="key"))
