"""Files of torch.save as sources: the same tensors, regions and values that torch.load gives."""

from __future__ import annotations

import os
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._base.boxes import Box
from holdfast._formats import ranged_files
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.source import ReadRequest
from holdfast._formats.torch_file.source import TorchFileSource
from holdfast._load.opening import open_source
from holdfast.errors import DamagedCheckpointError, NotACheckpointError, RefusedPickleError, UnsupportedValueError
from tests.dcp.states import bits, numbered
from tests.formats.regions import differing_from, every_kind, random_tensor, requests_for, whole, wrong
from tests.properties import examples

BASE = random_tensor(torch.float32, (6, 8), 1)
COMPLEX = random_tensor(torch.complex64, (3, 4), 2)
EXOTIC = {
    "transposed": BASE.T,
    "every other": BASE[::2, 1::3],
    "expanded": BASE[:1].expand(5, 8),
    "view at an offset": BASE[2:4],
    "channels last": random_tensor(torch.bfloat16, (2, 3, 4, 5), 3).to(memory_format=torch.channels_last),
    "conjugated": COMPLEX.conj(),
    "negated": random_tensor(torch.complex64, (3, 4), 5).conj().imag,
    "negated as a whole": torch._neg_view(BASE.clone()),
    "parameter": torch.nn.Parameter(BASE.clone()),
    "complex32": random_tensor(torch.complex32, (2, 3), 4),
    "scalar of a storage": BASE[3, 3],
}
KINDS = {**every_kind(), **EXOTIC}
TOO_NEW = {torch.uint16, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2}
OLD_KINDS = {key: tensor for key, tensor in KINDS.items() if tensor.dtype not in TOO_NEW}
FORMS = {"zip": KINDS, "legacy": OLD_KINDS}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tensors in today's format, and in that of torch before 1.6, in which newer dtypes cannot be loaded."""
    folder = tmp_path_factory.mktemp("files")
    torch.save(KINDS, folder / "zip.pt")
    torch.save(OLD_KINDS, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    return {"zip": folder / "zip.pt", "legacy": folder / "legacy.pt"}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("form", FORMS)
def test_every_dtype_shape_and_stride_is_listed_and_read(files: dict[str, Path], form: str) -> None:
    source = open_source(files[form])

    assert isinstance(source, TorchFileSource)
    assert (source.format, source.location) == ("torch", str(files[form]))
    assert differing_from(source, FORMS[form]) == []
    assert source.tree == {key: source.tensors[key] for key in FORMS[form]}
    assert source.chunks("transposed") == [Box((0, 0), (8, 6))]


@given(data=st.data())
@settings(max_examples=examples(120))
def test_any_region_goes_into_any_memory(files: dict[str, Path], data: st.DataObject) -> None:
    source = TorchFileSource(files[data.draw(st.sampled_from(["zip", "zip", "legacy"]))])
    requests = data.draw(requests_for(source))

    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):  # as if there was much to read: by several threads
            patch.setattr(ranged_files, "SEVERAL_READERS_FROM", 0)
        source.read(requests, verify=data.draw(st.booleans()))

    assert wrong(requests, KINDS) == []


