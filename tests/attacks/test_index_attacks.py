"""Malicious indexes: none runs anything, reaches outside of the checkpoint, or costs more than its own size."""

from __future__ import annotations

import copyreg
import os
import pickle
import zlib
from collections import OrderedDict
from typing import Any

import pytest
import torch

from holdfast._formats.dcp import metadata as nouns
from holdfast._formats.dcp.index import decode_index, encode_index
from holdfast._formats.dcp.metadata import _StorageInfo
from holdfast.errors import DamagedCheckpointError, RefusedPickleError, UnsafePathError
from tests.attacks.forging import (
    CODE,
    HARMFUL,
    Bait,
    arguments,
    assert_refused,
    bait,  # noqa: F401  # a fixture
    call,
    data,
    name,
    pickled,
    text,
)
from tests.formats.archives.graphs import example, facts, stock_pickle

MODULE = "torch.distributed.checkpoint.metadata"
STORAGE = "torch.distributed.checkpoint.filesystem"


def record(module: str, cls: str, **fields: bytes) -> bytes:
    state = b"}(" + b"".join(text(field) + push for field, push in fields.items()) + b"u"
    return name(module, cls) + b")\x81" + state + b"b"


def index_with(**fields: bytes) -> bytes:
    return pickled(record(MODULE, "Metadata", **{"state_dict_metadata": b"}", **fields}))


def read(index: bytes) -> nouns.Metadata:
    return decode_index(index, source="/run/.metadata")


def test_the_forged_indexes_are_good_ones_apart_from_what_is_put_into_them() -> None:
    assert read(index_with(planner_data=data({"a": ("b", 1)}))).planner_data == {"a": ("b", 1)}


@pytest.mark.parametrize("attack", CODE)
@pytest.mark.parametrize("place", ["planner_data", "storage_data", "storage_meta", "version", "state_dict_metadata"])
def test_code_in_any_field_is_refused_and_does_not_run(attack: str, place: str, bait: Bait) -> None:  # noqa: F811
    error = assert_refused(RefusedPickleError, lambda: read(index_with(**{place: CODE[attack](bait)})), bait)
    assert isinstance(error, RefusedPickleError)
    assert error.key is None
    assert "." in error.global_name


@pytest.mark.parametrize("attack", CODE)
def test_code_instead_of_an_index_or_beside_it_does_not_run(attack: str, bait: Bait) -> None:  # noqa: F811
    alone = pickled(CODE[attack](bait))
    beside = pickled(CODE[attack](bait) + b"0" + record(MODULE, "Metadata", state_dict_metadata=b"}"))
    inside = pickled(name(MODULE, "Metadata") + b")\x81" + CODE[attack](bait) + b"b")
    for index in (alone, beside, inside):
        assert_refused(RefusedPickleError, lambda index=index: read(index), bait)


@pytest.mark.parametrize("attack", CODE)
def test_the_trailer_does_not_make_an_index_trusted(attack: str, bait: Bait) -> None:  # noqa: F811
    body = index_with(planner_data=CODE[attack](bait))
    signed = body + b"hf-crc32" + zlib.crc32(body).to_bytes(4, "little")
    assert_refused(RefusedPickleError, lambda: read(signed), bait)


@pytest.mark.parametrize("attack", HARMFUL)
def test_misuse_of_what_is_allowed_is_damage(attack: str) -> None:
    before = dict(vars(OrderedDict))
    assert_refused(DamagedCheckpointError, lambda: read(index_with(planner_data=HARMFUL[attack])))
    assert dict(vars(OrderedDict)) == before
    assert not torch.float32.is_complex


