"""The machine that reads pickles gives what pickle gives for data, and refuses all the rest."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._formats.archives.known_names import AllowedName, Draft, Inert, draft_of, hash_work
from holdfast._formats.archives.safe_pickle import load
from holdfast.errors import DamagedCheckpointError, RefusedPickleError

PROTOCOLS = [2, 3, 4, 5]

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 2100), 1 << 2100)
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.text(min_size=250, max_size=300)
)
KEYS = ATOMS | st.tuples(ATOMS, st.tuples(ATOMS))
PLAIN = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner) | st.tuples(*[inner] * 5),
    max_leaves=30,
)


def nothing(module: str, name: str) -> None:
    return None


def read(data: bytes, table: dict[tuple[str, str], AllowedName] | None = None, **options: Any) -> Any:
    return load(data, lambda module, name: (table or {}).get((module, name)), source="file", key="key", **options)


def same(left: Any, right: Any) -> bool:
    """Equality that tells True from 1 and 0.0 from -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(k1, k2) and same(v1, v2) for (k1, v1), (k2, v2) in zip(left.items(), right.items(), strict=True)
        )
    return repr(left) == repr(right)


@settings(deadline=None)
@given(PLAIN, st.sampled_from(PROTOCOLS))
def test_plain_data_comes_back_with_the_same_types_and_order(value: Any, protocol: int) -> None:
    assert same(read(pickle.dumps(value, protocol)), value)


@settings(deadline=None)
@given(PLAIN, st.sampled_from([3, 4, 5]))
def test_an_optimized_pickle_is_read_too(value: Any, protocol: int) -> None:
    assert same(read(pickletools.optimize(pickle.dumps(value, protocol))), value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_number_size_is_read(protocol: int) -> None:
    numbers = [sign * ((1 << bits) + extra) for bits in range(130) for sign in (1, -1) for extra in (-1, 0, 1)]
    assert read(pickle.dumps(numbers, protocol)) == numbers


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("size", [0, 1, 255, 256, 70_000])
def test_bytes_texts_sets_and_large_frames_are_read(protocol: int, size: int) -> None:
    value = {"bytes": bytes(size), "text": "ü" * size, "set": set(range(size % 300)), "frozen": frozenset([size])}
    assert read(pickle.dumps(value, protocol)) == value
    assert read(pickle.dumps(bytearray(size), 5)) == bytearray(size)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_and_cyclic_parts_stay_shared_and_cyclic(protocol: int) -> None:
    shared = [1]
    value: dict[str, Any] = {"a": shared, "b": shared, "more": list(range(300))}
    value["self"] = value
    back = read(pickle.dumps(value, protocol))
    assert back["a"] is back["b"]
    assert back["self"] is back


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_name_outside_of_the_table_is_refused_by_name_with_all_ways_to_allow_it(protocol: int) -> None:
    with pytest.raises(RefusedPickleError) as caught:
        read(pickle.dumps(io.BytesIO, protocol))
    error = caught.value
    assert (error.key, error.global_name) == ("key", "_io.BytesIO")
    for way in (
        "torch.serialization.add_safe_globals([BytesIO])",
        "DefaultLoadPlanner(allow_pickle=True)",
        "FileSystemReader(path, allow_pickle=True)",
        "HOLDFAST_ALLOW_PICKLE=1",
        "holdfast._settings.override(allow_pickle=True)",
        "trust",
    ):
        assert way in str(error)


def test_names_match_as_a_whole() -> None:
    table = {("collections", "OrderedDict"): AllowedName(OrderedDict, call=OrderedDict)}
    assert read(b"\x80\x04ccollections\nOrderedDict\n)R.", table) == OrderedDict()
    for module, name in [("collections", "OrderedDict.fromkeys"), ("collections.abc", "OrderedDict"), ("", "")]:
        stream = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name))
        with pytest.raises(RefusedPickleError):
            read(stream + b"\x93.", table)


def test_a_draft_is_replaced_wherever_it_was_remembered() -> None:
    table = {("m", "Thing"): draft_of("Thing", lambda state: ("finished", state))}
    stream = b"\x80\x04]\x94(cm\nThing\n)\x81\x94K\x07bh\x01h\x01e."
    finished = ("finished", 7)
    back = read(stream, table)
    assert back == [finished] * 3
    assert back[0] is back[1] is back[2]


DRAFT = {("m", "Thing"): AllowedName(Inert("Thing"), new=lambda: Draft(lambda state: state))}


@pytest.mark.parametrize(
    "stream",
    [
        b"\x80\x04cm\nThing\n)\x81.",  # never finished
        b"\x80\x04](cm\nThing\n)\x81e.",  # put away unfinished
        b"\x80\x04cm\nThing\n)\x812Nb.",  # a second reference before it is finished
        b"\x80\x04](cm\nThing\n)\x81\x94h\x00Nbe.",  # and one through the memo
        b"\x80\x04cm\nThing\n)\x810N.",  # dropped unfinished
    ],
)
def test_an_unfinished_object_never_gets_out(stream: bytes) -> None:
    with pytest.raises(DamagedCheckpointError):
        read(stream, DRAFT)


