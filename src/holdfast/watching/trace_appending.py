"""Adding to a file of JSON that is to be complete at all times.

Every event is a line. The next one is written over the brackets at the end together with new brackets, in one write. If
even that is cut short, the next program that writes to the file mends it; viewers of traces take it as it is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.stores.os_errors import some

if sys.platform != "win32":
    import fcntl

_HEAD = b'{"displayTimeUnit": "ms", "traceEvents": [\n'
_TAIL = b"\n]}\n"
_BETWEEN = b",\n"


def append_to_trace(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Add events. The file is opened each time: others may write to it too, and this process may fork."""
    lines = _BETWEEN.join(json.dumps(event).encode() for event in events)
    file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        _lock(file)
        end, before = _end_of_events(file, path)
        try:
            _write(file, end, before + lines + _TAIL)
        except BaseException:
            # The disk is full. There was room for the end that was there.
            _write(file, end, _TAIL if end else b"")
            os.ftruncate(file, end + len(_TAIL) if end else 0)
            raise
    finally:
        _unlock(file)
        os.close(file)


def refuse_what_is_no_trace(path: Path) -> None:
    """Raise if there is something that is not a trace of ours."""
    if not path.exists():
        return
    with path.open("rb") as file:
        _refuse_others(file.read(len(_HEAD)), path)


def _refuse_others(head: bytes, path: Path) -> None:
    if not _HEAD.startswith(head):
        raise ValueError(f"{path} is there already and is no trace of Holdfast. Choose another name, or remove it.")


def _end_of_events(file: int, path: Path) -> tuple[int, bytes]:
    """Where the next event goes, and what is to be written in front of it."""
    size = os.fstat(file).st_size
    _refuse_others(_read(file, 0, len(_HEAD)), path)
    if size <= len(_HEAD):
        return 0, _HEAD
    if _read(file, size - len(_TAIL), len(_TAIL)) == _TAIL:
        return size - len(_TAIL), _BETWEEN
    return _mended(file, _read(file, 0, size))


def _mended(file: int, content: bytes) -> tuple[int, bytes]:
    """Cut off what is incomplete at the end."""
    end = 0
    position = len(_HEAD)
    for line in content[len(_HEAD) :].split(b"\n"):
        text = line.removesuffix(b",")
        if not _is_json(text):
            break
        end = position + len(text)
        position += len(line) + 1
    os.ftruncate(file, end)
    return (end, _BETWEEN) if end else (0, _HEAD)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _read(file: int, position: int, size: int) -> bytes:
    os.lseek(file, position, os.SEEK_SET)
    return os.read(file, size)


def _write(file: int, position: int, content: bytes) -> None:
    os.lseek(file, position, os.SEEK_SET)
    while content:
        content = content[some(os.write(file, content)) :]


def _unlock(file: int) -> None:
    """To close the file is not enough if a child was forked meanwhile."""
    if sys.platform != "win32":
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_UN)


def _lock(file: int) -> None:
    """Keep other threads and processes out until the file is closed, where there are locks."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
