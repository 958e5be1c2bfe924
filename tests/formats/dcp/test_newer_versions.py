"""Indexes of other versions of torch: what they add is kept or passed over; what is unknown is not called damaged."""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.metadata import TensorProperties

import holdfast
import holdfast.dcp as dcp
from holdfast._formats.dcp.index import decode_index, encode_index
from holdfast.errors import (
    CheckpointException,
    DamagedCheckpointError,
    NewerFormatError,
    RefusedPickleError,
    UnsupportedVersionError,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")

STATE = {"w": torch.arange(6.0).reshape(2, 3).T, "step": 3}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of the installed stock."""
    stock.save(dict(STATE), checkpoint_id=tmp_path / "a")
    return tmp_path / "a"


def index_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def rewrite(folder: Path, index: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def with_state(cls: type, *state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stock write tensor properties with these fields behind the five that all versions have."""
    five = cls.__getstate__
    monkeypatch.setattr(cls, "__getstate__", lambda self: (*five(self)[:5], *state))


def decoded(folder: Path) -> Any:
    return decode_index((folder / ".metadata").read_bytes(), source=str(folder))


def loads(folder: Path) -> bool:
    state = {"w": torch.zeros(3, 2), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    return torch.equal(state["w"], STATE["w"]) and state["step"] == 3


@pytest.mark.parametrize("fields", [(), (None,), ((1, 3),), ((1, 3), "of 2.16", {"x": 1})], ids=["5", "6", "6s", "8"])
def test_tensor_properties_of_any_length_are_read(saved, monkeypatch, fields):
    index = index_of(saved)
    with_state(TensorProperties, *fields, monkeypatch=monkeypatch)
    rewrite(saved, index)
    assert decoded(saved).state_dict_metadata["w"].properties.strides == (fields[0] if fields else None)
    assert loads(saved)


def test_what_we_write_has_the_five_fields_that_every_torch_reads(saved, monkeypatch):
    with_state(TensorProperties, (1, 3), monkeypatch=monkeypatch)
    rewrite(saved, index_of(saved))
    written = encode_index(decoded(saved))
    strides = [argument for opcode, argument, _ in pickletools.genops(io.BytesIO(written)) if argument == "strides"]
    assert strides == []
    taken: list[int] = []
    monkeypatch.setattr(TensorProperties, "__setstate__", lambda self, state: taken.append(len(state)))
    pickle.loads(written)
    assert taken == [5]


@pytest.mark.parametrize("damaged", ["a text", (1, -3), [1, 3], (1.5,)], ids=repr)
def test_strides_that_are_none_are_damage(saved, monkeypatch, damaged):
    with_state(TensorProperties, damaged, monkeypatch=monkeypatch)
    rewrite(saved, index_of(saved))
    with pytest.raises(DamagedCheckpointError):
        decoded(saved)


@pytest.mark.parametrize(
    "of", [lambda index: index, lambda index: index.state_dict_metadata["w"], lambda index: index.storage_meta]
)
def test_fields_that_say_nothing_about_bytes_are_passed_over(saved, of):
    index = index_of(saved)
    vars(of(index))["a_field_of_2_16"] = ["x"]
    rewrite(saved, index)
    assert loads(saved)


@pytest.mark.parametrize(
    ("record", "of"),
    [
        ("_StorageInfo", lambda index: next(iter(index.storage_data.values()))),
        ("MetadataIndex", lambda index: next(iter(index.storage_data))),
        ("ChunkStorageMetadata", lambda index: index.state_dict_metadata["w"].chunks[0]),
    ],
)
def test_a_new_field_about_stored_bytes_is_passed_over_with_a_line_in_the_log(saved, caplog, record, of):
    index = index_of(saved)
    vars(of(index))[f"checksum_of_{record}"] = "abc"
    rewrite(saved, index)
    assert loads(saved)
    assert loads(saved)
    (said,) = [line.getMessage() for line in caplog.records if "passed over" in line.getMessage()]
    assert f"{record}.checksum_of_{record}" in said


def test_a_flipped_bit_in_the_name_of_a_field_is_damage(saved):
    index = index_of(saved)
    info = next(iter(index.storage_data.values()))
    vars(info)["offseu"] = vars(info).pop("offset")
    rewrite(saved, index)
    with pytest.raises(DamagedCheckpointError):
        decoded(saved)


def renamed(folder: Path, old: bytes, new: bytes) -> None:
    index = (folder / ".metadata").read_bytes()
    assert len(old) == len(new)
    assert old in index
    (folder / ".metadata").write_bytes(index.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"TensorStorageMetadata", b"RaggedStorageMetadata"),
        (b"torch.distributed.checkpoint.metadata", b"torch.distributed.checkpoint.newstuff"),
        (b"float32", b"float99"),
    ],
)
def test_a_class_or_a_dtype_that_nobody_knows_is_of_a_newer_torch(saved, old, new):
    renamed(saved, old, new)
    for read in (decoded, holdfast.open, holdfast.verify):
        with pytest.raises(NewerFormatError, match=new.decode()) as raised:
            read(saved)
        assert new.decode() in raised.value.global_name
    with pytest.raises(CheckpointException) as raised:
        loads(saved)
    assert isinstance(raised.value.failures[0][0], NewerFormatError)


@pytest.mark.parametrize("name", [b"MetadataIndex", b"torch.distributed.checkpoint.metadata"])
def test_a_flipped_bit_in_a_name_is_damage(saved, name):
    renamed(saved, name, bytes([*name[:-1], name[-1] ^ 1]))
    with pytest.raises(DamagedCheckpointError, match="one bit away"):
        decoded(saved)


def test_a_format_version_that_does_not_exist_yet_is_reported(saved):
    index = index_of(saved)
    vars(index)["version"] = "2.0.0"
    rewrite(saved, index)
    with pytest.raises(UnsupportedVersionError, match=r"2\.0\.0"):
        decoded(saved)


def test_names_that_the_installed_torch_has_are_refused_as_ever(saved):
    index = index_of(saved)
    index.planner_data = torch.nn.Linear
    rewrite(saved, index)
    with pytest.raises(RefusedPickleError, match=r"torch\.nn") as raised:
        decoded(saved)
    assert not isinstance(raised.value, NewerFormatError)


def test_an_index_of_a_newer_torch_can_be_trusted_explicitly(saved):
    """If the installed torch has the class after all."""
    index = index_of(saved)
    index.planner_data = stock.planner.WriteItemType.TENSOR
    rewrite(saved, index)
    with pytest.raises(NewerFormatError):
        decoded(saved)
    trusted = decode_index((saved / ".metadata").read_bytes(), source="it", allow_pickle=True)
    assert trusted.planner_data is stock.planner.WriteItemType.TENSOR
