"""The header of a safetensors file: we read what the reference library writes, it reads ours, and damage is named."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import save as reference_save

from holdfast._formats.safetensors.dtypes import BITS, nbytes
from holdfast._formats.safetensors.header import MAX_LENGTH, plan_header, read_header
from holdfast._formats.safetensors.writer import SafetensorsWriter
from holdfast.errors import DamagedCheckpointError

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(lambda n: n != "__metadata__")
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
WHOLE_BYTES = sorted(name for name, bits in BITS.items() if bits % 8 == 0)
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from(WHOLE_BYTES), SHAPES), max_size=6)


def file_of(tensors: dict[str, tuple[str, tuple[int, ...]]], notes: dict[str, str] | None = None) -> bytes:
    stream = io.BytesIO()
    writer = SafetensorsWriter(stream, [(name, *what) for name, what in tensors.items()], notes)
    for number, name in enumerate(writer.header.tensors):
        writer.write(name, [bytes([number]) * writer.header.tensors[name].nbytes])
    writer.finish()
    return stream.getvalue()


@given(TENSORS, st.dictionaries(NAMES, st.text(st.characters(exclude_categories=["Cs"])), max_size=2))
def test_the_reference_library_reads_what_is_written(
    tensors: dict[str, tuple[str, tuple[int, ...]]], notes: dict[str, str]
) -> None:
    content = file_of(tensors, notes)

    found = {name: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in deserialize(content)}

    header = read_header(io.BytesIO(content), "file")
    assert {name: what[:2] for name, what in found.items()} == tensors
    assert header.notes == notes
    for name, (_, _, data) in found.items():
        start = header.position(name)
        assert content[start : start + header.tensors[name].nbytes] == data


@given(TENSORS)
def test_every_tensor_begins_at_a_multiple_of_its_element_size(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    header, _ = plan_header([(name, *what) for name, what in tensors.items()])

    assert [name for name in tensors if header.position(name) % (BITS[tensors[name][0]] // 8)] == []


def test_a_file_of_the_reference_library_is_read() -> None:
    content = reference_save({"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bool)}, {"a": "b"})

    header = read_header(io.BytesIO(content), "file")

    assert {name: (t.dtype, t.shape) for name, t in header.tensors.items()} == {
        "w": ("F32", (2, 3)),
        "b": ("BOOL", (3,)),
    }
    start = header.position("w")
    assert content[start : start + 24] == torch.arange(6.0).numpy().tobytes()
    assert header.notes == {"a": "b"}


def test_all_element_types_of_the_library_are_known(tmp_path: Any) -> None:
    """The library lists its types in the error about an unknown one."""
    text = json.dumps({"x": {"dtype": "Q7", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + b"x")
    with pytest.raises(SafetensorError) as told, safe_open(tmp_path / "file", "pt"):
        pass

    assert all(f"`{name}`" in str(told.value) for name in BITS)
    assert str(told.value).count("`") == 2 * (len(BITS) + 1)


def test_elements_of_less_than_a_byte_must_fill_whole_bytes() -> None:
    assert nbytes("F4", (3, 2)) == 3
    assert nbytes("F6_E2M3", (4,)) == 3
    assert nbytes("F4", (3,)) is None
    with pytest.raises(ValueError, match="whole bytes"):
        plan_header([("x", "F4", (3,))])


# --- damage ----------------------------------------------------------------------------------------------------------


def with_header(content: Any, data: bytes = b"") -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "U8", shape: Any = (2,), offsets: Any = (0, 2)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DAMAGE: dict[str, tuple[bytes, str | None, str]] = {
    "empty file": (b"", None, "cut off"),
    "half a length": (b"\x01\x00", None, "cut off"),
    "header beyond the file": (b"\xff\xff\x00\x00\x00\x00\x00\x00{}", None, "cut off"),
    "no JSON object": (with_header(b"[1]"), None, "brace"),
    "no JSON": (with_header(b"{nonsense"), None, "not JSON"),
    "deep JSON": (with_header(b'{"a":' * 100_000), None, "not JSON"),
    "no UTF-8": (with_header(b'{"\xff":1}'), None, "not JSON"),
    "the same name twice": (
        with_header(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8"}}', b"x"),
        None,
        "twice",
    ),
    "metadata of numbers": (with_header({"__metadata__": {"a": 1}}), "__metadata__", "that is not str"),
    "no description": (with_header({"a": 3}), "a", "not described"),
    "a field too many": (with_header({"a": {**entry(), "x": 1}}, b"xx"), "a", "not described"),
    "unknown dtype": (with_header({"a": entry("F99")}, b"xx"), "a", "unknown dtype"),
    "dtype that is a list": (with_header({"a": {**entry(), "dtype": ["U8"]}}, b"xx"), "a", "unknown dtype"),
    "negative shape": (with_header({"a": entry(shape=[-2])}, b"xx"), "a", "shape"),
    "boolean shape": (with_header({"a": entry(shape=[True, 2])}, b"xx"), "a", "shape"),
    "enormous shape": (with_header({"a": entry(shape=[1 << 70, 0], offsets=[0, 0])}), "a", "shape"),
    "three offsets": (with_header({"a": entry(offsets=[0, 1, 2])}, b"xx"), "a", "offsets"),
    "offsets backwards": (with_header({"a": entry(offsets=[2, 0])}, b"xx"), "a", "wrong number of bytes"),
    "too few bytes": (with_header({"a": entry(shape=[3])}, b"xx"), "a", "wrong number of bytes"),
    "overlap": (with_header({"a": entry(), "b": entry(offsets=[1, 3])}, b"xxx"), "b", "overlaps"),
    "hole": (with_header({"a": entry(), "b": entry(offsets=[3, 5])}, b"xxxxx"), "b", "hole"),
    "data cut off": (with_header({"a": entry()}, b"x"), "a", "cut off"),
    "data beyond the header": (with_header({"a": entry()}, b"xxx"), "a", "more data"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_refused_with_file_and_key(case: str) -> None:
    content, key, what = DAMAGE[case]

    with pytest.raises(DamagedCheckpointError, match=what) as refused:
        read_header(io.BytesIO(content), "some/file")

    assert refused.value.file == "some/file"
    assert "some/file" in str(refused.value)
    assert case == "the same name twice" or refused.value.key == key


def test_a_header_that_is_too_large_is_refused_unread() -> None:
    class Huge(io.BytesIO):
        def seek(self, offset: int, whence: int = 0) -> int:
            return (1 << 40) if whence == 2 else super().seek(offset, whence)

        def read(self, size: int | None = -1) -> bytes:
            assert size == 8
            return super().read(size)

    with pytest.raises(DamagedCheckpointError, match="too large"):
        read_header(Huge((MAX_LENGTH + 1).to_bytes(8, "little")), "file")


@given(st.data())
def test_no_change_of_a_byte_of_the_header_gives_anything_but_a_header_or_a_refusal(data: st.DataObject) -> None:
    content = bytearray(file_of({"weight": ("BF16", (2, 2)), "bias": ("U8", (3,))}, {"format": "pt"}))
    start = 8 + int.from_bytes(content[:8], "little")
    position = data.draw(st.integers(0, start - 1))
    content[position] = data.draw(st.integers(0, 255))
    try:
        header = read_header(io.BytesIO(content), "file")
    except DamagedCheckpointError:
        return
    assert sum(tensor.nbytes for tensor in header.tensors.values()) == len(content) - header.data_start


# --- the streaming writer --------------------------------------------------------------------------------------------


def test_writing_goes_piece_by_piece() -> None:
    stream = io.BytesIO()
    writer = SafetensorsWriter(stream, [("a", "U8", (5,))])
    lengths = []

    def pieces() -> Any:
        for piece in (b"12", b"345"):
            lengths.append(len(stream.getvalue()))
            yield piece

    writer.write("a", pieces())
    writer.finish()

    assert lengths[1] - lengths[0] == 2
    assert stream.getvalue().endswith(b"12345")


def test_tensors_out_of_turn_of_the_wrong_size_or_missing_are_refused() -> None:
    announced = [("a", "F32", (1,)), ("b", "U8", (1,))]
    with pytest.raises(ValueError, match="out of turn"):
        SafetensorsWriter(io.BytesIO(), announced).write("b", [b"x"])
    with pytest.raises(ValueError, match="4 bytes and came with 3"):
        SafetensorsWriter(io.BytesIO(), announced).write("a", [b"xxx"])
    writer = SafetensorsWriter(io.BytesIO(), announced)
    writer.write("a", [b"xxxx"])
    with pytest.raises(ValueError, match=r"not written.*'b'"):
        writer.finish()
    writer.write("b", [b"x"])
    with pytest.raises(ValueError, match="the end"):
        writer.write("b", [b"x"])


@pytest.mark.parametrize("names", [["__metadata__"], ["a", "a"]])
def test_names_that_a_file_cannot_hold_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match=names[-1]):
        plan_header([(name, "U8", (1,)) for name in names])


def test_a_shape_of_countless_dimensions_is_refused_at_once() -> None:
    entry = {"dtype": "U8", "shape": [1 << 61] * 60_000, "data_offsets": [0, 8]}
    text = json.dumps({"x": entry}).encode()
    stream = io.BytesIO(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(DamagedCheckpointError, match="no valid shape"):
        read_header(stream, "file")
