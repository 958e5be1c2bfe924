"""``holdfast.verify``: every damage of every file is found, all of it, with the right keys."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import holdfast
import holdfast.dcp
from holdfast._load.opening import open_source
from holdfast._tools.inspecting.verify import verify
from holdfast.errors import CheckpointNotFoundError, HoldfastError, NotACheckpointError, UnknownKeyError
from tests.native_files import table_begin
from tests.properties import examples
from tests.rank_pool import RankPool
from tests.torches import ALONE

BLOCK = 1 << 16


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(30, generator=generator)
    return {
        "model": {
            "large": torch.randn(300, 257, generator=generator),
            "small": torch.arange(7),
            "one": shared,
            "again": shared,
            "empty": torch.empty(0, 3),
        },
        "other": torch.randn(60_000, generator=generator),
        "more": [torch.randn(5000, generator=generator), 3, "text"],
        "step": 100,
    }


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("native") / "c"
    holdfast.save(state(), path, max_file_size=200_000)
    return path


@pytest.fixture(scope="module")
def dcp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp") / "c"
    holdfast.dcp.save(state(), checkpoint_id=path)
    return path


@pytest.fixture(scope="module")
def torch_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torch") / "model.pt"
    torch.save(state(), path)
    return path


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


def changed(path: Path, scratch: Path, name: str, at: int, flip: int = 1) -> Path:
    """A copy of a checkpoint in which one byte differs. Only that file is copied; the others are linked."""
    place = scratch / "copy"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for file in path.iterdir():
        if file.name != name:
            os.link(file, place / file.name)
    content = bytearray((path / name).read_bytes())
    content[at] ^= flip
    (place / name).write_bytes(content)
    return place


def expected_keys(path: Path, name: str, begin: int, end: int) -> set[str]:
    """The keys with bytes between these places, found by looking at every chunk of every tensor."""
    checkpoint = holdfast.open(path)
    return {
        key
        for key, value in checkpoint.items()
        if hasattr(value, "dtype")
        for chunk in checkpoint.layout(key)
        if chunk.file == name and chunk.begin is not None and chunk.begin < end and chunk.begin + chunk.nbytes > begin
    }


# --- whole ones ------------------------------------------------------------------------------------------------------


def test_whole_checkpoints_of_all_formats_are_whole(native: Path, dcp: Path, torch_file: Path, tmp_path: Path) -> None:
    save_file({"w": torch.ones(300, 300)}, tmp_path / "model.safetensors")
    stock.save(state(), checkpoint_id=tmp_path / "stock")
    reports = {
        "native": verify(native),
        "dcp": verify(dcp),
        "stock": verify(tmp_path / "stock"),
        "torch": verify(torch_file),
        "safetensors": verify(tmp_path / "model.safetensors"),
    }

    assert {name: (report.ok, report.damage) for name, report in reports.items()} == dict.fromkeys(reports, (True, ()))
    assert [report.checked for report in reports.values()] == ["all", "some", "some", "some", "none"]
    data = sum(table_begin(file.read_bytes()) for file in native.iterdir() if file.name.startswith("data-"))
    assert reports["native"].bytes_read == data
    assert (reports["native"].tensors, reports["native"].keys) == (6, 10)
    assert reports["safetensors"].bytes_read == 360_000
    assert "intact" in str(reports["native"])
    assert json.loads(json.dumps(reports["dcp"].to_json()))["ok"] is True


def test_progress_goes_from_nothing_to_all(native: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(native, on_progress=lambda done, total: seen.append((done, total)))

    assert seen == sorted(seen)
    assert seen[-1] == (report.bytes_read, report.bytes_read)


def test_an_opened_checkpoint_can_be_verified_and_stays_open(native: Path) -> None:
    with holdfast.open(native) as checkpoint:
        assert verify(checkpoint).ok
        assert checkpoint["model.small"][:].tolist() == list(range(7))


@pytest.mark.parametrize("place", ["nothing", "empty", "other"])
def test_what_is_no_checkpoint_is_an_error_and_not_damage(place: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("hello")

    with pytest.raises((CheckpointNotFoundError, NotACheckpointError)):
        verify(tmp_path / place)


# --- native ----------------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=examples(40))
def test_any_changed_byte_of_a_native_checkpoint_is_found(native: Path, scratch: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(file.name for file in native.iterdir())))
    size = (native / name).stat().st_size
    at, flip = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 255))
    copy = changed(native, scratch, name, at, flip)

    try:
        report = verify(copy)
    except HoldfastError:
        assert name == "holdfast.json"  # it may say that it is of a later version, or of no kind that is known
        return
    assert not report.ok
    assert {damage.file for damage in report.damage} == {name}
    if name.startswith("data-"):
        [damage] = report.damage
        end = table_begin((native / name).read_bytes())
        if at >= end:
            assert (damage.begin, damage.end) == (end, size)
            assert set(damage.keys) == expected_keys(native, name, 0, size)
        else:
            assert (damage.begin, damage.end) == (at // BLOCK * BLOCK, min((at // BLOCK + 1) * BLOCK, end))
            assert set(damage.keys) == expected_keys(native, name, damage.begin or 0, damage.end or 0)


def test_all_damage_is_listed(native: Path, scratch: Path) -> None:
    """Bits in two places, a file that is cut off, one that is missing, one with bytes behind its end."""
    checkpoint = holdfast.open(native)
    names = [name for name, _ in checkpoint.files() if name.startswith("data-")]
    assert len(names) >= 3
    copy = changed(native, scratch, names[0], 10)
    with (copy / names[0]).open("r+b") as file:
        file.seek(140_000)
        file.write(b"\0\0\0\0\0\0")
    (copy / names[1]).unlink()
    last = (native / names[-1]).read_bytes()
    (copy / names[-1]).unlink()
    (copy / names[-1]).write_bytes(last + b"more")
    (copy / "stranger.txt").write_text("no part of it")

    report = verify(copy)

    assert [(damage.file, damage.begin) for damage in report.damage] == sorted(
        [(names[0], 0), (names[0], 2 * BLOCK), (names[1], None), (names[-1], len(last))],
        key=lambda found: (found[0], -1 if found[1] is None else found[1]),
    )
    missing = next(damage for damage in report.damage if damage.file == names[1])
    assert (missing.problem, missing.found) == ("is missing", "no such file")
    assert set(missing.keys) == expected_keys(native, names[1], 0, 1 << 40)
    assert report.extra == ("stranger.txt",)
    assert "DAMAGED" in str(report)
    assert set(report.damaged_keys) >= {"model.large"}


@given(data=st.data())
@settings(max_examples=examples(12))
def test_a_cut_file_names_what_was_lost(native: Path, scratch: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(file.name for file in native.iterdir() if file.name[0] == "d")))
    size = (native / name).stat().st_size
    kept = data.draw(st.integers(0, size - 1))
    copy = changed(native, scratch, name, 0)
    (copy / name).write_bytes((native / name).read_bytes()[:kept])

    [damage] = verify(copy).damage

    assert (damage.file, damage.begin, damage.end, damage.problem) == (name, kept, size, "is cut off")
    # The table is at the end of the file, so that nothing in it can be read without repair, wherever it is cut.
    assert set(damage.keys) == expected_keys(native, name, 0, size)
    for key in damage.keys:
        with pytest.raises(HoldfastError):
            holdfast.open(copy).read(key)


def test_a_missing_file_and_an_empty_one_are_both_named(native: Path, scratch: Path) -> None:
    names = [name for name, _ in holdfast.open(native).files()]
    missing, data = names[1], names[2]
    copy = changed(native, scratch, data, 0)
    (copy / missing).unlink()
    (copy / data).write_bytes(b"")

    report = verify(copy)

    assert sorted((damage.file, damage.problem.split(":")[0]) for damage in report.damage) == sorted(
        [(missing, "is missing"), (data, "is cut off")]
    )


def test_header_and_gaps_are_told_from_tensors(tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(200_000), "x": torch.zeros(200_000, dtype=torch.uint8)}, tmp_path / "c")
    checkpoint = holdfast.open(tmp_path / "c")
    [chunk] = checkpoint.layout("w")
    copy = changed(tmp_path / "c", tmp_path, chunk.file, 20)
    [damage] = verify(copy).damage
    assert "the header of the file is here" in damage.problem

    ends = {chunk.begin + chunk.nbytes for key in checkpoint for chunk in checkpoint.layout(key) if chunk.begin}
    begins = {chunk.begin for key in checkpoint for chunk in checkpoint.layout(key)}
    gaps = [end for end in ends if end not in begins and end < (tmp_path / "c" / chunk.file).stat().st_size]
    for gap in gaps:
        assert not verify(changed(tmp_path / "c", tmp_path, chunk.file, gap)).ok


def test_only_chosen_keys_are_looked_at(native: Path, scratch: Path) -> None:
    checkpoint = holdfast.open(native)
    chunk = checkpoint.layout("model.large")[0]
    assert chunk.begin is not None
    copy = changed(native, scratch, chunk.file, chunk.begin + 100_000)

    assert verify(copy, exclude="model.large").ok
    assert not verify(copy, include="model.large").ok
    assert verify(copy, include="more").bytes_read < verify(copy).bytes_read
    assert verify(copy, include="model.again").tensors == 1


def test_a_small_budget_finds_the_same(native: Path, scratch: Path) -> None:
    copy = changed(native, scratch, holdfast.open(native).layout("model.large")[0].file, 150_000)

    assert verify(copy, memory_budget=1 << 18).damage == verify(copy).damage != ()


def save_on_ranks(path: Path) -> None:
    rank = torch.distributed.get_rank()
    holdfast.save({"own": holdfast.PerRank(torch.full((30_000,), rank)), "all": torch.ones(9)}, path)


def test_damage_of_one_rank_names_its_part(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save_on_ranks, tmp_path / "c")
    checkpoint = holdfast.open(tmp_path / "c")
    file = next(chunk for chunk in checkpoint.layout("own.1")).file
    copy = changed(tmp_path / "c", tmp_path, file, (tmp_path / "c" / file).stat().st_size - 1)

    assert verify(copy).damaged_keys == ["own.1"]


def test_native_and_safetensors_are_verified_without_torch(native: Path, scratch: Path, tmp_path: Path) -> None:
    save_file({"w": torch.ones(9)}, tmp_path / "model.safetensors")
    copy = changed(native, scratch, "holdfast.json", 300)
    program = f"""
