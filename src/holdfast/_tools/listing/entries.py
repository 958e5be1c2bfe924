"""What is listed of one checkpoint. It comes from names, sizes and records; the data is not read."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from typing import Any, Literal, TypeAlias

from holdfast._formats.format_names import Format, format_of_folder, format_of_unfinished
from holdfast._formats.native.names import RECORD, SET_ASIDE, generation_of
from holdfast._formats.native.record import LARGEST_RECORD, decode_record
from holdfast._manager.run_file import RunState
from holdfast._manager.steps import StepInfo, reason_to_pass_over, step_of
from holdfast._manager.summaries import Summary
from holdfast._stores.store import Store
from holdfast._tools.listing.liveliness import is_at_work, why_perhaps_writing
from holdfast._watching.progress import size
from holdfast.errors import HoldfastError

# Files and folders as a look at them found them.


@dataclass(frozen=True)
class SeenFile:
    """A file as a look at its folder found it."""

    name: str
    size: int
    changed_at: float | None = None
    """Seconds since the epoch, where the store says."""
    path: str | None = None
    """Where it is, if it is on a local disk."""


@dataclass(frozen=True)
class SeenFolder:
    """The files of a folder, or the one file that is a checkpoint by itself."""

    name: str
    files: tuple[SeenFile, ...]
    changed_at: float | None = None
    file_format: Format | None = None
    """If it is one file."""
    trouble: str = ""
    """Why it could not be looked at, if so. Its name is all that is known then."""

    @property
    def is_file(self) -> bool:
        """Whether it is a file and not a folder."""
        return self.file_format is not None

    @cached_property
    def names(self) -> set[str]:
        """Of all files."""
        return {file.name for file in self.files}

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)

    @cached_property
    def format(self) -> Format | None:
        """Of the checkpoint in it; None if there is none, or not yet."""
        return self.file_format or format_of_folder(self.names)

    @cached_property
    def unfinished_format(self) -> Format | None:
        """Of what a save has left in it, or is writing, if there is no checkpoint."""
        return format_of_unfinished(self.names) if self.format is None else None

    def last_change(self, names: Iterable[str] | None = None) -> float | None:
        """When one of its files, or of these, was last written; None where that is unknown."""
        wanted = self.names if names is None else set(names)
        times = [file.changed_at for file in self.files if file.name in wanted and file.changed_at is not None]
        return max(times, default=None)


State: TypeAlias = Literal["committed", "set aside", "damaged", "being written", "unfinished", "leftover"]

_NUMBER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True)
class Entry:
    """A checkpoint, or what is left of one."""

    name: str
    state: State
    format: Format
    identity: str
    """Another one if other content is under this name; empty if that is unknown."""
    step: int | None
    nbytes: int
    """Of its files. What other saves have left in its folder does not count."""
    path: str = ""
    bytes_on_disk: int = 0
    """Of everything in its folder."""
    saved_at: datetime | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = False
    why: str = ""
    """Why it is in this state, if it is not committed."""
    repaired: str = ""
    """What was rebuilt of it, if anything was."""

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "name": self.name,
            "path": self.path,
            "format": self.format,
            "state": self.state,
            "why": self.why,
            "step": self.step,
            "bytes": self.nbytes,
            "bytes_on_disk": self.bytes_on_disk,
            "saved_at": None if self.saved_at is None else self.saved_at.isoformat(),
            "metrics": {name: value if math.isfinite(value) else str(value) for name, value in self.metrics.items()},
            "pinned": self.pinned,
            "identity": self.identity,
            "repaired": self.repaired,
        }


def entry_of_step(info: StepInfo, seen: SeenFolder) -> Entry:
    """The entry of a step of a run."""
    is_legible = info.damage is None and info.unreadable is None
    state: State = "committed" if info.is_usable else "set aside" if is_legible else "damaged"
    entry = Entry(
        name=info.name,
        state=state,
        format="native",
        identity=info.identity,
        step=info.step,
        nbytes=info.nbytes or seen.nbytes,
        path=info.path,
        bytes_on_disk=seen.nbytes,
        saved_at=info.saved_at,
        metrics=info.metrics,
        metadata=info.metadata,
        pinned=info.pinned,
        why=info.unreadable or info.damage or info.set_aside or "",
        repaired=info.repaired,
    )
    return _with_missing_files(entry, seen)


def entry_of_other(seen: SeenFolder, path: str, store: Store | None) -> Entry | None:
    """The entry of a checkpoint that is no step of a run; None if there is none. A single file has no store."""
    found = seen.format
    if found is None:
        return None
    if found == "native" and store is not None:
        return _entry_of_native(seen, path, store)
    newest = seen.last_change()
    return Entry(
        name=seen.name,
        state="damaged" if seen.trouble else "committed",
        format=found,
        identity=f"{newest}-{seen.nbytes}-{len(seen.files)}",
        step=number_in(seen.name),
        nbytes=seen.nbytes,
        path=path,
        bytes_on_disk=seen.nbytes,
        saved_at=_moment(newest),
        why=seen.trouble,
    )


def entry_of_unfinished(seen: SeenFolder, path: str, run: RunState) -> Entry | None:
    """What a save without a record has left in a folder, or is writing there; None if there is nothing of the kind."""
    found = seen.unfinished_format
    if found is None:
        return None
    newest = seen.last_change()
    quiet = None if newest is None else time.time() - newest
    why = why_perhaps_writing(run, seen.name, quiet)
    state: State = "leftover" if why is None else "being written" if is_at_work(run, seen.name, quiet) else "unfinished"
    return Entry(
        name=seen.name,
        state=state,
        format=found,
        identity="",
        step=number_in(seen.name),
        nbytes=seen.nbytes,
        path=path,
        bytes_on_disk=seen.nbytes,
        saved_at=_moment(newest),
        why={"leftover": "a save was cut off: there is no record", "unfinished": why or ""}.get(state, ""),
    )


def number_in(name: str) -> int | None:
    """The step that a name ends in, perhaps: programs name folders in many ways.

    >>> number_in("checkpoint-500"), number_in("epoch=3-step=70.ckpt"), number_in("final")
    (500, 70, None)
    """
    found = _NUMBER.findall(name)
    return int(found[-1]) if found else None


def _entry_of_native(seen: SeenFolder, path: str, store: Store) -> Entry | None:
    entry = Entry(seen.name, "damaged", "native", "", number_in(seen.name), seen.nbytes, path, seen.nbytes)
    try:
        record_bytes = store.size(RECORD)
        if record_bytes is None:
            return None
        if record_bytes > LARGEST_RECORD:
            return replace(entry, why=f"{store.path_of(RECORD)} is too large for a record: {record_bytes} bytes")
        content = store.read(RECORD)
        summary = Summary.of(decode_record(content, store.path_of(RECORD)), len(content))
        aside = reason_to_pass_over(store) if SET_ASIDE in seen.names else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (HoldfastError, OSError) as error:
        return replace(entry, why=str(error))
    step = step_of(seen.name)
    entry = replace(
        entry,
        state="committed" if aside is None else "set aside",
        identity=summary.identity,
        step=step if step is not None else summary.step if summary.step is not None else number_in(seen.name),
        nbytes=summary.nbytes,
        saved_at=summary.time(),
        metrics=summary.numbers(),
        metadata=summary.metadata,
        why=aside or "",
        repaired=summary.repaired,
    )
    return _with_missing_files(entry, seen)


def _with_missing_files(entry: Entry, seen: SeenFolder) -> Entry:
    """A record without its files is not a checkpoint. That much is known without reading them."""
    if entry.state == "damaged":
        return entry
    present = sum(file.size for file in seen.files if file.name == RECORD or generation_of(file.name) == entry.identity)
    if present == entry.nbytes:
        return entry
    what = "more" if present > entry.nbytes else "fewer"
    why = f"its files have {what} bytes than its record says: {size(present)} of {size(entry.nbytes)}"
    return replace(entry, state="damaged", why=why)


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)
