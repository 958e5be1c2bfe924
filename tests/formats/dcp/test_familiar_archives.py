"""Small tensors of one form: the second and all further ones are recognized, and checked like the first."""

from __future__ import annotations

import io
import random
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock

import holdfast.dcp as dcp
from holdfast._formats.archives.zip_layout import read_directory
from holdfast._formats.dcp.archive import FamiliarArchives
from tests.torches import ALONE


def archived(tensor: torch.Tensor) -> bytearray:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return bytearray(stream.getvalue())


def familiar_with(blob: bytearray, dtype: torch.dtype, sizes: tuple[int, ...]) -> FamiliarArchives:
    entries = read_directory(lambda at, length: bytes(blob[at : at + length]), len(blob), source="a test")
    familiar = FamiliarArchives()
    familiar.remember(memoryview(blob), entries["data/0"].offset, dtype, sizes)
    return familiar


def test_another_tensor_of_the_form_is_recognized_with_its_own_elements_and_crc() -> None:
    familiar = familiar_with(archived(torch.randn(5, 7)), torch.float32, (5, 7))
    other = torch.randn(5, 7)

    found = familiar.recognize(memoryview(archived(other)))

    assert found is not None
    assert (found.dtype, found.sizes) == (torch.float32, (5, 7))
    assert bytes(found.elements) == other.numpy().tobytes()
    assert found.crc == zlib.crc32(found.elements)


def test_what_only_looks_alike_is_not() -> None:
    familiar = familiar_with(archived(torch.randn(5, 7)), torch.float32, (5, 7))

    for other in (torch.randn(7, 5), torch.ones(5, 7, dtype=torch.int32), torch.randn(5, 8), torch.randn(7, 5).T):
        assert familiar.recognize(memoryview(archived(other))) is None


def test_a_changed_byte_is_never_taken_for_something_else() -> None:
    saved = torch.randn(5, 7)
    blob = archived(saved)
    familiar = familiar_with(archived(torch.randn(5, 7)), torch.float32, (5, 7))
    for at in range(len(blob)):
        changed = bytearray(blob)
        changed[at] ^= 1 << random.Random(at).randrange(8)
        found = familiar.recognize(memoryview(changed))
        if found is not None and zlib.crc32(found.elements) == found.crc:
            assert bytes(found.elements) == saved.numpy().tobytes()


def test_what_comes_behind_elements_that_no_crc_follows_is_compared() -> None:
    blob = repacked(archived(torch.randn(5, 7)))
    familiar = familiar_with(blob, torch.float32, (5, 7))
    entries = read_directory(lambda at, length: bytes(blob[at : at + length]), len(blob), source="a test")
    behind = entries["data/0"].offset + entries["data/0"].length
    assert familiar.recognize(memoryview(blob)) is not None

    blob[behind + 8] ^= 1  # how the next entry is compressed

    assert familiar.recognize(memoryview(blob)) is None


def repacked(blob: bytearray) -> bytearray:
    """The same archive as other programs write it, with every CRC in front of what it is of."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(blob)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return bytearray(stream.getvalue())


def test_lengths_are_worth_learning_when_they_come_again() -> None:
    familiar = FamiliarArchives()

    assert [familiar.is_worth_learning(length) for length in (5, 7, 5, 7, 9)] == [False, False, True, True, False]


@pytest.mark.parametrize("at", ["elements", "description"])
def test_damage_of_one_of_many_small_tensors_is_found(tmp_path: Path, at: str) -> None:
    saved = {f"t{number}": torch.full((300,), float(number)) for number in range(20)}
    stock.save(saved, checkpoint_id=str(tmp_path), **ALONE)
    state = {key: torch.zeros(300) for key in saved}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(state[key], saved[key]) for key in saved)
    (file,) = tmp_path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    where = content.index(saved["t13"].numpy().tobytes())
    if at == "elements":
        content[where + 100] ^= 1
    else:
        content[content.rindex(b"FloatStorage", 0, where)] ^= 1
    file.write_bytes(content)

    with pytest.raises(dcp.CheckpointException, match=r"'t13'.*damaged"):
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