@pytest.mark.parametrize("chain", [("builtins", "getattr"), ("__builtin__", "getattr")])
def test_attribute_chains_lead_nowhere(chain: tuple[str, str], bait: Bait) -> None:  # noqa: F811
    def get(target: bytes, attribute: str) -> bytes:
        return call(name(*chain), target, text(attribute))

    globals_of = get(get(name("collections", "OrderedDict"), "__init__"), "__globals__")
    for program in (globals_of, get(data("x"), "__class__"), get(name("torch", "Size"), "__subclasses__")):
        error = assert_refused(RefusedPickleError, lambda p=program: read(index_with(planner_data=p)), bait)
        assert isinstance(error, RefusedPickleError)
        assert error.global_name == "builtins.getattr"


CLASSES = {
    "Metadata": (MODULE, nouns.Metadata),
    "ChunkStorageMetadata": (MODULE, nouns.ChunkStorageMetadata),
    "MetadataIndex": (MODULE, nouns.MetadataIndex),
    "TensorProperties": (MODULE, nouns.TensorProperties),
    "BytesStorageMetadata": (MODULE, nouns.BytesStorageMetadata),
    "_StorageInfo": (STORAGE, _StorageInfo),
}


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("state", [data({"offset": 1}), b"N" + data({"offset": 1}) + b"\x86"])
def test_a_state_for_one_of_our_classes_itself_changes_nothing(cls: str, state: bytes) -> None:
    module, ours = CLASSES[cls]
    before = dict(vars(ours))
    assert_refused(DamagedCheckpointError, lambda: read(pickled(name(module, cls) + state + b"b")))
    assert dict(vars(ours)) == before


def test_attributes_of_records_cannot_be_smuggled_in() -> None:
    extra = data({"__class__": 1, "__dict__": {}, "__reduce__": "x"})
    chunk = record(MODULE, "ChunkStorageMetadata", offsets=data((0,)), sizes=data((1,)))
    forged = chunk[:-1] + b"0" + chunk[:-2] + b"b"  # twice, the first dropped unfinished
    assert_refused(DamagedCheckpointError, lambda: read(index_with(planner_data=forged)))
    assert_refused(DamagedCheckpointError, lambda: read(index_with(planner_data=chunk + extra + b"b")))


def test_extension_codes_of_this_process_are_not_reachable(bait: Bait) -> None:  # noqa: F811
    copyreg.add_extension("posix" if os.name == "posix" else "nt", "system", 201)
    try:
        # Somebody else's unpickling has put the function into the process-wide cache.
        assert pickle.loads(b"\x80\x02\x82\xc9.") is os.system
        program = b"\x82\xc9" + arguments(text(bait.command)) + b"R"
        assert_refused(DamagedCheckpointError, lambda: read(index_with(planner_data=program)), bait)
    finally:
        copyreg.remove_extension("posix" if os.name == "posix" else "nt", "system", 201)