def test_references_to_things_outside_go_through_the_callers_hands() -> None:
    stream = b"\x80\x02X\x01\x00\x00\x00aQ."
    assert read(stream, persistent_load=lambda reference: reference * 3) == "aaa"
    with pytest.raises(DamagedCheckpointError):
        read(stream)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_pickle_that_was_cut_off_anywhere_is_damaged(protocol: int) -> None:
    value = {"key": [1, 2.5, "text", b"bytes" if protocol > 2 else "b", (1 << 70, None, True)], "other": {"x": -1}}
    data = pickle.dumps(value, protocol)
    assert read(data) == value
    for length in range(len(data)):
        with pytest.raises(DamagedCheckpointError) as caught:
            read(data[:length])
        assert caught.value.file == "file"


def test_bytes_after_the_end_are_damage() -> None:
    with pytest.raises(DamagedCheckpointError, match="after the end"):
        read(pickle.dumps([1], 4) + b"x")


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (b"\x80\x06N.", "protocol"),
        (b"\x80\x04\x95\xff\xff\xff\xff\x00\x00\x00\x00N.", "frame"),
        (b"\x80\x04.", "not enough values"),
        (b"\x80\x04NN.", "too many values"),
        (b"\x80\x04(N.", "unfinished"),
        (b"\x80\x04u.", "IndexError"),
        (b"\x80\x04}(Nu.", "without a value"),
        (b"\x80\x04h\x00.", "IndexError"),
        (b"\x80\x04NK\x01\x85R.", "a call of None"),
        (b"\x80\x04]]s.", "IndexError"),
        (b"\x80\x04]K\x01K\x02s.", "entries for a list"),
        (b"\x80\x04}K\x01a.", "items for a dict"),
        (b"\x80\x04](K\x01\x90.", "members for a list"),
        (b"\x80\x04}}K\x01s.", "unhashable"),
        (b"\x80\x04K\x01}b.", "a state for a int"),
        (b"\x80\x04K\x01K\x02\x93.", "not a str"),
        (b"\x80\x04\x8c\x02\xff\xfe.", "UnicodeDecodeError"),
        (b"\x80\x04I1\n.", "opcode 0x49"),
        (b"\x80\x04\x8b\xff\xff\xff\xff.", "EOFError"),
    ],
)
def test_impossible_streams_are_damage_with_the_reason_and_the_place(stream: bytes, reason: str) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"\(at byte \d+\)") as caught:
        read(stream)
    assert reason in str(caught.value.found)
    assert caught.value.key == "key"


def test_errors_of_the_functions_behind_names_are_damage_and_interrupts_are_not() -> None:
    def fail() -> None:
        raise MemoryError("too much")

    def interrupt() -> None:
        raise KeyboardInterrupt

    stream = b"\x80\x04cm\nf\n)R."
    with pytest.raises(DamagedCheckpointError, match="MemoryError"):
        read(stream, {("m", "f"): AllowedName(Inert("f"), call=fail)})
    with pytest.raises(KeyboardInterrupt):
        read(stream, {("m", "f"): AllowedName(Inert("f"), call=interrupt)})


def test_ordinary_keys_pass_and_bottomless_ones_do_not() -> None:
    assert hash_work((1, ("a", (None, 2.5)), frozenset([1])), 100) == 10
    assert hash_work(tuple(range(100_000)), 100_001) == 100_001
    deep: tuple[Any, ...] = ()
    wide: tuple[Any, ...] = (1,)
    for _ in range(100):
        deep, wide = (deep,), (wide, wide)
    for key in (deep, wide, tuple(range(100_001))):
        with pytest.raises(ValueError, match="nested too deeply"):
            hash_work(key, 100_000)


@pytest.mark.parametrize("use", [b"h\x00K\x01", b"h\x00h\x00"])
def test_one_large_key_used_again_and_again_is_found_out(use: bytes) -> None:
    key = b")" + b"2\x86" * 12 + b"\x940"  # thousands of parts in 24 bytes
    assert len(read(b"\x80\x04" + key + b"}(" + b"h\x00K\x01" * 5 + b"u.")) == 1
    with pytest.raises(DamagedCheckpointError, match="too large"):
        read(b"\x80\x04" + key + b"}(" + use * 2000 + b"u.")


def test_many_tuples_as_keys_are_no_reason_for_suspicion() -> None:
    value = {(number, (number, "x")): number for number in range(100_000)}
    assert read(pickle.dumps(value, 4)) == value
    assert read(pickle.dumps([value, set(value), value], 4))[1] == set(value)
