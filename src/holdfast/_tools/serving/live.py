"""Saves that are under way, and what saves that were cut off have left."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal, TypeAlias

from holdfast._formats.dcp.names import rank_of_data_file
from holdfast._formats.native.names import RECORD, generation_of, rank_of
from holdfast._manager.run_file import RunState
from holdfast._tools.listing.entries import SeenFile, SeenFolder, number_in
from holdfast._tools.listing.liveliness import was_cut_off, why_perhaps_writing

# How much of a file has been written so far.
#
# Its size does not show that: large files get all of their space before the first byte, so that a full disk is noticed
# early. The file system knows which parts are still holes.


_MOST_PARTS = 10_000
"""A file in more parts than this counts as written: to go through all would take too long."""


def written_bytes(path: str | os.PathLike[str]) -> int:
    """How many bytes of a file have content; all of them where the file system does not say.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     size = file.truncate(1 << 24)
    ...     before = written_bytes(file.name)
    ...     written = os.pwrite(file.fileno(), bytes(1 << 20), 1 << 23)
    ...     before, written_bytes(file.name)
    (0, 1048576)
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        size = os.fstat(descriptor).st_size
        if not hasattr(os, "SEEK_DATA"):
            return size
        return _without_holes(descriptor, size)
    finally:
        os.close(descriptor)


def _without_holes(descriptor: int, size: int) -> int:
    position = written = 0
    for _ in range(_MOST_PARTS):
        try:
            begin = os.lseek(descriptor, position, os.SEEK_DATA)
            position = os.lseek(descriptor, begin, os.SEEK_HOLE)
        except OSError:  # there is no content behind this position, or the file system has no such call
            return written
        written += position - begin
        if position >= size:
            return min(written, size)
    return size


# Nobody announces a save to others: it is seen by its files, which have no record yet. Those of a save that runs
# grow; a run file says besides which folders its job has begun to change, and whether that job is alive.


Activity: TypeAlias = Literal["writing", "committing", "stalled", "being deleted", "leftover"]
RUNNING: tuple[Activity, ...] = ("writing", "committing", "stalled")

_STALLED = 10.0
"""Seconds without a byte after which a save is called stalled."""
_WINDOW = 10.0
"""Seconds over which the rate is taken."""
_SHOWN_FOR = 600.0
"""Seconds for which the end of a save is shown."""
_MOST_SHOWN = 8


@dataclass(frozen=True)
class RankBytes:
    """What one rank has written."""

    rank: int
    nbytes: int
    reserved: int
    """The size of its files, of which some may not be written yet."""


@dataclass(frozen=True)
class SaveFacts:
    """A save without a record: one that runs, or what is left of one."""

    name: str
    generation: str
    step: int | None
    activity: Activity
    nbytes: int
    expected: int | None
    """About how many bytes it will have, if there is anything to guess from."""
    rate: float | None
    """Bytes per second of late."""
    ranks: tuple[RankBytes, ...]
    began_at: datetime
    quiet: float
    """Seconds since it grew."""
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """As the page gets it."""
        return {
            "name": self.name,
            "generation": self.generation,
            "step": self.step,
            "activity": self.activity,
            "is_running": self.activity in RUNNING,
            "bytes": self.nbytes,
            "expected": self.expected,
            "rate": None if self.rate is None else round(self.rate),
            "ranks": [[rank.rank, rank.nbytes, rank.reserved] for rank in self.ranks],
            "began_at": self.began_at.isoformat(timespec="seconds"),
            "quiet": int(self.quiet) if self.activity == "stalled" else 0,
            "why": self.why,
        }


@dataclass(frozen=True)
class Ended:
    """How a save ended that was seen before."""

    name: str
    step: int | None
    outcome: Literal["committed", "failed"]
    nbytes: int
    seconds: float
    at: datetime

    def to_json(self) -> dict[str, Any]:
        """As the page gets it."""
        return {
            "name": self.name,
            "step": self.step,
            "outcome": self.outcome,
            "bytes": self.nbytes,
            "seconds": round(self.seconds, 1),
            "at": self.at.isoformat(timespec="seconds"),
        }


