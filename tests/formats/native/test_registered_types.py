"""Registered classes: stored by their fields, given back as what they were, and never looked up by a file's word."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import json
from typing import Any, Generic, NamedTuple, TypeVar

import pytest

from holdfast._formats.native import registered_types as registry
from holdfast._formats.native.refs import UnregisteredValue
from holdfast._formats.native.values import Encoder, decode, register_type
from holdfast.errors import UnsupportedValueError


@pytest.fixture(autouse=True)
def _forget_what_a_test_registers(monkeypatch):
    monkeypatch.setattr(registry, "_by_name", dict(registry._by_name))
    monkeypatch.setattr(registry, "_by_class", dict(registry._by_class))


def encode(value: Any) -> Any:
    return json.loads(json.dumps(Encoder(lambda path, tensor: None).encode(value)))


def round_trip(value: Any) -> Any:
    return decode(encode(value), str)


def test_a_registered_dataclass_comes_back():
    @register_type
    @dataclasses.dataclass
    class Config:
        rate: float
        betas: tuple[float, float] = (0.9, 0.999)

    stored = encode(Config(0.1))

    name = f"{__name__}:{Config.__qualname__}"
    fields = {"rate": 0.1, "betas": {"$": "tuple", "items": [0.9, 0.999]}}
    assert stored == {"$": "dataclass", "type": name, "fields": fields}
    assert decode(stored, str) == Config(0.1)
    assert type(decode(stored, str)) is Config


@pytest.mark.parametrize(
    "options", [{"frozen": True}, {"slots": True}, {"frozen": True, "slots": True}, {"kw_only": True}]
)
def test_dataclasses_of_all_makes_come_back(options):
    @register_type
    @dataclasses.dataclass(**options)
    class Config:
        a: int
        b: list[int] = dataclasses.field(default_factory=list)

    assert round_trip(Config(a=1, b=[2])) == Config(a=1, b=[2])


def test_loading_sets_the_fields_and_does_not_construct():
    made = []

    @register_type
    @dataclasses.dataclass
    class Config:
        given: int
        twice: int = dataclasses.field(init=False)
        scale: dataclasses.InitVar[int] = 2

        def __post_init__(self, scale: int) -> None:
            made.append(self)
            self.twice = self.given * scale

    value = Config(3, 5)
    value.twice = 99

    again = round_trip(value)

    assert (again.given, again.twice, len(made)) == (3, 99, 1)


def test_a_field_that_was_never_set_is_refused_by_name():
    @register_type
    @dataclasses.dataclass
    class Config:
        late: int = dataclasses.field(init=False)

    with pytest.raises(UnsupportedValueError, match="late"):
        encode({"a": Config()})


def test_attributes_that_are_no_fields_are_refused_but_for_cached_ones():
    @register_type
    @dataclasses.dataclass
    class Config:
        a: int

        @functools.cached_property
        def double(self) -> int:
            return 2 * self.a

    class Derived(Config):
        pass

    register_type(dataclasses.dataclass(Derived))
    for config in (Config(1), Derived(1)):
        assert config.double == 2
        assert vars(config) == {"a": 1, "double": 2}
        assert vars(round_trip(config)) == {"a": 1}
        config.tag = "x"
        with pytest.raises(UnsupportedValueError, match=r"not fields of its class, \['tag'\]") as raised:
            encode({"configs": [config]})
        assert raised.value.keys == ["configs.0"]


def test_registered_generic_and_inherited_dataclasses_come_back():
    content = TypeVar("content")

    @dataclasses.dataclass
    class Base(Generic[content]):
        a: content

    @register_type
    @dataclasses.dataclass
    class Child(Base[int]):
        b: int

    assert round_trip(Child(1, 2)) == Child(1, 2)
    with pytest.raises(UnsupportedValueError, match="register_type"):
        encode(Base(1))


def test_named_tuples_of_both_kinds_come_back():
    @register_type
    class Typed(NamedTuple):
        x: int
        y: float = 1.0

    Plain = register_type(collections.namedtuple("Plain", "x y"))  # noqa: N806

    for value in (Typed(1), Plain(1, [2])):
        assert round_trip(value) == value
        assert type(round_trip(value)) is type(value)


@pytest.mark.parametrize("base", [enum.Enum, enum.IntEnum])
def test_enum_members_come_back_as_the_members_themselves(base):
    @register_type
    class Color(base):
        RED = 1
        CRIMSON = 1
        BLUE = 2

    assert round_trip([Color.CRIMSON, {Color.BLUE: 1}]) == [Color.RED, {Color.BLUE: 1}]
    assert round_trip(Color.BLUE) is Color.BLUE
    assert encode(Color.CRIMSON)["name"] == "RED"


@pytest.mark.parametrize("base", [enum.Flag, enum.IntFlag])
def test_flags_come_back_alone_together_and_empty(base):
    @register_type
    class Parts(base):
        MODEL = 1
        OPTIMIZER = 2
        DATA = 4
        BOTH = 3

    for value in [Parts.DATA, Parts.BOTH, Parts.DATA | Parts.MODEL, Parts(0)]:
        assert round_trip(value) is value


def test_flags_without_names_are_refused():
    @register_type
    class Parts(enum.IntFlag):
        MODEL = 1

    with pytest.raises(UnsupportedValueError, match="no names"):
        encode(Parts(8))


def test_without_a_registration_the_fields_are_given_and_stored_again():
    stored = [
        {"$": "dataclass", "type": "elsewhere:Config", "fields": {"a": {"$": "tuple", "items": [1]}}},
        {"$": "namedtuple", "type": "elsewhere:Pair", "fields": {"x": 1}},
        {"$": "enum", "type": "elsewhere:Color", "name": "RED"},
    ]

    found = decode(stored, str)

    assert found == [
        UnregisteredValue("dataclass", "elsewhere:Config", {"a": (1,)}),
        UnregisteredValue("namedtuple", "elsewhere:Pair", {"x": 1}),
        UnregisteredValue("enum", "elsewhere:Color", {"name": "RED"}),
    ]
    assert encode(found) == stored


def test_a_class_that_was_moved_is_registered_under_its_old_name():
    @register_type(name="old.place:Config")
    @dataclasses.dataclass
    class Config:
        a: int

    stored = {"$": "dataclass", "type": "old.place:Config", "fields": {"a": 1}}

    assert decode(stored, str) == Config(1)
    assert encode(Config(1)) == stored


def test_a_name_of_another_kind_is_not_taken():
    @register_type(name="some:Thing")
    class Thing(enum.Enum):
        A = 1

    stored = {"$": "dataclass", "type": "some:Thing", "fields": {"A": 1}}

    assert isinstance(decode(stored, str), UnregisteredValue)


def test_fields_that_were_added_since_get_their_defaults():
    @register_type(name="m:C")
    @dataclasses.dataclass
    class Config:
        new: list[int] = dataclasses.field(default_factory=lambda: [7])
        old: int = 0
        newer: str = "x"

    @register_type(name="m:N")
    class Pair(NamedTuple):
        x: int
        y: int = 5

    assert decode({"$": "dataclass", "type": "m:C", "fields": {"old": 1}}, str) == Config([7], 1, "x")
    assert decode({"$": "namedtuple", "type": "m:N", "fields": {"x": 1}}, str) == Pair(1, 5)


@pytest.mark.parametrize(("fields", "reason"), [({"a": 1, "gone": 2}, "no field 'gone'"), ({}, "'a' .* not stored")])
def test_a_class_that_no_longer_fits_gives_the_fields_and_says_why(fields, reason):
    @register_type(name="m:C")
    @dataclasses.dataclass
    class Config:
        a: int

    with pytest.warns(UserWarning, match=reason):
        found = decode({"here": {"$": "dataclass", "type": "m:C", "fields": fields}}, str)

    assert found["here"] == UnregisteredValue("dataclass", "m:C", fields)


def test_a_member_that_is_gone_gives_its_name_and_says_why():
    @register_type(name="m:E")
    class Color(enum.Enum):
        RED = 1

    with pytest.warns(UserWarning, match="no member 'BLUE'"):
        found = decode({"$": "enum", "type": "m:E", "name": "BLUE"}, str)

    assert found == UnregisteredValue("enum", "m:E", {"name": "BLUE"})


def test_a_class_can_be_defined_again_as_in_a_notebook():
    def cell():
        @register_type
        @dataclasses.dataclass
        class Config:
            a: int

        return Config

    old, new = cell(), cell()

    assert type(round_trip(new(1))) is new
    assert type(round_trip(old(1))) is new


def test_two_classes_cannot_have_one_name():
    @register_type(name="m:C")
    class One(enum.Enum):
        A = 1

    class Two(enum.Enum):
        A = 1

    with pytest.raises(ValueError, match="already is"):
        register_type(Two, name="m:C")
    assert register_type(One, name="m:C") is One


@dataclasses.dataclass
class AlsoADict(dict):
    a: int = 1


@pytest.mark.parametrize("cls", [int, type("Plain", (), {}), AlsoADict, lambda: 1, 5])
def test_only_enums_dataclasses_and_named_tuples_can_be_registered(cls):
    with pytest.raises(TypeError):
        register_type(cls)


def test_registering_after_a_refusal_helps():
    class Color(enum.Enum):
        RED = 1

    with pytest.raises(UnsupportedValueError):
        encode(Color.RED)
    register_type(Color)

    assert round_trip(Color.RED) is Color.RED
