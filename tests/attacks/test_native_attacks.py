"""Checkpoints of version 1 of our own format that were made to do harm, with digests that are right.

Each must end in an error that says what is wrong, before memory is taken for what cannot be and without a look at files
outside of the checkpoint.
"""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast._base.json_objects import parse_json_object
from holdfast._load.opening import open_source
from holdfast.errors import (
    DamagedCheckpointError,
    HoldfastError,
    StateMismatchError,
    UnsafePathError,
    UnsupportedValueError,
    UnsupportedVersionError,
)
from tests.attacks.native_forgery import Forgery
from tests.version_1 import make_version_1

CLEAN = (DamagedCheckpointError, UnsupportedVersionError, UnsafePathError, UnsupportedValueError)
MEBIBYTE = 1 << 20


def tensors() -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(24, dtype=torch.float32).reshape(4, 6), "bias": torch.arange(10, dtype=torch.int64)}


@pytest.fixture
def forgery(tmp_path: Path) -> Forgery:
    """Of two tensors, the first in two chunks: weight rows 0-1 and 2-3, then bias."""
    holdfast.save({**tensors(), "step": 1}, tmp_path / "c", max_file_size=80)
    make_version_1(tmp_path / "c")
    found = Forgery(tmp_path / "c")
    assert found.columns["chunk_tensor"].tolist()[:2] == [0, 0]
    return found


def open_and_load(folder: Path) -> Any:
    return holdfast.open(folder).read()


def open_and_slice(folder: Path) -> Any:
    checkpoint = holdfast.open(folder)
    return [checkpoint[key][...] for key in checkpoint if hasattr(checkpoint[key], "shape")]


def load_into_tensors(folder: Path) -> Any:
    state = {key: torch.zeros_like(tensor) for key, tensor in tensors().items()}
    holdfast.load({**state, "step": 0}, folder)
    return state


def load_into_nothing(folder: Path) -> Any:
    state: dict[str, Any] = {"weight": None, "bias": None, "step": None}
    holdfast.load(state, folder)
    return state


def verify(folder: Path) -> Any:
    with open_source(folder) as source:
        assert source.tree is not None
        return source.verify()


WAYS = [open_and_load, open_and_slice, load_into_tensors, load_into_nothing, verify]


def outcome(read: Callable[[Path], Any], folder: Path) -> BaseException | None:
    """What a way of reading raised; it must not take much memory for that."""
    tracemalloc.start()
    try:
        read(folder)
    except Exception as error:
        return error
    else:
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 * MEBIBYTE, f"{read.__name__} took {peak} bytes"


def test_the_forgery_is_read_if_nothing_is_forged(forgery):
    forgery.write()
    assert [outcome(read, forgery.folder) for read in WAYS] == [None] * len(WAYS)


def first(record: dict[str, Any], table: str) -> dict[str, Any]:
    return record[table][0]


RECORDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "version 2": lambda r: r.update(version=[2, 0]),
    "version 0": lambda r: r.update(version=[0, 9]),
    "version 999999999": lambda r: r.update(version=[999999999, 0]),
    "version of many digits": lambda r: r.update(version=[10**30, 0]),
    "version as a text": lambda r: r.update(version="1.0"),
    "version of floats": lambda r: r.update(version=[1.0, 0.0]),
    "version of truths": lambda r: r.update(version=[True, False]),
    "version -1": lambda r: r.update(version=[-1, 0]),
    "version of three": lambda r: r.update(version=[1, 0, 0]),
    "no version": lambda r: r.pop("version"),
    "no generation": lambda r: r.pop("generation"),
    "a generation that leads out": lambda r: r.update(generation="../../../../etc"),
    "a generation of another length": lambda r: r.update(generation="0" * 17),
    "a generation with a newline": lambda r: r.update(generation="0" * 15 + "\n"),
    "no blocks": lambda r: r.update(block_bytes=0),
    "negative blocks": lambda r: r.update(block_bytes=-4096),
    "blocks of a byte": lambda r: r.update(block_bytes=1),
    "blocks of no power of two": lambda r: r.update(block_bytes=65537),
    "huge blocks": lambda r: r.update(block_bytes=1 << 40),
    "blocks of a float": lambda r: r.update(block_bytes=65536.0),
    "smaller blocks than digested": lambda r: r.update(block_bytes=4096),
    "larger blocks than digested": lambda r: (r.update(block_bytes=131072), first(r, "files").update(bytes=140000)),
    "no files": lambda r: r.update(files=[]),
    "files as an object": lambda r: r.update(files={}),
    "files as numbers": lambda r: r.update(files=[1, 2]),
    "a file that leads out": lambda r: first(r, "files").update(name="../../secret.safetensors"),
    "a file with an absolute path": lambda r: first(r, "files").update(name="/etc/passwd"),
    "a data file's name behind a folder": lambda r: first(r, "files").update(name="x/" + first(r, "files")["name"]),
    "a data file's name and more": lambda r: first(r, "files").update(name=first(r, "files")["name"] + "\n"),
    "a file that is the record": lambda r: first(r, "files").update(name="holdfast.json"),
    "a file that is the columns": lambda r: first(r, "files").update(name=r["index"]["name"]),
    "a file name that is a number": lambda r: first(r, "files").update(name=7),
    "a file name with a zero": lambda r: first(r, "files").update(name=first(r, "files")["name"] + "\0"),
    "a file twice": lambda r: r["files"].append(first(r, "files")),
    "a file of negative size": lambda r: first(r, "files").update(bytes=-1),
    "a file of huge size": lambda r: first(r, "files").update(bytes=1 << 61),
    "a file beyond all numbers": lambda r: first(r, "files").update(bytes=10**300),
    "a file of half a byte": lambda r: first(r, "files").update(bytes=0.5),
    "a file that does not exist": lambda r: first(r, "files").update(name=f"data-{'0' * 16}-0-0.safetensors"),
    "a file less": lambda r: r["files"].pop(),
    "no index": lambda r: r.pop("index"),
    "an index as a text": lambda r: r.update(index="index"),
    "an index that leads out": lambda r: r["index"].update(name="../../index-0.safetensors"),
    "an index of another generation": lambda r: r["index"].update(name=f"index-{'0' * 16}.safetensors"),
    "an index of huge size": lambda r: r["index"].update(bytes=1 << 61, keep=1),
    "an index of negative size": lambda r: r["index"].update(bytes=-1, keep=1),
    "a digest of the index that is a number": lambda r: r["index"].update(xxh3_128=7, keep=1),
    "tensors as an object": lambda r: r.update(tensors={}),
    "tensors as texts": lambda r: r.update(tensors=["weight"]),
    "a tensor twice": lambda r: r["tensors"].append(first(r, "tensors")),
    "a tensor less": lambda r: r["tensors"].pop(),
    "a tensor more": lambda r: r["tensors"].append({**first(r, "tensors"), "key": "more"}),
    "a key that is a number": lambda r: first(r, "tensors").update(key=7),
    "a key that is a list": lambda r: first(r, "tensors").update(key=[]),
    "a huge shape": lambda r: first(r, "tensors").update(shape=[1 << 40, 1 << 21]),
    "a shape whose product overflows": lambda r: first(r, "tensors").update(shape=[1 << 32, 1 << 32]),
    "a shape whose product overflows to the right size": lambda r: first(r, "tensors").update(
        shape=[24, (1 << 61) + 1]
    ),
    "a huge shape without elements": lambda r: first(r, "tensors").update(shape=[0, 1 << 61, 1 << 61]),
    "a negative size": lambda r: first(r, "tensors").update(shape=[-4, -6]),
    "sizes of floats": lambda r: first(r, "tensors").update(shape=[4.0, 6.0]),
    "sizes of truths": lambda r: first(r, "tensors").update(shape=[True, 24]),
    "sizes beyond all numbers": lambda r: first(r, "tensors").update(shape=[10**400]),
    "a shape of 65 dimensions": lambda r: first(r, "tensors").update(shape=[1] * 65),
    "a shape of very many dimensions": lambda r: first(r, "tensors").update(shape=[2] * 100_000),
    "a shape that is a number": lambda r: first(r, "tensors").update(shape=24),
    "another shape of the same size": lambda r: first(r, "tensors").update(shape=[2, 12]),
    "a dimension more": lambda r: first(r, "tensors").update(shape=[4, 6, 1]),
    "an unknown dtype": lambda r: first(r, "tensors").update(dtype="object"),
    "a dtype that is a list": lambda r: first(r, "tensors").update(dtype=["float32"]),
    "a dtype that is a number": lambda r: first(r, "tensors").update(dtype=5),
    "a raw dtype without size": lambda r: first(r, "tensors").update(dtype="raw0"),
    "a raw dtype of huge size": lambda r: first(r, "tensors").update(dtype="raw1048577"),
    "a raw dtype of many digits": lambda r: first(r, "tensors").update(dtype="raw" + "9" * 5000),
    "a larger dtype": lambda r: first(r, "tensors").update(dtype="complex128"),
    "an unknown kind": lambda r: first(r, "tensors").update(kind="evil"),
    "a kind that is a list": lambda r: first(r, "tensors").update(kind=["sharded"]),
    "per rank without a rank": lambda r: first(r, "tensors").update(kind="per_rank"),
    "a rank without per rank": lambda r: first(r, "tensors").update(rank=0),
    "a negative rank": lambda r: first(r, "tensors").update(kind="per_rank", rank=-1),
    "a reference to a tensor that is not there": lambda r: r["tree"]["weight"].update(key="gone"),
    "a reference to a list": lambda r: r["tree"]["weight"].update(key=[]),
    "a reference without key": lambda r: r["tree"]["weight"].pop("key"),
    "written as a list": lambda r: r.update(written=[]),
}


