"""What ``verify`` and ``load`` say of an index (``.metadata``) of stock torch in which one bit is not as it was.

The format has no digest of the index. What is wrong with its sense is damage; a changed name that makes sense
everywhere cannot be told from what was meant, by anybody.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import holdfast
from holdfast._tools.inspecting.verify import verify
from holdfast.errors import HoldfastError, StateMismatchError
from tests.sharding import sharded
from tests.torches import ALONE

SAMPLE = 37
"""So many bits apart are those that are tried in the short test: a number that is no multiple of eight."""


def state() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(30.0).reshape(6, 5), "b": torch.arange(7.0), "e": torch.arange(12).reshape(3, 4)},
        "step": 7,
        "lr": 0.5,
    }


def template() -> dict[str, Any]:
    empty = {key: torch.zeros_like(tensor) for key, tensor in state()["model"].items()}
    return {"model": empty, "step": 0, "lr": 0.0}


def save_in_shards(path: Path) -> None:
    """On two ranks: tensors in two chunks each, and one that is stored by one rank alone."""
    saved = state()
    for key in ("w", "e"):
        saved["model"][key] = sharded(saved["model"][key])
    stock.save(saved, checkpoint_id=path)


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def outcome_of_load(path: Path) -> str:
    loaded = template()
    try:
        holdfast.load(loaded, path)
    except StateMismatchError as error:
        # The path of such a key is nothing but its name, so that nothing is left that tells what it was.
        is_renamed = error.missing and set(error.missing) <= {"step", "lr"}
        return "another name" if is_renamed else "refused"
    except HoldfastError:
        return "refused"
    return "right" if is_same(loaded, state()) else "WRONG"


def outcome_of_verify(path: Path) -> str:
    try:
        return "intact" if verify(path).ok else "damaged"
    except HoldfastError:
        return "damaged"


def outcomes(path: Path, bits: Iterator[int]) -> Iterator[tuple[int, str, str]]:
    index = path / ".metadata"
    written = index.read_bytes()
    try:
        for bit in bits:
            changed = bytearray(written)
            changed[bit // 8] ^= 1 << (bit % 8)
            index.write_bytes(changed)
            yield bit, outcome_of_verify(path), outcome_of_load(path)
    finally:
        index.write_bytes(written)


def contradictions(path: Path, step: int) -> list[tuple[int, str, str]]:
    """Flips after which a load does not give what was saved, and which ``verify`` calls intact nevertheless."""
    bits = (path / ".metadata").stat().st_size * 8
    found = outcomes(path, iter(range(0, bits, step)))
    return [one for one in found if one[1] == "intact" and one[2] not in ("right", "another name")]


@pytest.fixture(params=["one file", "shards"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, ranks: Any) -> Path:
    path = tmp_path / "c"
    if request.param == "shards":
        ranks(2).run(save_in_shards, path)
    else:
        stock.save(state(), checkpoint_id=path, **ALONE)
    assert (outcome_of_verify(path), outcome_of_load(path)) == ("intact", "right")
    return path


def test_what_a_load_refuses_after_a_flipped_bit_is_not_called_intact(checkpoint: Path) -> None:
    assert contradictions(checkpoint, SAMPLE) == []


@pytest.mark.long
def test_what_a_load_refuses_after_any_flipped_bit_is_not_called_intact(checkpoint: Path) -> None:
    assert contradictions(checkpoint, 1) == []


@pytest.mark.parametrize("key", ["model.w", "model.b", "model.e"])
def test_a_size_that_the_chunks_do_not_cover_is_damage_of_the_index(tmp_path: Path, key: str) -> None:
    stock.save(state(), checkpoint_id=tmp_path / "c", **ALONE)
    index = tmp_path / "c" / ".metadata"
    metadata = stock.FileSystemReader(tmp_path / "c").read_metadata()
    entry = metadata.state_dict_metadata[key]
    entry.size = torch.Size([entry.size[0] + 1, *entry.size[1:]])
    _write(metadata, index)

    report = verify(tmp_path / "c")

    [damage] = report.damage
    assert (damage.file, damage.keys) == (".metadata", (key,))
    assert "elements are in the chunks" in damage.problem
    assert verify(tmp_path / "c", exclude=key).ok
    assert not verify(tmp_path / "c", include=key).ok


def test_chunks_that_are_all_missing_are_damage_of_the_index(tmp_path: Path) -> None:
    saved = {"scalar": torch.tensor(3.0), "row": torch.ones(4)}
    stock.save(saved, checkpoint_id=tmp_path / "c", **ALONE)
    metadata = stock.FileSystemReader(tmp_path / "c").read_metadata()
    for entry in metadata.state_dict_metadata.values():
        entry.chunks = []
    _write(metadata, tmp_path / "c" / ".metadata")

    assert set(verify(tmp_path / "c").damaged_keys) == {"scalar", "row"}


def test_a_flipped_bit_in_a_name_shows_if_the_path_of_the_key_is_as_it_was(tmp_path: Path) -> None:
    stock.save(state(), checkpoint_id=tmp_path / "c", **ALONE)
    index = tmp_path / "c" / ".metadata"
    written = index.read_bytes()
    for right, wrong in ((b"\x07model.w", b"\x07model.v"), (b"\x07model.b", b"\x07lodel.b")):
        assert written.count(right) == 1
        index.write_bytes(written.replace(right, wrong))
        [damage] = verify(tmp_path / "c").damage
        assert (damage.file, damage.keys) == (".metadata", (wrong[1:].decode(),))
        assert right[1:].decode() in damage.problem


def test_keys_that_a_planner_has_renamed_are_no_damage(tmp_path: Path) -> None:
    saved = {f"layers.{number}": torch.full((3,), float(number)) for number in range(3)}
    stock.save(saved, checkpoint_id=tmp_path / "c", **ALONE)
    metadata = stock.FileSystemReader(tmp_path / "c").read_metadata()
    metadata.planner_data = {key: (f"layers.{int(key[-1]) ^ 1}",) for key in saved}
    _write(metadata, tmp_path / "c" / ".metadata")

    assert verify(tmp_path / "c").ok


def _write(metadata: Any, file: Path) -> None:
    file.write_bytes(pickle.dumps(metadata))
