"""Converting between DCP checkpoints and torch.save files, compared with what stock makes of the same."""

from __future__ import annotations

import errno
import os
import resource
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import format_utils as stock_utils
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import holdfast.dcp as dcp
from holdfast import _settings as settings
from holdfast.dcp.format_utils import dcp_to_torch_save, torch_save_to_dcp
from holdfast.dcp.state_dict_loader import _load_state_dict_from_keys
from holdfast.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    RefusedPickleError,
    StateMismatchError,
    UnsupportedTensorError,
    UnsupportedValueError,
)
from tests.dcp.states import LAYOUTS, Layouts, bits, numbered
from tests.properties import examples
from tests.rank_pool import RankPool
from tests.torches import ALONE

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")  # stock says so on every call

SHARED = torch.arange(4.0)
STATE: dict[str, Any] = {
    "model": OrderedDict(
        w=numbered(3, 5),
        turned=numbered(3, 5).t(),
        half=torch.ones(2, dtype=torch.bfloat16),
        f8=torch.ones(4).to(torch.float8_e5m2),
        u16=torch.tensor([1, 65535], dtype=torch.uint16),
        flags=torch.tensor([True, False]),
        complex=torch.tensor([1 + 2j]),
        empty=torch.empty(0, 3),
        scalar=torch.tensor(4),
        parameter=torch.nn.Parameter(torch.ones(2)),
    ),
    "tied": [SHARED, SHARED],
    "nested": [{"a": torch.ones(1)}, [torch.zeros(2), 5]],
    "values": (1, "text", None, {"t": torch.arange(3)}),
    "plain list": [1, 2.5],
    "dots.in.key": b"bytes",
    3: {4: 5},
    "nothing": {},
}


def save(library: Any, state: dict[str, Any], path: Path) -> Path:
    library.save(state, checkpoint_id=path)
    return path