@pytest.mark.parametrize("attack", RECORDS)
def test_a_forged_record_is_refused(forgery, attack):
    RECORDS[attack](forgery.record)
    forgery.write()
    for read in WAYS:
        error = outcome(read, forgery.folder)
        # A shape or a key that is a lie may also be found out because the state has another one.
        fits = (*CLEAN, StateMismatchError) if read is load_into_tensors else CLEAN
        assert isinstance(error, fits), (read.__name__, error)
        if isinstance(error, DamagedCheckpointError):
            assert len(str(error)) < 2000


C = dict[str, np.ndarray]


def put(name: str, position: int, value: int) -> Callable[[C], None]:
    def attack(columns: C) -> None:
        columns[name][position] = value

    return attack


def resized(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[C], None]:
    def attack(columns: C) -> None:
        columns[name] = change(columns[name])

    return attack


def many_chunks_whose_sizes_overflow(columns: C) -> None:
    """The elements of all chunks add up to the right number if sums are taken modulo 2**64."""
    columns["chunk_sizes"][:] = 1 << 61


def an_empty_chunk_beside_the_right_ones(columns: C) -> None:
    for name, value in {
        "chunk_tensor": 1,
        "chunk_file": 0,
        "chunk_begin": 0,
        "chunk_offsets": 0,
        "chunk_sizes": 0,
    }.items():
        columns[name] = np.append(columns[name], columns[name].dtype.type(value))


COLUMNS: dict[str, Callable[[C], None]] = {
    "an empty chunk": an_empty_chunk_beside_the_right_ones,
    "a tensor out of range": put("chunk_tensor", -1, 99),
    "the largest tensor number": put("chunk_tensor", -1, 2**32 - 1),
    "tensors out of order": put("chunk_tensor", 0, 1),
    "a file out of range": put("chunk_file", 0, 99),
    "the largest file number": put("chunk_file", 0, 2**32 - 1),
    "a chunk behind the end of its file": put("chunk_begin", 0, 1 << 20),
    "a chunk that ends behind its file": put("chunk_begin", 0, 4097),
    "a chunk at the end of all numbers": put("chunk_begin", 0, 2**64 - 1),
    "a chunk where sums overflow": put("chunk_begin", 0, 2**63 - 1),
    "a chunk outside of its tensor": put("chunk_offsets", 0, 3),
    "a chunk far outside of its tensor": put("chunk_offsets", 0, 2**64 - 1),
    "a chunk at an offset where sums overflow": put("chunk_offsets", 0, 2**63 - 1),
    "chunks that overlap": put("chunk_offsets", 2, 0),
    "chunks that overlap in part": put("chunk_offsets", 2, 1),
    "a chunk without elements": put("chunk_sizes", 0, 0),
    "a chunk that is too small": put("chunk_sizes", 0, 1),
    "a huge chunk": put("chunk_sizes", 0, 2**64 - 2),
    "a chunk larger than its tensor": put("chunk_sizes", 0, 5),
    "sizes that overflow": many_chunks_whose_sizes_overflow,
    "a chunk less": resized("chunk_tensor", lambda column: column[:-1]),
    "a chunk more": resized("chunk_tensor", lambda column: np.append(column, column[-1:])),
    "no chunks": resized("chunk_tensor", lambda column: column[:0]),
    "a file number less": resized("chunk_file", lambda column: column[:-1]),
    "a position less": resized("chunk_begin", lambda column: column[:-1]),
    "an offset less": resized("chunk_offsets", lambda column: column[:-1]),
    "an offset more": resized("chunk_offsets", lambda column: np.append(column, column[-1:])),
    "a size less": resized("chunk_sizes", lambda column: column[:-1]),
    "a digest less": resized("digests", lambda column: column[:-1]),
    "a digest more": resized("digests", lambda column: np.append(column, column[-1:])),
    "no digests": resized("digests", lambda column: column[:0]),
    "other digests": resized("digests", lambda column: column ^ np.uint32(1)),
    "a column of another type": resized("chunk_begin", lambda column: column.astype("<i8")),
    "a column of smaller numbers": resized("chunk_begin", lambda column: column.astype("<u4")),
    "a column of floats": resized("digests", lambda column: column.view("<f4")),
    "a column in two dimensions": resized("chunk_tensor", lambda column: column.reshape(1, -1)),
    "a column without dimensions": resized("chunk_tensor", lambda column: column[:1].reshape(())),
    "a column that is missing": lambda columns: columns.pop("digests"),
}


