"""DCP checkpoints of either library as sources: the same tensors, regions and values that were saved."""

from __future__ import annotations

import re
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._base.boxes import Box
from holdfast._dcp.source import DcpSource
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.refs import PickledValue, TensorRef, UnknownValue
from holdfast._formats.source import ReadRequest
from holdfast._load.opening import open_source
from holdfast.errors import CheckpointNotFoundError, DamagedCheckpointError, StateMismatchError
from tests.dcp.states import LAYOUTS, LIBRARIES, Layouts, change_index, numbered, save
from tests.formats.regions import differing_from, every_kind, requests_for, wrong
from tests.properties import examples
from tests.rank_pool import RankPool
from tests.torches import ALONE

BOTH = pytest.mark.parametrize("library", LIBRARIES)


def ref(key: str, tensor: torch.Tensor, kind: str = "replicated") -> TensorRef:
    return TensorRef(key, dtype_named(str(tensor.dtype).removeprefix("torch.")), tuple(tensor.shape), kind)


# --- tensors ---------------------------------------------------------------------------------------------------------

KINDS = every_kind()


@pytest.fixture(scope="module")
def saved_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tensor of every dtype and shape, saved by each library from one process."""
    places = {}
    for library in LIBRARIES:
        places[library] = tmp_path_factory.mktemp(library)
        save(library, dict(KINDS), places[library], no_dist=True)
    return places


@BOTH
def test_every_dtype_and_shape_is_listed_and_read(library: str, saved_alone: dict[str, Path]) -> None:
    source = open_source(saved_alone[library])

    assert isinstance(source, DcpSource)
    assert (source.format, source.location) == ("dcp", str(saved_alone[library]))
    assert differing_from(source, KINDS) == []


@BOTH
@given(data=st.data())
@settings(max_examples=examples(100))
def test_any_region_goes_into_any_memory(library: str, saved_alone: dict[str, Path], data: st.DataObject) -> None:
    source = DcpSource(saved_alone[library])
    requests = data.draw(requests_for(source))

    source.read(requests, verify=data.draw(st.booleans()))

    assert wrong(requests, KINDS) == []


FULL = {layout: numbered(7, 9, start=1000 * number) for number, layout in enumerate(LAYOUTS)}


def save_in_all_layouts(library: str, path: Path) -> None:
    layouts = Layouts()
    state = {layout: layouts.lay_out(layout, full) for layout, full in FULL.items()}
    save(library, {"model": state}, path)


@pytest.mark.hypothesis
@pytest.mark.parametrize("world_size", [2, 4])
@BOTH
def test_regions_across_the_parts_of_ranks(ranks: RankPool, tmp_path: Path, library: str, world_size: int) -> None:
    ranks(world_size).run(save_in_all_layouts, library, tmp_path)
    originals = {f"model.{layout}": full for layout, full in FULL.items()}
    source = DcpSource(tmp_path)

    assert differing_from(source, originals) == []
    assert source.tree == {"model": {layout: source.tensors[f"model.{layout}"] for layout in FULL}}

    @given(data=st.data())
    @settings(max_examples=examples(60))
    def regions_are_right(data: st.DataObject) -> None:
        requests = data.draw(requests_for(source))
        source.read(requests)
        assert wrong(requests, originals) == []

    regions_are_right()
    stored = stock.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    for key, ref_ in source.tensors.items():
        expected = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored[key].chunks]
        assert source.chunks(key) == expected
        assert ref_.kind == ("sharded" if len(expected) > 1 else "replicated")


def save_apart(library: str, path: Path) -> None:
    layouts = Layouts()
    state = {layout: layouts.lay_out(layout, FULL[layout]) for layout in ("plain", "rows", "blocks")}
    save(library, {**state, "rank": layouts.rank}, path, use_collectives=False)


@BOTH
def test_a_checkpoint_saved_rank_by_rank_is_one(ranks: RankPool, tmp_path: Path, library: str) -> None:
    ranks(2).run(save_apart, library, tmp_path)
    source = open_source(tmp_path)

    assert differing_from(source, {name: FULL[name] for name in ("plain", "rows", "blocks")}) == []
    assert source.tree["rank"] == 0


def test_a_part_of_a_tensor_that_no_rank_has_saved_is_an_error_and_not_zeros(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save_apart, "ours", tmp_path)
    (tmp_path / "__1.metadata").unlink()
    source = DcpSource(tmp_path)
    into = np.zeros((7, 9), "<u4")

    with pytest.raises(StateMismatchError, match="no chunk covers"):
        source.read([ReadRequest("rows", (0, 0), (7, 9), into)])
    source.read([ReadRequest("rows", (0, 0), (4, 9), into[:4])])
    assert into[:4].tobytes() == FULL["rows"][:4].numpy().tobytes()


def test_a_chunk_that_many_requests_share_is_read_once(tmp_path: Path) -> None:
    stock.save({"w": numbered(64, 64)}, checkpoint_id=tmp_path, **ALONE)
    source = DcpSource(tmp_path)
    into = np.zeros((64, 64), "<u4")

    once = source.read([ReadRequest("w", (0, 0), (64, 64), into)])
    by_rows = source.read([ReadRequest("w", (row, 0), (1, 64), into[row : row + 1]) for row in range(64)])

    assert once == by_rows
    assert 64 * 64 * 4 <= once < 64 * 64 * 4 + 4096


# --- values ----------------------------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "epoch": 3,
    "lr": 0.1,
    "name": "run",
    "nothing": None,
    "schedule": [1, 2, 3],
    "betas": (0.9, 0.95),
    "table": {"a": {"b": [1, {"c": "d"}]}, 7: "seven"},
    "array": np.arange(3),
}


@BOTH
def test_the_nested_state_is_there_again(tmp_path: Path, library: str) -> None:
    w, step = numbered(2, 3), torch.tensor(5)
    state = {"model": {"layer.weight": w}, "optim": {"state": [{"step": step}, {"step": step}]}, **VALUES}
    save(library, state, tmp_path, no_dist=True)
    source = DcpSource(tmp_path)

    tree = source.tree

    assert tree.keys() == state.keys()
    assert tree["model"] == {"layer.weight": ref("model.layer.weight", w)}
    steps = [{"step": ref(f"optim.state.{position}.step", step)} for position in range(2)]
    assert tree["optim"] == {"state": steps}
    assert tree["array"].tolist() == [0, 1, 2]
    # DCP makes texts of all dict keys.
    expected = {**VALUES, "table": {"a": {"b": [1, {"c": "d"}]}, "7": "seven"}}
    assert {key: tree[key] for key in VALUES if key != "array"} == {
        key: value for key, value in expected.items() if key != "array"
    }


def test_listing_tensors_reads_no_values(tmp_path: Path) -> None:
    stock.save({"value": "a" * 1000}, checkpoint_id=tmp_path, **ALONE)
    for file in tmp_path.glob("*.distcp"):
        file.unlink()
    source = DcpSource(tmp_path)

    assert source.tensors == {}
    with pytest.raises(DamagedCheckpointError, match="is missing"):
        _ = source.tree


class Custom:
    def __init__(self, content: int) -> None:
        self.content = content


@pytest.mark.filterwarnings("ignore::UserWarning")
@BOTH
def test_a_value_that_needs_code_is_kept_as_a_pickle_unless_allowed(tmp_path: Path, library: str) -> None:
    save(library, {"custom": Custom(4), "plain": 1}, tmp_path, no_dist=True)

    tree = open_source(tmp_path).tree
    allowed = open_source(tmp_path, allow_pickle=True).tree

    assert isinstance(tree["custom"], PickledValue)
    assert tree["plain"] == 1
    assert allowed["custom"].content == 4


def test_a_quantized_tensor_is_listed_as_a_value_that_cannot_be_had(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2, 3), 0.5, 1, torch.quint8)
    save("ours", {"q": quantized, "w": torch.ones(2)}, tmp_path, no_dist=True)
    source = DcpSource(tmp_path)

    assert list(source.tensors) == ["w"]
    assert source.tree["q"] == UnknownValue("torch.quint8", {"shape": [2, 3]})
    with pytest.raises(KeyError):
        source.chunks("q")


# --- trees that cannot be built --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "paths",
    [
        None,
        {},
        {"a.b": ("a", "b"), "a.c": ("a",)},
        {"a.b": ("a", "b"), "a.c": ("a", "b")},
        {"a.b": ("a", "b"), "a.c": ("a", "b", "c")},
        {"a.b": ("x", "y"), "a.c": ("x", "z")},
        {"a.b": "a.b", "a.c": "a.c"},
    ],
    ids=["none", "empty", "wrong", "twice", "below a leaf", "of other keys", "texts"],
)
def test_without_usable_paths_the_tree_is_flat(tmp_path: Path, paths: Any) -> None:
    stock.save({"a": {"b": 1, "c": 2}}, checkpoint_id=tmp_path, **ALONE)

    def change(index: Any) -> None:
        index.planner_data = paths

    change_index(tmp_path, change)

    assert DcpSource(tmp_path).tree == {"a.b": 1, "a.c": 2}


def test_empty_containers_in_a_list_leave_a_gap_and_no_list_of_any_length_is_made(tmp_path: Path) -> None:
    stock.save({"a": [{"x": 1}, {}, {"y": 2}]}, checkpoint_id=tmp_path, **ALONE)

    assert DcpSource(tmp_path).tree == {"a": {0: {"x": 1}, 2: {"y": 2}}}

    def change(index: Any) -> None:
        far = 10**15
        index.state_dict_metadata[f"a.{far}.z"] = index.state_dict_metadata.pop("a.2.y")
        index.planner_data[f"a.{far}.z"] = ("a", far, "z")
        place = next(item for item in index.storage_data if item.fqn == "a.2.y")
        index.storage_data[type(place)(f"a.{far}.z")] = index.storage_data.pop(place)

    change_index(tmp_path, change)

    assert DcpSource(tmp_path).tree == {"a": {0: {"x": 1}, 10**15: {"z": 2}}}


# --- identity, damage, misuse ----------------------------------------------------------------------------------------


@BOTH
def test_the_identity_is_that_of_the_save(tmp_path: Path, library: str) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    save(library, {"w": torch.ones(2)}, one, no_dist=True)
    save(library, {"w": torch.ones(2)}, other, no_dist=True)

    assert DcpSource(one).identity == DcpSource(one).identity
    assert DcpSource(one).identity != DcpSource(other).identity
    assert DcpSource(one).metadata["save_id"] == DcpSource(one).identity


def test_without_an_id_the_identity_follows_from_what_is_stored(tmp_path: Path) -> None:
    def forget(index: Any) -> None:
        index.storage_meta = None

    identities = []
    for number, size in enumerate([2, 2, 3]):
        stock.save({"w": torch.ones(size)}, checkpoint_id=tmp_path / str(number), **ALONE)
        change_index(tmp_path / str(number), forget)
        identities.append(DcpSource(tmp_path / str(number)).identity)

    assert identities[0] == identities[1] != identities[2]


@BOTH
def test_damage_is_noticed_when_it_is_looked_for(tmp_path: Path, library: str) -> None:
    save(library, {"w": numbered(100)}, tmp_path, no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    at = content.index(np.arange(20, 30, dtype="<f4").tobytes())
    content[at] ^= 1
    file.write_bytes(content)
    source = DcpSource(tmp_path)
    into = np.zeros(100, "<u4")

    with pytest.raises(DamagedCheckpointError, match=re.escape(file.name)):
        source.read([ReadRequest("w", (0,), (100,), into)])
    source.read([ReadRequest("w", (0,), (100,), into)], verify=False)
    assert into[40] == np.float32(40).view("<u4")


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_chunks_that_torch_has_stored_in_another_order_are_read_in_ranges(tmp_path: Path, order: Any) -> None:
    lies = torch.arange(3_000_000, dtype=torch.int32).reshape(100, 150, 200)
    tensor = lies.permute(order)
    stock.save({"w": tensor}, checkpoint_id=tmp_path, **ALONE)
    source = DcpSource(tmp_path)

    whole = np.zeros(tensor.shape, source.tensors["w"].dtype.carrier)
    assert source.read([ReadRequest("w", (0, 0, 0), tuple(tensor.shape), whole)]) == tensor.nbytes
    assert np.array_equal(whole.view(np.int32), tensor.numpy())

    slowest = order.index(0)
    offsets, sizes = [3, 4, 5], [7, 20, 30]
    offsets[slowest], sizes[slowest] = 90, 2
    part = np.zeros(sizes, source.tensors["w"].dtype.carrier)
    assert source.read([ReadRequest("w", tuple(offsets), tuple(sizes), part)]) < tensor.nbytes / 10
    wanted = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
    assert np.array_equal(part.view(np.int32), tensor.numpy()[wanted])


@BOTH
def test_verify_reads_values_too(tmp_path: Path, library: str) -> None:
    save(library, {"w": torch.ones(3), "note": "as it was saved"}, tmp_path, no_dist=True)
    assert DcpSource(tmp_path).verify() > 12
    (file,) = tmp_path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[content.index(b"as it was saved")] ^= 1
    file.write_bytes(content)

    with pytest.raises(DamagedCheckpointError, match="note"):
        DcpSource(tmp_path).verify()


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (ReadRequest("v", (0,), (1,), np.zeros(1, "<u4")), KeyError),
        (ReadRequest("w", (3,), (2,), np.zeros(2, "<u4")), ValueError),
        (ReadRequest("w", (-1,), (2,), np.zeros(2, "<u4")), ValueError),
        (ReadRequest("w", (0, 0), (1, 1), np.zeros((1, 1), "<u4")), ValueError),
        (ReadRequest("w", (0,), (2,), np.zeros(3, "<u4")), ValueError),
        (ReadRequest("w", (0,), (2,), np.zeros(2, "<f4")), ValueError),
        (ReadRequest("w", (0,), (2,), np.frombuffer(bytes(8), "<u4")), ValueError),
    ],
    ids=["unknown", "beyond", "before", "dimensions", "shape", "dtype", "read-only"],
)
def test_a_request_that_makes_no_sense_is_refused_before_anything_is_read(
    tmp_path: Path, request_: ReadRequest, error: type[Exception]
) -> None:
    stock.save({"w": torch.ones(4)}, checkpoint_id=tmp_path, **ALONE)
    good = np.zeros(4, "<u4")

    with pytest.raises(error, match=request_.key):
        DcpSource(tmp_path).read([ReadRequest("w", (0,), (4,), good), request_])
    assert not good.any()


def test_a_folder_without_an_index_is_no_source() -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.raises(CheckpointNotFoundError, match=re.escape(folder)):
        DcpSource(folder)


def test_the_memory_needed_besides_the_targets_is_that_of_a_chunk(tmp_path: Path) -> None:
    chunk = 4 << 20
    state = {f"w{number}": numbered(chunk // 4, start=number) for number in range(8)}
    save("ours", state, tmp_path, no_dist=True)
    source = DcpSource(tmp_path)
    requests = [ReadRequest(key, (0,), (chunk // 4,), np.zeros(chunk // 4, "<u4")) for key in state]

    tracemalloc.start()
    source.read(requests)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 1.5 * chunk
    assert wrong(requests, state) == []
