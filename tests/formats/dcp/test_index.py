"""`.metadata`, both ways: stock torch loads what we write, we load what any torch wrote, and damage is noticed."""

from __future__ import annotations

import copy
import io
import pathlib
import pickle
import random
import re
import types
from collections import OrderedDict
from string import Template
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock_dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor import metadata as sharded_metadata
from torch.distributed.checkpoint import metadata as stock

from holdfast._formats.dcp import index_shortcut, index_writer
from holdfast._formats.dcp.index import decode_index, encode_index
from holdfast._formats.dcp.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    Seal,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)
from holdfast.errors import (
    DamagedCheckpointError,
    HoldfastError,
    RefusedPickleError,
    UnsafePathError,
    UnsupportedVersionError,
)
from tests.formats.archives.graphs import STOCK_MODULES, example, facts, modules_in, stock_pickle, to_stock
from tests.properties import examples

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
SOURCE = "/run/.metadata"


def decode(data: bytes, **options: Any) -> Metadata:
    return decode_index(data, source=SOURCE, **options)


# Random indexes

SIZES = st.integers(0, 300) | st.integers(0, 1 << 62)
NAMES = st.text(min_size=1, max_size=12) | st.sampled_from(["model.w", "x" * 300])
INFOS = st.builds(
    _StorageInfo,
    st.sampled_from(["__0_0.distcp", "__1_0.distcp", "sub/__2_0.distcp", "f" * 260]),
    SIZES,
    SIZES,
    st.none() | st.lists(st.sampled_from(["stream.zstd/1", "other/2"]), max_size=2),
    st.none() | st.builds(Seal, SIZES, SIZES, st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 32) - 1)),
)
PROPERTIES = st.builds(
    TensorProperties,
    st.sampled_from(DTYPES),
    st.sampled_from([torch.strided, torch.sparse_coo]),
    st.booleans(),
    st.sampled_from([torch.contiguous_format, torch.channels_last, torch.preserve_format]),
    st.booleans(),
)


@st.composite
def tensors(draw: st.DrawFn) -> TensorStorageMetadata:
    rank = draw(st.integers(0, 5))
    boxes = st.lists(SIZES, min_size=rank, max_size=rank).map(torch.Size)
    chunks = draw(st.lists(st.builds(ChunkStorageMetadata, boxes, boxes), max_size=4))
    return TensorStorageMetadata(draw(PROPERTIES), draw(boxes), chunks)


@st.composite
def indexes(draw: st.DrawFn) -> Metadata:
    described = draw(st.dictionaries(NAMES, tensors() | st.builds(BytesStorageMetadata), max_size=5))
    items = st.builds(
        MetadataIndex, NAMES, st.none() | st.lists(SIZES, max_size=5).map(torch.Size), st.none() | st.integers(0, 9)
    )
    paths = st.lists(NAMES | st.integers(-5, 1 << 40), max_size=4).map(tuple)
    return Metadata(
        described,
        draw(st.none() | st.dictionaries(NAMES, paths, max_size=5)),
        draw(st.none() | st.dictionaries(items, INFOS, max_size=8)),
        draw(st.none() | st.builds(StorageMeta, st.none() | NAMES, st.none() | NAMES, st.none(), st.lists(NAMES))),
        draw(st.sampled_from([None, "1.0.0", "1.7"])),
    )


@given(indexes())
@settings(max_examples=examples(60))
def test_any_index_comes_back_as_it_was(metadata: Metadata) -> None:
    back = decode(encode_index(metadata))
    assert facts(back) == facts(metadata)
    assert [info.seal for info in (back.storage_data or {}).values()] == [
        info.seal for info in (metadata.storage_data or {}).values()
    ]


@given(indexes())
@settings(max_examples=examples(60))
def test_any_index_of_ours_is_in_stock_what_stock_would_have_written(metadata: Metadata) -> None:
    loaded = pickle.loads(encode_index(metadata))
    assert facts(loaded) == facts(to_stock(metadata))
    assert not any(module.startswith("holdfast") for module in modules_in(loaded))


@given(indexes(), st.sampled_from([2, 3, 4, 5]))
@settings(max_examples=examples(60))
def test_any_index_of_stock_is_read_as_it_is(metadata: Metadata, protocol: int) -> None:
    assert facts(decode(stock_pickle(metadata, protocol))) == facts(metadata)


