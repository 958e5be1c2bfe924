"""Draw on the terminal: colours and a live status line on a TTY, plain text anywhere else."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

BOLD, DIM, RED, GREEN = "1", "2", "31", "32"
JOB_COLOURS = {"A": "36", "B": "35", "C": "33", "D": "34"}

EIGHTHS = " ▁▂▃▄▅▆▇█"
CHART_HEIGHT = 8
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Screen:
    """Standard output with styles that vanish when nobody would see them."""

    def __init__(self) -> None:
        # A terminal that cannot show a character shows a question mark instead of ending the demo.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        self.live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.colour = self.live and not os.environ.get("NO_COLOR")

    def paint(self, text: str, *styles: str) -> str:
        return f"\x1b[{';'.join(styles)}m{text}\x1b[0m" if self.colour and styles else text

    def line(self, text: str = "") -> None:
        print(f"{self._erase()}{text}", flush=True)

    def heading(self, text: str, aside: str = "") -> None:
        self.line()
        self.line(f" {self.paint(text, BOLD)}" + (f"  {self.paint(aside, DIM)}" if aside else ""))
        self.line()

    def status(self, text: str) -> None:
        """Show ``text`` until the next line replaces it; nothing where lines cannot be replaced."""
        if self.live:
            print(f"{self._erase()}{text}", end="", flush=True)

    def _erase(self) -> str:
        return "\r\x1b[2K" if self.live else ""


def bar(first: int, done: int, total: int) -> str:
    """A progress bar with one character per step; the steps before ``first`` are somebody else's."""
    skipped, filled = first - 1, max(0, done - first + 1)
    return "·" * skipped + "━" * filled + "╌" * (total - skipped - filled)


def size(count: int) -> str:
    return f"{count / 1024:,.1f} KiB" if count < 1024**2 else f"{count / 1024**2:,.2f} MiB"


def columns(values: Sequence[float], top: float) -> list[str]:
    """Draw each value as a column one character wide; rows from top to bottom."""
    heights = [round(value / top * CHART_HEIGHT * 8) for value in values]
    return [
        "".join(EIGHTHS[min(8, max(0, height - 8 * row))] for height in heights)
        for row in reversed(range(CHART_HEIGHT))
    ]


def outline(values: Sequence[float], top: float) -> list[str]:
    """Draw only where the columns of the same values would end; rows from top to bottom."""
    ends = [min(CHART_HEIGHT - 1, int(value / top * CHART_HEIGHT)) for value in values]
    return ["".join("·" if end == row else " " for end in ends) for row in reversed(range(CHART_HEIGHT))]
