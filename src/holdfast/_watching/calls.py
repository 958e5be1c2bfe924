"""One call of a verb: the one object that knows its phases, counts its bytes and emits its events."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from holdfast._watching import logs, telemetry
from holdfast._watching.event import Event, known
from holdfast._watching.progress import Progress
from holdfast._watching.subscribers import Subscription, subscriptions
from holdfast._watching.trace_file import trace_of_environment

logger = logging.getLogger(__name__)

# A call that nobody listens to costs a few microseconds, and each of its phases one. Nothing is done per tensor.


class Update(NamedTuple):
    """How far a call is in another process, and perhaps an event of it."""

    phase: str
    done_bytes: int
    event: Event | None = None


class Call(Progress):
    """One call of a verb on this rank. Its phases may be in any threads, and other calls may go on meanwhile.

    It is passed as an argument to whatever does a part of the work. It can be pickled, for a part that is done in
    another process: ``send_to`` there and ``receive`` here keep this one informed.

    >>> from holdfast.watching import subscribe
    >>> with subscribe(lambda event: print(event.name, event.nbytes, event.error)):
    ...     with Call("save", "runs/a/step-500", step=500) as call:
    ...         with call.phase("write") as seen:
    ...             seen.nbytes = 1000
    ...         call.finish(nbytes=1000)
    save.write 1000 None
    save 1000 None
    """

    def __init__(
        self,
        verb: str,
        path: object,
        step: int | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        started: float | None = None,
    ) -> None:
        """``started`` is the ``time.perf_counter()`` of when it began, if that was before."""
        super().__init__(0)
        now = time.perf_counter()
        step_around, detail = known()
        self.verb = verb
        self.path = str(path)
        self.step = step_around if step is None else step
        self.rank = rank
        self.world_size = world_size
        self.nbytes = 0
        """Of all ranks together, reported at the end."""
        self.slowest_rank: int | None = None
        self.detail = dict(detail)
        """Reported at the end, and with the phases that end after it was put there."""
        self.id = os.urandom(8).hex()
        self.is_finished = False
        self.current_phase = ""
        """The one that began last."""
        self.seconds: dict[str, float] = {}
        """How long each phase took so far, in the order in which they ended first."""
        self.stalled = 0.0
        """For how many seconds the program has waited for a call that goes on in the background."""
        self._started = now if started is None else started
        # All times of a call come from one clock that is never set, so that its phases are within it.
        self._epoch = time.time() - now
        self._span = telemetry.begin(verb, self._epoch + self._started)
        self._sink: Callable[[Update], object] | None = None
        self._sink_has_failed = False

    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self._started

    def phase(self, name: str, nbytes: int = 0) -> Phase:
        """A ``with`` block that is a phase, or one more part of it. Its event is emitted when it ends or fails."""
        return Phase(self, name, nbytes)

    def enter(self, phase: str) -> None:
        """A phase begins, here or on the rank that this one waits for."""
        self.current_phase = phase
        self._send(None)

    def advance(self, nbytes: int) -> None:
        """So many more bytes are done."""
        super().advance(nbytes)
        self._send(None)

    def stall(self, seconds: float) -> None:
        """The program has waited so much longer."""
        self.stalled += seconds

    def start_over(self, *done: str) -> None:
        """Count from the beginning: the work is tried again, from what comes after the phases that are ``done``."""
        self.done_bytes = 0
        self.seconds = {name: seconds for name, seconds in self.seconds.items() if name in done}

    def send_to(self, sink: Callable[[Update], object]) -> None:
        """Have ``sink`` called with all that happens from now on, and nobody else: in a writer process.

        >>> updates = []
        >>> call = Call("save", "runs/a/step-500")
        >>> call.send_to(updates.append)
        >>> with call.phase("write"):
        ...     call.advance(1000)
        >>> [(update.phase, update.done_bytes) for update in updates]    # in the program: call.receive(update)
        [('write', 0), ('write', 1000), ('write', 1000)]
        """
        self._sink = sink

    def receive(self, update: Update) -> None:
        """Take over what the same call has sent from another process."""
        self.current_phase, self.done_bytes = update.phase, update.done_bytes
        if update.event is not None:
            self._emit(update.event)

    def finish(
        self,
        *,
        nbytes: int | None = None,
        slowest_rank: int | None = None,
        error: BaseException | str | None = None,
        **detail: Any,
    ) -> None:
        """Publish the event of the call as a whole. Only the first time counts. Fields give what is not given here."""
        if self.is_finished:
            return
        self.is_finished = True
        if self._has_listeners(whole=True):
            seconds = time.perf_counter() - self._started
            nbytes = self.nbytes if nbytes is None else nbytes
            slowest_rank = self.slowest_rank if slowest_rank is None else slowest_rank
            self._emit(self._event("", self._started, seconds, nbytes, error, slowest_rank, detail))

    def _send(self, event: Event | None) -> None:
        if self._sink is not None:
            try:
                self._sink(Update(self.current_phase, self.done_bytes, event))
            except Exception:  # a save is worth more than a word about it
                if not self._sink_has_failed:
                    self._sink_has_failed = True
                    logger.exception("how far the %s of %s is cannot be sent", self.verb, self.path)

    def _emit(self, event: Event) -> None:
        """Pass an event on to all who listen."""
        if self._sink is not None:
            self._send(event)
            return
        for subscription in subscriptions():
            subscription.publish(event)
        trace = trace_of_environment()
        if trace is not None:
            trace.publish(event)
        _to_the_log.publish(event)
        if self._span is not None:
            self._span.publish(event)

    def _has_listeners(self, *, whole: bool = False) -> bool:
        return bool(
            subscriptions()
            or self._span is not None
            or logs.is_read(whole=whole)
            or trace_of_environment() is not None
            or self._sink is not None
        )

    def _event(
        self,
        phase: str,
        started: float,
        seconds: float,
        nbytes: int,
        error: BaseException | str | None,
        slowest_rank: int | None,
        detail: dict[str, Any],
    ) -> Event:
        return Event(
            verb=self.verb,
            phase=phase,
            path=self.path,
            step=self.step,
            rank=self.rank,
            world_size=self.world_size,
            call=self.id,
            call_began=self._epoch + self._started,
            began=self._epoch + started,
            seconds=seconds,
            nbytes=nbytes,
            error=_text_of(error),
            slowest_rank=slowest_rank,
            detail={**self.detail, **detail},
        )

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(error=error)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_span": None, "_sink": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())


class Phase:
    """A phase of a call, as long as its ``with`` block. What is put into its fields is reported at the end."""

    __slots__ = ("_call", "_started", "detail", "name", "nbytes", "seconds", "slowest_rank")

    def __init__(self, call: Call, name: str, nbytes: int = 0) -> None:
        self.name = name
        self.nbytes = nbytes
        self.slowest_rank: int | None = None
        self.detail: dict[str, Any] = {}
        self.seconds = 0.0
        """Known at the end."""
        self._call = call
        self._started = 0.0

    def __enter__(self) -> Phase:
        self._call.enter(self.name)
        self._started = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.perf_counter() - self._started
        call = self._call
        with call._lock:
            call.seconds[self.name] = call.seconds.get(self.name, 0.0) + self.seconds
        if call._has_listeners():
            call._emit(
                call._event(self.name, self._started, self.seconds, self.nbytes, error, self.slowest_rank, self.detail)
            )


_to_the_log = Subscription(logs.log)


def _text_of(error: BaseException | str | None) -> str | None:
    if error is None or isinstance(error, str):
        return error
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:  # an error without a message is reported all the same
        return type(error).__name__


MOST_RANKS_TIMED = 20
"""A record says of so many ranks how long they took, however many there are."""


def busiest(ranks: Sequence[Mapping[str, float]], most: int = MOST_RANKS_TIMED) -> list[int]:
    """The ranks to report, in their order: the slowest in each phase, and of the others those that were busy longest.

    >>> busiest([{"write": 1.0}, {"write": 3.0}, {"write": 2.0, "plan": 0.5}], 2), busiest([{}, {}])
    ([1, 2], [0, 1])
    """
    if len(ranks) <= most:
        return list(range(len(ranks)))
    names = {name: None for seconds in ranks for name in seconds}
    slowest = [max(range(len(ranks)), key=lambda rank: ranks[rank].get(name, 0.0)) for name in names]
    longest = sorted(range(len(ranks)), key=lambda rank: -sum(ranks[rank].values()))
    return sorted(list(dict.fromkeys([*slowest, *longest]))[:most])


def by_phase(ranks: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The seconds of all ranks by phase, rounded to what matters.

    >>> by_phase([{"write": 1.00001}, {"write": 2.0}])
    {'write': [1.0, 2.0]}
    """
    names = {name: None for seconds in ranks for name in seconds}
    return {name: [round(seconds.get(name, 0.0), 4) for seconds in ranks] for name in names}