@given(indexes(), st.booleans())
@settings(max_examples=examples(50))
def test_the_shortcut_and_the_machine_agree(metadata: Metadata, by_stock: bool) -> None:
    data = stock_pickle(metadata) if by_stock else encode_index(metadata)
    fast = decode(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_shortcut, "_FIRST", re.compile(b"(?!)"))
        assert facts(decode(data)) == facts(fast)


@pytest.mark.parametrize("by_stock", [True, False])
def test_nearly_all_records_of_both_writers_take_the_shortcut(monkeypatch: pytest.MonkeyPatch, by_stock: bool) -> None:
    original = index_shortcut._Opcodes.push_record
    done = []

    def counting(self: Any, *groups: Any) -> bool:
        done.append(original(self, *groups))
        return done[-1]

    monkeypatch.setattr(index_shortcut._Opcodes, "push_record", counting)
    decode(stock_pickle(large()) if by_stock else encode_index(large()))
    assert done.count(True) > 0.95 * 900


def large() -> Metadata:
    """Enough entries for memo references of both lengths, and for several frames."""
    described: dict[str, Any] = {}
    places = {}
    for number in range(100):
        fqn = f"model.layers.{number}.weight"
        chunks = [ChunkStorageMetadata(torch.Size([row * 3, number]), torch.Size([3, 7])) for row in range(3)]
        described[fqn] = TensorStorageMetadata(TensorProperties(DTYPES[number % 20]), torch.Size([9, 7]), chunks)
        for row, chunk in enumerate(chunks):
            places[MetadataIndex(fqn, chunk.offsets, row)] = _StorageInfo(f"__{row}_0.distcp", number << 30, 1 << 12)
    return Metadata(described, {fqn: ("model", fqn) for fqn in described}, places, StorageMeta("id"), "1.0.0")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_large_index_with_long_memo_references_is_read_and_written(protocol: int) -> None:
    metadata = large()
    assert facts(decode(encode_index(metadata))) == facts(metadata)
    assert facts(decode(stock_pickle(metadata, protocol))) == facts(metadata)
    assert facts(pickle.loads(encode_index(metadata))) == facts(to_stock(metadata))


def test_stock_gets_objects_of_its_own_classes_only() -> None:
    loaded = pickle.loads(encode_index(example()))
    assert type(loaded) is stock.Metadata
    assert {m for m in modules_in(loaded) if "checkpoint" in m or "holdfast" in m} == set(STOCK_MODULES)
    assert loaded == to_stock(example())
    assert loaded.state_dict_metadata["model.w"].properties.memory_format is torch.channels_last
    hints = [index.index for index in loaded.storage_data]
    assert hints == [0, 1, 2, 0, None]
    assert "offset" not in vars(next(index for index in loaded.storage_data if index.fqn == "step"))


def test_the_seal_is_an_attribute_that_stock_ignores() -> None:
    loaded = pickle.loads(encode_index(example()))
    first, *_, last = loaded.storage_data.values()
    assert first.holdfast_seal == (64, 13, 0xDEADBEEF, 7)
    assert type(first.holdfast_seal) is tuple
    assert not hasattr(last, "holdfast_seal")
    assert first == to_stock(_StorageInfo("__0_0.distcp", 0, 77))


def test_an_index_that_stock_loaded_and_wrote_again_keeps_its_seals() -> None:
    again = pickle.dumps(pickle.loads(encode_index(example())))
    assert [info.seal for info in decode(again).storage_data.values()][:3] == [Seal(64, 13, 0xDEADBEEF, 7)] * 3


def test_a_path_object_as_checkpoint_id_is_stored_as_text(tmp_path: pathlib.Path) -> None:
    metadata = example()
    metadata.storage_meta = StorageMeta(tmp_path, "id")
    data = encode_index(metadata)
    assert b"pathlib" not in data
    assert pickle.loads(data).storage_meta.checkpoint_id == str(tmp_path)
    assert decode(data).storage_meta == StorageMeta(str(tmp_path), "id")
    assert metadata.storage_meta.checkpoint_id is tmp_path


def test_the_same_index_gives_the_same_bytes() -> None:
    assert encode_index(example()) == encode_index(copy.deepcopy(example()))


