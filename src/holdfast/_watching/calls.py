"""One call of a verb and its phases: where events come from."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from holdfast._watching import logs, telemetry
from holdfast._watching.event import Event, known
from holdfast._watching.subscribers import Subscription, subscriptions
from holdfast._watching.trace_file import trace_of_environment

# A call that nobody listens to costs a few microseconds, and each of its phases one. Nothing is done per tensor.


_sink: ContextVar[Callable[[Event], object] | None] = ContextVar("holdfast_event_sink", default=None)


class Call:
    """One call of a verb on this rank. Its phases may be in any threads, and other calls may go on meanwhile.

    It can be pickled, for a part of the work that is done in another process (see ``emitting_to``).

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
        now = time.perf_counter()
        step_around, detail = known()
        self.verb = verb
        self.path = str(path)
        self.step = step_around if step is None else step
        self.rank = rank
        self.world_size = world_size
        self.nbytes = 0
        """Of all ranks together, told at the end."""
        self.slowest_rank: int | None = None
        self.detail = dict(detail)
        """Told at the end, and with the phases that end after it was put there."""
        self.id = os.urandom(8).hex()
        self.is_finished = False
        self._started = now if started is None else started
        # All times of a call come from one clock that is never set, so that its phases lie within it.
        self._epoch = time.time() - now
        self._span = telemetry.begin(verb, self._epoch + self._started)

    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self._started

    def phase(self, name: str, nbytes: int = 0) -> Phase:
        """A ``with`` block that is a phase. Its event is told at the end, also of a failure."""
        return Phase(self, name, nbytes)

    def finish(
        self,
        *,
        nbytes: int | None = None,
        slowest_rank: int | None = None,
        error: BaseException | str | None = None,
        **detail: Any,
    ) -> None:
        """Tell of the call as a whole. Only the first time counts. What is not given is taken from the fields."""
        if self.is_finished:
            return
        self.is_finished = True
        if self._is_heard(whole=True):
            seconds = time.perf_counter() - self._started
            nbytes = self.nbytes if nbytes is None else nbytes
            slowest_rank = self.slowest_rank if slowest_rank is None else slowest_rank
            self.tell(self._event("", self._started, seconds, nbytes, error, slowest_rank, detail))

    def tell(self, event: Event) -> None:
        """Pass an event of this call on to all who listen: one that came from another process, too."""
        sink = _sink.get()
        if sink is not None:
            Subscription(sink).tell(event)
            return
        for subscription in subscriptions():
            subscription.tell(event)
        trace = trace_of_environment()
        if trace is not None:
            trace.tell(event)
        _to_the_log.tell(event)
        if self._span is not None:
            self._span.tell(event)

    def _is_heard(self, *, whole: bool = False) -> bool:
        return bool(
            subscriptions()
            or self._span is not None
            or logs.is_read(whole=whole)
            or trace_of_environment() is not None
            or _sink.get() is not None
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
        return {**vars(self), "_span": None}


class Phase:
    """A phase of a call, as long as its ``with`` block. What is put into its fields is told at the end."""

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
        self._started = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.perf_counter() - self._started
        call = self._call
        if call._is_heard():
            call.tell(
                call._event(self.name, self._started, self.seconds, self.nbytes, error, self.slowest_rank, self.detail)
            )


@contextmanager
def emitting_to(sink: Callable[[Event], object]) -> Iterator[None]:
    """Have the events of this block go to ``sink`` and nowhere else: to be sent from a writer process to its program.

    >>> events = []
    >>> call = Call("save", "runs/a/step-500")
    >>> with emitting_to(events.append), call.phase("write"):
    ...     pass
    >>> [event.name for event in events]    # in the program: call.tell(event) for each of them
    ['save.write']
    """
    token = _sink.set(sink)
    try:
        yield
    finally:
        _sink.reset(token)


_to_the_log = Subscription(logs.log)


def _text_of(error: BaseException | str | None) -> str | None:
    if error is None or isinstance(error, str):
        return error
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:  # an error that cannot be told is told of all the same
        return type(error).__name__


# How long the phases of a call took.


class Phases:
    """The phases of one call on one rank, in the order in which they began.

    >>> phases = Phases(Call("save", "runs/a/step-500"))
    >>> with phases.during("write"):
    ...     pass
    >>> list(phases.seconds)
    ['write']
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        """Whose phases these are: it tells of each."""
        self.seconds: dict[str, float] = {}
        self.enter: Callable[[str], None] | None = None
        """Told of each phase when it begins."""

    @contextmanager
    def during(self, name: str) -> Iterator[Phase]:
        """A phase, or one more part of it."""
        if self.enter is not None:
            self.enter(name)
        phase = self.call.phase(name)
        try:
            with phase:
                yield phase
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + phase.seconds

    def elapsed(self) -> float:
        """Seconds since the call began."""
        return self.call.elapsed()


def by_phase(ranks: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The seconds of all ranks by phase, rounded to what matters.

    >>> by_phase([{"write": 1.00001}, {"write": 2.0}])
    {'write': [1.0, 2.0]}
    """
    names = {name: None for seconds in ranks for name in seconds}
    return {name: [round(seconds.get(name, 0.0), 4) for seconds in ranks] for name in names}