@pytest.mark.parametrize("attack", COLUMNS)
def test_forged_columns_are_refused(forgery, attack):
    COLUMNS[attack](forgery.columns)
    forgery.write()
    for read in WAYS:
        error = outcome(read, forgery.folder)
        assert isinstance(error, DamagedCheckpointError), (read.__name__, error)
        assert str(forgery.folder) in error.file


def test_columns_with_others_beside_them_are_read(forgery):
    forgery.columns["more"] = np.arange(3, dtype="<u4")
    forgery.write()
    assert outcome(open_and_load, forgery.folder) is None


def test_members_of_a_later_minor_version_are_passed_over(forgery):
    forgery.record.update(version=[1, 7], news={"a": [1]})
    first(forgery.record, "tensors")["news"] = 1
    first(forgery.record, "files")["news"] = 1
    forgery.write()
    assert [outcome(read, forgery.folder) for read in WAYS] == [None] * len(WAYS)


BODIES: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda body: b"",
    "a byte order mark": lambda body: b"\xef\xbb\xbf" + body,
    "UTF-16": lambda body: body.decode().encode("utf-16"),
    "spaces before": lambda body: b" " + body,
    "bytes that are no text": lambda body: body.replace(b'"step"', b'"\xff\xfe"'),
    "lists without end": lambda body: body.replace(b'"step":1', b'"step":' + b"[" * 200_000),
    "lists of great depth": lambda body: body.replace(b'"step":1', b'"step":' + b"[" * 100_000 + b"]" * 100_000),
    "objects of great depth": lambda body: body.replace(
        b'"step":1', b'"step":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    ),
    "lists of moderate depth": lambda body: body.replace(b'"step":1', b'"step":' + b"[" * 500 + b"]" * 500),
    "an int of a million digits": lambda body: body.replace(b'"step":1', b'"step":' + b"9" * 100_000),
    "not a number": lambda body: body.replace(b'"step":1', b'"step":NaN'),
    "infinity": lambda body: body.replace(b'"step":1', b'"step":-Infinity'),
    "a member twice": lambda body: body.replace(b'"step":1', b'"step":1,"step":2'),
    "the version twice": lambda body: body + b',"version":[1,0]',
    "the tensors twice": lambda body: body + b',"tensors":[]',
    "a comma too many": lambda body: body + b",",
    "more behind the end": lambda body: body + b"}{",
    "another format": lambda body: body.replace(b'"holdfast"', b'"shaky"', 1),
}


@pytest.mark.parametrize("attack", BODIES)
def test_a_record_that_is_not_as_json_must_be_is_refused(forgery, attack):
    body, _, _ = (forgery.folder / "holdfast.json").read_bytes().rpartition(b',"check":')
    forgery.write_body(BODIES[attack](body))
    for read in WAYS:
        error = outcome(read, forgery.folder)
        assert isinstance(error, DamagedCheckpointError), (read.__name__, error)
        assert len(str(error)) < 2000


def test_a_later_major_version_is_reported_even_if_it_is_sealed_in_another_way(tmp_path):
    (tmp_path / "holdfast.json").write_bytes(b'{"format":"holdfast",\n"version":[3,0],\n"sealed":"otherwise"}')
    with pytest.raises(UnsupportedVersionError, match=r"version 3\.0"):
        holdfast.open(tmp_path)


def huge_file(path: Path, size: int) -> None:
    """A file that takes no room on the disk, and all of the memory if it is read."""
    with path.open("r+b") as file:
        os.ftruncate(file.fileno(), size)