import sys
sys.modules["torch"] = None
from holdfast._tools.inspecting.verify import verify
for place in {[str(native), str(tmp_path / "model.safetensors"), str(copy)]!r}:
    print(verify(place).ok)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert ran.stdout.split() == ["True", "True", "False"], ran.stderr


# --- other formats ---------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=examples(15))
def test_any_changed_byte_of_our_dcp_data_is_found(dcp: Path, scratch: Path, data: st.DataObject) -> None:
    items = open_source(dcp).stored_items()  # type: ignore[attr-defined]
    item = data.draw(st.sampled_from(sorted(item for item in items if item.key != "model.empty")))
    at = item.begin + data.draw(st.integers(0, item.nbytes - 1))
    copy = changed(dcp, scratch, item.file, at, data.draw(st.integers(1, 255)))

    [damage] = verify(copy).damage

    assert (damage.file, damage.begin, damage.end) == (item.file, item.begin, item.begin + item.nbytes)
    assert damage.keys == (item.key,)


def test_damage_of_a_stock_checkpoint_is_listed_with_files_that_are_gone(tmp_path: Path) -> None:
    stock.save(state(), checkpoint_id=tmp_path / "c")
    source = open_source(tmp_path / "c")
    large = source.chunk_places("model.large")[0]
    assert large.begin is not None
    copy = changed(tmp_path / "c", tmp_path, large.file, large.begin + large.nbytes // 2)
    report = verify(copy)
    assert [(damage.keys, damage.begin) for damage in report.damage] == [(("model.large",), large.begin)]

    (copy / large.file).unlink()
    gone = verify(copy)
    assert [damage.problem for damage in gone.damage] == ["is missing"]
    assert set(gone.damage[0].keys) >= {"model.large", "step"}

    (copy / large.file).write_bytes((tmp_path / "c" / large.file).read_bytes()[: large.begin + 5])
    assert "model.large" in verify(copy).damaged_keys


@pytest.mark.parametrize("content", [b"", b"\x80\x04nonsense", b"x" * 500])
def test_a_damaged_dcp_index_is_damage(dcp: Path, scratch: Path, content: bytes) -> None:
    copy = changed(dcp, scratch, ".metadata", 0)
    (copy / ".metadata").write_bytes(content)

    report = verify(copy)

    assert (report.format, [damage.file for damage in report.damage]) == ("dcp", [".metadata"])


@given(data=st.data())
@settings(max_examples=examples(15))
def test_any_changed_byte_of_an_entry_of_a_torch_file_is_found(
    torch_file: Path, scratch: Path, data: st.DataObject
) -> None:
    source = open_source(torch_file)
    entries = [entry for entry in source.entries() if entry.nbytes]  # type: ignore[attr-defined]
    entry = data.draw(st.sampled_from(sorted(entries)))
    at = entry.begin + data.draw(st.integers(0, entry.nbytes - 1))
    copy = changed(torch_file.parent, scratch, torch_file.name, at, data.draw(st.integers(1, 255))) / torch_file.name

    report = verify(copy)

    assert not report.ok
    if entry.keys:
        assert [damage.keys for damage in report.damage] == [entry.keys]


def test_all_damage_of_a_hugging_face_folder_is_listed(tmp_path: Path) -> None:
    names = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    for number, name in enumerate(names):
        save_file({f"w{number}": torch.full((50,), float(number))}, tmp_path / name)
    index = {"metadata": {}, "weight_map": {f"w{number}": name for number, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert verify(tmp_path).ok

    (tmp_path / names[0]).unlink()
    (tmp_path / names[1]).write_bytes((tmp_path / names[1]).read_bytes()[:-3])
    (tmp_path / names[2]).write_bytes(b"")
    report = verify(tmp_path)

    assert report.format == "safetensors"
    assert [(damage.file, damage.keys) for damage in report.damage] == [
        (names[0], ("w0",)),
        (names[1], ("w1",)),
        (names[2], ("w2",)),
    ]


def test_safetensors_reports_say_that_changed_elements_cannot_be_noticed(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(50)}, file)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    report = verify(file)

    assert (report.ok, report.checked) == (True, "none")
    assert "cannot be noticed" in str(report)
    assert np.frombuffer(content[-4:], "<f4")[0] != 1


# --- what is where ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("past", [0, 1])
def test_a_tensor_belongs_to_the_block_that_its_last_byte_lies_in(past: int, tmp_path: Path) -> None:
    begin = 0
    for _ in range(3):  # where it begins depends on the header, and so on the sizes in it
        length = 6 * BLOCK - begin + past
        holdfast.save({"w": torch.ones(length, dtype=torch.uint8)}, tmp_path / "c", overwrite=True)
        [chunk] = holdfast.open(tmp_path / "c").layout("w")
        assert chunk.begin is not None
        begin = chunk.begin
    assert chunk.begin + chunk.nbytes == 6 * BLOCK + past

    copy = changed(tmp_path / "c", tmp_path, chunk.file, 6 * BLOCK + past - 1)
    for found in (verify(copy), verify(copy, include="w")):
        [damage] = found.damage
        assert damage.keys == ("w",)
        assert damage.begin == (6 if past else 5) * BLOCK
    read = verify(tmp_path / "c", include="w").bytes_read
    assert read == -(-(6 * BLOCK + past) // BLOCK) * BLOCK - begin // BLOCK * BLOCK - (BLOCK - 1 if past else 0)


@pytest.mark.parametrize("kind", ["native", "dcp", "torch_file"])
def test_patterns_that_mean_nothing_are_an_error_and_no_verdict(kind: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(kind)
    with pytest.raises(UnknownKeyError, match=r"no 'model\.lrge'"):
        verify(path, include="model.lrge")
    with pytest.raises(UnknownKeyError, match=r"all keys of .* are excluded by \*"):
        verify(path, exclude=["*"])


def test_a_report_about_a_part_does_not_speak_of_every_byte(native: Path, torch_file: Path) -> None:
    assert "Every byte that is there" in verify(native).why
    assert verify(native, include="model").why.startswith("Every block of the chosen tensors")
    assert verify(torch_file, include="model").why.startswith("The chosen entries")


def test_any_changed_byte_of_a_stock_index_is_reported_and_never_an_error_of_another_kind(tmp_path: Path) -> None:
    stock.save({"w": torch.ones(3, 4), "z": torch.ones(0, 3), "step": 7}, checkpoint_id=tmp_path / "c", **ALONE)
    index = tmp_path / "c" / ".metadata"
    content = index.read_bytes()
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        index.write_bytes(damaged)
        with contextlib.suppress(HoldfastError):  # what no index can be recognised in
            verify(tmp_path / "c")


def test_many_safetensors_are_looked_at_together_and_damage_is_still_told_apart(tmp_path: Path) -> None:
    save_file({f"w{number}": torch.ones(4) for number in range(300)}, tmp_path / "model.safetensors")
    with holdfast.open(tmp_path / "model.safetensors") as checkpoint:
        place = checkpoint.layout("w299")[0]
        last = max((checkpoint.layout(key)[0] for key in checkpoint), key=lambda chunk: chunk.begin or 0)
        assert verify(checkpoint).ok
        os.truncate(tmp_path / "model.safetensors", (last.begin or 0) + 1)
        damage = verify(checkpoint).damage
    assert place.file == "model.safetensors"
    assert len(damage) == 1
    assert damage[0].begin == last.begin


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotACheckpointError, match="neither a folder nor a file"):
        verify(tmp_path / "pipe")