def outline(value: Any) -> Any:
    """Everything about a loaded state: containers, types, dtypes, shapes, strides and bits."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, tuple(value.shape), value.requires_grad, bits(value)
    if isinstance(value, dict):
        return type(value), [(key, outline(child)) for key, child in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [outline(child) for child in value]
    return type(value), value


def loaded(path: Path, **options: Any) -> Any:
    return torch.load(path, weights_only=True, **options)


def only_cause(raised: pytest.ExceptionInfo[dcp.CheckpointException]) -> BaseException:
    ((error, _),) = raised.value.failures.values()
    return error


# DCP to torch


@pytest.mark.parametrize("saved_by", [dcp, stock], ids=["saved by us", "saved by stock"])
def test_the_file_holds_what_the_file_of_stock_holds(tmp_path: Path, saved_by: Any) -> None:
    save(saved_by, STATE, tmp_path / "c")

    dcp_to_torch_save(tmp_path / "c", tmp_path / "ours.pt")
    stock_utils.dcp_to_torch_save(tmp_path / "c", tmp_path / "theirs.pt")

    assert outline(loaded(tmp_path / "ours.pt")) == outline(loaded(tmp_path / "theirs.pt"))


def test_the_file_can_be_mapped_and_its_crcs_are_right(tmp_path: Path) -> None:
    save(dcp, STATE, tmp_path / "c")

    dcp_to_torch_save(tmp_path / "c", tmp_path / "f.pt")

    mapped = loaded(tmp_path / "f.pt", mmap=True)
    assert outline(mapped) == outline(loaded(tmp_path / "f.pt"))
    assert mapped["model"]["w"].data_ptr() % 64 == 0
    with zipfile.ZipFile(tmp_path / "f.pt") as archive:
        assert archive.testzip() is None


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.builds(
    lambda shape, dtype: torch.arange(int(np.prod(shape))).reshape(shape).to(dtype),
    SHAPES,
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.uint32, torch.float8_e4m3fn]),
)
LEAVES = st.one_of(TENSORS, st.integers(), st.text(max_size=3), st.none(), st.tuples(st.integers(), TENSORS))
KEYS = st.text("abc", min_size=1, max_size=3)
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES, lambda inner: st.one_of(st.dictionaries(KEYS, inner, max_size=3), st.lists(inner, max_size=3))
    ),
    min_size=1,
    max_size=4,
)


def opened(value: Any) -> bool:
    """Whether the leaves of a container are stored one by one."""
    return isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(child, torch.Tensor) or opened(child) for child in value)
    )


def vanishes(value: Any) -> bool:
    """A container without leaves is not stored."""
    children = value.values() if isinstance(value, dict) else value
    return opened(value) and all(map(vanishes, children))


def normalised(value: Any) -> Any:
    """What a checkpoint keeps of a state. Stock keeps the same, but cannot load lists with a gap."""
    if not opened(value):
        return value
    if isinstance(value, dict):
        return {key: normalised(child) for key, child in value.items() if not vanishes(child)}
    children = [None if vanishes(child) else normalised(child) for child in value]
    while vanishes(value[len(children) - 1]):
        children.pop()
    return children


@given(TREES)
@hypothesis_settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
def test_any_state_goes_both_ways(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("tree")
    torch.save(state, folder / "in.pt")

    torch_save_to_dcp(folder / "in.pt", folder / "c")
    dcp_to_torch_save(folder / "c", folder / "out.pt")

    assert outline(loaded(folder / "out.pt")) == outline(normalised(state))


def save_laid_out(folder: Path, use_collectives: bool) -> None:
    layouts = Layouts()
    state: dict[str, Any] = {layout: layouts.lay_out(layout, numbered(8, 12)) for layout in LAYOUTS}
    state |= {f"of rank {dist.get_rank()}": dist.get_rank(), "step": 7}
    dcp.save(state, checkpoint_id=folder, use_collectives=use_collectives)


@pytest.mark.parametrize("use_collectives", [True, False], ids=["together", "rank by rank"])
def test_shards_are_put_together(ranks: RankPool, tmp_path: Path, use_collectives: bool) -> None:
    ranks(4).run(save_laid_out, tmp_path / "c", use_collectives)

    dcp_to_torch_save(tmp_path / "c", tmp_path / "f.pt")

    found = loaded(tmp_path / "f.pt")
    assert [layout for layout in LAYOUTS if not torch.equal(found.pop(layout), numbered(8, 12))] == []
    assert found == {"step": 7, **{f"of rank {rank}": rank for rank in range(4)}}


def save_with_stock(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {"d": distribute_tensor(numbered(5, 3), mesh, [Shard(0)]), "step": 7}
    stock.save(state, checkpoint_id=folder)


def test_shards_of_stock_are_put_together(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save_with_stock, tmp_path / "c")

    dcp_to_torch_save(tmp_path / "c", tmp_path / "f.pt")

    assert outline(loaded(tmp_path / "f.pt")) == outline({"d": numbered(5, 3), "step": 7})


def test_a_lost_part_is_reported_and_nothing_is_written(ranks: RankPool, tmp_path: Path) -> None:
    ranks(4).run(save_laid_out, tmp_path / "c", False)
    (tmp_path / "c" / "__1.metadata").unlink()

    with pytest.raises(dcp.CheckpointException) as raised:
        dcp_to_torch_save(tmp_path / "c", tmp_path / "f.pt")

    assert isinstance(only_cause(raised), StateMismatchError)
    assert os.listdir(tmp_path) == ["c"]


class Custom:
    """A class that nobody knows."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore:1 saved value")
