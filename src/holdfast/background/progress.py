"""How a save that runs somewhere else tells how far it is."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

advance: ContextVar[Callable[[int], None] | None] = ContextVar("holdfast_advance", default=None)
"""Takes the number of bytes that were written, part by part."""