def test_an_index_that_is_put_together_in_many_parts_has_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = [encode_index(metadata) for metadata in (example(), unusual())]
    monkeypatch.setattr(index_writer, "_PARTS_AT_ONCE", 1)
    assert [encode_index(metadata) for metadata in (example(), unusual())] == at_once


def test_encoding_does_not_change_what_it_encodes() -> None:
    metadata = example()
    encode_index(metadata)
    assert facts(metadata) == facts(example())


# What stock really writes


def test_a_checkpoint_saved_by_stock_is_read(tmp_path: pathlib.Path) -> None:
    state = {
        "model": {"w": torch.arange(12.0).reshape(3, 4), "half": torch.ones(2, dtype=torch.float16)},
        "optim": {"state": [{"step": torch.tensor(3.0), "name": "adam"}], "lr": 1e-3},
        "nothing": None,
        "flags": torch.zeros(3, dtype=torch.bool, requires_grad=False),
    }
    stock_dcp.save(state, checkpoint_id=tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    read = decode(data)
    expected = pickle.loads(data)
    expected.storage_meta.checkpoint_id = str(tmp_path)
    assert facts(read) == facts(expected)
    assert read.version == ("1.0.0" if hasattr(expected, "version") else None)
    assert type(read.storage_meta.checkpoint_id) is str


def test_stock_loads_a_checkpoint_whose_index_we_wrote_again(tmp_path: pathlib.Path) -> None:
    state = {"w": torch.arange(12.0).reshape(3, 4), "deep": {"value": [1, "two", None]}, "t": torch.tensor(4)}
    stock_dcp.save(state, checkpoint_id=tmp_path)
    index = tmp_path / ".metadata"
    index.write_bytes(encode_index(decode(index.read_bytes())))
    target = {"w": torch.zeros(3, 4), "deep": {"value": [0, "", 0]}, "t": torch.tensor(0)}
    stock_dcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["w"], state["w"])
    assert target["deep"] == state["deep"]
    assert target["t"] == 4


# What other versions of torch and Python write


@pytest.mark.parametrize("missing", [("version",), ("storage_meta", "version"), ("storage_data", "planner_data")])
def test_fields_that_older_versions_lack_are_none(missing: tuple[str, ...]) -> None:
    old = to_stock(example())
    for name in missing:
        vars(old).pop(name, None)  # older torches lack some themselves
    read = decode(pickle.dumps(old))
    assert all(getattr(read, name) is None for name in missing)
    assert facts(read.state_dict_metadata) == facts(example().state_dict_metadata)


def test_properties_of_sharded_tensors_are_read_as_older_versions_wrote_them() -> None:
    old = to_stock(example())
    old.state_dict_metadata["model.w"].properties = sharded_metadata.TensorProperties(
        torch.bfloat16, requires_grad=True, memory_format=torch.channels_last
    )
    assert facts(decode(pickle.dumps(old))) == facts(example())


def test_the_module_names_of_torch_1_13_are_known() -> None:
    data = pickle.dumps(to_stock(example()), 2)
    old = data.replace(b"ctorch.distributed.checkpoint.", b"ctorch.distributed._shard.checkpoint.")
    assert old != data
    assert facts(decode(old)) == facts(example())


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize(
    ("name", "parts", "text"),
    [
        ("PosixPath", ("/", "data", "run"), "/data/run"),
        ("PurePosixPath", ("a", "b"), "a/b"),
        ("WindowsPath", ("C:\\", "run"), "C:\\run"),
        ("PureWindowsPath", ("run",), "run"),
    ],
)
def test_path_objects_of_any_python_and_system_become_text(module: str, name: str, parts: Any, text: str) -> None:
    metadata = to_stock(example())
    metadata.storage_meta.checkpoint_id = pathlib.PurePosixPath(*parts)
    assert metadata.storage_meta.checkpoint_id.parts == parts
    data = pickle.dumps(metadata, 2)
    own = type(metadata.storage_meta.checkpoint_id).__module__  # pathlib._local in Python 3.13
    foreign = data.replace(f"c{own}\nPurePosixPath\n".encode(), f"c{module}\n{name}\n".encode())
    assert foreign.count(name.encode()) == 1
    assert decode(foreign).storage_meta.checkpoint_id == text


