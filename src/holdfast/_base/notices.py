"""Warnings that point at the caller's line instead of ours, and remarks on errors of others."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path

_OURS = (str(Path(__file__).parents[1]) + os.sep, contextlib.__file__)
"""The package, and what stands between its functions where one is decorated with a context manager."""


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, attributed to the innermost line of code that is not part of Holdfast."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level + 1)


def add_note(error: BaseException, text: str) -> None:
    """Add a remark to an error that is not ours. Python shows it below the message since 3.11; 3.10 only keeps it."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), text]  # type: ignore[attr-defined]
