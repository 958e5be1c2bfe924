"""The final name has the old result or the new one, intact, whatever happens; the next run removes leftovers."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast._tools.converting import placing, work_folders
from holdfast._tools.converting.proof import prove
from holdfast._tools.converting.work_folders import ResultFolder, left_over, remove_left_over
from holdfast.errors import CheckpointExistsError, DamagedCheckpointError, NotAFolderError
from tests.tools.converting.formats import read_safetensors
from tests.warm_python import warm_python

KILLED = """
import os, signal, sys
import holdfast

source, destination, to, moment = sys.argv[1:]
seen = 0

def die(done, total):
    global seen
    seen += 1
    if done >= float(moment) * total:
        os.kill(os.getpid(), signal.SIGKILL)

holdfast.convert(source, destination, to=to, overwrite=True, memory_budget=1 << 18, on_progress=die)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    holdfast.save({"w": torch.arange(200_000), "v": torch.ones(3)}, tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("moment", ["0.1", "0.9"])  # when it writes, and when it reads back
@pytest.mark.parametrize(("to", "name"), [("native", "new"), ("safetensors", "new.safetensors")])
def test_a_kill_leaves_the_old_result_or_nothing_and_the_next_run_works(saved, tmp_path, to, name, moment):
    program = [*warm_python(), "-c", KILLED, str(saved), str(tmp_path / name), to, moment]
    assert subprocess.run(program, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / name).exists()
    assert len(left_over(tmp_path)) == 1

    holdfast.convert(saved, tmp_path / name, to=to)
    assert names(tmp_path) == sorted([name, "saved"])

    other = tmp_path / "other"
    holdfast.save({"w": torch.zeros(7)}, other)
    holdfast.convert(other, tmp_path / name, to=to, overwrite=True)
    assert subprocess.run(program, check=False).returncode == -signal.SIGKILL
    assert torch.equal(holdfast.open(tmp_path / name)["w"][...], torch.zeros(7))
    holdfast.convert(saved, tmp_path / name, to=to, overwrite=True)
    assert torch.equal(holdfast.open(tmp_path / name)["w"][...], torch.arange(200_000))
    assert names(tmp_path) == sorted([name, "other", "saved"])


@pytest.mark.parametrize("is_readable", [True, False])
def test_other_models_in_the_folder_are_not_lost_to_an_overwrite(saved, tmp_path, is_readable):
    model = tmp_path / "model"
    holdfast.export(saved, model, max_file_size="1MB")
    save_file({"v": torch.zeros(3)}, model / "lora.safetensors")
    if not is_readable:
        (model / "model.safetensors.index.json").write_text("{")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    with pytest.raises(CheckpointExistsError, match=r"other models .*lora\.safetensors"):
        holdfast.export(saved, model, overwrite=True)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before

    (model / "lora.safetensors").unlink()
    holdfast.export(saved, model, overwrite=True)
    assert names(model) == ["model.safetensors"]


def test_what_another_process_is_writing_is_not_swept(saved, tmp_path):
    program = """
import sys, holdfast
def wait(done, total):
    print("writing", flush=True)
    sys.stdin.read()
holdfast.convert(sys.argv[1], sys.argv[2], to="safetensors", on_progress=wait)
"""
    job = subprocess.Popen(
        [*warm_python(), "-c", program, str(saved), str(tmp_path / "new.safetensors")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert job.stdout is not None
    job.stdout.readline()
    (being_written,) = left_over(tmp_path)
    assert not remove_left_over(being_written)

    holdfast.convert(saved, tmp_path / "new.safetensors", to="safetensors")
    assert being_written.exists()
    job.communicate()
    assert job.returncode != 0  # the name was taken meanwhile, and nobody said that it may be replaced
    assert names(tmp_path) == ["new.safetensors", "saved"]


def test_what_is_there_stays_unless_it_may_be_replaced(saved, tmp_path):
    for to, name in (("native", "new"), ("safetensors", "new.safetensors"), ("torch", "new.pt"), ("dcp", "dcp")):
        holdfast.convert(saved, tmp_path / name, to=to)
        with pytest.raises(CheckpointExistsError, match="overwrite=True"):
            holdfast.convert(saved, tmp_path / name, to=to)
        holdfast.convert(saved, tmp_path / name, to=to, overwrite=True, include="v")
        assert list(holdfast.open(tmp_path / name)) == ["v"]
    assert names(tmp_path) == ["dcp", "new", "new.pt", "new.safetensors", "saved"]


def test_one_format_replaces_another_and_other_files_stay(saved, tmp_path):
    holdfast.convert(saved, tmp_path / "new", to="safetensors", max_file_size=100)
    (tmp_path / "new" / "config.json").write_text("{}")
    holdfast.convert(saved, tmp_path / "new", to="native", overwrite=True)
    assert holdfast.open(tmp_path / "new").format == "native"
    assert (tmp_path / "new" / "config.json").read_text() == "{}"
    assert not list((tmp_path / "new").glob("model*"))


def test_an_empty_folder_is_no_obstacle(saved, tmp_path):
    (tmp_path / "new").mkdir()
    holdfast.convert(saved, tmp_path / "new", to="native")
    assert list(holdfast.open(tmp_path / "new")) == ["w", "v"]


def test_what_is_no_checkpoint_is_never_replaced(saved, tmp_path):
    (tmp_path / "home" / "photos").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("all of my notes")
    run = tmp_path / "run"
    holdfast.save({"w": torch.ones(1)}, run / "step-00000001")
    holdfast.save({"w": torch.ones(1)}, tmp_path / "with_more")
    (tmp_path / "with_more" / "thesis").mkdir()
    for place in (tmp_path / "home", run, tmp_path / "with_more"):
        with pytest.raises(CheckpointExistsError, match="nothing was written"):
            holdfast.convert(saved, place, to="native", overwrite=True)
    with pytest.raises(CheckpointExistsError, match="nothing was written"):
        holdfast.convert(saved, tmp_path / "notes.txt", to="torch", overwrite=True)
    with pytest.raises(CheckpointExistsError, match="cannot replace"):
        holdfast.convert(saved, saved, to="torch", overwrite=True)
    assert (tmp_path / "home" / "photos").is_dir()
    assert (tmp_path / "notes.txt").read_text() == "all of my notes"


def test_a_file_is_no_folder_to_write_below(saved, tmp_path):
    (tmp_path / "notes.txt").write_text("all of my notes")
    with pytest.raises(NotAFolderError, match=r"notes.txt is a file"):
        holdfast.convert(saved, tmp_path / "notes.txt" / "a" / "new", to="native")
    assert (tmp_path / "notes.txt").read_text() == "all of my notes"


def test_a_checkpoint_can_be_converted_in_its_own_place(saved):
    holdfast.convert(saved, saved, to="dcp", overwrite=True)
    assert holdfast.open(saved).format == "dcp"
    assert torch.equal(holdfast.open(saved)["w"][...], torch.arange(200_000))


def test_a_link_stays_a_link(saved, tmp_path):
    holdfast.convert(saved, tmp_path / "first", to="native", include="v")
    (tmp_path / "link").symlink_to(tmp_path / "first")
    holdfast.convert(saved, tmp_path / "link", to="native", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert list(holdfast.open(tmp_path / "first")) == ["w", "v"]


def test_file_systems_that_cannot_exchange_names_get_the_new_one_too(saved, tmp_path):
    holdfast.convert(saved, tmp_path / "new", to="native", include="v")
    with mock.patch.object(placing, "_renameat2", return_value=None):
        holdfast.convert(saved, tmp_path / "new", to="native", overwrite=True)
        holdfast.convert(saved, tmp_path / "other", to="native")
        holdfast.convert(saved, tmp_path / "other.pt", to="torch")
    assert list(holdfast.open(tmp_path / "new")) == ["w", "v"]
    assert names(tmp_path) == ["new", "other", "other.pt", "saved"]


def test_a_kill_between_taking_the_old_one_away_and_putting_the_new_one_there_is_mended(saved, tmp_path):
    final = tmp_path / "new"
    holdfast.convert(saved, final, to="native", include="v")
    work = ResultFolder(tmp_path / ".new.holdfast-0123456789abcdef.partial", final)
    work.folder.mkdir()
    work.prepare()
    work.new.mkdir()
    final.rename(work.old)

    holdfast.convert(saved, tmp_path / "unrelated", to="native")
    assert not final.exists()
    assert work_folders.sweep(final) == [work.folder]
    assert list(holdfast.open(final)) == ["v"]


def test_an_error_while_writing_leaves_nothing_not_even_new_folders(saved, tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch("holdfast._stores.file_sink.FileSink.finish", side_effect=full),
        pytest.raises(OSError, match="space"),
    ):
        holdfast.convert(saved, tmp_path / "a" / "b" / "new.safetensors", to="safetensors")
    assert names(tmp_path) == ["saved"]


def test_a_disk_that_changes_bits_is_noticed_before_anything_gets_its_name(saved, tmp_path):
    def damage_and_prove(outgoing, place, *rest):
        content = bytearray(place.read_bytes())
        content[-1] ^= 1
        place.write_bytes(content)
        prove(outgoing, place, *rest)

    with (
        mock.patch("holdfast._tools.converting.convert.prove", damage_and_prove),
        pytest.raises(DamagedCheckpointError, match="'v'"),
    ):
        holdfast.convert(saved, tmp_path / "new.safetensors", to="safetensors")
    assert names(tmp_path) == ["saved"]


def test_without_the_check_nothing_is_read_back(saved, tmp_path):
    with mock.patch("holdfast._tools.converting.convert.prove", side_effect=AssertionError("it was read back")):
        report = holdfast.convert(saved, tmp_path / "new.safetensors", to="safetensors", check=False)
    assert not report.checked
    assert torch.equal(read_safetensors(tmp_path / "new.safetensors")["w"], torch.arange(200_000))