def test_a_training_state_is_there_again(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "rng": (torch.get_rng_state(), [1, 2]),
        "history": [{"loss": 0.5}, {"loss": 0.25}],
    }
    torch.save(state, tmp_path / "all.pt")
    source = open_source(tmp_path / "all.pt")

    tree = source.tree

    assert type(tree["model"]) is OrderedDict
    assert tree["model"]["0.weight"].key == "model.0.weight"
    assert tree["optimizer"]["state"][1]["exp_avg"].key == "optimizer.state.1.exp_avg"
    assert tree["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    assert tree["rng"] == (source.tensors["rng.0"], [1, 2])
    assert (tree["epoch"], tree["history"]) == (3, state["history"])
    expected = {f"model.{key}": value for key, value in model.state_dict().items()}
    for number, entry in optimizer.state_dict()["state"].items():
        expected |= {f"optimizer.state.{number}.{name}": value for name, value in entry.items()}
    assert differing_from(source, {**expected, "rng.0": state["rng"][0]}) == []


class Pair(NamedTuple):
    left: Any
    right: Any


def test_containers_keep_their_types(tmp_path: Path) -> None:
    t = torch.ones(2)
    a, b, c, d, e, f = (t.clone() for _ in range(6))
    state = {
        "ordered": OrderedDict(a=a),
        "default": defaultdict(list, {"a": [b]}),
        "deep": [({"x": [c]},)],
        "pair": Pair(d, 1),
        "list of values": [1, (2, "three")],
        3: {"a": e},
        (1, "a"): f,
    }
    torch.save(state, tmp_path / "state.pt")
    source = open_source(tmp_path / "state.pt", allow_pickle=True)

    tree = source.tree

    assert tree.keys() == state.keys()
    assert (type(tree["ordered"]), tree["ordered"]["a"].key) == (OrderedDict, "ordered.a")
    assert (tree["default"].default_factory, tree["default"]["a"][0].key) == (list, "default.a.0")
    assert tree["deep"] == [({"x": [source.tensors["deep.0.0.x.0"]]},)]
    assert tree["pair"] == Pair(source.tensors["pair.left"], 1)
    assert tree["list of values"] == [1, (2, "three")]
    assert tree[3]["a"].key == "3.a"
    assert len(source.tensors) == 6
    assert all(whole(source, key) == bits(t) for key in source.tensors)


def test_keys_that_would_be_the_same_are_told_apart(tmp_path: Path) -> None:
    torch.save({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}, tmp_path / "state.pt")
    source = open_source(tmp_path / "state.pt")

    assert whole(source, source.tree["a.b"].key) == bits(torch.zeros(1))
    assert whole(source, source.tree["a"]["b"].key) == bits(torch.ones(1))

    torch.save({"a.b": torch.zeros(1), "a": {"b": "a value"}}, tmp_path / "state.pt")
    assert list(open_source(tmp_path / "state.pt").tensors) == ['["a.b"]']


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_of_other_kinds_are_values(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    quantized = torch.quantize_per_tensor(torch.ones(2, 3), 0.5, 1, torch.quint8)
    torch.save({"sparse": sparse, "quantized": quantized, "w": torch.ones(1)}, tmp_path / "state.pt")
    source = open_source(tmp_path / "state.pt")

    assert list(source.tensors) == ["w"]
    assert torch.equal(source.tree["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(source.tree["quantized"].dequantize(), quantized.dequantize())


def test_tensors_without_elements_are_in_host_memory_whatever_the_default_device(tmp_path: Path) -> None:
    torch.save({"empty": torch.empty(0, 3)}, tmp_path / "state.pt")

    with torch.device("meta"):
        source = open_source(tmp_path / "state.pt")

    assert source.tensors["empty"].shape == (0, 3)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_scales_that_are_a_tensor_of_the_state_too_are_there(tmp_path: Path) -> None:
    scales, zero_points = torch.rand(8, dtype=torch.float64) + 0.1, torch.arange(8)
    quantized = torch.quantize_per_channel(torch.randn(8, 50), scales, zero_points, 0, torch.qint8)
    torch.save({"scales": scales, "zeros": zero_points, "quantized": quantized}, tmp_path / "state.pt")

    found = open_source(tmp_path / "state.pt").tree["quantized"]

    assert torch.equal(found.q_per_channel_scales(), scales)
    assert torch.equal(found.dequantize(), quantized.dequantize())


def test_opening_a_large_file_reads_only_its_description(tmp_path: Path) -> None:
    w = numbered(1000, 1000)
    torch.save({"w": w, "step": 7}, tmp_path / "state.pt")
    source = TorchFileSource(tmp_path / "state.pt")
    column = np.zeros((1000, 1), "<u4")

    total = source.read([ReadRequest("w", (0, 10), (1000, 1), column)], verify=False)
    row = source.read([ReadRequest("w", (10, 0), (1, 1000), np.zeros((1, 1000), "<u4"))], verify=False)
    checked = source.read([ReadRequest("w", (10, 0), (1, 1000), np.zeros((1, 1000), "<u4"))])
    again = source.read([ReadRequest("w", (10, 0), (1, 1000), np.zeros((1, 1000), "<u4"))])

    assert column.tobytes() == w[:, 10].contiguous().numpy().tobytes()
    assert total == 999 * 4000 + 4  # from the first to the last element, as they lie close together
    assert (row, checked, again) == (4000, 4000, 4000)  # there is no CRC that a part could be compared with


def with_damage(path: Path, at: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(at)] ^= 1
    path.write_bytes(content)


def test_damage_of_a_tensor_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    torch.save({"w": numbered(100), "fine": torch.ones(3)}, tmp_path / "state.pt")
    with_damage(tmp_path / "state.pt", np.arange(20, 30, dtype="<f4").tobytes())
    source = TorchFileSource(tmp_path / "state.pt")

    assert whole(source, "fine") == bits(torch.ones(3))
    for _ in range(2):
        with pytest.raises(DamagedCheckpointError, match="CRC"):
            whole(source, "w")
    assert len(whole(source, "w", verify=False)) == 400


VIEWS = {
    "turned": lambda whole: whole.T,
    "the first rows": lambda whole: whole[:2],
    "every other": lambda whole: whole.flatten()[::2],
    "every other column": lambda whole: whole[:, ::2],
    "without the last column": lambda whole: whole[:, :-1],
    "turned, without the first row": lambda whole: whole.T[1:],
    "expanded": lambda whole: whole[None].expand(2, 6, 8),
    "three dimensions": lambda whole: whole.reshape(2, 3, 8).permute(2, 0, 1),
    "negated": lambda whole: torch._neg_view(whole),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_sound_storages_are_read_and_damage_anywhere_in_them_is_noticed(tmp_path: Path, view: str) -> None:
    tensor = VIEWS[view](torch.arange(48, dtype=torch.int32).reshape(6, 8) + 1000)
    torch.save({"view": tensor}, tmp_path / "file.pt")
    assert whole(TorchFileSource(tmp_path / "file.pt"), "view") == bits(tensor)

    for element in (1001, 1047):
        torch.save({"view": tensor}, tmp_path / "file.pt")
        with_damage(tmp_path / "file.pt", element.to_bytes(4, "little"))
        with pytest.raises(DamagedCheckpointError, match="CRC"):
            whole(TorchFileSource(tmp_path / "file.pt"), "view")


def test_what_was_sound_before_is_compared_again_by_verify(tmp_path: Path) -> None:
    torch.save({"w": torch.full((3,), 12345)}, tmp_path / "file.pt")
    source = TorchFileSource(tmp_path / "file.pt")
    whole(source, "w")
    assert source.verify() >= 24
    times = os.stat(tmp_path / "file.pt")
    with_damage(tmp_path / "file.pt", (12345).to_bytes(8, "little"))
    os.utime(tmp_path / "file.pt", ns=(times.st_atime_ns, times.st_mtime_ns))  # as if the disk had done it

    with pytest.raises(DamagedCheckpointError, match="CRC"):
        source.verify()


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="asks Linux how much was read")
def test_no_byte_of_a_turned_tensor_is_read_twice(tmp_path: Path) -> None:
    tensor = torch.arange(3_000_000, dtype=torch.int32).reshape(1500, 2000).T  # 12 MB: more than is read at once
    torch.save({"w": tensor}, tmp_path / "file.pt")
    source = TorchFileSource(tmp_path / "file.pt")
    before = bytes_read_by_this_process()

    found = whole(source, "w")

    assert bytes_read_by_this_process() - before < 1.1 * tensor.nbytes
    assert found == bits(tensor)


def bytes_read_by_this_process() -> int:
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damage_of_what_is_not_read_as_a_region_is_noticed_at_once(tmp_path: Path) -> None:
    hidden = torch.quantize_per_tensor(torch.arange(40.0), 1.0, 0, torch.quint8)
    torch.save({"hidden": hidden}, tmp_path / "state.pt")
    with_damage(tmp_path / "state.pt", bytes(range(40)))

    with pytest.raises(DamagedCheckpointError, match="CRC"):
        open_source(tmp_path / "state.pt")


def test_damage_of_a_description_is_not_taken_for_what_was_saved(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "state.pt")
    content = (tmp_path / "state.pt").read_bytes()
    (tmp_path / "state.pt").write_bytes(content.replace(b"}q\x00.", b"]q\x00."))  # an empty list

    with pytest.raises(DamagedCheckpointError, match="CRC"):
        open_source(tmp_path / "state.pt")


@pytest.mark.parametrize("change", ["replaced", "overwritten", "cut off", "removed"])
def test_a_file_that_changes_while_it_is_open_is_an_error_and_no_crash(tmp_path: Path, change: str) -> None:
    file = tmp_path / "state.pt"
    torch.save({"w": numbered(5000), "t": numbered(50, 100).T}, file)
    source = TorchFileSource(file)
    if change == "replaced":
        torch.save({"w": numbered(5000, start=1), "t": numbered(50, 100).T}, tmp_path / "new.pt")
        os.replace(tmp_path / "new.pt", file)
    elif change == "overwritten":
        torch.save({"w": numbered(5000, start=1), "t": numbered(50, 100).T}, file)
        os.utime(file, ns=(0, 0))  # as fast as this is, the clock of the file system may not have moved on
    elif change == "cut off":
        os.truncate(file, 100)
    else:
        file.unlink()

    for key in ("w", "t"):
        with pytest.raises(DamagedCheckpointError, match="is no longer the file"):
            whole(source, key)


class Custom:
    def __init__(self, content: int) -> None:
        self.content = content


def test_a_file_that_needs_code_is_refused_unless_allowed(tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    torch.save({"custom": Custom(4), "w": numbered(3, 4)}, file)

    with pytest.raises(RefusedPickleError, match=r"test_source\.Custom"):
        open_source(file)
    source = open_source(file, allow_pickle=True)
    assert source.tree["custom"].content == 4
    assert whole(source, "w") == bits(numbered(3, 4))


def test_classes_that_torch_was_told_to_trust_are_loaded(tmp_path: Path) -> None:
    torch.save({"custom": Custom(4), "w": numbered(3)}, tmp_path / "state.pt")

    with torch.serialization.safe_globals([Custom]):
        source = open_source(tmp_path / "state.pt")

    assert source.tree["custom"].content == 4
    assert whole(source, "w") == bits(numbered(3))


@pytest.mark.parametrize("content", [torch.ones(2), [torch.ones(2)], 7])
def test_a_file_without_a_dict_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "state.pt")

    with pytest.raises(UnsupportedValueError, match="a checkpoint is a dict"):
        open_source(tmp_path / "state.pt")


def endless() -> dict[str, Any]:
    state: dict[str, Any] = {"w": torch.ones(1)}
    state["itself"] = [state]
    return state


def a_million_times_a_million() -> dict[str, Any]:
    state: Any = [torch.ones(1)]
    for _ in range(40):
        state = [state, state]
    return {"a": state}


@pytest.mark.parametrize("make", [endless, a_million_times_a_million])
def test_states_that_never_end_are_refused(tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast._formats.torch_file.opened_states._MOST_LEAVES", 10_000)
    torch.save(make(), tmp_path / "state.pt")

    with pytest.raises(UnsupportedValueError, match=r"state\.pt"):
        open_source(tmp_path / "state.pt")


def test_a_shared_list_without_tensors_costs_nothing(tmp_path: Path) -> None:
    state: Any = [1, {}]
    for _ in range(40):
        state = [state, state]
    torch.save({"a": state, "w": torch.ones(1)}, tmp_path / "state.pt")

    assert list(open_source(tmp_path / "state.pt").tensors) == ["w"]


def test_another_zip_archive_is_no_checkpoint(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "some.zip", "w") as archive:
        archive.writestr("root/readme.txt", "hello")

    with pytest.raises(NotACheckpointError, match=r"not one that torch\.save wrote"):
        open_source(tmp_path / "some.zip")


def test_the_identity_is_that_of_the_content(tmp_path: Path) -> None:
    for name, value in [("one", 1.0), ("same", 1.0), ("other", 2.0)]:
        torch.save({"w": torch.full((3,), value)}, tmp_path / name)
    one, same, other = (open_source(tmp_path / name).identity for name in ("one", "same", "other"))

    assert (one == same, one == other) == (True, False)


def test_a_closed_source_gives_nothing(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "state.pt")
    with open_source(tmp_path / "state.pt") as source:
        assert isinstance(source.tree["w"], TensorRef)

    with pytest.raises(KeyError):
        whole(source, "w")
