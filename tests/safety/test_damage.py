"""Stored bytes that are not the bytes that were saved are noticed when they are loaded, with file and key.

The checkpoints are small enough to try every byte.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import holdfast.dcp as dcp
from holdfast import _settings as settings
from holdfast.dcp import CheckpointException, FileSystemReader, FileSystemWriter
from holdfast.errors import DamagedCheckpointError
from tests.rank_pool import RankPool
from tests.sharding import sharded


def original() -> dict[str, Any]:
    return {"weight": torch.arange(1.0, 7.0).reshape(2, 3), "settings": {"name": "small"}}


def blank() -> dict[str, Any]:
    return {"weight": torch.zeros(2, 3), "settings": {"name": ""}}


def load_into(target: dict[str, Any], folder: Path) -> DamagedCheckpointError | None:
    """Load, and return what was found to be damaged."""
    try:
        dcp.load(target, checkpoint_id=folder)
    except CheckpointException as error:
        ((cause, _),) = error.failures.values()
        assert isinstance(cause, DamagedCheckpointError), repr(cause)
        return cause
    return None


def is_original(state: dict[str, Any]) -> bool:
    return torch.equal(state["weight"], original()["weight"]) and state["settings"] == original()["settings"]


def data_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.distcp"))


def key_at(folder: Path, file: Path, offset: int) -> str | None:
    """The key whose bytes are at a place in a data file."""
    for index, info in FileSystemReader(folder).read_metadata().storage_data.items():
        if info.relative_path == file.name and info.offset <= offset < info.offset + info.length:
            return index.fqn
    return None


def flips(file: Path, bits: Iterable[int]) -> Iterator[int]:
    """Damage a file bit by bit; yields the position of the byte while the damage is done."""
    content = file.read_bytes()
    with file.open("r+b", buffering=0) as stream:
        for bit in bits:
            position, mask = bit // 8, 1 << bit % 8
            stream.seek(position)
            stream.write(bytes([content[position] ^ mask]))
            yield position
            stream.seek(position)
            stream.write(content[position : position + 1])
    assert file.read_bytes() == content


def all_bits(file: Path) -> Iterable[int]:
    return range(8 * file.stat().st_size)


def a_bit_of_every_byte(file: Path) -> Iterable[int]:
    return all_bits(file)[::9]


def a_bit_of_some_bytes(file: Path) -> Iterable[int]:
    """Of every fifth byte, and of all that make up the values."""
    content = file.read_bytes()
    values = [original()["weight"].numpy().tobytes(), original()["settings"]["name"].encode()]
    places = [range(content.index(value), content.index(value) + len(value)) for value in values]
    return sorted({*all_bits(file)[::45], *(8 * byte + byte % 8 for place in places for byte in place)})


def cut(file: Path, lengths: Iterable[int]) -> Iterator[int]:
    """Cut a file to each of the lengths; yields it while the rest is gone."""
    content = file.read_bytes()
    for length in lengths:
        file.write_bytes(content[:length])
        yield length
    file.write_bytes(content)


def all_lengths(file: Path) -> Iterable[int]:
    return range(file.stat().st_size)


def some_lengths(file: Path) -> Iterable[int]:
    """Every seventh, and the last ones, where the descriptions of archives stand."""
    return sorted({*all_lengths(file)[::7], *all_lengths(file)[-40:]})


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    folder = tmp_path / "ours"
    dcp.save(original(), checkpoint_id=folder)
    return folder


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.save(original(), checkpoint_id=folder)
    return folder


def check_flips_of_data(folder: Path, bits: Callable[[Path], Iterable[int]]) -> None:
    (file,) = data_files(folder)
    owners = [key_at(folder, file, position) for position in range(file.stat().st_size)]
    assert set(owners) == {"weight", "settings.name"}  # no byte belongs to nothing
    for position in flips(file, bits(file)):
        damage = load_into(blank(), folder)
        assert damage is not None, f"nobody noticed that byte {position} of {file.name} ({owners[position]}) changed"
        assert (damage.file, damage.key) == (str(file), owners[position])
        assert str(file) in str(damage)
        assert f"'{owners[position]}'" in str(damage)


def check_flips_of_the_index(folder: Path, bits: Callable[[Path], Iterable[int]]) -> None:
    file = folder / ".metadata"
    for position in flips(file, bits(file)):
        damage = load_into(blank(), folder)
        assert damage is not None, f"nobody noticed that byte {position} of the index changed"
        assert damage.file == str(file)


def check_cuts_of_data(folder: Path, lengths: Callable[[Path], Iterable[int]]) -> None:
    (file,) = data_files(folder)
    for length in cut(file, lengths(file)):
        damage = load_into(blank(), folder)
        assert damage is not None, f"nobody noticed that {file.name} has only {length} bytes"
        assert damage.file == str(file)
        assert damage.key in ("weight", "settings.name")
        assert "too early" in str(damage)


def check_cuts_of_the_index(folder: Path, lengths: Callable[[Path], Iterable[int]]) -> None:
    file = folder / ".metadata"
    whole = []
    for length in cut(file, lengths(file)):
        state = blank()
        damage = load_into(state, folder)
        if damage is None:
            assert is_original(state), length
            whole.append(length)
        else:
            assert damage.file == str(file)
    assert len(whole) <= 1  # without the CRC after its end it is an index as stock torch writes it


def check_flips_of_stock_data(folder: Path, bits: Callable[[Path], Iterable[int]]) -> None:
    """The archives of stock torch have bytes that no checksum covers and that nobody needs."""
    (file,) = data_files(folder)
    content = file.read_bytes()
    payload = original()["weight"].numpy().tobytes()
    values = {content.index(b"small"), *range(content.index(payload), content.index(payload) + len(payload))}
    tried, noticed = set(), set()
    for position in flips(file, bits(file)):
        state = blank()
        damage = load_into(state, folder)
        tried.add(position)
        if damage is None:
            assert is_original(state), f"byte {position} changed a value and nobody noticed"
        else:
            noticed.add(position)
            assert (damage.file, damage.key) == (str(file), key_at(folder, file, position))
    assert noticed >= values & tried


def test_a_flipped_bit_anywhere_in_the_data_is_reported_with_file_and_key(ours: Path):
    check_flips_of_data(ours, a_bit_of_every_byte)


def test_a_flipped_bit_anywhere_in_the_index_is_reported_with_its_file(ours: Path):
    check_flips_of_the_index(ours, a_bit_of_every_byte)


def test_a_flipped_bit_in_data_that_stock_torch_wrote_is_reported_or_harmless(theirs: Path):
    check_flips_of_stock_data(theirs, a_bit_of_some_bytes)


def test_a_data_file_that_is_cut_off_is_reported_with_file_and_key(ours: Path):
    check_cuts_of_data(ours, some_lengths)


def test_a_data_file_of_stock_torch_that_is_cut_off_is_reported_with_file_and_key(theirs: Path):
    check_cuts_of_data(theirs, some_lengths)


def test_an_index_that_is_cut_off_is_reported(ours: Path):
    check_cuts_of_the_index(ours, some_lengths)


@pytest.mark.long
def test_every_bit_and_every_length_of_a_checkpoint_counts(ours: Path):
    check_flips_of_data(ours, all_bits)
    check_flips_of_the_index(ours, all_bits)
    check_cuts_of_data(ours, all_lengths)
    check_cuts_of_the_index(ours, all_lengths)


@pytest.mark.long
def test_every_bit_and_every_length_of_a_checkpoint_of_stock_torch_counts(theirs: Path):
    check_flips_of_stock_data(theirs, all_bits)
    check_cuts_of_data(theirs, all_lengths)


def test_keys_outside_of_the_damage_still_load(ours: Path):
    (file,) = data_files(ours)
    content = bytearray(file.read_bytes())
    content[content.index(original()["weight"].numpy().tobytes())] ^= 1
    file.write_bytes(content)
    state = blank()
    del state["weight"]
    assert load_into(state, ours) is None
    assert state["settings"] == original()["settings"]
    damage = load_into(blank(), ours)
    assert damage is not None
    assert damage.key == "weight"


def test_without_verification_damage_goes_unnoticed(ours: Path):
    """What the tests above rely on is the check, and nothing else."""
    (file,) = data_files(ours)
    content = bytearray(file.read_bytes())
    content[content.index(original()["weight"].numpy().tobytes()) + 3] ^= 1
    file.write_bytes(content)
    with settings.override(verify=False):
        state = blank()
        assert load_into(state, ours) is None
    assert not is_original(state)
    assert load_into(blank(), ours) is not None


def test_a_missing_data_file_is_reported_with_file_and_key(ours: Path):
    (file,) = data_files(ours)
    file.unlink()
    damage = load_into(blank(), ours)
    assert damage is not None
    assert damage.file == str(file)
    assert damage.key is not None
    assert f"{file} is missing" in str(damage)


def test_swapped_files_of_two_equally_shaped_tensors_are_reported(tmp_path):
    state = {"exp_avg": torch.rand(40), "exp_avg_sq": torch.rand(40)}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path, single_file_per_rank=False))
    one, other = data_files(tmp_path)
    swap(one, other)
    for key in state:
        with pytest.raises(CheckpointException) as caught:
            dcp.load({key: torch.zeros(40)}, checkpoint_id=tmp_path)
        damage = caught.value.failures[0][0]
        assert isinstance(damage, DamagedCheckpointError)
        assert damage.key == key


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def test_a_file_of_another_save_is_reported(tmp_path):
    states = [{"weight": torch.full((40,), float(number))} for number in range(2)]
    for number, state in enumerate(states):
        dcp.save(state, checkpoint_id=tmp_path / str(number))
    (right,), (wrong,) = data_files(tmp_path / "0"), data_files(tmp_path / "1")
    shutil.copy(wrong, right)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"weight": torch.zeros(40)}, checkpoint_id=tmp_path / "0")
    damage = caught.value.failures[0][0]
    assert isinstance(damage, DamagedCheckpointError)
    assert (damage.file, damage.key) == (str(right), "weight")


def sharded_state(fill: float) -> dict[str, Any]:
    full = torch.arange(1.0, 9.0) if fill else torch.zeros(8)
    return {"weight": sharded(full)}


def save_sharded(folder: Path) -> None:
    dcp.save(sharded_state(1.0), checkpoint_id=folder)


def load_sharded(folder: Path) -> tuple[list[int], list[str], list[float]]:
    state = sharded_state(0.0)
    try:
        dcp.load(state, checkpoint_id=folder)
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        assert all(isinstance(cause, DamagedCheckpointError) for cause in causes)
        return list(error.failures), [Path(cause.file).name for cause in causes], []
    return [], [], state["weight"].to_local().tolist()


def test_swapped_files_of_two_ranks_are_reported_on_both(ranks: RankPool, tmp_path):
    ranks(2).run(save_sharded, tmp_path)
    one, other = data_files(tmp_path)
    assert ranks(2).run(load_sharded, tmp_path) == [([], [], [1, 2, 3, 4]), ([], [], [5, 6, 7, 8])]
    swap(one, other)
    assert ranks(2).run(load_sharded, tmp_path) == [([0, 1], [one.name, other.name], [])] * 2


def test_damage_that_only_one_rank_reads_fails_the_load_on_every_rank(ranks: RankPool, tmp_path):
    ranks(2).run(save_sharded, tmp_path)
    _, file = data_files(tmp_path)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 64
    file.write_bytes(content)
    assert ranks(2).run(load_sharded, tmp_path) == [([1], [file.name], [])] * 2