def test_values_that_need_code_are_refused_by_key_and_read_after_an_opt_in(tmp_path: Path) -> None:
    save(dcp, {"w": torch.ones(2), "deep": {"object": Custom()}}, tmp_path / "c")

    with pytest.raises(dcp.CheckpointException) as raised:
        dcp_to_torch_save(tmp_path / "c", tmp_path / "f.pt")

    error = only_cause(raised)
    assert isinstance(error, RefusedPickleError)
    assert error.key == "deep.object"
    assert os.listdir(tmp_path) == ["c"]
    dcp_to_torch_save(tmp_path / "c", tmp_path / "f.pt", allow_pickle=True)
    assert torch.load(tmp_path / "f.pt", weights_only=False)["deep"]["object"] == Custom()
    with settings.override(allow_pickle=True):
        dcp_to_torch_save(tmp_path / "c", tmp_path / "f.pt")


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_a_quantized_tensor_is_refused_by_name(tmp_path: Path) -> None:
    # Stock fails with an internal assertion of torch.
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 1, torch.qint8)
    save(dcp, {"w": torch.ones(2), "q": quantized}, tmp_path / "c")

    with pytest.raises(dcp.CheckpointException, match="'q' is a quantized tensor"):
        dcp_to_torch_save(tmp_path / "c", tmp_path / "f.pt")

    assert os.listdir(tmp_path) == ["c"]


def data_file(folder: Path) -> Path:
    (path,) = folder.glob("*.distcp")
    return path


def flip_a_bit(folder: Path) -> None:
    content = bytearray(data_file(folder).read_bytes())
    content[content.index(bytes(200)) + 100] ^= 1
    data_file(folder).write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a changed bit": flip_a_bit,
    "a file cut off": lambda folder: os.truncate(data_file(folder), 300),
    "a missing file": lambda folder: data_file(folder).unlink(),
    "a broken index": lambda folder: (folder / ".metadata").write_bytes(b"nonsense") and None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error_and_leaves_an_earlier_file_alone(tmp_path: Path, damage: str) -> None:
    save(dcp, {"first": torch.ones(100), "zeros": torch.zeros(100), "step": 7}, tmp_path / "c")
    (tmp_path / "f.pt").write_bytes(b"earlier")
    DAMAGES[damage](tmp_path / "c")

    with pytest.raises(dcp.CheckpointException) as raised:
        dcp_to_torch_save(tmp_path / "c", tmp_path / "f.pt")

    assert isinstance(only_cause(raised), DamagedCheckpointError)
    assert (tmp_path / "f.pt").read_bytes() == b"earlier"
    assert sorted(os.listdir(tmp_path)) == ["c", "f.pt"]


def test_what_is_no_checkpoint_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()

    for name, text in (("nothing", "does not exist"), ("file", "is not a folder"), ("folder", "no .metadata")):
        with pytest.raises(dcp.CheckpointException) as raised:
            dcp_to_torch_save(tmp_path / name, tmp_path / "f.pt")
        error = only_cause(raised)
        assert isinstance(error, CheckpointNotFoundError)
        assert text in str(error)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_folder_in_the_place_of_the_file_is_reported(tmp_path: Path) -> None:
    save(dcp, {"step": 7}, tmp_path / "c")

    with pytest.raises(IsADirectoryError):
        dcp_to_torch_save(tmp_path / "c", tmp_path)
    with pytest.raises(FileNotFoundError):
        dcp_to_torch_save(tmp_path / "c", tmp_path / "no" / "f.pt")


# torch to DCP


def test_stock_loads_the_checkpoint(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "f.pt")

    torch_save_to_dcp(tmp_path / "f.pt", tmp_path / "ours")
    stock_utils.torch_save_to_dcp(tmp_path / "f.pt", tmp_path / "theirs")

    for name in ("ours", "theirs"):
        stock_utils.dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
    assert outline(loaded(tmp_path / "ours.pt")) == outline(loaded(tmp_path / "theirs.pt"))


