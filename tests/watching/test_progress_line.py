"""The line about a pending save, on a real terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest

from holdfast._watching.progress_line import ProgressLine


class Save:
    """A save that goes as far as it is told to."""

    def __init__(self, *states: tuple[str, int, int]) -> None:
        self._states = iter(states)
        self._now = next(self._states)
        self.is_done = False
        self.asked = threading.Event()

    def progress(self) -> tuple[str, int, int]:
        told, self._now = self._now, next(self._states, self._now)
        self.asked.set()
        return told

    def done(self) -> bool:
        return self.is_done


class Terminal:
    def __init__(self) -> None:
        self._ours, theirs = pty.openpty()
        self.stream: TextIO = os.fdopen(theirs, "w")
        self.text = ""

    def read_until(self, pattern: str) -> None:
        while not re.search(pattern, self.text):
            self.text += os.read(self._ours, 10_000).decode()

    def close(self) -> None:
        self.stream.close()
        os.close(self._ours)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()
    yield terminal
    terminal.close()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "holdfast-progress"]


def test_it_shows_how_far_a_save_is_and_leaves_nothing_behind(terminal: Terminal) -> None:
    save = Save(("copying", 0, 1000), ("writing", 250, 1000), ("writing", 1000, 1000))
    line = ProgressLine(save, "step 500", stream=terminal.stream, patience=0.0)
    assert line.is_shown
    terminal.read_until("step 500: copying   0%")
    terminal.read_until("step 500: writing  25% .* 250 B of 1.0 KB")
    terminal.read_until("step 500: writing 100%")

    save.is_done = True
    terminal.read_until(r"\r {99}\r$")

    line.close()
    line.close()
    assert "\n" not in terminal.text
    assert threads() == []


def test_what_the_program_prints_begins_where_the_line_does(terminal: Terminal) -> None:
    with ProgressLine(Save(("writing", 1, 2)), stream=terminal.stream, patience=0.0):
        terminal.read_until("save: writing  50% .*\r$")


def test_closing_ends_it_before_the_save(terminal: Terminal) -> None:
    save = Save(("writing", 1, 2))
    with ProgressLine(save, stream=terminal.stream, patience=0.0):
        assert save.asked.wait(60)

    assert threads() == []
    assert not save.is_done


def test_a_short_save_is_not_shown() -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen, save = Screen(), Save(("writing", 1, 2))
    with ProgressLine(save, stream=screen, patience=60.0) as line:
        assert line.is_shown

    assert screen.getvalue() == ""
    assert not save.asked.is_set()


def test_saves_are_shown_one_after_the_other(terminal: Terminal) -> None:
    first, second = Save(("writing", 1, 2)), Save(("waiting", 0, 2))
    with (
        ProgressLine(first, "first", stream=terminal.stream, patience=0.0),
        ProgressLine(second, "second", stream=terminal.stream, patience=0.0),
    ):
        terminal.read_until("first: writing|second: waiting")
        shown, other = (first, second) if "first" in terminal.text else (second, first)
        assert not other.asked.is_set()
        shown.is_done = True
        assert other.asked.wait(60)


def test_only_rank_0_and_only_a_terminal_is_written_to(
    terminal: Terminal, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Save(("writing", 1, 2))
    with ProgressLine(save, rank=1, stream=terminal.stream, patience=0.0) as on_rank_1:
        assert threads() == []
    with ProgressLine(save, patience=0.0) as in_a_pipe:
        assert threads() == []
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw
    with ProgressLine(save, patience=0.0) as nowhere:
        assert threads() == []

    assert [line.is_shown for line in (on_rank_1, in_a_pipe, nowhere)] == [False] * 3
    assert capfd.readouterr() == ("", "")


def test_a_program_that_ends_takes_the_line_away(terminal: Terminal) -> None:
    program = """
from holdfast._watching.progress_line import ProgressLine
import threading
asked = threading.Event()
class Save:
    def progress(self):
        asked.set()
        return "writing", 1, 2
    def done(self):
        return False
ProgressLine(Save(), "step 5", patience=0.0)
assert asked.wait(60)
"""
    done = subprocess.run([sys.executable, "-c", program], stderr=terminal.stream, timeout=60, check=False)

    assert done.returncode == 0
    terminal.read_until(r"step 5: writing  50% .*\r +\r$")


def test_a_save_that_cannot_tell_ends_the_line_and_nothing_else(
    terminal: Terminal, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Save):
        def progress(self) -> tuple[str, int, int]:
            raise RuntimeError("no idea")

    save = Broken(("", 0, 0))
    line = ProgressLine(save, stream=terminal.stream, patience=0.0)
    for thread in threads():
        thread.join()
    line.close()
    assert [record.getMessage() for record in caplog.records] == ["how far a save is cannot be shown any longer: save"]

    with ProgressLine(Save(("writing", 1, 2)), stream=terminal.stream, patience=0.0):
        terminal.read_until("writing  50%")
