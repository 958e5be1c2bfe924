"""One flipped bit anywhere, a file cut off, grown, lost, or exchanged for another: no way of reading passes it over."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast._load.opening import open_source
from holdfast._stores.local_store import LocalStore
from holdfast.errors import DamagedCheckpointError, HoldfastError, ReplacedCheckpointError, UnsupportedVersionError
from tests.exact import assert_same
from tests.formats.native.specified_reader import SpecifiedReader
from tests.native_files import table_begin
from tests.rank_pool import RankPool
from tests.sharding import dtensor_of, mesh_of_all_ranks
from tests.tools.repairing.checkpoints import write

BLOCK = 65536


def large_state() -> dict[str, torch.Tensor]:
    """Some blocks: `first` and `second` share one, `third` is in several."""
    return {
        "first": torch.arange(20_000, dtype=torch.int64).reshape(100, 200),
        "second": torch.arange(3000, dtype=torch.float32),
        "third": torch.arange(90_000, dtype=torch.int16).reshape(300, 300),
        "fourth": torch.arange(70, dtype=torch.uint8),
    }


def small_state() -> dict[str, Any]:
    return {"weight": torch.arange(12.0).reshape(3, 4), "step": 3, "list": [1.5, "text"]}


@contextmanager
def changed(path: Path, content: bytes | None) -> Iterator[None]:
    """A file with another content, or without the file, for a while."""
    original = path.read_bytes()
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(original)


def flipped(content: bytes, position: int, bit: int) -> bytes:
    found = bytearray(content)
    found[position] ^= 1 << bit
    return bytes(found)


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def verify(folder: Path) -> None:
    with open_source(folder) as source:
        source.verify()


def load_everything(folder: Path, state: dict[str, Any]) -> None:
    holdfast.load(
        {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()},
        folder,
    )


def write_in_uneven_parts(folder: Path) -> None:
    """A tensor that is divided over ranks by no rule."""
    cuts = [(0, (0,), (3,)), (1, (3,), (6,)), (2, (9,), (1,))]
    write(LocalStore(folder), {"w": ("float32", (10,))}, {"w": cuts})


def open_everything(folder: Path) -> None:
    holdfast.open(folder).read()


def bits_to_flip(path: Path, every_bit: bool) -> Iterator[tuple[int, int]]:
    for position in range(path.stat().st_size):
        yield from ((position, bit) for bit in (range(8) if every_bit else [position % 8]))


@pytest.mark.parametrize("every_bit", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["holdfast.json", "data-*.safetensors"])
def test_a_flipped_bit_at_every_byte_of_the_record_and_the_table_is_found(tmp_path, name, every_bit):
    holdfast.save(small_state(), tmp_path)
    path = only(tmp_path, name)
    content = path.read_bytes()
    first = 0 if name == "holdfast.json" else table_begin(content)
    for position, bit in bits_to_flip(path, every_bit):
        if position < first:
            continue
        with changed(path, flipped(content, position, bit)):
            for read in (open_everything, verify):
                with pytest.raises((DamagedCheckpointError, UnsupportedVersionError)) as caught:
                    read(tmp_path)
                assert caught.value.file == str(path)
    open_everything(tmp_path)


@pytest.mark.parametrize("name", ["holdfast.json", "data-*.safetensors"])
def test_a_load_and_a_slice_notice_damage_of_the_record_and_the_table(tmp_path, name):
    holdfast.save(small_state(), tmp_path)
    path = only(tmp_path, name)
    content = path.read_bytes()
    first = 0 if name == "holdfast.json" else table_begin(content)
    for position in range(first, len(content), 97):
        with changed(path, flipped(content, position, position % 8)):
            with pytest.raises((DamagedCheckpointError, UnsupportedVersionError)):
                load_everything(tmp_path, small_state())
            with pytest.raises((DamagedCheckpointError, UnsupportedVersionError)):
                holdfast.open(tmp_path)["weight"][1:2]


class Layout:
    """Where the elements of a checkpoint of one data file lie."""

    def __init__(self, folder: Path) -> None:
        reader = SpecifiedReader(folder)
        self.path = folder / reader.record["files"][0]["name"]
        self.content = reader.files[0]
        self.places = {
            reader.record["tensors"][chunk.tensor]["key"]: (chunk.begin, chunk.begin + self._nbytes(reader, chunk))
            for chunk in reader.chunks
        }
        self.header_end = min(begin for begin, _ in self.places.values())
        self.table_begin = table_begin(self.content)

    def _nbytes(self, reader: SpecifiedReader, chunk: Any) -> int:
        return reader.tensors[reader.record["tensors"][chunk.tensor]["key"]].raw.size

    def blocks(self, begin: int, end: int) -> set[int]:
        return set(range(begin // BLOCK, (end - 1) // BLOCK + 1))

    def edges(self) -> set[int]:
        """Around every border of a block, of a chunk, of the header and of its padding, and the last byte."""
        padding = self.content.index(b"}}  ") if b"}}  " in self.content[: self.header_end] else 8
        borders = {
            0,
            8,
            padding + 2,
            self.header_end,
            self.table_begin,
            len(self.content),
            *range(0, len(self.content), BLOCK),
        }
        borders |= {border for place in self.places.values() for border in place}
        return {at for border in borders for at in (border - 1, border, border + 1) if 0 <= at < len(self.content)}

    def affected(self, position: int) -> set[str]:
        """Keys that cannot be read if this byte is damaged."""
        block = position // BLOCK
        if position >= self.table_begin or block in self.blocks(0, self.header_end):
            return set(self.places)
        return {key for key, place in self.places.items() if block in self.blocks(*place)}


def positions_of(layout: Layout, count: int) -> list[int]:
    sampled = np.random.default_rng(0).integers(0, len(layout.content), count).tolist()
    return sorted(layout.edges() | set(sampled) | set(range(0, layout.header_end, 997)))


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.long)])
def test_a_flipped_bit_in_a_data_file_is_found_by_all_who_read_that_block_and_by_nobody_else(tmp_path, count):
    state = large_state()
    holdfast.save(state, tmp_path)
    layout = Layout(tmp_path)
    assert len(layout.content) > 5 * BLOCK
    for position in positions_of(layout, count):
        affected = layout.affected(position)
        with changed(layout.path, flipped(layout.content, position, position % 8)):
            with pytest.raises(DamagedCheckpointError) as caught:
                verify(tmp_path)
            assert caught.value.key in affected
            for key, value in state.items():
                target = {key: torch.zeros_like(value)}
                if key not in affected:
                    holdfast.load(target, tmp_path)
                    assert_same(target, {key: value})
                    continue
                with pytest.raises(DamagedCheckpointError) as caught:
                    holdfast.load(target, tmp_path)
                assert caught.value.file == str(layout.path)
                assert caught.value.key == key
                assert layout.path.name in str(caught.value)
                assert repr(key) in str(caught.value)


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.long)])
def test_a_slice_notices_damage_in_the_blocks_that_it_takes_and_in_no_others(tmp_path, count):
    state = large_state()
    holdfast.save(state, tmp_path)
    layout = Layout(tmp_path)
    begin, _ = layout.places["third"]
    header = layout.blocks(0, layout.header_end)
    for position in positions_of(layout, count):
        with changed(layout.path, flipped(layout.content, position, position % 8)):
            for rows in (slice(0, 1), slice(100, 200), slice(299, 300)):
                needed = layout.blocks(begin + rows.start * 600, begin + rows.stop * 600) | header
                handle = holdfast.open(tmp_path)["third"]
                if position // BLOCK in needed or position >= layout.table_begin:
                    with pytest.raises(DamagedCheckpointError) as caught:
                        handle[rows, 5:7]
                    assert caught.value.file == str(layout.path)
                    assert caught.value.key == "third"
                else:
                    assert_same(handle[rows, 5:7], state["third"][rows, 5:7])


def damaged_ways(folder: Path) -> dict[str, Callable[[Path], None]]:
    content = only(folder, "data-*-0-0.safetensors").read_bytes()
    return {
        "a byte less": lambda path: path.write_bytes(content[:-1]),
        "a block less": lambda path: path.write_bytes(content[:-BLOCK]),
        "cut at a block": lambda path: path.write_bytes(content[:BLOCK]),
        "cut in the header": lambda path: path.write_bytes(content[:100]),
        "empty": lambda path: path.write_bytes(b""),
        "a byte more": lambda path: path.write_bytes(content + b"\0"),
        "twice as large": lambda path: path.write_bytes(content * 2),
        "missing": lambda path: path.unlink(),
        "zeros": lambda path: path.write_bytes(bytes(len(content))),
        "blocks exchanged": lambda path: path.write_bytes(
            content[:BLOCK] + content[2 * BLOCK : 3 * BLOCK] + content[BLOCK : 2 * BLOCK] + content[3 * BLOCK :]
        ),
    }


@pytest.mark.parametrize(
    "way",
    [
        *("a byte less", "a block less", "cut at a block", "cut in the header", "empty", "a byte more"),
        *("twice as large", "missing", "zeros", "blocks exchanged"),
    ],
)
def test_a_data_file_that_is_not_as_it_was(tmp_path, way):
    state = large_state()
    holdfast.save(state, tmp_path)
    path = only(tmp_path, "data-*")
    damaged_ways(tmp_path)[way](path)
    # Of the two tensors one is in the blocks that were exchanged.
    for key in ("first", "third") if way != "blocks exchanged" else ("first",):
        for read in (
            lambda key=key: holdfast.load({key: torch.zeros_like(state[key])}, tmp_path),
            lambda key=key: holdfast.open(tmp_path)[key][50:60],
            lambda key=key: holdfast.open(tmp_path).read(key),
        ):
            with pytest.raises(DamagedCheckpointError) as caught:
                read()
            assert caught.value.file == str(path)
            assert caught.value.key == key
            assert key in str(caught.value)
    with pytest.raises(DamagedCheckpointError):
        verify(tmp_path)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b"", None])
def test_an_index_that_is_not_as_it_was(tmp_path, change):
    write_in_uneven_parts(tmp_path)
    path = only(tmp_path, "index-*")
    with changed(path, change and change(path.read_bytes())):
        for read in (open_everything, verify):
            with pytest.raises(DamagedCheckpointError) as caught:
                read(tmp_path)
            assert caught.value.file == str(path)


@pytest.mark.parametrize("cut", [0, 1, 20, 300])
def test_a_record_that_is_cut_off(tmp_path, cut):
    holdfast.save(small_state(), tmp_path)
    path = tmp_path / "holdfast.json"
    content = path.read_bytes()
    with changed(path, content[: cut and -cut]), pytest.raises(DamagedCheckpointError, match="cut off"):
        holdfast.open(tmp_path)


def test_data_files_that_changed_places(tmp_path):
    state = {"one": torch.arange(100), "two": torch.arange(100, 200)}
    holdfast.save(state, tmp_path, max_file_size=800)
    one, two = sorted(tmp_path.glob("data-*"))
    assert one.stat().st_size == two.stat().st_size
    one_content, two_content = one.read_bytes(), two.read_bytes()
    one.write_bytes(two_content)
    two.write_bytes(one_content)
    for key in state:
        with pytest.raises(DamagedCheckpointError, match=f"'{key}'"):
            holdfast.load({key: torch.zeros(100, dtype=torch.int64)}, tmp_path)
    with pytest.raises(DamagedCheckpointError):
        verify(tmp_path)


def test_files_of_another_save_under_the_names_of_this_one(tmp_path):
    """As after a copy that was interrupted: same sizes, same layout, other content."""
    holdfast.save({"weight": torch.zeros(1000)}, tmp_path / "old")
    holdfast.save({"weight": torch.ones(1000)}, tmp_path / "new")
    shutil.copy(only(tmp_path / "old", "data-*"), only(tmp_path / "new", "data-*"))
    target = {"weight": torch.full((1000,), 5.0)}
    with pytest.raises(DamagedCheckpointError):
        holdfast.load(target, tmp_path / "new")
    with pytest.raises(DamagedCheckpointError):
        verify(tmp_path / "new")
    with pytest.raises(DamagedCheckpointError):
        holdfast.open(tmp_path / "new")["weight"][3:4]


def test_a_record_among_the_files_of_another_save(tmp_path):
    holdfast.save(small_state(), tmp_path / "old")
    holdfast.save(small_state(), tmp_path / "new")
    shutil.copy(tmp_path / "old" / "holdfast.json", tmp_path / "new")
    with pytest.raises(DamagedCheckpointError, match="is missing"):
        holdfast.open(tmp_path / "new").read()


def test_a_checkpoint_that_is_replaced_while_it_is_read_says_so(tmp_path):
    holdfast.save(small_state(), tmp_path)
    opened = holdfast.open(tmp_path)
    holdfast.save(small_state(), tmp_path, overwrite=True)
    with pytest.raises(ReplacedCheckpointError, match="another save has replaced the checkpoint"):
        opened["weight"][0]


@pytest.mark.parametrize("what", ["flip", "cut", "missing"])
def test_damage_found_first_leaves_the_state_as_it_was(tmp_path, what):
    state = large_state()
    holdfast.save({**state, "step": 7}, tmp_path)
    layout = Layout(tmp_path)
    last = len(layout.content) - 1
    content = {"flip": flipped(layout.content, last, 0), "cut": layout.content[:-1], "missing": None}[what]
    target = {**{key: torch.full_like(value, 9) for key, value in state.items()}, "step": 0}
    with changed(layout.path, content), pytest.raises(DamagedCheckpointError) as caught:
        holdfast.load(target, tmp_path, verify_first=True)
    assert "partly loaded" not in str(caught.value)
    assert_same(target, {**{key: torch.full_like(value, 9) for key, value in state.items()}, "step": 0})


def test_damage_found_while_the_state_is_filled_says_that_it_is_partly_loaded(tmp_path):
    holdfast.save(large_state(), tmp_path)
    layout = Layout(tmp_path)
    target = {key: torch.zeros_like(value) for key, value in large_state().items()}
    partly = pytest.raises(DamagedCheckpointError, match="partly loaded now and must not be used")
    with changed(layout.path, flipped(layout.content, len(layout.content) - 1, 0)), partly:
        holdfast.load(target, tmp_path)


def whole() -> torch.Tensor:
    return torch.arange(40_000, dtype=torch.int32).reshape(200, 200)


def save_rows(folder: Path) -> None:
    mesh = mesh_of_all_ranks()
    holdfast.save({"weight": dtensor_of(whole(), mesh, [Shard(0)]), "step": 5}, folder)


def load_columns(folder: Path, *, verify_first: bool) -> tuple[str, str | None, str, bool]:
    """What the load said, and whether the state is as before."""
    mesh = mesh_of_all_ranks()
    target: DTensor = dtensor_of(torch.full((200, 200), -1, dtype=torch.int32), mesh, [Shard(1)])
    state = {"weight": target, "step": 0}
    try:
        holdfast.load(state, folder, verify_first=verify_first)
    except HoldfastError as error:
        untouched = bool((target.to_local() == -1).all()) and state["step"] == 0
        return type(error).__name__, getattr(error, "key", None), str(error), untouched
    return "loaded", None, "", False


def load_columns_again_and_again(folder: Path, positions: list[tuple[str, int]]) -> list[Any]:
    found = []
    for name, position in positions:
        if dist.get_rank() == 0:
            content = (folder / name).read_bytes()
            (folder / name).write_bytes(flipped(content, position, position % 8))
        dist.barrier()
        found.append([load_columns(folder, verify_first=first) for first in (False, True)])
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / name).write_bytes(content)
    dist.barrier()
    assert load_columns(folder, verify_first=True)[0] == "loaded"
    return found


def test_a_load_by_another_number_of_ranks_and_another_layout_finds_it_on_all_ranks(ranks: RankPool, tmp_path):
    ranks(4).run(save_rows, tmp_path)
    files = sorted(path for path in tmp_path.glob("data-*"))
    assert len(files) == 4
    positions = [(path.name, at) for path in files for at in (3, 4000, 4096, path.stat().st_size - 1)]
    for outcomes in zip(*ranks(2).run(load_columns_again_and_again, tmp_path, positions), strict=True):
        for verified, verified_first in outcomes:
            for name, key, text, _ in (verified, verified_first):
                assert (name, key) == ("DamagedCheckpointError", "weight")
                assert re.search(r"data-\w+-\d-0\.safetensors", text)
            assert verified_first[3]


def load_rows(folder: Path, position: int, name: str) -> tuple[str, bool]:
    """The damage is in the part of one rank alone."""
    mesh = mesh_of_all_ranks()
    target: DTensor = dtensor_of(torch.full((200, 200), -1, dtype=torch.int32), mesh, [Shard(0)])
    try:
        holdfast.load({"weight": target}, folder, verify_first=True)
    except DamagedCheckpointError as error:
        return str(error), bool((target.to_local() == -1).all())
    return "loaded", False


def test_damage_found_first_by_one_rank_leaves_the_state_of_all_ranks_as_it_was(ranks: RankPool, tmp_path):
    ranks(2).run(save_rows, tmp_path)
    path = only(tmp_path, "data-*-1-0.safetensors")
    content = path.read_bytes()
    with changed(path, flipped(content, len(content) - 1, 3)):
        for text, untouched in ranks(2).run(load_rows, tmp_path, 0, path.name):
            assert path.name in text
            assert "on rank 1" in text
            assert untouched