@dataclass
class _Tracked:
    """What earlier looks have seen of a save."""

    began: float
    grew_at: float
    samples: deque[tuple[float, int]] = field(default_factory=deque)
    measured: dict[str, tuple[int, float | None, int]] = field(default_factory=dict)
    last: SaveFacts | None = None


@dataclass(frozen=True)
class _Unfinished:
    name: str
    generation: str
    """Empty for a save of DCP, whose files carry no id."""
    files: tuple[SeenFile, ...]
    changed_at: float | None


class LiveSaves:
    """Looks at the files of saves from time to time, and remembers enough to know whether they grow."""

    def __init__(self) -> None:
        self._tracked: dict[tuple[str, str], _Tracked] = {}
        self._committed: set[tuple[str, str]] = set()
        self._ended: deque[Ended] = deque(maxlen=_MOST_SHOWN)

    def look(
        self,
        folders: Sequence[SeenFolder],
        committed: Mapping[str, str],
        run: RunState,
        *,
        expected: int | None = None,
        sizes: Mapping[str, int] | None = None,
        now: float | None = None,
    ) -> list[SaveFacts]:
        """All saves without a record in these folders.

        ``committed`` has the identity of the checkpoint in each folder that has one, ``sizes`` how many
        bytes they have, and ``expected`` is how many a checkpoint has. ``now`` is in seconds since the epoch.
        """
        now = time.time() if now is None else now
        self._committed |= set(committed.items())
        unfinished = [found for folder in folders for found in _unfinished_in(folder, committed.get(folder.name))]
        facts = [self._facts(found, run, expected, now) for found in unfinished]
        self._note_ended({(found.name, found.generation) for found in unfinished}, committed, sizes or {}, now)
        names = {folder.name for folder in folders}
        self._committed = {(name, identity) for name, identity in self._committed if name in names}
        return facts

    def ended(self, now: float | None = None) -> list[Ended]:
        """Saves that have ended of late, the last one first."""
        now = time.time() if now is None else now
        return [one for one in reversed(self._ended) if now - one.at.timestamp() < _SHOWN_FOR]

    def _facts(self, found: _Unfinished, run: RunState, expected: int | None, now: float) -> SaveFacts:
        key = found.name, found.generation
        changes = [file.changed_at for file in found.files if file.changed_at is not None]
        tracked = self._tracked.get(key)
        if tracked is None:
            # None of these is before the save began, so the first is the closest.
            began = min([now, *changes, *([found.changed_at] if found.changed_at is not None else [])])
            tracked = self._tracked[key] = _Tracked(began, max(changes, default=now))
        ranks = _by_rank(found.files, tracked)
        nbytes = sum(rank.nbytes for rank in ranks)
        if tracked.samples and tracked.samples[-1][1] != nbytes:
            tracked.grew_at = now
        tracked.grew_at = min(now, max([tracked.grew_at, *changes]))
        tracked.samples.append((now, nbytes))
        while len(tracked.samples) > 2 and now - tracked.samples[1][0] >= _WINDOW:
            tracked.samples.popleft()
        activity, why = self._activity(found, run, now - tracked.grew_at)
        reserved = sum(rank.reserved for rank in ranks)
        guess = max(reserved, expected or 0)
        tracked.last = SaveFacts(
            name=found.name,
            generation=found.generation,
            step=number_in(found.name),
            activity=activity,
            nbytes=nbytes,
            expected=guess if guess > nbytes or expected else None,
            rate=_rate(tracked, nbytes, now) if activity in RUNNING else None,
            ranks=tuple(ranks),
            began_at=datetime.fromtimestamp(tracked.began, timezone.utc),
            quiet=max(0.0, now - tracked.grew_at),
            why=why,
        )
        return tracked.last

    def _activity(self, found: _Unfinished, run: RunState, quiet: float) -> tuple[Activity, str]:
        key = found.name, found.generation
        noted = run.unfinished.get(found.name)
        if key in self._committed or (noted and noted == found.generation):
            return "being deleted", "its record is gone, and its files are being removed"
        if was_cut_off(run, found.name):
            return "leftover", f"the job that wrote it has ended ({run.owner}). The next job of this run removes it"
        is_dated = any(file.changed_at is not None for file in found.files)
        doubt = why_perhaps_writing(run, found.name, quiet if is_dated else None)
        if doubt is None:
            return "leftover", "the save was cut off. holdfast repair --sweep --apply removes what it has left"
        if quiet > _STALLED:
            is_begun = noted is not None and run.owner is not None and run.owner.life() == "alive"
            return "stalled", f"its job is alive: {run.owner}" if is_begun else f"it may have been cut off, but {doubt}"
        has_index = any(file.name.startswith("index-") for file in found.files)
        return ("committing" if has_index else "writing"), ""

    def _note_ended(
        self, present: Collection[tuple[str, str]], committed: Mapping[str, str], sizes: Mapping[str, int], now: float
    ) -> None:
        for key in self._tracked.keys() - present:
            last, began = self._tracked[key].last, self._tracked[key].began
            del self._tracked[key]
            if last is None or last.activity not in RUNNING:
                continue
            name, generation = key
            has_record = committed.get(name) is not None and generation in ("", committed[name])
            at = datetime.fromtimestamp(now, timezone.utc)
            outcome: Literal["committed", "failed"] = "committed" if has_record else "failed"
            nbytes = sizes.get(name, last.nbytes) if has_record else last.nbytes
            self._ended.append(Ended(name, last.step, outcome, nbytes, max(0.0, now - began), at))


