"""A version of the checkpoints that a program derives from others. Nobody here looks at it; programs may set it."""

from __future__ import annotations

_derived_version: str | None = None