def test_fields_that_nobody_knows_are_left_out() -> None:
    metadata = to_stock(example(seal=False))
    metadata.from_the_future = 1
    for info in metadata.storage_data.values():
        info.checksum = "abc"
    for described in metadata.state_dict_metadata.values():
        described.note = "new"
    assert facts(decode(pickle.dumps(metadata))) == facts(example(seal=False))


@pytest.mark.parametrize("version", ["1.0.0", "1.0", "1", "1.99.3", None])
def test_versions_of_the_same_generation_are_read(version: str | None) -> None:
    metadata = example()
    metadata.version = version
    assert decode(encode_index(metadata)).version == version


@pytest.mark.parametrize("version", ["2.0.0", "99.0", "", "1.0.0-rc1", "10", "0.9"])
def test_another_version_is_refused_by_name_and_says_what_to_do(version: str) -> None:
    metadata = example()
    metadata.version = version
    with pytest.raises(UnsupportedVersionError) as caught:
        decode(encode_index(metadata))
    assert caught.value.version == version
    assert caught.value.file == SOURCE
    assert "newer Holdfast" in str(caught.value)


# What custom planners and storages put there


def unusual() -> Metadata:
    metadata = example()
    chunk = ChunkStorageMetadata(torch.Size([1]), torch.Size([2]))
    metadata.planner_data = {"note": Template("$x"), "again": [chunk, chunk], "table": list(range(30_000))}
    metadata.storage_data["by name"] = types.SimpleNamespace(info=_StorageInfo("x", 1, 2), dtype=torch.float8_e5m2)
    metadata.storage_data[MetadataIndex("plain")] = ("bucket", 7)
    return metadata


def test_other_objects_reach_stock_with_our_classes_inside_turned_into_its_own() -> None:
    loaded = pickle.loads(encode_index(unusual()))
    assert loaded.planner_data["note"].template == "$x"
    assert loaded.planner_data["again"][0] is loaded.planner_data["again"][1]
    assert type(loaded.planner_data["again"][0]) is stock.ChunkStorageMetadata
    assert loaded.planner_data["table"] == list(range(30_000))
    assert loaded.storage_data["by name"].info == to_stock(_StorageInfo("x", 1, 2))
    assert loaded.storage_data[stock.MetadataIndex("plain")] == ("bucket", 7)
    assert not any(module.startswith("holdfast") for module in modules_in(loaded))
    assert facts(loaded.state_dict_metadata) == facts(to_stock(example().state_dict_metadata))


def test_other_objects_are_refused_on_reading_and_read_with_an_opt_in() -> None:
    data = encode_index(unusual())
    with pytest.raises(RefusedPickleError) as caught:
        decode(data)
    assert caught.value.global_name in ("string.Template", "types.SimpleNamespace")
    assert "The index" in str(caught.value)
    read = decode(data, allow_pickle=True)
    assert read.planner_data["note"].template == "$x"
    assert type(read.planner_data["again"][0]) is ChunkStorageMetadata
    assert read.storage_data["by name"].info == _StorageInfo("x", 1, 2)
    assert facts(read.state_dict_metadata) == facts(example().state_dict_metadata)
    assert read.storage_data[MetadataIndex("model.w", [2, 0])].seal == Seal(64, 13, 0xDEADBEEF, 7)


def test_a_class_declared_safe_is_read_without_trusting_everything() -> None:
    data = encode_index(unusual())
    with torch.serialization.safe_globals([Template, types.SimpleNamespace]):
        read = decode(data)
    assert read.planner_data["note"].template == "$x"
    with torch.serialization.safe_globals([Template]), pytest.raises(RefusedPickleError, match="SimpleNamespace"):
        decode(data)


@pytest.mark.parametrize(
    "planner_data",
    [None, {}, [1, 2], "text", {"a": ["list"]}, {"a": (True,)}, {1: ("x",)}, OrderedDict(a=("b",)), {"a": (1.5, None)}],
)
def test_plain_data_of_a_custom_planner_needs_no_opt_in(planner_data: Any) -> None:
    metadata = example()
    metadata.planner_data = planner_data
    for data in (encode_index(metadata), pickle.dumps(to_stock(metadata))):
        read = decode(data).planner_data
        assert read == planner_data
        assert type(read) is type(planner_data)
    assert pickle.loads(encode_index(metadata)).planner_data == planner_data


