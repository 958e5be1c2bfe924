"""Safetensors files and folders as sources: the same tensors and regions that the safetensors package wrote."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

try:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as StockWriter
except ImportError:  # until torch 2.7
    StockWriter = None

from holdfast._base.boxes import Box
from holdfast._formats import ranged_files
from holdfast._formats.safetensors import source as safetensors_source
from holdfast._formats.safetensors.source import SafetensorsSource
from holdfast._formats.source import ReadRequest
from holdfast._load.opening import open_source
from holdfast.dcp.hf_storage import HuggingFaceStorageWriter
from holdfast.errors import DamagedCheckpointError, UnsafePathError
from tests.dcp.states import LAYOUTS, Layouts, bits, numbered, save
from tests.formats.regions import DTYPES, differing_from, every_kind, requests_for, whole, wrong
from tests.properties import examples
from tests.rank_pool import RankPool

KINDS = every_kind([dtype for dtype in DTYPES if dtype != torch.complex128])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    save_file(KINDS, path, metadata={"format": "pt", "made by": "hand"})
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in three files with an index, as Hugging Face's libraries write it."""
    path = tmp_path_factory.mktemp("folder")
    write_model(path, KINDS, files=3)
    return path


def write_model(path: Path, tensors: dict[str, torch.Tensor], files: int) -> None:
    weight_map = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = dict(list(tensors.items())[number::files])
        save_file(part, path / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_file_is_listed_and_read(file: Path) -> None:
    source = open_source(file)

    assert isinstance(source, SafetensorsSource)
    assert (source.format, source.location) == ("safetensors", str(file))
    assert differing_from(source, KINDS) == []
    assert source.tree == source.tensors
    assert source.metadata == {"format": "pt", "made by": "hand"}


@pytest.mark.parametrize("given_path", ["", "model.safetensors.index.json"])
def test_a_folder_is_listed_and_read(folder: Path, given_path: str) -> None:
    source = open_source(folder / given_path)

    assert source.format == "safetensors"
    assert differing_from(source, KINDS) == []
    assert source.chunks("float32.5x3") == [Box((0, 0), (5, 3))]


@given(data=st.data())
@settings(max_examples=examples(100))
def test_any_region_goes_into_any_memory(file: Path, folder: Path, data: st.DataObject) -> None:
    source = SafetensorsSource(data.draw(st.sampled_from([file, folder])))
    requests = data.draw(requests_for(source))

    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):  # as if all were large: by several threads
            patch.setattr(safetensors_source, "SMALL_TENSOR", -1)
            patch.setattr(safetensors_source, "SEVERAL_READERS_FROM", 0)
            patch.setattr(ranged_files, "SEVERAL_READERS_FROM", 0)
        source.read(requests)

    assert wrong(requests, KINDS) == []


FULL = {layout: numbered(7, 9, start=1000 * number) for number, layout in enumerate(LAYOUTS)}


def save_parts(path: Path, writer_type: type, options: dict[str, bool], layouts: list[str]) -> None:
    by_name = Layouts()
    state = {layout: by_name.lay_out(layout, FULL[layout]) for layout in layouts}
    library = "stock" if writer_type is StockWriter else "ours"
    save(library, state, path, storage_writer=writer_type(path=str(path), **options))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("writer_type", "options", "layouts"),
    [
        (HuggingFaceStorageWriter, {}, LAYOUTS),
        (HuggingFaceStorageWriter, {"save_distributed": True}, LAYOUTS),
        pytest.param(
            *(StockWriter, {"save_distributed": True}, ["plain", "rows", "columns", "blocks"]),
            marks=pytest.mark.skipif(
                "save_distributed" not in inspect.signature(StockWriter or object).parameters,
                reason="this torch's writer of Hugging Face folders does not know that option",
            ),
        ),
    ],
    ids=["whole files", "parts", "parts by stock torch"],
)
@pytest.mark.hypothesis
@pytest.mark.parametrize("world_size", [2, 4])
def test_what_ranks_have_written_through_dcp(
    ranks: RankPool, tmp_path: Path, writer_type: type, options: dict[str, bool], layouts: list[str], world_size: int
) -> None:
    ranks(world_size).run(save_parts, tmp_path, writer_type, options, layouts)
    source = open_source(tmp_path)
    originals = {layout: FULL[layout] for layout in layouts}

    assert differing_from(source, originals) == []
    in_parts = bool(options)
    assert source.tensors["rows"].kind == ("sharded" if in_parts else "replicated")
    assert (len(source.chunks("rows")) > 1) == in_parts

    @given(data=st.data())
    @settings(max_examples=examples(30))
    def regions_are_right(data: st.DataObject) -> None:
        requests = data.draw(requests_for(source))
        source.read(requests)
        assert wrong(requests, originals) == []

    regions_are_right()


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    big = numbered(1000, 1000)
    save_file({"w": big}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path / "model.safetensors")

    row = np.zeros((1, 1000), "<u4")
    assert source.read([ReadRequest("w", (500, 0), (1, 1000), row)]) == 4000
    assert row.tobytes() == big[500].numpy().tobytes()
    edges = np.zeros((3, 2), "<u4")
    wide = numbered(3, 40_000)  # 160,000 bytes from row to row: more than is worth reading along
    save_file({"w": wide}, tmp_path / "wide.safetensors")
    wide_source = SafetensorsSource(tmp_path / "wide.safetensors")
    assert wide_source.read([ReadRequest("w", (0, 7), (3, 2), edges)]) == 3 * 8
    assert edges.tobytes() == wide[:, 7:9].contiguous().numpy().tobytes()