def _unfinished_in(folder: SeenFolder, committed: str | None) -> Iterator[_Unfinished]:
    """The saves of which there are files in a folder, but for the one that its record is of."""
    if folder.is_file or (committed is None and RECORD in folder.names):
        return  # a record that cannot be read may need any of these files
    by_generation: dict[str, list[SeenFile]] = {}
    for file in folder.files:
        generation = generation_of(file.name)
        if generation is not None and generation != committed:
            by_generation.setdefault(generation, []).append(file)
    for generation, files in by_generation.items():
        yield _Unfinished(folder.name, generation, tuple(files), folder.changed_at)
    parts = tuple(file for file in folder.files if file.name.endswith(".distcp"))
    if parts and folder.format is None:
        yield _Unfinished(folder.name, "", parts, folder.changed_at)


def _by_rank(files: Sequence[SeenFile], tracked: _Tracked) -> list[RankBytes]:
    done: dict[int, list[int]] = {}
    for file in files:
        rank = rank_of(file.name) or rank_of_data_file(file.name) or 0
        sums = done.setdefault(rank, [0, 0])
        sums[0] += _written(file, tracked)
        sums[1] += file.size
    return [RankBytes(rank, *sums) for rank, sums in sorted(done.items())]


def _written(file: SeenFile, tracked: _Tracked) -> int:
    """How much of a file is written. One that was complete when last looked at, and is unchanged, still is."""
    if file.path is None:
        return file.size
    size, changed_at, written = tracked.measured.get(file.name, (-1, None, -1))
    if (size, changed_at) != (file.size, file.changed_at) or written < size:
        try:
            written = min(written_bytes(file.path), os.stat(file.path).st_size)
        except OSError:  # it was removed just now, or is not ours to read
            written = file.size
        tracked.measured[file.name] = file.size, file.changed_at, written
    return written


def _rate(tracked: _Tracked, nbytes: int, now: float) -> float | None:
    begin, before = tracked.samples[0]
    if now - begin < 0.2:  # this is the first look
        begin, before = tracked.began, 0
    return max(0.0, (nbytes - before) / (now - begin)) if now - begin >= 0.2 else None
