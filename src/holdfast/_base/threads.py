"""Threads that do not outlive the call that starts them, and waits that end.

All work that is spread over threads is one of these: ``work_through`` does tasks in any order, ``share_work`` likewise
with workers that keep something between tasks, ``map_in_threads`` returns results, and ``in_order`` hands them over one
by one while those that follow are under way. The first failure stops the rest, and is raised when no thread works any
more; so is what interrupts the calling thread. Context variables are those of the calling thread. Where no thread can
be started, that one does all the work.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, TypeVar

from holdfast._base.tuning import RANKS_OF_A_MACHINE
from holdfast.errors import OtherProcessError

R = TypeVar("R")
T = TypeVar("T")

SIGNALS_WITHIN = 1.0
"""Seconds. Python runs handlers of signals between its own instructions: one that arrives just before the main thread
waits for a lock, or in another thread, is handled when that wait has ended. So no wait for work is longer than this."""


class ProcessFuture(Future[T]):
    """A future that threads of this process complete. Forked processes have a copy of it, and no such threads.

    There it returns what was known when they were forked, and raises ``OtherProcessError`` where it would have to wait.

    >>> copied = ProcessFuture("a copy")
    >>> copied.set_result(5)
    >>> copied.result()
    5
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.owner = os.getpid()
        self._what = what
        # Apart from the base class, whose lock another thread may have held when the process was forked.
        self._end: tuple[Any, BaseException | None] | None = None

    def set_result(self, result: T) -> None:
        """It has ended well."""
        super().set_result(result)
        self._end = result, None

    def set_exception(self, exception: BaseException | None) -> None:
        """It has failed."""
        super().set_exception(exception)
        self._end = None, exception

    def result(self, timeout: float | None = None) -> T:
        """Its result, when there is one; raises what it failed with."""
        if self.owner == os.getpid():
            return super().result(timeout)
        result, error = self._end_before_the_fork()
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What it failed with, or None, when it has ended."""
        return super().exception(timeout) if self.owner == os.getpid() else self._end_before_the_fork()[1]

    def done(self) -> bool:
        """Whether it has ended. Who asks again and again waits too, so this raises in a process that never learns."""
        return super().done() if self.owner == os.getpid() else self._end_before_the_fork() is not None

    def is_known_here(self) -> bool:
        """Whether this process has seen the end of it, or will."""
        return self.owner == os.getpid() or self._end is not None

    def _end_before_the_fork(self) -> tuple[Any, BaseException | None]:
        if self._end is None:
            raise OtherProcessError(
                f"{self._what} belongs to process {self.owner}, from which this one, {os.getpid()}, was forked before "
                "it had ended. It goes on there, and this process does not learn how it ends: wait for it in process "
                f"{self.owner}.",
                owner=self.owner,
                process=os.getpid(),
            )
        return self._end


def work_through(tasks: Iterable[T], work: Callable[[T], object], threads: int, name: str) -> None:
    """Do all tasks, each in one of some threads.

    >>> done = []
    >>> work_through("abc", done.append, 2, "example")
    >>> sorted(done)
    ['a', 'b', 'c']
    """

    def work_on(shared: Iterator[T]) -> None:
        for task in shared:
            work(task)

    share_work(tasks, [work_on] * max(1, threads), name)


def map_in_threads(function: Callable[[T], R], items: Iterable[T], threads: int, name: str) -> list[R]:
    """What a function returns for all items, called in some threads.

    >>> map_in_threads(len, ["a", "bcd"], 2, "example")
    [1, 3]
    """
    items = list(items)
    results: dict[int, R] = {}

    def call(number: int) -> None:
        results[number] = function(items[number])

    work_through(range(len(items)), call, min(threads, len(items)), name)
    return [results[number] for number in range(len(items))]


def share_work(tasks: Iterable[T], workers: Sequence[Callable[[Iterator[T]], R]], name: str) -> list[R]:
    """Call each worker in a thread of its own, the first one in this thread, and return what they returned.

    All are given the same tasks: each takes the next one when it has done one, so that all are busy to the end. After
    a failure there are no more.

    >>> sum(share_work(range(1000), [sum] * 3, "example"))
    499500
    """
    shared = _SharedTasks(tasks)
    jobs: list[tuple[threading.Thread, Future[R]]] = []
    try:
        for number, worker in enumerate(workers[1:]):
            job: Future[R] = Future()
            work = partial(copy_context().run, _complete, job, shared, worker)
            thread = threading.Thread(target=work, name=f"{name}_{number}")
            jobs.append((thread, job))  # before it starts: an interrupt finds all jobs
            try:
                thread.start()
            except RuntimeError:  # there are no more to be had
                jobs.pop()
                break
        first = shared.until_one_fails(workers[0])
        while wait([job for _, job in jobs], SIGNALS_WITHIN).not_done:
            pass
    except BaseException as error:
        shared.stop(error)  # a signal is nothing that the other threads notice
    finally:
        begun = [(thread, job) for thread, job in jobs if not job.cancel()]
        wait_for_all(job for _, job in begun)
        for thread, _ in begun:
            thread.join()
    if shared.error is not None:
        raise shared.error
    return [first, *(job.result() for _, job in jobs)]


def _complete(job: Future[R], shared: _SharedTasks[T], worker: Callable[[Iterator[T]], R]) -> None:
    if not job.set_running_or_notify_cancel():
        return  # whoever started this was interrupted, and waits no more
    try:
        job.set_result(shared.until_one_fails(worker))
    except BaseException as error:
        job.set_exception(error)


class _SharedTasks(Generic[T]):
    """Tasks that several threads take from."""

    def __init__(self, tasks: Iterable[T]) -> None:
        self._tasks = iter(tasks)
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        """The first failure. There is nothing more to do then."""

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._lock:
            return next(self._tasks)

    def until_one_fails(self, worker: Callable[[Iterator[T]], R]) -> R:
        try:
            return worker(self)
        except BaseException as error:
            self.stop(error)
            raise

    def stop(self, error: BaseException) -> None:
        with self._lock:
            self._tasks = iter(())
            if self.error is None or not isinstance(error, Exception):  # Ctrl-C is raised as that, whatever failed
                self.error = error


def in_order(
    function: Callable[[T], R], items: Iterable[T], *, threads: int, ahead: int, name: str, joins: bool = False
) -> Generator[tuple[T, R], None, None]:
    """All items, each with what a function returned for it, which some threads call.

    ``ahead`` of them at most are under way or wait to be taken. The items are asked for by the thread that takes the
    results. With ``joins`` it is one of the threads, and calls the function itself rather than to wait for others: for
    results that nobody is in a hurry for. The items are begun in their order, so a call may wait for those before it.
    Close this when you stop before the end; that returns when no thread works any more.

    >>> [length for _, length in in_order(len, ["a", "bcd"], threads=2, ahead=4, name="example")]
    [1, 3]
    """
    calls = _OrderedCalls(function)
    under_way: deque[_Call[T, R]] = deque()
    source = iter(items)
    try:
        helpers = calls.start(threads - joins if threads > 1 else 0, name)
        more = True
        while more or under_way:
            while more and len(under_way) < (ahead if helpers else 1):
                try:
                    under_way.append(_Call(next(source)))
                except StopIteration:
                    more = False
                else:
                    calls.put(under_way[-1])
            if under_way:
                calls.finish(under_way[0], joins=joins or not helpers)
                yield under_way[0].item, under_way[0].outcome()
                under_way.popleft()
    finally:
        calls.stop()


class _Call(Generic[T, R]):
    """Of a function, with an item."""

    def __init__(self, item: T) -> None:
        self.item = item
        self.has_ended = False
        self._result: R | None = None
        self.error: BaseException | None = None

    def make(self, function: Callable[[T], R]) -> None:
        try:
            self._result = function(self.item)
        except BaseException as error:
            self.error = error

    def outcome(self) -> R:
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]


class _OrderedCalls(Generic[T, R]):
    """Calls that threads begin in their order. None of them is woken for a call as long as it has others to make."""

    def __init__(self, function: Callable[[T], R]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._more = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        self._todo: deque[_Call[T, R]] = deque()
        self._threads: list[threading.Thread] = []
        self._at_work = 0
        self._stopped = False

    def start(self, count: int, name: str) -> int:
        """Start threads, as many as there are to be had. Returns how many those are."""
        for number in range(count):
            # Nobody may close what it belongs to. Python shall end all the same.
            work = partial(copy_context().run, self._work)
            thread = threading.Thread(target=work, name=f"{name}_{number}", daemon=True)
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError:
                self._threads.pop()
                break
        return len(self._threads)

    def put(self, call: _Call[T, R]) -> None:
        """One more to make."""
        with self._lock:
            self._todo.append(call)
            self._more.notify()

    def finish(self, call: _Call[T, R], *, joins: bool) -> None:
        """Return when a call has ended. Who ``joins`` makes calls until then."""
        while not call.has_ended:
            own = None
            with self._lock:
                if joins and self._todo:
                    own = self._todo.popleft()
                elif not call.has_ended:
                    self._ended.wait(SIGNALS_WITHIN)
            if own is not None:
                own.make(self._function)
                own.has_ended = True
                if own.error is not None and not isinstance(own.error, Exception):
                    raise own.error  # an interrupt

    def stop(self) -> None:
        """Make no more calls, and return when none is being made. What interrupts this is raised then."""
        interrupt: BaseException | None = None
        while True:
            try:
                with self._lock:
                    self._todo.clear()
                    self._stopped = True
                    self._more.notify_all()
                    while self._at_work:
                        self._ended.wait(SIGNALS_WITHIN)
                break
            except BaseException as error:  # a handler of signals can raise anything
                interrupt = error
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        if interrupt is not None:
            raise interrupt

    def _work(self) -> None:
        while True:
            with self._lock:
                while not (self._todo or self._stopped):
                    self._more.wait()
                if self._stopped:
                    return
                call = self._todo.popleft()
                self._at_work += 1
            call.make(self._function)
            with self._lock:
                call.has_ended = True
                self._at_work -= 1
                self._ended.notify_all()


def some_threads(count: int, name: str) -> ThreadPoolExecutor | None:
    """Threads to give work to, all of them started; fewer if there are no more to be had.

    None if there are none at all: what runs when Python ends has to do without.

    >>> with some_threads(2, "reader") as pool:
    ...     pool.submit(sum, [1, 2]).result()
    3
    """
    while count:
        pool, started = ThreadPoolExecutor(count, name), 0
        all_started = threading.Event()  # until then each is busy, so that the next one is started
        try:
            for started in range(count):  # noqa: B007
                pool.submit(all_started.wait)
        except RuntimeError:
            count = started
        else:
            return pool
        finally:
            all_started.set()
        pool.shutdown(wait=True)
    return None


def wait_for_all(jobs: Iterable[Future[Any]]) -> None:
    """Return when none of the jobs is running. Whatever interrupts this is raised then, and not before.

    They use memory and descriptors that the caller is about to give back. It would not do to join their threads:
    after an interrupt, some versions of Python take a thread that they were waiting for to be at its end.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> pool = ThreadPoolExecutor(2)
    >>> jobs = [pool.submit(sum, [1, 2]), pool.submit(int, "not a number")]
    >>> wait_for_all(jobs)
    >>> [job.done() for job in jobs]
    [True, True]
    >>> pool.shutdown()
    """
    jobs = list(jobs)
    interrupt: BaseException | None = None
    while not all(job.done() for job in jobs):
        try:
            wait(jobs, SIGNALS_WITHIN)
        except BaseException as error:  # a handler of signals can raise anything
            interrupt = error
    if interrupt is not None:
        raise interrupt


# How many processors there are for us.


def count_processors() -> int:
    """How many this process may use: containers and schedulers often give it fewer than the machine has.

    >>> count_processors() >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processors_of_a_rank(*, shared: bool) -> int:
    """How many of them there are for this process, if other ranks of its machine are at work at the same time.

    >>> processors_of_a_rank(shared=False) == count_processors()
    True
    """
    processors = count_processors()
    if not shared:
        return processors
    launched = os.environ.get("LOCAL_WORLD_SIZE", "")  # which torchrun and others set
    ranks = int(launched) if launched.isdecimal() and int(launched) else RANKS_OF_A_MACHINE
    if processors * ranks <= (os.cpu_count() or 1):
        return processors  # each rank has some of its own
    return max(1, processors // ranks)
