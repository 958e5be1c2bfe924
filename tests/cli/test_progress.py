"""Progress: a bar on a terminal, lines elsewhere, and nothing for what is quick."""

from __future__ import annotations

import io
import re

import pytest

from holdfast._cli.console import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock():
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    return Clock()


def test_a_pipe_gets_a_line_every_five_seconds(monkeypatch, clock):
    monkeypatch.setattr("sys.stderr", stream := io.StringIO())
    with progress("verifying", clock=clock) as on_progress:
        for second in range(12):
            clock.now = float(second)
            on_progress(second * 1_000_000, 20_000_000)

    assert stream.getvalue().splitlines() == [
        "verifying  25% 5.0 MB of 20.0 MB, 1.0 MB/s, 0:15 left",
        "verifying  50% 10.0 MB of 20.0 MB, 1.0 MB/s, 0:10 left",
    ]


def test_a_terminal_gets_a_bar_that_is_wiped_away(monkeypatch, clock):
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    with progress("verifying", clock=clock) as on_progress:
        clock.now = 2.0
        on_progress(10, 20)
        clock.now = 4.0
        on_progress(15, 20)
    shown = re.sub("\\x1b[^a-zA-Z]*[a-zA-Z]", "", stream.getvalue())
    assert re.search(r"verifying .* 75% 15/20 bytes", shown)
    assert stream.getvalue().endswith("\x1b[2K")


def test_an_answer_that_is_printed_meanwhile_goes_where_answers_go(monkeypatch, clock):
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setattr("sys.stdout", answers := Terminal())
    with progress("verifying", clock=clock) as on_progress:
        clock.now = 2.0
        on_progress(10, 20)
        print("the answer")

    assert answers.getvalue() == "the answer\n"


def test_a_terminal_that_went_away_is_no_reason_to_fail(monkeypatch, clock):
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    with progress("verifying", clock=clock) as on_progress:
        clock.now = 2.0
        on_progress(10, 20)
        stream.close()
        on_progress(15, 20)


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_what_is_quick_or_quiet_shows_nothing(monkeypatch, clock, stream):
    monkeypatch.setattr("sys.stderr", stream)
    with progress("verifying", clock=clock) as on_progress:
        clock.now = 0.3
        on_progress(10, 20)
    with progress("verifying", quiet=True, clock=clock) as on_progress:
        clock.now = 1000.0
        on_progress(15, 20)

    assert stream.getvalue() == ""
