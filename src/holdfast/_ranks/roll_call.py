"""Who is where: every rank that is in a call for longer notes how far it is, so that no wait is without a name.

The notes are in a store that all ranks reach. A rank that waits looks at the notes of those that it waits for. When one
of them has made no progress for too long (it never joined, hangs, was stopped), it writes a verdict, which all others
find. Nothing of this happens in calls that take less than a moment, nor anything per message.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch.distributed.distributed_c10d import PrefixStore, Store

from holdfast._compat.groups import connection_of_its_own
from holdfast._ranks.signs_of_progress import SignsOfProgress
from holdfast._watching.progress import size as named_size

_PATIENCE = timedelta(seconds=5)
"""With a store that does not answer."""

_SHORTEST_TICK, _LONGEST_TICK = 0.25, 1.0
"""Seconds between two looks at the store."""
_RANKS_PER_SECOND = 1000
"""How many ranks may look at the store each second."""


_OVERSLEPT = 1.0
"""Seconds by which the watch may wake up late. If it is more, its own process was stopped, or got no time to run."""

_SIGNS_COUNT_FOR = 10
"""Timeouts in which the bytes of a process pass for progress if nothing else does. They may be of something else."""


class Progressing(Protocol):
    """What knows how far a call is."""

    current_phase: str
    done_bytes: int


@dataclass(frozen=True)
class Verdict:
    """Why a call has ended on all ranks: those that are missing, and what is known of them."""

    missing: Mapping[int, str]
    reason: str
    """What they did not do."""
    is_final: bool = False
    """Whether they have died, so that no later call can have them."""
    epoch: int = 0
    """The connection that ends with it. They are counted, and each has one verdict at most."""
    call: int = 0
    """The call that it is about, counted from the first one of the connection."""
    name: str = ""
    """What was called."""

    def packed(self) -> bytes:
        """As bytes."""
        entries = [[rank, text] for rank, text in self.missing.items()]
        return json.dumps([entries, self.reason, self.is_final, self.epoch, self.call, self.name]).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Verdict:
        """From bytes.

        >>> Verdict.unpacked(Verdict({3: "it is stopped"}, "did not join").packed()).missing
        {3: 'it is stopped'}
        """
        entries, *rest = json.loads(data)
        return cls(dict(entries), *rest)


def verdict_in(store: Store, epoch: int) -> Verdict | None:
    """The verdict that has ended a connection, if there is one."""
    key = _verdict_key(epoch)
    return Verdict.unpacked(store.get(key)) if store.check([key]) else None


def _verdict_key(epoch: int) -> str:
    return f"verdict/{epoch}"


Place = tuple[int, int]
"""Of a call: the connection, and the number of the call on it."""


class RankNote(NamedTuple):
    """Where a rank is. Connections, calls on them and exchanges in these are counted."""

    epoch: int
    call: int
    exchange: int
    name: str
    phase: str
    nbytes: int
    """What the call has done."""
    transfers: int
    """How many parcels it has sent and received."""
    signs: int
    """Bytes that its process has moved."""
    waits_for: Sequence[int]
    """The ranks that it waits for, the next one first; none while it works."""
    beat: int
    """Grows as long as the process is alive."""

    @property
    def place(self) -> Place:
        """Of its call."""
        return self.epoch, self.call

    def describe(self) -> str:
        """For people."""
        parts = [self.name]
        if self.phase:
            parts.append(f"phase {self.phase}")
        if self.nbytes:
            parts.append(f"{named_size(self.nbytes)} done")
        return ", ".join(parts)


class RollCall:
    """The notes of all ranks of a group, and the verdicts about their calls."""

    def __init__(self, store: Store, rank: int, others: Mapping[str, Store] | None = None) -> None:
        """``others`` are the stores of other rolls of the same ranks, such as that of their background saves."""
        self._store = store
        self._rank = rank
        self._others = dict(others or {})
        for each in (store, *self._others.values()):
            with suppress(Exception):
                each.set_timeout(_PATIENCE)

    @classmethod
    def opened(cls, store: Store, rank: int, name: str, other_names: Sequence[str]) -> RollCall:
        """The roll of that name in a store, over a connection of its own: nobody must wait while it is called."""
        own = connection_of_its_own(store)
        others = {each.rpartition("/")[2]: PrefixStore(each, own) for each in other_names}
        return cls(PrefixStore(name, own), rank, others)

    def publish(self, note: RankNote) -> None:
        """Say where this rank is."""
        self._store.set(_key(self._rank), json.dumps(note))

    def note_of(self, rank: int) -> RankNote | None:
        """Where a rank was last seen."""
        return _note_in(self._store, rank)

    def elsewhere(self, rank: int) -> str:
        """Where a rank is that is waited for here."""
        for what, store in self._others.items():
            with suppress(Exception):
                note = _note_in(store, rank)
                if note is not None and note.waits_for:
                    return f"; it waits for other ranks in {what}: {note.describe()}"
        return ""

    def verdict_on(self, epoch: int) -> Verdict | None:
        """The verdict that has ended a connection, if there is one."""
        return verdict_in(self._store, epoch)

    def pass_verdict(self, verdict: Verdict) -> Verdict:
        """Have a verdict hold for all ranks, or the one that another rank was faster with."""
        return Verdict.unpacked(self._store.compare_set(_verdict_key(verdict.epoch), "", verdict.packed().decode()))


def _note_in(store: Store, rank: int) -> RankNote | None:
    if not store.check([_key(rank)]):
        return None
    return RankNote(*json.loads(store.get(_key(rank))))


def _key(rank: int) -> str:
    return f"at/{rank}"


@dataclass
class _Seen:
    """What was last seen of a rank, and when it was new."""

    sight: Any
    since: float


@dataclass
class Watch:
    """A thread that notes where this rank is as long as it is in a call, and looks after those that it waits for."""

    rank: int
    size: int
    on_verdict: Callable[[Verdict], None]
    """Called when the call cannot go on."""
    open_roll: Callable[[], RollCall] | None = None
    """Opens the roll when it is first needed, in a call that takes longer."""
    epoch: int = 0
    """The connection that the calls are made on."""
    call: int = 0
    exchange: int = 0
    waits_for: Sequence[int] = ()
    """Set by who waits; those that may have joined too, the next one first."""
    waits_at_once: bool = False
    """Whether there is no next one, so that two ranks may wait for each other as long as a third one is missing."""
    name: str = ""
    timeout: float = 0.0
    progress: Progressing | None = None
    transfers: int = 0
    """Counted by who exchanges bytes: what arrives is progress, and the wait for the next is a new one."""
    shows_signs: bool = True
    """Whether the bytes that the process moves are a sign that it gets on with the call."""
    has_looked: bool = False
    """Whether this rank was in the call when there was no verdict on it yet."""
    is_outside: bool = False
    """Whether this rank has no connection and does not know which one the others are on, so that it judges nobody."""
    _beat: int = 0
    _signs: SignsOfProgress = field(default_factory=SignsOfProgress)
    _last_sign: int = 0
    _last_progress: tuple[Any, float] = (None, 0.0)
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _seen_at: tuple[Place, int, int] = ((0, 0), 0, 0)
    _active: bool = False
    _closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _roll: RollCall | None = None
    _opening: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, name: str, timeout: float, progress: Progressing | None) -> None:
        """A call begins."""
        self.call += 1
        self.exchange = self.transfers = 0
        self.waits_for = ()
        self.has_looked = False
        self.name, self.timeout, self.progress = name, timeout, progress
        with self._changed:
            self._active = True
            if self._thread is None and self.size > 1:
                self._thread = threading.Thread(target=self._run, name="holdfast-roll-call", daemon=True)
                self._thread.start()
            self._changed.notify()

    @property
    def place(self) -> Place:
        """Of the call."""
        return self.epoch, self.call

    def move_to(self, epoch: int) -> None:
        """The call goes on over another connection, as its first call: all ranks count from there."""
        with self._changed:
            self.epoch, self.call, self.exchange = epoch, 1, 0
            self.has_looked = False
            self._changed.notify()

    def verdict(self, missing: Mapping[int, str], reason: str, *, is_final: bool = False) -> Verdict:
        """A verdict on this call."""
        return Verdict(missing, reason, is_final, self.epoch, self.call, self.name)

    def end(self) -> None:
        """The call is over."""
        with self._changed:
            self._active = False
            self.progress = None
            self._changed.notify()

    def close(self) -> None:
        """There will be no more calls."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_LONGEST_TICK)  # it must not be in the middle of something when Python ends

    def roll(self) -> RollCall:
        """The notes of all ranks. Raises if the store is gone, as with the process group of a save that goes on."""
        with self._opening:
            if self._roll is None:
                if self.open_roll is None:
                    raise ConnectionError("there is no store, or it is gone")
                open_roll, self.open_roll = self.open_roll, None
                self._roll = open_roll()
            return self._roll

    def _do_without_the_roll(self) -> None:
        with self._opening:
            self._roll = self.open_roll = None

    def _has_roll(self) -> bool:
        return self._roll is not None

    def tick(self) -> float:
        """Seconds between two looks."""
        return max(_SHORTEST_TICK, min(self.timeout / 6, _LONGEST_TICK)) + self.size / _RANKS_PER_SECOND

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._active or self._closed):
                    self._changed.wait()
                if self._closed:
                    return
                place, began, tick = self.place, time.monotonic(), self.tick()
                if self._changed.wait_for(partial(self._is_over, place), tick):
                    continue
            self.oversleep(time.monotonic() - began - tick)
            verdict = self._look(place)
            if verdict is not None and not self._is_over(place):
                self.on_verdict(verdict)
                with self._changed:
                    self._changed.wait_for(partial(self._is_over, place))

    def oversleep(self, seconds: float) -> None:
        """Hold no time against others in which this rank did not run itself: it may have been so for all of them."""
        if seconds > _OVERSLEPT:
            for seen in self._seen.values():
                seen.since += seconds

    def _is_over(self, place: Place) -> bool:
        return self._closed or not self._active or self.place != place

    def _look(self, place: Place) -> Verdict | None:
        try:
            roll = self.roll()
            roll.publish(self.own_note())
            if self.is_outside:
                return None
            known = roll.verdict_on(place[0])
            if known is not None:
                return known
        except Exception:
            self._do_without_the_roll()
        with self._changed:
            if self.is_outside or self.place != place:
                return None
            self.has_looked = True
        own = self._judge()
        if own is None or own.epoch != place[0]:
            return None
        with suppress(Exception):
            return self.roll().pass_verdict(own)
        return own

    def own_note(self) -> RankNote:
        """Where this rank is."""
        self._beat += 1
        progress = self.progress
        phase, nbytes = ("", 0) if progress is None else (progress.current_phase, progress.done_bytes)
        note = RankNote(self.epoch, self.call, self.exchange, self.name, phase, nbytes, self.transfers, 0, (), 0)
        signs = self._signs_beside(note) if self.shows_signs else 0
        return note._replace(signs=signs, waits_for=list(self.waits_for), beat=self._beat)

    def _signs_beside(self, progress: RankNote) -> int:
        """Bytes of the process, for as long as they may pass for progress of a call that shows none itself."""
        now = time.monotonic()
        if self._last_progress[0] != progress:
            self._last_progress = progress, now
        if now - self._last_progress[1] < _SIGNS_COUNT_FOR * self.timeout:
            self._last_sign = self._signs.look()
        return self._last_sign

    def _judge(self) -> Verdict | None:
        """Who of those that are waited for has made no progress for too long."""
        at, waits_for, now = (self.place, self.exchange, self.transfers), self.waits_for, time.monotonic()
        if at != self._seen_at:
            self._seen, self._seen_at = {}, at
        self._seen = {rank: seen for rank, seen in self._seen.items() if rank in waits_for}
        missing: dict[int, str] = {}
        for rank in waits_for:
            note = None
            try:
                note = self.roll().note_of(rank)
            except Exception:
                self._do_without_the_roll()
            if note is not None and self._has_come(note, rank):
                self._seen.pop(rank, None)
                continue
            if not self._has_roll() and rank != waits_for[0]:
                continue  # it may have joined: nobody can know without the notes
            sight = self._sight_of(note)
            seen = self._seen.get(rank)
            if seen is None or seen.sight != sight:
                self._seen[rank] = _Seen(sight, now)
            elif now - seen.since >= self.timeout:
                missing[rank] = self._described(rank, note)
        if not missing:
            return None
        return self.verdict(
            missing, f"did not join {self.name} within {self.timeout:g} s, or made no progress for so long"
        )

    def _has_come(self, note: RankNote, rank: int) -> bool:
        """Whether a rank waits for this one, whose turn it has not been yet."""
        is_here = (note.place, note.exchange) == (self.place, self.exchange)
        return is_here and list(note.waits_for[:1]) == [self.rank] and list(self.waits_for[:1]) != [rank]

    def _sight_of(self, note: RankNote | None) -> Any:
        """What changes while a rank makes progress, or waits for others itself."""
        if note is None:
            return None
        waits_for_others = bool(note.waits_for) and (self.waits_at_once or list(note.waits_for[:1]) != [self.rank])
        return note if waits_for_others and note.place == self.place else note._replace(beat=0, waits_for=())

    def _described(self, rank: int, note: RankNote | None) -> str:
        """What is known of a rank that is missing."""
        if not self._has_roll():
            return "nothing is known of it, since the process group's store is gone"
        elsewhere = self.roll().elsewhere(rank)
        if note is None:
            return f"it has not joined this call{elsewhere}"
        if note.place < self.place:
            return f"it has not called Holdfast again since {note.name}{elsewhere}"
        return f"it was last seen in {note.describe()}: busy without progress, stopped or dead{elsewhere}"
