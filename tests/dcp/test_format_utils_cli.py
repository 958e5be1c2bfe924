"""The command line of format_utils, as a process of its own."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast.dcp as dcp
from holdfast._formats.archives.zip_writer import ZipWriter
from holdfast.dcp import format_utils
from holdfast.dcp.state_dict_loader import _load_state_dict_from_keys
from tests.rank_pool import RankPool

STATE: dict[str, Any] = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "step": 7}


class Custom:
    pass


def start(*arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "holdfast.dcp.format_utils", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def main(*arguments: Any) -> int:
    """The same inside of this process, which saves the seconds that importing torch takes."""
    return format_utils._main([str(argument) for argument in arguments])


def test_it_converts_both_ways_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(STATE, tmp_path / "in.pt")

    statuses = [
        main("torch_to_dcp", tmp_path / "in.pt", tmp_path / "c"),
        main("dcp_to_torch", tmp_path / "c", tmp_path / "out.pt"),
    ]

    assert statuses == [0, 0]
    said = "Converting checkpoint from {} to {} using method: '{}'\n"
    assert capsys.readouterr() == (
        said.format(tmp_path / "in.pt", tmp_path / "c", "torch_to_dcp")
        + said.format(tmp_path / "c", tmp_path / "out.pt", "dcp_to_torch"),
        "",
    )
    assert repr(torch.load(tmp_path / "out.pt", weights_only=True)) == repr(STATE)
    assert repr(_load_state_dict_from_keys(checkpoint_id=tmp_path / "c")) == repr(STATE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "file.pt")
    torch.save([1], tmp_path / "list.pt")
    torch.save({"o": Custom()}, tmp_path / "code.pt")
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    dcp.save(STATE, checkpoint_id=tmp_path / "dcp")
    dcp.save(STATE, checkpoint_id=tmp_path / "cut")
    (data,) = (tmp_path / "cut").glob("*.distcp")
    os.truncate(data, 100)
    return tmp_path


@pytest.mark.parametrize(
    ("mode", "source", "message"),
    [
        ("torch_to_dcp", "nothing", "the path does not exist"),
        ("torch_to_dcp", "dcp", "it is a folder"),
        ("torch_to_dcp", "text.txt", "not a file that torch.save wrote"),
        ("torch_to_dcp", "list.pt", "a checkpoint is a dict"),
        ("torch_to_dcp", "code.pt", "--allow-pickle"),
        ("dcp_to_torch", "nothing", "the path does not exist"),
        ("dcp_to_torch", "file.pt", "it is not a folder"),
        ("dcp_to_torch", "empty", "there is no .metadata in it"),
        ("dcp_to_torch", "cut", "was cut off"),
    ],
)
def test_a_missing_or_wrong_source_is_status_2_with_a_message(
    folder: Path, capsys: pytest.CaptureFixture[str], mode: str, source: str, message: str
) -> None:
    before = sorted(os.listdir(folder))

    assert main(mode, folder / source, folder / "result") == 2

    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert source in said
    assert "Traceback" not in said
    assert sorted(os.listdir(folder)) == before


def test_the_status_is_that_of_the_process(tmp_path: Path) -> None:
    failed = start("dcp_to_torch", tmp_path / "nothing", tmp_path / "f.pt")
    dcp.save(STATE, checkpoint_id=tmp_path / "c")
    worked = start("dcp_to_torch", tmp_path / "c", tmp_path / "f.pt")

    assert "no checkpoint at" in failed.communicate()[1]
    assert worked.communicate()[1] == ""
    assert failed.returncode == 2  # stock says "Skipping conversion" and returns 0
    assert worked.returncode == 0
    assert repr(torch.load(tmp_path / "f.pt", weights_only=True)) == repr(STATE)


def test_a_target_that_cannot_be_written_is_status_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("dcp_to_torch", folder / "dcp", folder / "no" / "f.pt") == 1
    assert main("torch_to_dcp", folder / "file.pt", folder / "text.txt") == 1

    assert capsys.readouterr().err.count("error: ") == 2
    assert (folder / "text.txt").read_text() == "hello"


@pytest.mark.filterwarnings("ignore:1 saved value")
def test_code_runs_after_an_opt_in(folder: Path) -> None:
    assert main("torch_to_dcp", folder / "code.pt", folder / "c", "--allow-pickle") == 0
    assert main("dcp_to_torch", folder / "c", folder / "f.pt") == 2
    assert main("dcp_to_torch", folder / "c", folder / "f.pt", "--allow-pickle") == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["sideways", "a", "b"],
        ["dcp_to_torch", "a"],
        ["torch_to_dcp"],
        ["torch_to_dcp", "a", ""],  # as from a shell variable that is not set
        ["dcp_to_torch", "", "b"],
    ],
)
def test_wrong_arguments_are_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(*arguments)

    assert raised.value.code == 2
    assert "usage: python -m holdfast.dcp.format_utils" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["torch_to_dcp", "dcp_to_torch"])
def test_a_bar_is_shown_on_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    source = folder / ("file.pt" if mode == "torch_to_dcp" else "dcp")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert main(mode, source, folder / "result") == 0
        monkeypatch.undo()
        os.set_blocking(ours, False)
        shown = "".join(iter(lambda: read_some(ours), ""))

    os.close(ours)
    assert "100% [##############################]" in shown
    assert shown.endswith("\r\n")


def read_some(descriptor: int) -> str:
    try:
        return os.read(descriptor, 100_000).decode()
    except BlockingIOError:
        return ""


def convert_until(name: str, source: Path, target: Path) -> None:
    """Let a signal come when three entries are written."""
    plain, calls = ZipWriter.add, []

    def interrupted(self: ZipWriter, entry: str, content: Any) -> None:
        plain(self, entry, content)
        calls.append(entry)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.Signals[name])

    ZipWriter.add = interrupted
    try:
        main("dcp_to_torch", source, target)
    finally:
        ZipWriter.add = plain


@pytest.mark.parametrize(
    ("name", "end"), [("SIGINT", "KeyboardInterrupt"), ("SIGTERM", "RankDied"), ("SIGKILL", "RankDied")]
)
def test_an_interrupted_conversion_leaves_nothing_behind(ranks: RankPool, tmp_path: Path, name: str, end: str) -> None:
    dcp.save({f"t{n}": torch.ones(100) for n in range(5)}, checkpoint_id=tmp_path / "c")
    (tmp_path / "f.pt").write_bytes(b"earlier")

    (outcome,) = ranks(1).run_raw(convert_until, name, tmp_path / "c", tmp_path / "f.pt", process_group=False)

    assert outcome.error.type_name == end
    assert sorted(os.listdir(tmp_path)) == ["c", "f.pt"]
    assert (tmp_path / "f.pt").read_bytes() == b"earlier"
