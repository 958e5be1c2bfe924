"""``holdfast.open``: keys, handles, slices, whole states, and all that without torch."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as stock
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast._formats.native.source import NativeSource
from holdfast._formats.source import WholeReads


class Point(NamedTuple):
    x: Any
    y: Any


holdfast.register_type(Point)

CUBE = torch.arange(7 * 5 * 6).reshape(7, 5, 6).to(torch.int32)
TIED = torch.rand(3, 2)
STATE = {
    "cube": CUBE,
    "model": {"w": TIED, "again": TIED, "half": torch.rand(4).to(torch.bfloat16)},
    "small": torch.arange(5).float().to(torch.float8_e4m3fn),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "array": np.arange(6).reshape(2, 3),
    "dates": np.array(["2020-01-02"], "M8[D]"),
    "mixed": OrderedDict([(3, "three"), (None, Point(1, torch.ones(2))), ("list", [1, 2])]),
    "default": defaultdict(int, {"a": 1}),
    "counter": Counter("aab"),
    "own": holdfast.PerRank({"seed": 5, "t": torch.zeros(2)}),
    "step": 100,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("open") / "saved"
    holdfast.save(STATE, folder, metadata={"loss": 0.25, "tags": ["a"]})
    return folder


def test_a_checkpoint_is_a_mapping_of_its_keys(place):
    with holdfast.open(place) as checkpoint:
        keys = list(checkpoint)
        assert keys[:4] == ["cube", "model.w", "model.again", "model.half"]
        assert '["mixed"][null]["y"]' in keys
        assert "own.0.seed" in keys
        assert len(checkpoint) == len(keys) == len(set(keys))
        assert "model.w" in checkpoint
        assert "model" not in checkpoint
        assert 5 not in checkpoint
        assert checkpoint["step"] == 100
        assert checkpoint["mixed.list"] == [1, 2]
        assert checkpoint["mixed.3"] == "three"
        assert checkpoint["own.0.seed"] == 5
        assert dict(checkpoint)["step"] == 100


def test_what_is_known_of_a_checkpoint_is_read_without_its_tensors(place, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "holdfast.json").write_bytes((place / "holdfast.json").read_bytes())
    checkpoint = holdfast.open(bare)
    assert checkpoint.path == str(bare)
    assert checkpoint.format == "native"
    assert checkpoint.metadata == {"loss": 0.25, "tags": ["a"]}
    assert checkpoint.provenance["world_size"] == 1
    handle = checkpoint["cube"]
    assert (handle.key, handle.shape, handle.ndim, len(handle), handle.nbytes) == ("cube", (7, 5, 6), 3, 7, 840)
    assert handle.dtype == torch.int32
    assert handle.dtype == np.int32
    assert handle.dtype == "int32"
    assert handle.kind == "replicated"
    assert repr(handle) == "<stored tensor 'cube': int32 [7, 5, 6]>"
    assert repr(checkpoint).startswith(f"<native checkpoint {bare}: ")
    with pytest.raises(TypeError, match="no length"):
        len(checkpoint["scalar"])


def test_keys_that_are_not_there_are_answered_with_a_hint(place):
    checkpoint = holdfast.open(place)
    with pytest.raises(KeyError, match=r"did you mean 'model.half'"):
        checkpoint["model.hlaf"]
    with pytest.raises(KeyError, match=r"not one entry but 3, such as 'model.w'; read\('model'\) reads them all"):
        checkpoint["model"]
    with pytest.raises(KeyError, match=r"there is no 'modle\.\*' in .*; did you mean"):
        checkpoint.read("modle.*")


indices = st.one_of(
    st.integers(-9, 9),
    st.builds(slice, *[st.none() | st.integers(-9, 9)] * 2, st.none() | st.integers(-4, 4).filter(bool)),
)


@given(index=st.lists(indices, max_size=4), dots=st.none() | st.integers(0, 4))
def test_slices_are_those_of_numpy(place, index, dots):
    parts: list[Any] = list(index)
    if dots is not None:
        parts.insert(dots, ...)
    handle = holdfast.open(place)["cube"]
    try:
        expected = CUBE.numpy()[tuple(parts)]
    except IndexError:
        with pytest.raises(IndexError):
            handle[tuple(parts)]
        return
    found = handle[tuple(parts)]
    assert isinstance(found, torch.Tensor)
    assert tuple(found.shape) == expected.shape
    assert np.array_equal(found.numpy(), expected)
    assert np.array_equal(handle.numpy(tuple(parts)), expected)
    if len(parts) == 1:
        assert np.array_equal(handle[parts[0]].numpy(), expected)


def test_indices_that_would_copy_are_refused(place):
    handle = holdfast.open(place)["cube"]
    for index in [[0, 1], True, np.array([1]), torch.tensor([True] * 7), "a", 1.0]:
        with pytest.raises(TypeError, match="sliced"):
            handle[index]
    with pytest.raises(IndexError, match=r"one '\.\.\.'"):
        handle[..., ...]
    assert handle[np.int64(2), torch.tensor(1)].tolist() == CUBE[2, 1].tolist()


def test_a_handle_is_walked_through_row_by_row(place):
    assert [row.tolist() for row in holdfast.open(place)["cube"]] == CUBE.tolist()


def test_elements_come_as_torch_numpy_or_bits(place):
    checkpoint = holdfast.open(place)
    half, small = checkpoint["model.half"], checkpoint["small"]
    stored = STATE["model"]["half"]
    assert half[:].dtype == torch.bfloat16
    assert torch.equal(half[:], stored)
    assert half.numpy().dtype == np.float32
    assert np.array_equal(half.numpy(), stored.float().numpy())
    assert half.raw().dtype == np.uint16
    assert np.array_equal(half.raw(), stored.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(small.numpy(), np.arange(5, dtype=np.float32))
    assert small[1:3].dtype == torch.float8_e4m3fn
    assert np.asarray(checkpoint["cube"], dtype=np.float64).sum() == CUBE.sum()
    assert checkpoint["scalar"][...].shape == ()
    assert checkpoint["scalar"][()].item() == 2.5
    assert checkpoint["scalar"].numpy().shape == ()
    assert checkpoint["empty"][:].shape == (0, 3)
    array = checkpoint["array"]
    assert isinstance(array[0], np.ndarray)
    assert torch.equal(array.torch(), torch.arange(6).reshape(2, 3))
    assert checkpoint["dates"][:] == STATE["dates"]
    with pytest.raises(TypeError, match="torch does not have"):
        checkpoint["dates"].torch()


def test_a_slice_reads_little_of_a_large_tensor(tmp_path, monkeypatch):
    holdfast.save({"w": torch.arange(4_000_000).reshape(2000, 2000)}, tmp_path / "large")
    read: list[int] = []
    whole = NativeSource.read

    def counted(self: NativeSource, *arguments: Any, **options: Any) -> int:
        read.append(whole(self, *arguments, **options))
        return read[-1]

    monkeypatch.setattr(NativeSource, "read", counted)
    handle = holdfast.open(tmp_path / "large")["w"]
    assert handle[1000, 5:7].tolist() == [2000005, 2000006]
    assert handle[1500:1510].sum() == sum(range(1500 * 2000, 1510 * 2000))
    assert sum(read) < 1_000_000, "of 32 MB"


def test_the_tree_has_handles_in_the_containers_that_were_saved(place):
    tree = holdfast.open(place).tree()
    assert list(tree) == list(STATE)
    assert type(tree["mixed"]) is OrderedDict
    assert list(tree["mixed"]) == [3, None, "list"]
    assert type(tree["mixed"][None]) is Point
    assert tree["mixed"][None].y[:].tolist() == [1, 1]
    assert tree["own"][0]["seed"] == 5
    assert tree["own"][0]["t"].shape == (2,)


def test_a_state_is_read_into_memory_with_its_types_and_ties(place):
    found = holdfast.open(place).read()
    assert list(found) == list(STATE)
    assert torch.equal(found["cube"], CUBE)
    assert found["model"]["w"] is found["model"]["again"]
    assert found["model"]["half"].dtype == torch.bfloat16
    assert found["scalar"].shape == ()
    assert found["scalar"].item() == 2.5
    assert type(found["array"]) is np.ndarray
    assert found["dates"] == STATE["dates"]
    assert type(found["default"]) is defaultdict
    assert found["default"].default_factory is int
    assert found["counter"] == Counter("aab")
    assert found["mixed"][None].x == 1
    assert found["own"] == [{"seed": 5, "t": found["own"][0]["t"]}]


def test_a_pattern_reads_a_part(place, monkeypatch):
    requested: list[str] = []
    whole = NativeSource.read_many

    def noted(self: NativeSource, requests: Any, wholes: WholeReads, **options: Any) -> int:
        requested.extend([*(request.key for request in requests), *wholes.keys])
        return whole(self, requests, wholes, **options)

    monkeypatch.setattr(NativeSource, "read_many", noted)
    checkpoint = holdfast.open(place)
    assert list(checkpoint.read("model")) == ["model"]
    assert sorted(requested) == ["model.half", "model.w"]
    part = checkpoint.read(["step", "model.again"])
    assert list(part) == ["model", "step"]
    assert torch.equal(part["model"]["again"], TIED)
    assert checkpoint.read("mixed.3") == {"mixed": OrderedDict({3: "three"})}


def test_other_formats_are_opened_alike(tmp_path):
    state = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "step": 3}
    torch.save(state, tmp_path / "file.pt")
    stock.save(state, checkpoint_id=tmp_path / "dcp")
    safetensors.torch.save_file({"model.w": state["model"]["w"]}, tmp_path / "m.safetensors")
    for name, kind in [("file.pt", "torch"), ("dcp", "dcp"), ("m.safetensors", "safetensors")]:
        with holdfast.open(tmp_path / name) as checkpoint:
            assert checkpoint.format == kind
            assert checkpoint["model.w"][1, 1:].tolist() == [4, 5]
            if kind != "safetensors":
                assert checkpoint["step"] == 3
                assert checkpoint.read()["model"]["w"].sum() == 15


def without_torch(program: str) -> str:
    """Run a program in an interpreter where torch cannot be imported."""
    lines = "import sys\nsys.modules['torch'] = None\n" + textwrap.dedent(program)
    result = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_everything_can_be_looked_at_without_torch(place):
    out = without_torch(
        f"""
        import numpy as np, holdfast
        with holdfast.open({str(place)!r}) as checkpoint:
            assert len(checkpoint) == {len(holdfast.open(place))}
            assert checkpoint["cube"][2, 1:3, ::-2].tolist() == {CUBE[2, 1:3].flip(-1)[:, ::2].tolist()}
            assert checkpoint["model.half"][:].dtype == np.float32
            assert checkpoint["small"].numpy().tolist() == [0, 1, 2, 3, 4]
            assert checkpoint["scalar"][...] == 2.5
            assert checkpoint.metadata["loss"] == 0.25
            found = checkpoint.read(["cube", "step", "model"])
            assert type(found["cube"]) is np.ndarray and found["step"] == 100
            assert found["model"]["w"] is found["model"]["again"]
            print(checkpoint.tree()["mixed"][3])
            assert checkpoint.verify().ok
            try:
                checkpoint["cube"].torch()
            except holdfast.HoldfastError as error:
                assert error.install == "torch"
            else:
                raise AssertionError
        for name in ("save", "load", "RngState"):
            try:
                getattr(holdfast, name)
            except holdfast.HoldfastError as error:
                print(type(error).__name__, error.install)
        """
    )
    assert out.split() == ["three", *["MissingPackageError", "torch"] * 3]


def test_damage_is_found_without_torch(place, tmp_path):
    for file in place.iterdir():
        data = bytearray(file.read_bytes())
        if file.name.startswith("data-"):
            data[-3] ^= 1
        (tmp_path / file.name).write_bytes(data)
    out = without_torch(
        f"""
        import holdfast
        try:
            holdfast.open({str(tmp_path)!r}).read()
        except holdfast.HoldfastError as error:
            print(type(error).__name__)
        """
    )
    assert out.split() == ["DamagedCheckpointError"]


def test_importing_the_package_does_not_import_torch():
    program = "import sys, holdfast; dir(holdfast); print('torch' in sys.modules, holdfast.__version__)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.split()[0] == "False"