def test_the_identity_tells_checkpoints_apart(tmp_path: Path) -> None:
    places = []
    for number, size in enumerate([2, 2, 3]):
        places.append(tmp_path / str(number))
        places[-1].mkdir()
        write_model(places[-1], {"w": torch.ones(size), "v": torch.ones(1)}, files=2)
    identities = [SafetensorsSource(place).identity for place in places]

    assert identities[0] == identities[1] != identities[2]


def test_saves_that_differ_in_nothing_but_their_content_are_told_apart_by_their_id(tmp_path: Path) -> None:
    for name in ("one", "other"):
        writer = HuggingFaceStorageWriter(path=str(tmp_path / name))
        save("ours", {"w": torch.ones(2)}, tmp_path / name, storage_writer=writer, no_dist=True)
    one, again, other = (SafetensorsSource(tmp_path / name) for name in ("one", "one", "other"))

    assert one.identity == again.identity == one.metadata["save_id"]
    assert one.identity != other.identity


def test_the_index_alone_says_what_belongs_to_the_model(tmp_path: Path) -> None:
    write_model(tmp_path, {"w": torch.ones(2)}, files=1)
    save_file({"other": torch.ones(2)}, tmp_path / "other.safetensors")

    assert list(SafetensorsSource(tmp_path).tensors) == ["w"]
    assert list(open_source(tmp_path / "other.safetensors").tensors) == ["other"]


def test_a_file_that_was_replaced_meanwhile_is_not_mixed_with_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(4)}, file)
    source = SafetensorsSource(file)
    save_file({"w": torch.ones(2, 2)}, file)

    with pytest.raises(DamagedCheckpointError, match="is no longer the file"):
        whole(source, "w")


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(100)}, file)
    file.write_bytes(file.read_bytes()[:-7])

    with pytest.raises(DamagedCheckpointError, match="is cut off"):
        open_source(file)


def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "secret.safetensors")
    (tmp_path / "model").mkdir()
    index = {"weight_map": {"w": "../secret.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(UnsafePathError):
        open_source(tmp_path / "model")


def test_the_safetensors_package_agrees(folder: Path) -> None:
    source = SafetensorsSource(folder)
    for file in folder.glob("*.safetensors"):
        for key, tensor in load_file(file).items():
            assert whole(source, key) == bits(tensor)


def test_requests_that_share_bytes_read_them_once(tmp_path: Path) -> None:
    tensor = torch.arange(400 * 500, dtype=torch.int32).view(400, 500)
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path / "model.safetensors")
    carrier = source.tensors["w"].dtype.carrier
    places = [np.empty((400, 100), carrier) for _ in range(5)]
    requests = [ReadRequest("w", (0, 100 * n), (400, 100), into) for n, into in enumerate(places)]

    count = source.read([*requests, ReadRequest("w", (7, 0), (50, 500), np.empty((50, 500), carrier))])

    assert count == tensor.nbytes
    for number, into in enumerate(places):
        assert np.array_equal(into.view("<i4"), tensor[:, 100 * number : 100 * (number + 1)].numpy())


def test_files_and_folders_are_read_without_torch(file: Path, folder: Path) -> None:
    program = f"""
import sys
sys.modules["torch"] = None
import numpy as np, holdfast
for place in ({str(file)!r}, {str(folder)!r}):
    checkpoint = holdfast.open(place)
    print(len(checkpoint), checkpoint["float32.5x3"].numpy().sum() == {KINDS["float32.5x3"].sum().item()!r})
    print(checkpoint.verify().ok, checkpoint["bfloat16.5x3"][1:].dtype, checkpoint.layout("bfloat16.5x3")[0].nbytes)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)

    assert ran.stdout.splitlines() == [f"{len(KINDS)} True", "True float32 30"] * 2, ran.stderr
