"""The pickle of a torch.save file whose tensors come later, read by torch.load."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast._formats.archives.zip_writer import ZipWriter
from holdfast._formats.tensor_bytes import as_bytes
from holdfast._formats.torch_file.description import describe
from tests.dcp.states import same_bits

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def written(state: Any, real: dict[int, torch.Tensor]) -> io.BytesIO:
    """A file of ``state``, in which the tensors of ``real`` come after their stand-ins have been described."""
    stand_ins = [tensor for tensor in walk(state) if id(tensor) in real]
    description, entries = describe(state, stand_ins)
    stream = io.BytesIO()
    archive = ZipWriter(stream)
    archive.add("data.pkl", description)
    archive.add("byteorder", b"little")
    for number, entry in enumerate(entries):
        source = entry.source
        if isinstance(source, torch.Tensor):
            content = as_bytes(real[id(source)])
        else:
            content = as_bytes(torch.empty(0, dtype=torch.uint8).set_(source))
        assert len(content) == entry.nbytes
        archive.add(f"data/{number}", content)
    archive.add("version", b"3\n")
    archive.close()
    stream.seek(0)
    return stream


def walk(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for child in children for tensor in walk(child)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_stand_in_becomes_the_tensor_of_any_dtype(dtype: torch.dtype) -> None:
    whole = torch.arange(6).reshape(2, 3).to(dtype)
    stand_in = torch.empty(2, 3, dtype=dtype, device="meta")

    loaded = torch.load(written({"t": stand_in}, {id(stand_in): whole}), weights_only=True)

    assert same_bits(loaded["t"], whole)


@given(st.lists(st.lists(st.integers(0, 4), max_size=4).map(tuple), max_size=5))
def test_stand_ins_of_any_shape_are_told_apart(shapes: list[tuple[int, ...]]) -> None:
    wholes = [torch.rand(shape) for shape in shapes]
    stand_ins = [torch.empty(shape, device="meta") for shape in shapes]
    real = {id(stand_in): whole for stand_in, whole in zip(stand_ins, wholes, strict=True)}

    loaded = torch.load(written({"all": stand_ins}, real), weights_only=True)

    assert all(map(same_bits, loaded["all"], wholes))
    assert [tensor.stride() for tensor in loaded["all"]] == [whole.stride() for whole in wholes]


def test_tensors_in_memory_are_stored_as_torch_save_stores_them() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "view": (base, base[1:], base.t()),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "f8": torch.ones(3).to(torch.float8_e4m3fn),
        "text": "t",
    }

    loaded = torch.load(written(state, {}), weights_only=True)

    assert repr(loaded) == repr(state)
    whole, rows, turned = loaded["view"]
    assert whole.data_ptr() == turned.data_ptr() == rows.data_ptr() - 16  # they share memory, as they did
    assert turned.stride() == (1, 4)


def test_a_stand_in_that_is_in_the_state_twice_is_one_tensor() -> None:
    stand_in = torch.empty(2, device="meta")

    loaded = torch.load(written({"a": stand_in, "b": [stand_in]}, {id(stand_in): torch.ones(2)}), weights_only=True)

    assert loaded["a"] is loaded["b"][0]


def test_a_meta_tensor_that_stands_for_itself_stays_one(tmp_path: Path) -> None:
    stand_in, meta = torch.empty(2, device="meta"), torch.empty(3, device="meta")

    loaded = torch.load(written({"a": stand_in, "m": meta}, {id(stand_in): torch.ones(2)}), weights_only=False)

    assert loaded["m"].is_meta
    assert loaded["a"].tolist() == [1, 1]
