"""The progress bar, seen through a terminal."""

from __future__ import annotations

import io
import os
import pty
import re

import pytest

from holdfast._watching.progress import Progress, duration, size
from holdfast._watching.progress_line import ProgressBar, render


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def frames(stream: io.StringIO) -> list[str]:
    return [frame.strip() for frame in stream.getvalue().split("\r") if frame.strip()]


def test_it_shows_how_far_how_fast_and_how_long_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    stream, clock = Terminal(), Clock()

    with ProgressBar("saving", stream=stream, clock=clock) as bar:
        clock.now = 10.0
        bar.show(250_000_000, 1_000_000_000)
        clock.now = 40.0
        bar.show(1_000_000_000, 1_000_000_000)

    first, *_, last = frames(stream)
    assert first.startswith("saving  25% [#######")
    assert first.endswith("250.0 MB of 1.0 GB, 25.0 MB/s, 0:30 left")
    assert last.startswith("saving 100% [##############################] 1.0 GB of 1.0 GB")
    assert "left" not in last
    assert stream.getvalue().endswith("\n")


def test_it_is_not_drawn_more_often_than_people_can_read() -> None:
    stream, clock = Terminal(), Clock()

    with ProgressBar(stream=stream, clock=clock) as bar:
        for number in range(1000):
            clock.now += 0.001
            bar.show(number, 1000)

    assert 5 <= len(frames(stream)) <= 12


def test_a_line_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()

    with ProgressBar("saving", stream=stream) as bar:
        bar.show(10**11, 10**12)

    assert max(len(frame) for frame in stream.getvalue().rstrip("\n").split("\r")) == 39


def test_nothing_is_written_to_what_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    with ProgressBar(stream=stream) as bar, ProgressBar() as on_stderr:
        bar.show(5, 10)
        on_stderr.show(5, 10)

    assert stream.getvalue() == ""
    assert capfd.readouterr() == ("", "")


def test_it_works_on_a_real_terminal() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream, ProgressBar("loading", stream=stream) as bar:
        bar.show(10, 10)

    assert re.search(rb"\rloading 100% \[#+\] 10 B of 10 B", os.read(ours, 10_000))
    os.close(ours)


def test_a_terminal_that_went_away_stops_the_bar_and_nothing_else() -> None:
    stream = Terminal()

    with ProgressBar(stream=stream, clock=Clock()) as bar:
        progress = Progress(10, bar.show)
        stream.close()
        progress.advance(3)
        progress.advance(4)

    assert progress.done_bytes == 7


@pytest.mark.parametrize(
    ("done", "total", "shown"),
    [(0, 100, "  0% [.............................."), (0, 0, "100%"), (300, 100, "100%"), (99, 100, " 99%")],
)
def test_the_ends_are_right(done: int, total: int, shown: str) -> None:
    assert shown.strip() in render(done, total, 0.0)


def test_numbers_are_for_people() -> None:
    assert [size(n) for n in (0, 999, 1000, 2_500_000, 10**18)] == ["0 B", "999 B", "1.0 KB", "2.5 MB", "1000.0 PB"]
    assert [duration(s) for s in (0, 59.6, 3599, 3600, 100_000)] == ["0:00", "1:00", "59:59", "1:00:00", "27:46:40"]