PATHS = [
    "/etc/passwd",
    "//server/share",
    "\\\\server\\share",
    "\\windows",
    "C:\\secret",
    "c:secret",
    "..",
    "../other/__0_0.distcp",
    "a/../../b",
    "a/..",
    "a\\..\\..\\b",
    "./..",
    "",
    ".",
    "./",
    "a\0b",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("protocol", [2, 4])
def test_file_names_that_leave_the_checkpoint_are_refused(path: str, protocol: int) -> None:
    metadata = example()
    for place in metadata.storage_data.values():
        place.relative_path = path
    for index in (encode_index(metadata), stock_pickle(metadata, protocol)):
        error = assert_refused(UnsafePathError, lambda index=index: read(index))
        assert isinstance(error, UnsafePathError)
        assert error.name == path
        assert "/run/.metadata" in str(error)


@pytest.mark.parametrize("path", ["__0_0.distcp", "sub/dir/file", "..data", "a..b", "...", "./a", "weird name:x"])
def test_unusual_file_names_inside_the_checkpoint_are_fine(path: str) -> None:
    metadata = example()
    for place in metadata.storage_data.values():
        place.relative_path = path
    assert facts(read(encode_index(metadata))) == facts(metadata)


BOMBS = {
    "a memo slot far away": b"Nr\xff\xff\xff\x7f",
    "a huge text": b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fx",
    "a text of 4 GiB": b"X\xff\xff\xff\xffx",
    "huge bytes": b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx",
    "a huge bytearray": b"\x96\xff\xff\xff\xff\xff\xff\x00\x00x",
    "a huge number": b"\x8b\xff\xff\xff\x7fx",
    "a huge frame": b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
    "a size of a number": call(name("torch", "Size"), data(1 << 40)),
    "a bytearray of a number": call(name("builtins", "bytearray"), data(1 << 40)),
    "a fraction of a billion digits": call(name("fractions", "Fraction"), data("1e999999999")),
    "a deeply nested key": b"}" + b")" + b"\x85" * 300_000 + b"K\x01s",
    "a key of endless width": b"}" + b")" + b"2\x86" * 64 + b"K\x01s",
    "a deeply nested set member": b"\x8f(" + b")" + b"\x85" * 300_000 + b"\x90",
    "a frozen set of an endless tuple": b"(" + b")" + b"2\x86" * 64 + b"\x91",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_do_not_go_off(bomb: str) -> None:
    assert_refused(DamagedCheckpointError, lambda: read(index_with(planner_data=BOMBS[bomb])))


@pytest.mark.parametrize("field", ["state_dict_metadata", "storage_meta", "version"])
@pytest.mark.parametrize("shape", ["deep", "endless"])
def test_a_wrong_field_that_has_an_endless_text_is_named_without_it(field: str, shape: str) -> None:
    # An endless one has 2**64 parts for whoever walks it, but only 64 different ones.
    program = b"]" * 100_000 + b"a" * 99_999 if shape == "deep" else b"]" + b"2\x86" * 64
    assert_refused(DamagedCheckpointError, lambda: read(index_with(**{field: program})))


@pytest.mark.parametrize("cls", ["ChunkStorageMetadata", "MetadataIndex", "TensorStorageMetadata", "StorageMeta"])
def test_endless_values_in_every_field_of_every_record_are_refused(cls: str) -> None:
    endless = b")" + b"2\x86" * 64
    names = {
        "ChunkStorageMetadata": ("offsets", "sizes"),
        "MetadataIndex": ("fqn", "index", "offset"),
        "TensorStorageMetadata": ("properties", "size", "chunks"),
        "StorageMeta": ("checkpoint_id", "save_id", "modules"),
    }[cls]
    program = record(MODULE, cls, **dict.fromkeys(names, endless))
    assert_refused(DamagedCheckpointError, lambda: read(index_with(planner_data=program)))


def test_endless_values_where_anything_goes_are_just_data() -> None:
    assert isinstance(read(index_with(planner_data=b")" + b"2\x86" * 64)).planner_data, tuple)


def test_references_into_the_inside_of_shortened_records_are_damage() -> None:
    names = (text("offsets"), text("sizes"), name("torch", "Size"), name(MODULE, "ChunkStorageMetadata"))
    prelude = b"".join(push + b"\x940" for push in names)
    size = b"h\x02K\x01\x85\x94\x85\x94R\x94"
    chunk = b"h\x03)\x81\x94}\x94(h\x00" + size + b"h\x01" + size + b"ub"

    def again(slot: int) -> Any:
        return read(index_with(planner_data=prelude + b"](" + chunk + b"h" + bytes([slot]) + b"e")).planner_data[1]

    # The object, its state, and for each size two argument tuples and the size itself.
    assert again(4) == nouns.ChunkStorageMetadata(torch.Size([1]), torch.Size([1]))
    assert again(8) == again(11) == torch.Size([1])
    for slot in (5, 6, 7, 9, 10):
        assert_refused(DamagedCheckpointError, lambda slot=slot: again(slot))


def test_a_reference_to_outside_is_damage() -> None:
    assert_refused(DamagedCheckpointError, lambda: read(index_with(planner_data=text("storage") + b"Q")))
