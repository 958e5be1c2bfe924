"""Putting a page into a file: whole, or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

_MARK = b'name="generator" content="holdfast report"'
_WITHIN = 4096


def write_page(path: Path, text: str) -> Path:
    """Write a page and give it its name when it is whole. A page that was there is replaced at that moment."""
    require_folder(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path


def require_folder(path: Path) -> None:
    """Refuse a name in a folder that does not exist."""
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{path} cannot be written: there is no folder {path.parent}; make it, or choose another"
        )


def is_report(path: Path) -> bool:
    """Whether a file is a report, which may be replaced by another."""
    try:
        with path.open("rb") as file:
            return _MARK in file.read(_WITHIN)
    except OSError:
        return False
