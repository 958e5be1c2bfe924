"""What a background save writes comes straight from the memory of its snapshot, in any mixture of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast._base.tuning import MIB
from holdfast._formats.native.writing import ChunkBytes
from holdfast._save.local_bytes import bytes_of
from holdfast._stores.file_sink import FileSink
from tests.properties import examples
from tests.stores.test_direct_files import direct_disk

__all__ = ["direct_disk"]

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex128, torch.bool]


def test_nearly_all_bytes_of_a_snapshot_are_written_from_where_they_are(
    direct_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the tensors are like: those that are smaller than a page too, and of several types."""
    in_place = count_in_place(monkeypatch)
    state: dict[str, Any] = {f"small.{number}": torch.randn(37 + number) for number in range(200)}
    state |= {f"large.{number}": torch.randn(300, 1001) for number in range(20)}
    state |= {f"half.{number}": torch.randn(500, 777).bfloat16() for number in range(10)}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    holdfast.async_save(state, direct_disk / "checkpoint").result()
    assert sum(in_place) > nbytes - 2 * MIB
    assert_loads(state, direct_disk / "checkpoint")


def test_a_save_of_live_tensors_copies_them(direct_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody might change one between its digest and the write, which nothing would notice before it is loaded."""
    in_place = count_in_place(monkeypatch)
    holdfast.save({"w": torch.randn(4 * MIB)}, direct_disk / "checkpoint")
    assert not in_place


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.integers(0, 700), st.integers(0, 2000), st.sampled_from("ptvc")),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([None, "1MB", "3000000"]),
    st.sampled_from(["thread", "process"]),
)
def test_any_mixture_is_loaded_as_it_was(tmp_path_factory, described, max_file_size, writer) -> None:
    state: dict[str, Any] = {}
    for number, (dtype, rows, columns, kind) in enumerate(described):
        tensor = torch.randint(0, 2, (rows, columns)).to(dtype)
        if kind == "t":
            tensor = tensor.T  # whose elements are elsewhere in memory than in the file
        elif kind == "v" and rows > 2:
            tensor = tensor[1::2]
        state[f"tensor.{number}"] = tensor
        if kind == "c":
            state[f"tied.{number}"] = tensor
    path = tmp_path_factory.mktemp("mixture") / "checkpoint"
    options = {} if max_file_size is None else {"max_file_size": max_file_size}
    holdfast.async_save(state, path, writer=writer, **options).result()
    assert_loads(state, path)


def test_runs_are_tensors_one_behind_the_other() -> None:
    memory = torch.arange(100, dtype=torch.uint8)
    parts = [memory[:10], memory[10:30], memory[40:50], torch.ones(3).to(torch.uint8), memory[50:51]]
    given = opened(parts)
    found = [given.run(number) for number in range(len(parts))]
    assert [None if run is None else (run[0], run[1].tolist()) for run in found] == [
        (2, list(range(30))),
        None,
        (1, list(range(40, 50))),
        (1, [1, 1, 1]),
        (1, [50]),
    ]


def opened(parts: list[torch.Tensor]) -> ChunkBytes:
    """The bytes of a file with these tensors."""
    from holdfast._formats.native.dtypes import dtype_named
    from holdfast._formats.native.layout import ChunkToWrite, lay_out
    from holdfast._layout.descriptions import LocalTensor

    local = {str(number): LocalTensor(str(number), part, None) for number, part in enumerate(parts)}
    chunks = [
        ChunkToWrite(number, str(number), dtype_named("uint8"), tuple(part.shape), (0,), tuple(part.shape))
        for number, part in enumerate(parts)
    ]
    (layout,) = lay_out(chunks, "0123456789abcdef")
    with bytes_of(local, private=True)(layout) as given:
        assert given.run is not None
        return given


def count_in_place(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is written in place from now on."""
    taken: list[int] = []
    write_in_place = FileSink.write_in_place

    def noting(sink: FileSink, view: memoryview) -> bool:
        if done := write_in_place(sink, view):
            taken.append(view.nbytes)
        return done

    monkeypatch.setattr(FileSink, "write_in_place", noting)
    return taken


def assert_loads(state: dict[str, Any], path: Path) -> None:
    loaded = {key: torch.zeros_like(tensor, memory_format=torch.contiguous_format) for key, tensor in state.items()}
    for key in state:
        if key.startswith("tied."):
            loaded[key] = loaded[key.replace("tied", "tensor")]
    holdfast.load(loaded, path)
    for key, tensor in state.items():
        assert torch.equal(loaded[key], tensor), key
