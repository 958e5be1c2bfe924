"""Everything that the page of a run shows, as one JSON object: its checkpoints, its job, its saves."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from holdfast._formats.native.names import RECORD
from holdfast._formats.native.record import HEAD_BYTES, written_in
from holdfast._manager.run_file import RunState
from holdfast._manager.run_owner import Owner
from holdfast._stores.roots import Root
from holdfast._stores.store import Store
from holdfast._tools.listing.entries import Entry
from holdfast._tools.listing.listing import Catalogue
from holdfast._tools.serving.live import Ended, LiveSaves, SaveFacts
from holdfast.errors import HoldfastError

# What the page of a run shows of one checkpoint.


@dataclass(frozen=True)
class Writing:
    """How a checkpoint was written, as its record says."""

    world_size: int | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the slowest rank, by phase."""

    @staticmethod
    def of(written: Any) -> Writing:
        """What can be understood of it: it is from a file that anybody may have written."""
        if not isinstance(written, dict):
            return Writing()
        ranks, phases = written.get("world_size"), written.get("phases")
        slowest = {
            str(name): max(seconds)
            for name, seconds in (phases.items() if isinstance(phases, dict) else ())
            if isinstance(seconds, list) and seconds and all(_is_number(one) for one in seconds)
        }
        return Writing(ranks if type(ranks) is int else None, slowest)

    @staticmethod
    def noted_in(store: Store) -> Writing:
        """How the record in a store says that it was written, from its first lines: the rest of it may be large."""
        try:
            with store.reader(RECORD) as reader:
                head = bytearray(min(HEAD_BYTES, reader.size))
                reader.read_into(0, head)
            return Writing.of(written_in(bytes(head)))
        except (OSError, HoldfastError):
            return Writing()


@dataclass(frozen=True)
class CheckpointFacts(Entry):
    """A checkpoint that is there, intact or not."""

    writing: Writing = field(default_factory=Writing)

    @staticmethod
    def of(entry: Entry, writing: Writing) -> CheckpointFacts:
        """What is listed of it, and how it was written."""
        return CheckpointFacts(**vars(entry), writing=writing)

    def to_json(self) -> dict[str, Any]:
        """As the page gets it."""
        return {
            **super().to_json(),
            "quoted": quoted(self.name),
            "metadata": {name: _as_text(value) for name, value in self.metadata.items()},
            "world_size": self.writing.world_size,
            "phases": dict(self.writing.phases),
        }


def quoted(name: str) -> str:
    """A name as a part of a URL. Names of files need not be texts.

    >>> quoted("step 1/é")
    'step%201%2F%C3%A9'
    """
    return quote(os.fsencode(name), safe="")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_FRESH = 0.5
"""Seconds for which a look serves everybody who asks."""
_REST = 4
"""On a slow disk, so many times as long as a look took is rested before the next."""