@pytest.mark.parametrize("storage_data", [None, {}, [1], {"key": "place"}, {("a", 1): {"url": "x", "size": 3}}])
def test_plain_data_of_a_custom_storage_needs_no_opt_in(storage_data: Any) -> None:
    metadata = example()
    metadata.storage_data = storage_data
    assert decode(encode_index(metadata)).storage_data == storage_data
    assert pickle.loads(encode_index(metadata)).storage_data == storage_data


def test_attributes_added_to_the_index_reach_stock() -> None:
    metadata = example()
    metadata.note = {"made by": "me"}  # type: ignore[attr-defined]
    assert pickle.loads(encode_index(metadata)).note == {"made by": "me"}
    assert facts(decode(encode_index(metadata))) == facts(example())


def test_trusting_an_index_does_not_switch_off_its_checks() -> None:
    metadata = unusual()
    metadata.storage_data[MetadataIndex("evil")] = _StorageInfo("../../etc/passwd", 0, 1)
    with pytest.raises(UnsafePathError):
        decode(encode_index(metadata), allow_pickle=True)
    metadata = unusual()
    metadata.storage_data[MetadataIndex("negative")] = _StorageInfo("x", -1, 1)
    with pytest.raises(DamagedCheckpointError):
        decode(encode_index(metadata), allow_pickle=True)
    metadata = unusual()
    metadata.state_dict_metadata["model.w"].chunks[0].offsets = torch.Size([-2, 0])  # type: ignore[union-attr]
    with pytest.raises(DamagedCheckpointError):
        decode(encode_index(metadata), allow_pickle=True)
    metadata = unusual()
    metadata.version = "3.0"
    with pytest.raises(UnsupportedVersionError):
        decode(encode_index(metadata), allow_pickle=True)


def test_a_trusted_index_of_a_class_that_is_not_installed_says_which() -> None:
    data = encode_index(unusual()).replace(b"string", b"strung")[:-12]
    with pytest.raises(ModuleNotFoundError, match="strung"):
        decode(data, allow_pickle=True)


# Damage


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_index_of_stock_that_was_cut_off_anywhere_is_damaged(protocol: int) -> None:
    data = stock_pickle(example(), protocol)
    for length in range(len(data)):
        with pytest.raises(DamagedCheckpointError) as caught:
            decode(data[:length])
        assert caught.value.file == SOURCE


def test_an_index_of_ours_that_was_cut_off_anywhere_is_damaged_or_whole() -> None:
    data = encode_index(example())
    end = data.rindex(b"hf-crc32")
    for length in range(len(data)):
        if length != end:
            with pytest.raises(DamagedCheckpointError):
                decode(data[:length])
    assert facts(decode(data[:end])) == facts(example())  # only the CRC is gone


def test_every_flipped_bit_of_our_index_is_noticed() -> None:
    data = encode_index(example())
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(DamagedCheckpointError):
                decode(bytes(damaged))


