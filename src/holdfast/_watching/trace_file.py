"""Traces for Perfetto (ui.perfetto.dev) and ``chrome://tracing``: when which rank did what, on a line of time."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast._stores.os_errors import some
from holdfast._watching.event import Event
from holdfast._watching.subscribers import Subscription, subscribe

# Adding to a file of JSON that is to be complete at all times.
#
# Every event is a line. The next one is written over the brackets at the end together with new brackets, in one
# write. If even that is cut short, the next program that writes to the file mends it; viewers of traces take it as it
# is.


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
            # The disk is full. There was space for the end that was there.
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
        raise ValueError(f"{path} already exists and is not a trace of Holdfast. Choose another name, or remove it.")


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


# Traces for Perfetto (ui.perfetto.dev) and ``chrome://tracing``: when which rank did what, drawn on a line of time.
#
# A file is complete after every event, so it can be looked at while the program runs, and after it was killed. It is
# JSON in Chrome's trace event format: an object whose ``traceEvents`` have ``ph``, ``ts`` and ``dur`` in
# microseconds, ``pid`` (the rank) and ``tid`` (a row; calls that overlap have rows of their own).


_VARIABLE = "HOLDFAST_TRACE"


def trace_to(path: str | os.PathLike[str]) -> Subscription:
    """Draw all saves and loads of this process into a trace file, until the ``with`` block is left or it is cancelled.

    With several ranks each has a file of its own: ``trace.json`` becomes ``trace.rank-0.json`` and so on. A file that
    is there already is continued. ``HOLDFAST_TRACE=trace.json`` in the environment does the same for the whole program.

    Example:
        >>> import json, tempfile, torch
        >>> import holdfast
        >>> folder = tempfile.mkdtemp()
        >>> saved = holdfast.save({"w": torch.ones(4)}, folder + "/step-100")
        >>> with holdfast.trace_to(folder + "/trace.json"):
        ...     loaded = holdfast.load({"w": torch.zeros(4)}, folder + "/step-100")
        >>> [event["name"] for event in json.load(open(folder + "/trace.json"))["traceEvents"] if event["ph"] == "X"]
        ['load.plan', 'load.read', 'load.apply', 'load']
    """
    trace = TraceFile(path)
    trace.path.parent.mkdir(parents=True, exist_ok=True)
    refuse_what_is_no_trace(trace.path)
    return subscribe(trace)


def trace_of_environment() -> Subscription | None:
    """The trace that the environment asks for."""
    path = os.environ.get(_VARIABLE)
    return _kept_trace(path) if path else None


@functools.lru_cache(maxsize=8)
def _kept_trace(path: str) -> Subscription:
    trace = TraceFile(path)
    with suppress(OSError):  # which is raised when the first event cannot be written
        trace.path.parent.mkdir(parents=True, exist_ok=True)
    return Subscription(trace)


class TraceFile:
    """Takes events, and writes them into the file of their rank."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with suppress(OSError):  # the folder that the program is in is gone
            self.path = self.path.absolute()
        self._rows: dict[int, _Rows] = {}
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            rows = self._rows.setdefault(event.rank, _Rows())
            row, is_new = rows.row_of(event)
        drawn = [*(_names(event.rank, row) if is_new else ()), _drawn(event, row)]
        append_to_trace(self.file_of(event.rank, event.world_size), drawn)

    def file_of(self, rank: int, world_size: int) -> Path:
        """Where a rank writes to.

        >>> TraceFile("/runs/trace.json").file_of(3, 4).name
        'trace.rank-3.json'
        """
        return self.path.with_suffix(f".rank-{rank}{self.path.suffix}") if world_size > 1 else self.path


class _Rows:
    """Which row is whose. What is in one row must not overlap, or else it cannot be drawn."""

    def __init__(self) -> None:
        self._row_of: dict[str, int] = {}
        self._taken_until: list[float] = []

    def row_of(self, event: Event) -> tuple[int, bool]:
        """The row of the event's call, and whether it is used for the first time."""
        row = self._row_of.get(event.call)
        if row is None:
            row = next(
                (row for row, end in enumerate(self._taken_until) if end <= event.call_began), len(self._taken_until)
            )
        is_new = row == len(self._taken_until)
        if is_new:
            self._taken_until.append(math.inf)
        if event.is_whole:
            self._row_of.pop(event.call, None)
            self._taken_until[row] = event.began + event.seconds
        else:
            self._row_of[event.call] = row
            self._taken_until[row] = math.inf
        return row, is_new


def _drawn(event: Event, row: int) -> dict[str, Any]:
    fields = event.as_dict()
    shown = {name: fields[name] for name in ("path", "step", "nbytes", "error", "slowest_rank", "call")}
    began, ended = (round(seconds * 1e6) for seconds in (event.began, event.began + event.seconds))
    return {
        "name": event.name,
        "cat": "holdfast",
        "ph": "X",
        "ts": began,
        "dur": max(0, ended - began),
        "pid": event.rank,
        "tid": row,
        "args": {**fields["detail"], **{name: value for name, value in shown.items() if value is not None}},
    }


def _names(rank: int, row: int) -> Sequence[dict[str, Any]]:
    names = {
        "process_name": f"rank {rank}",
        "thread_name": "holdfast" if row == 0 else f"holdfast, at once ({row + 1})",
    }
    return [{"name": kind, "ph": "M", "pid": rank, "tid": row, "args": {"name": name}} for kind, name in names.items()]