def test_tied_tensors_have_both_names(tmp_path: Path) -> None:
    torch.save({"a": SHARED, "b": SHARED[1:3]}, tmp_path / "f.pt")

    torch_save_to_dcp(tmp_path / "f.pt", tmp_path / "c")

    found = _load_state_dict_from_keys(checkpoint_id=tmp_path / "c")
    assert {key: value.tolist() for key, value in found.items()} == {"a": [0, 1, 2, 3], "b": [1, 2]}


class Module(dict[str, Any]):
    """Looks like something with a state, and is stored as what it is."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("nobody should ask")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nobody should ask")


def test_stateful_objects_are_not_asked_for_their_state(tmp_path: Path) -> None:
    torch.save({"m": Module(w=torch.ones(2))}, tmp_path / "f.pt")

    torch_save_to_dcp(tmp_path / "f.pt", tmp_path / "c", allow_pickle=True)

    assert repr(_load_state_dict_from_keys(checkpoint_id=tmp_path / "c")) == repr({"m": {"w": torch.ones(2)}})


def test_old_files_are_converted_too(tmp_path: Path) -> None:
    torch.save({"w": numbered(3, 4), "step": 7}, tmp_path / "f.pt", _use_new_zipfile_serialization=False)

    torch_save_to_dcp(tmp_path / "f.pt", tmp_path / "c")

    assert outline(_load_state_dict_from_keys(checkpoint_id=tmp_path / "c")) == outline(
        {"w": numbered(3, 4), "step": 7}
    )


@pytest.mark.filterwarnings("ignore:1 saved value")
def test_a_file_that_needs_code_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    torch.save({"object": Custom()}, tmp_path / "f.pt")

    with pytest.raises(RefusedPickleError, match="Custom"):
        torch_save_to_dcp(tmp_path / "f.pt", tmp_path / "c")

    assert os.listdir(tmp_path) == ["f.pt"]
    torch_save_to_dcp(tmp_path / "f.pt", tmp_path / "c", allow_pickle=True)
    with settings.override(allow_pickle=True):
        assert _load_state_dict_from_keys(checkpoint_id=tmp_path / "c") == {"object": Custom()}


def test_a_source_that_is_no_dict_makes_nothing(tmp_path: Path) -> None:
    torch.save([torch.ones(2)], tmp_path / "f.pt")

    with pytest.raises(UnsupportedValueError, match=r"builtins\.list"):
        torch_save_to_dcp(tmp_path / "f.pt", tmp_path / "a" / "b")
    with pytest.raises(FileNotFoundError):
        torch_save_to_dcp(tmp_path / "none.pt", tmp_path / "a" / "b")

    assert os.listdir(tmp_path) == ["f.pt"]


def test_new_folders_are_removed_after_an_error_and_old_ones_stay(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "s": torch.eye(3).to_sparse()}, tmp_path / "f.pt")
    (tmp_path / "old").mkdir()

    for folder in ("a/b/c", "old/new", "old"):
        with pytest.raises(dcp.CheckpointException) as raised:
            torch_save_to_dcp(tmp_path / "f.pt", tmp_path / folder)
        assert isinstance(only_cause(raised), UnsupportedTensorError)

    assert sorted(os.listdir(tmp_path)) == ["f.pt", "old"]
    assert os.listdir(tmp_path / "old") == []


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({f"t{n}": torch.ones(1000) for n in range(3)}, tmp_path / "f.pt")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast._dcp.torch_file_conversions.StridedArray.read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        torch_save_to_dcp(tmp_path / "f.pt", tmp_path / "a" / "b")

    assert os.listdir(tmp_path) == ["f.pt"]


def test_an_earlier_checkpoint_is_replaced_with_a_warning(tmp_path: Path) -> None:
    save(dcp, {"old": 1}, tmp_path / "c")
    torch.save({"new": 2}, tmp_path / "f.pt")

    with pytest.warns(UserWarning, match="will replace"):
        torch_save_to_dcp(tmp_path / "f.pt", tmp_path / "c")

    assert _load_state_dict_from_keys(checkpoint_id=tmp_path / "c") == {"new": 2}


# A full disk


def with_small_files(limit: int, convert: Callable[[], None]) -> None:
    """No file may become larger than ``limit``, which looks like a full disk to whoever writes one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # Python ignores the signal that comes with it
    try:
        convert()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    state = {f"t{n}": torch.ones(10_000) for n in range(4)}
    torch.save(state, tmp_path / "in.pt")
    save(dcp, state, tmp_path / "c")

    with pytest.raises(OSError, match="large") as raised:
        with_small_files(100_000, lambda: dcp_to_torch_save(tmp_path / "c", tmp_path / "out.pt"))
    with pytest.raises(dcp.CheckpointException) as in_save:
        with_small_files(100_000, lambda: torch_save_to_dcp(tmp_path / "in.pt", tmp_path / "new"))

    assert raised.value.errno == errno.EFBIG
    assert isinstance(only_cause(in_save), OSError)
    assert sorted(os.listdir(tmp_path)) == ["c", "in.pt"]