def test_flipped_bits_of_a_stock_index_give_an_index_or_one_of_our_errors() -> None:
    data = stock_pickle(example())
    for position in range(len(data)):
        for bit in (position % 8, (position + 3) % 8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            try:
                assert type(decode(bytes(damaged))) is Metadata
            except HoldfastError:
                pass


def test_random_bytes_in_the_middle_of_an_index_give_an_index_or_one_of_our_errors() -> None:
    data = stock_pickle(large())
    chooser = random.Random(0)
    for _ in range(100):
        start = chooser.randrange(len(data))
        junk = chooser.randbytes(chooser.randrange(1, 30))
        try:
            decode(data[:start] + junk + data[start + chooser.randrange(30) :])
        except HoldfastError:
            pass


def test_a_wrong_crc_says_what_was_expected_and_found() -> None:
    data = bytearray(encode_index(example()))
    data[100] ^= 1
    with pytest.raises(DamagedCheckpointError, match="CRC-32") as caught:
        decode(bytes(data))
    assert isinstance(caught.value.expected, int)
    assert caught.value.expected != caught.value.found


@pytest.mark.parametrize("data", [b"", b"not a pickle", b"\x80\x04N.", b"\x80\x04]."])
def test_something_else_than_an_index_is_damaged(data: bytes) -> None:
    with pytest.raises(DamagedCheckpointError):
        decode(data)


def test_a_stream_reader_like_stocks_never_sees_the_trailer() -> None:
    stream = io.BytesIO(encode_index(example()))
    pickle.load(stream)
    assert stream.read() != b""
    assert pickle.Unpickler(io.BytesIO(encode_index(example()))).load() == to_stock(example())


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("metadata", "state_dict_metadata", None),
        ("metadata", "state_dict_metadata", [1]),
        ("metadata", "state_dict_metadata", {1: stock.BytesStorageMetadata()}),
        ("metadata", "state_dict_metadata", {"a": "b"}),
        ("metadata", "state_dict_metadata", {"a": stock.ChunkStorageMetadata(torch.Size([]), torch.Size([]))}),
        ("metadata", "storage_meta", "text"),
        ("metadata", "version", 1),
        ("tensor", "size", torch.Size([-1, 4])),
        ("tensor", "size", "54"),
        ("tensor", "size", (5, 4.0)),
        ("tensor", "size", (True, 4)),
        ("tensor", "size", None),
        ("tensor", "chunks", None),
        ("tensor", "chunks", (1,)),
        ("tensor", "chunks", [None]),
        ("tensor", "chunks", [stock.ChunkStorageMetadata(torch.Size([1]), torch.Size([1]))]),
        ("tensor", "properties", None),
        ("tensor", "properties", {"dtype": torch.float32}),
        ("properties", "dtype", "float32"),
        ("properties", "layout", torch.float32),
        ("properties", "requires_grad", 1),
        ("properties", "pin_memory", None),
        ("chunk", "offsets", torch.Size([0])),
        ("chunk", "offsets", (-1, 0)),
        ("chunk", "sizes", torch.Size([2, 4, 1])),
        ("chunk", "sizes", 2),
        ("chunk", "sizes", ("2", "4")),
        ("index", "fqn", None),
        ("index", "fqn", b"model.w"),
        ("index", "offset", (0, -2)),
        ("index", "index", "0"),
        ("index", "index", -1),
        ("info", "relative_path", None),
        ("info", "relative_path", ["a"]),
        ("info", "relative_path", 3),
        ("info", "offset", -1),
        ("info", "offset", 1.0),
        ("info", "offset", None),
        ("info", "length", -7),
        ("info", "length", "7"),
        ("info", "length", True),
        ("info", "transform_descriptors", "zstd"),
        ("info", "transform_descriptors", [1]),
        ("info", "holdfast_seal", (1, 2, 3)),
        ("info", "holdfast_seal", [1, 2, 3, 4]),
        ("info", "holdfast_seal", (1, 2, 3, -4)),
        ("meta", "checkpoint_id", 5),
        ("meta", "save_id", b"x"),
        ("meta", "modules", "x"),
        ("meta", "modules", [1]),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_field_of_the_wrong_type_is_damage_not_a_surprise_later(
    where: str, name: str, value: Any, protocol: int
) -> None:
    metadata = to_stock(example(seal=False))
    tensor = metadata.state_dict_metadata["model.w"]
    index, info = next(iter(metadata.storage_data.items()))
    targets = {
        "metadata": metadata,
        "tensor": tensor,
        "properties": tensor.properties,
        "chunk": tensor.chunks[0],
        "index": index,
        "info": info,
        "meta": metadata.storage_meta,
    }
    vars(targets[where])[name] = value
    if where == "index":
        metadata.storage_data = _Items([(index, info)])
    with pytest.raises(DamagedCheckpointError) as caught:
        decode(pickle.dumps(metadata, protocol))
    assert caught.value.file == SOURCE


class _Items(dict[Any, Any]):
    """Pickles as a dictionary of keys that could not be hashed here."""

    def __init__(self, items: list[Any]) -> None:
        super().__init__()
        self._items = items

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, (), None, None, iter(self._items)


@pytest.mark.parametrize("missing", ["fqn", "relative_path", "offset", "length", "size", "chunks", "properties"])
def test_a_record_without_a_field_it_must_have_is_damage(missing: str) -> None:
    metadata = to_stock(example(seal=False))
    tensor = metadata.state_dict_metadata["model.w"]
    index, info = next(iter(metadata.storage_data.items()))
    for target in (tensor, info, index):
        if missing in vars(target) and not (target is index and missing == "offset"):
            del vars(target)[missing]
    metadata.storage_data = _Items([(index, info)])
    with pytest.raises(DamagedCheckpointError):
        decode(pickle.dumps(metadata))