@pytest.mark.parametrize("name", ["holdfast.json", "index-*", "data-*-0-0.safetensors"])
def test_a_file_of_a_terabyte_is_refused_before_it_is_read(forgery, name):
    huge_file(next(forgery.folder.glob(name)), 1 << 40)
    for read in WAYS:
        assert isinstance(outcome(read, forgery.folder), DamagedCheckpointError)


def test_a_tensor_that_claims_an_exabyte_with_files_to_match_is_refused_before_memory_is_taken(forgery):
    """Record and columns agree with each other; only the files do not have that much."""
    size = 1 << 50
    name = first(forgery.record, "files")["name"]
    forgery.record.update(
        block_bytes=1 << 30,
        files=[{"name": name, "bytes": size + 4096}],
        tensors=[{"key": "weight", "dtype": "uint8", "shape": [size], "kind": "replicated"}],
        tree={"weight": {"$": "tensor", "key": "weight"}},
    )
    forgery.columns = {
        "chunk_tensor": np.array([0], "<u4"),
        "chunk_file": np.array([0], "<u4"),
        "chunk_begin": np.array([4096], "<u8"),
        "chunk_offsets": np.array([0], "<u8"),
        "chunk_sizes": np.array([size], "<u8"),
        "digests": np.zeros((size >> 30) + 1, "<u4"),
    }
    forgery.write()
    for read in (open_and_load, open_and_slice, load_into_nothing, verify):
        error = outcome(read, forgery.folder)
        assert isinstance(error, DamagedCheckpointError), error
        assert error.key == "weight"


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/full", "pipe", "folder", "nowhere"])
@pytest.mark.parametrize("name", ["holdfast.json", "index-*", "data-*-0-0.safetensors"])
def test_what_is_not_a_plain_file_is_not_read_for_ever(forgery, name, target):
    path = next(forgery.folder.glob(name))
    path.unlink()
    if target == "pipe":
        os.mkfifo(path)
    elif target == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
    for read in WAYS:
        assert isinstance(outcome(read, forgery.folder), (HoldfastError, OSError))


def test_a_save_over_a_hostile_checkpoint_removes_nothing_outside_of_it(forgery, tmp_path):
    secret = tmp_path / "data-0011223344556677-0-0.safetensors"
    secret.write_bytes(b"precious")
    first(forgery.record, "files")["name"] = f"../{secret.name}"
    forgery.write()
    holdfast.save({"weight": torch.ones(3)}, forgery.folder, overwrite=True)
    assert secret.read_bytes() == b"precious"
    assert open_and_load(forgery.folder).keys() == {"weight"}


def test_a_numpy_dtype_that_is_harmful_or_does_not_fit_is_refused(forgery):
    for stored in (
        "|O",
        [["a", "|O"]],
        "<f3",
        "f4,f4",
        "__import__('os')",
        [["a", "<f4"]] * 2,
        "<f8",
        "<i4",
        "<f2",
        "|V0",
        7,
        None,
        {},
    ):
        first(forgery.record, "tensors")["numpy"] = stored
        forgery.write()
        error = outcome(open_and_load, forgery.folder)
        assert isinstance(error, CLEAN), (stored, error)


def test_the_messages_are_about_the_record_and_not_the_whole_of_it(forgery):
    first(forgery.record, "tensors")["kind"] = "x" * 1_000_000
    forgery.write()
    assert len(str(outcome(open_and_load, forgery.folder))) < 2000
    first(forgery.record, "tensors").update(kind="sharded", shape="x", key="k" * 1_000_000)
    forgery.write()
    assert json.loads((forgery.folder / "holdfast.json").read_bytes())
    assert isinstance(outcome(open_and_load, forgery.folder), DamagedCheckpointError)


def test_chunks_that_are_right_but_out_of_order_are_refused(tmp_path):
    """A reader that looks for the chunks of a tensor where they must be would find those of another one."""
    holdfast.save({"weight": torch.arange(4), "bias": torch.arange(4, 8)}, tmp_path)
    make_version_1(tmp_path)
    forgery = Forgery(tmp_path)
    for name in ("chunk_tensor", "chunk_begin"):
        forgery.columns[name] = forgery.columns[name][::-1].copy()
    forgery.write()
    with pytest.raises(DamagedCheckpointError, match="out of order"):
        open_and_load(tmp_path)


def test_a_name_twice_among_many_is_found_without_comparing_all_with_all():
    """Two hundred thousand names: all with all would take minutes."""
    names = ",".join(f'"tensor{number}":0' for number in range(200_000))
    with pytest.raises(DamagedCheckpointError, match="'tensor199999' is listed twice"):
        parse_json_object(f'{{{names},"tensor199999":1}}', "record")