# Memory budgets


@pytest.mark.parametrize("budget", [0, -1, 1000, 1.5, True, "64 kiwis", "64 KiB"])
def test_a_budget_that_is_none_is_refused_before_anything_is_done(tmp_path: Path, budget: Any) -> None:
    for convert in (torch_save_to_dcp, dcp_to_torch_save):
        with pytest.raises(ValueError, match=r"memory_budget(: .* is not a size| must be 262144 bytes at least)"):
            convert(tmp_path / "none", tmp_path / "new", memory_budget=budget)

    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("saved_by", [dcp, stock], ids=["saved by us", "saved by stock"])
def test_with_the_smallest_budget_the_result_is_the_same(tmp_path: Path, saved_by: Any) -> None:
    large = torch.arange(700_000, dtype=torch.int32).view(700, 1000)
    state = {"rows": large, "turned": large.t(), "complex": large.to(torch.complex64).conj(), "small": torch.ones(3)}
    if saved_by is dcp:
        state |= {"stepped": large[::2, ::5], "part": large[3:400, 7:900], "again": large[0].expand(600, 1000)}
    save(saved_by, state, tmp_path / "c")

    dcp_to_torch_save(tmp_path / "c", tmp_path / "f.pt", memory_budget=256 << 10)
    torch_save_to_dcp(tmp_path / "f.pt", tmp_path / "again", memory_budget=256 << 10)
    torch.save(state, tmp_path / "as they are.pt")
    torch_save_to_dcp(tmp_path / "as they are.pt", tmp_path / "from them", memory_budget=256 << 10)

    expected = outline({key: tensor.resolve_conj() for key, tensor in state.items()})
    assert outline(loaded(tmp_path / "f.pt", mmap=True)) == expected
    assert outline(loaded(tmp_path / "f.pt")) == expected
    with zipfile.ZipFile(tmp_path / "f.pt") as archive:
        assert archive.testzip() is None
    for folder in ("again", "from them"):
        assert outline(_load_state_dict_from_keys(checkpoint_id=tmp_path / folder)) == expected


def test_conversions_do_not_mind_that_programs_make_tensors_on_the_meta_device(tmp_path: Path) -> None:
    saved = {"w": torch.randn(30, 40), "turned": torch.randn(20, 30).T, "empty": torch.empty(0, 3)}
    torch.save(saved, tmp_path / "saved.pt")

    with torch.device("meta"):
        torch_save_to_dcp(tmp_path / "saved.pt", tmp_path / "dcp")
        dcp_to_torch_save(tmp_path / "dcp", tmp_path / "again.pt")

    state = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
    stock.load(state, checkpoint_id=tmp_path / "dcp", **ALONE)
    again = torch.load(tmp_path / "again.pt")
    for key, tensor in saved.items():
        assert torch.equal(state[key], tensor)
        assert torch.equal(again[key], tensor)
