"""How damage of a checkpoint is told."""

from __future__ import annotations

from typing import Any, NoReturn

from holdfast.errors import DamagedCheckpointError

_MOST_TEXT = 200


def refuse(file: str, what: str, expected: Any, found: Any, key: str | None = None) -> NoReturn:
    """Raise for a file that is not what it must be. ``key`` is what it is needed for."""
    needed = "" if key is None else f"; it is needed for {key!r}"
    raise DamagedCheckpointError(
        f"{file} {what} (expected {_short(expected)}, found {_short(found)}{needed}). Copy the checkpoint again with "
        "all its files, or load another one.",
        file=file,
        key=key,
        expected=expected,
        found=found,
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"
