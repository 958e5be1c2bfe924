"""How a save that runs somewhere else tells how far it is."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol


class Watcher(Protocol):
    """Who wants to know."""

    def advance(self, nbytes: int) -> None:
        """So many more bytes are written."""

    def enter(self, phase: str) -> None:
        """A phase begins."""


watcher: ContextVar[Watcher | None] = ContextVar("holdfast_watcher", default=None)
"""Of the save that is under way here."""