@dataclass(frozen=True)
class RunFacts:
    """A run as it was seen at one moment."""

    location: str
    is_single: bool
    """Whether this is a checkpoint by itself and not a folder with some."""
    run: RunState = field(default_factory=RunState)
    checkpoints: Sequence[CheckpointFacts] = ()
    saves: Sequence[SaveFacts] = ()
    ended: Sequence[Ended] = ()
    free_bytes: int | None = None
    problem: str = ""
    """Why not everything could be looked at."""

    def checkpoint(self, name: str) -> CheckpointFacts | None:
        """The checkpoint of this name, if there is one."""
        return next((facts for facts in self.checkpoints if facts.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """As the page gets it. Nothing in it changes by itself, so that the page can see that nothing has."""
        return {
            "title": PurePath(self.location).name or self.location,
            "location": self.location,
            "is_single": self.is_single,
            "run": self.run.run,
            "owner": _owner(self.run.owner),
            "free_bytes": None if self.free_bytes is None else _rounded(self.free_bytes),
            "checkpoints": [facts.to_json() for facts in self.checkpoints],
            "saves": [facts.to_json() for facts in self.saves],
            "ended": [ended.to_json() for ended in self.ended],
            "problem": self.problem,
        }


@dataclass(frozen=True)
class Encoded:
    """The JSON of a run, and by what to know it again."""

    content: bytes
    tag: str


class RunWatch:
    """Looks at a run whenever somebody asks, but not more often than its disk can bear.

    Example:
        >>> import tempfile, torch
        >>> import holdfast
        >>> folder = tempfile.mkdtemp()
        >>> with holdfast.CheckpointManager(folder, background=False, save_at_end=False) as manager:
        ...     saved = manager.save(500, {"w": torch.ones(4)}, metrics={"loss": 0.25})
        >>> [(facts.step, facts.state, dict(facts.metrics)) for facts in RunWatch(folder).look().checkpoints]
        [(500, 'committed', {'loss': 0.25})]
    """

    def __init__(self, place: str | os.PathLike[str] | Root) -> None:
        self._catalogue = Catalogue(place)
        self.watched = self._catalogue.watched
        self._live = LiveSaves()
        self._lock = threading.Lock()
        self._facts: RunFacts | None = None
        self._encoded: Encoded | None = None
        self._good_until = 0.0
        self._writings: dict[tuple[str, str], Writing] = {}
        self._names: set[str] = set()

    def look(self) -> RunFacts:
        """What there is now, or was half a second ago."""
        with self._lock:
            return self._look()

    def encoded(self) -> Encoded:
        """The same as JSON."""
        with self._lock:
            facts = self._look()
            if self._encoded is None:
                content = json.dumps(facts.to_json(), allow_nan=False).encode("ascii")
                self._encoded = Encoded(content, hashlib.sha256(content).hexdigest()[:32])
            return self._encoded

    def forget_look(self) -> None:
        """Look again when somebody asks: something has turned out to be different."""
        with self._lock:
            self._good_until = 0.0

    def was_listed(self, name: str) -> bool:
        """Whether there was a checkpoint of this name at some time."""
        return name in self._names

    def _look(self) -> RunFacts:
        started = time.monotonic()
        if self._facts is not None and started < self._good_until:
            return self._facts
        try:
            self._facts = self._look_at_all()
        except (HoldfastError, OSError) as error:
            before = self._facts or RunFacts(self.watched.location, self.watched.single is not None)
            self._facts = replace(before, saves=(), problem=str(error))
        self._encoded = None
        ended = time.monotonic()
        self._good_until = ended + max(_FRESH, _REST * (ended - started))
        return self._facts

    def _look_at_all(self) -> RunFacts:
        look = self._catalogue.look()
        checkpoints = [CheckpointFacts.of(entry, self._writing(entry)) for entry in look.checkpoints]
        here = {(facts.name, facts.identity) for facts in checkpoints}
        self._writings = {key: writing for key, writing in self._writings.items() if key in here}
        committed = [facts for facts in checkpoints if facts.state == "committed"]
        newest = max(committed, key=_age_of, default=None)
        saves = self._live.look(
            look.folders,
            {facts.name: facts.identity for facts in checkpoints if facts.identity},
            look.run,
            expected=None if newest is None else newest.nbytes,
            sizes={facts.name: facts.nbytes for facts in checkpoints},
        )
        self._names |= {facts.name for facts in checkpoints}
        return RunFacts(
            location=self.watched.location,
            is_single=self.watched.single is not None,
            run=look.run,
            checkpoints=checkpoints,
            saves=saves,
            ended=self._live.ended(),
            free_bytes=self.watched.root.free_bytes(),
            problem=look.problem,
        )

    def _writing(self, entry: Entry) -> Writing:
        if entry.format != "native" or not entry.identity:
            return Writing()
        key = entry.name, entry.identity
        if key not in self._writings:
            self._writings[key] = Writing.noted_in(self.watched.root.child(entry.name))
        return self._writings[key]


def _age_of(facts: CheckpointFacts) -> tuple[float, int]:
    return (0.0 if facts.saved_at is None else facts.saved_at.timestamp(), facts.step or 0)


def _owner(owner: Owner | None) -> Mapping[str, Any] | None:
    if owner is None:
        return None
    return {"host": owner.host, "pid": owner.pid, "since": owner.since, "life": owner.life()}


def _rounded(nbytes: int) -> int:
    """To two digits: the free space of a disk changes all the time, and only roughly matters."""
    if nbytes < 100:
        return nbytes
    unit: int = 10 ** (int(math.log10(nbytes)) - 1)
    return nbytes // unit * unit
