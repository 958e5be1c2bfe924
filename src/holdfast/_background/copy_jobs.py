"""Brings the elements of many tensors into private memory: at once, or while the program goes on."""

from __future__ import annotations

import _thread
import concurrent.futures
import ctypes
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from holdfast._background.arenas import ArenaPool, Lease, aligned
from holdfast._background.tensor_copies import bytes_of, fingerprint_of_memory, has_ordinary_memory, transfer, twin_over
from holdfast._base.threads import ProcessFuture, work_through
from holdfast._base.tuning import COPY_AT_ONCE, SMALL_TENSOR
from holdfast._compat.tensors import count_of_changes
from holdfast._formats.tensor_bytes import has_its_memory, is_plain_contiguous, move_small, tensor_pieces
from holdfast._layout.descriptions import digest_pieces
from holdfast._ranks.interrupts import interrupts_wait
from holdfast.errors import TornSnapshotError

# The moment at which a copy was asked for, as an accelerator sees it.
#
# Work that was submitted before must be done before elements are copied, also if another thread copies them.


class Moment:
    """A moment."""

    def __init__(self, event: Any) -> None:
        self._event = event

    @classmethod
    def now(cls) -> Moment:
        """This one."""
        if not torch.accelerator.is_available():
            return cls(None)
        event = torch.Event(torch.accelerator.current_accelerator())
        event.record()
        return cls(event)

    def device_copies(self) -> Any:
        """Copies inside of the ``with`` block come after this moment, and are complete at its end."""
        return nullcontext() if self._event is None else _OnSideStream(self._event)


class _OnSideStream:
    """Copies that the program's own stream does not wait for."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self._stream = torch.Stream(torch.accelerator.current_accelerator())

    def __enter__(self) -> None:
        self._stream.wait_event(self._event)
        self._stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._stream.__exit__(*error)
        self._stream.synchronize()


# A copy that is put off is right only as long as nobody changes its source. Whether somebody did is known from the
# counters that torch keeps of changes, and on request from digests.


_Part = Callable[[], None]

_MOST_THREADS = 8
"""By then it is memory that takes the time."""


class Copy:
    """One tensor on its way. ``twin`` is its copy, once there is memory for it."""

    __slots__ = ("digest", "name", "source", "twin", "version")

    def __init__(self, name: str, source: torch.Tensor, *, watched: bool = True) -> None:
        self.name = name
        self.source: Any = source
        self.twin: Any = None
        self.version = count_of_changes(source) if watched else None
        self.digest: bytes | None = None

    def settle(self) -> None:
        """The elements are there: make sure that they are those of the moment of the call, and forget the source."""
        changed = self.version is not None and self.version != count_of_changes(self.source)
        if not changed and self.digest is not None:
            changed = digest_pieces(tensor_pieces(self.twin)) != self.digest
        self.source = None
        if changed:
            raise self.torn()

    def move(self, begin: int, nbytes: int) -> None:
        """Copy some of the bytes of a source that is contiguous."""
        # Whoever saves memory may take that of a parameter away, and would give us no other sign of it.
        if not has_its_memory(self.source):
            raise self.torn()
        # Not by torch, which would start threads for it that the program's own work has to share processors with.
        ctypes.memmove(self.twin.data_ptr() + begin, self.source.data_ptr() + begin, nbytes)

    def torn(self) -> TornSnapshotError:
        """What to raise if the source is not what it was."""
        return TornSnapshotError(
            f"'{self.name}' was changed while it was being copied, so this save was given up. Only the optimizers "
            "that are given to async_save wait for the copy: give all of them, or call pending.staged.result() "
            "before anything else changes the state.",
            key=self.name,
        )


class Copies:
    """Private copies of tensors, all in one block of memory.

    First ``add`` all of them, then ``begin``, then ``copy_now`` or ``copy_later``. Who knows beforehand how much memory
    they take may ``begin`` first, and gets each ``twin`` at once. Tensors that are the same elements are copied once.

    Copies that are not ``watched`` have whatever the sources hold while they are copied. Copies with storages
    ``of_their_own`` can be saved one by one by whoever saves storages as a whole, which takes some microseconds each.

    >>> copies, weights = Copies(), torch.ones(2)
    >>> copy = copies.add("weights", weights)
    >>> copies.begin(ArenaPool())
    >>> copies.copy_now(); _ = weights.zero_()
    >>> copy.twin
    tensor([1., 1.])
    """

    def __init__(self, *, watched: bool = True, of_their_own: bool = False) -> None:
        self._watched = watched
        self._of_their_own = of_their_own
        self._memory: _Memory | None = None
        self._waiting: list[Copy] = []
        self._by_address: dict[int, list[Copy]] = {}
        self._moment = Moment.now()
        self.nbytes = 0
        """How much memory they take."""
        self.done: ProcessFuture[None] = ProcessFuture("the copy of a state for a background save")
        """When the program may change its tensors again."""
        self.done.set_running_or_notify_cancel()
        self._parts: deque[_Part] = deque()
        self._unfinished = 0
        self._changed = threading.Lock()
        self._error: BaseException | None = None

    def add(self, name: str, source: torch.Tensor) -> Copy:
        """Have a tensor copied."""
        if not has_ordinary_memory(source):
            copy = Copy(name, source)
            copy.twin = source.detach().to("cpu", copy=True)
            return copy
        there = self._by_address.setdefault(source.data_ptr(), [])
        for other in there:
            if fingerprint_of_memory(other.source) == fingerprint_of_memory(source):
                return other
        copy = Copy(name, source, watched=self._watched)
        if self._memory is not None:
            copy.twin = self._memory.twin_of(source)
        there.append(copy)
        self._waiting.append(copy)
        self.nbytes += aligned(bytes_of(source)) if self._of_their_own else bytes_of(source)
        return copy

    def begin(self, pool: ArenaPool, nbytes: int | None = None, *, check: bool = False) -> None:
        """Take memory for all copies: ``nbytes``, or as much as those need that were added.

        ``check`` takes digests now, to be compared with those of the copies.
        """
        size = aligned(self.nbytes if nbytes is None else nbytes)  # which is a whole number of elements of any type
        self._memory = _Memory(pool.lend(size), size, of_their_own=self._of_their_own)
        # The largest elements first, so that all are aligned without gaps, as in files: runs of copies are written as
        # they are.
        for copy in sorted(self._waiting, key=lambda copy: copy.source.element_size(), reverse=True):
            copy.twin = self._memory.twin_of(copy.source)
            if check:
                copy.digest = digest_pieces(tensor_pieces(copy.source))

    def copy_now(self, chosen: Callable[[torch.Tensor], bool] | None = None) -> None:
        """Copy the elements, of all or of those that are chosen. They may change when this returns."""
        self._let_go_of_memory()
        now, later = self._waiting, []
        if chosen is not None:
            is_now = [chosen(copy.source) for copy in self._waiting]
            now = [copy for copy, one in zip(self._waiting, is_now, strict=True) if one]
            later = [copy for copy, one in zip(self._waiting, is_now, strict=True) if not one]
        # As many threads as torch would use, which would wait for each other after every tensor: that takes long if the
        # processors have more to do.
        parts = list(_in_parts(now, self._moment))
        threads = min(len(parts), torch.get_num_threads(), _MOST_THREADS)
        work_through(parts, lambda part: part(), threads, "holdfast-stage")
        for copy in now:
            copy.settle()
        self._waiting = later
        if not later:
            self.done.set_result(None)

    def copy_later(self) -> None:
        """Copy what is not copied yet in a thread of its own."""
        self._let_go_of_memory()
        if self.done.done():
            return
        if self._waiting:
            self._parts.extend(_in_parts(self._waiting, self._moment))
            self._unfinished = len(self._parts)
            with _lock:
                _under_way.add(self)
            if not self._start_a_thread():
                with interrupts_wait():  # what is left half done would be waited for
                    self._work()
        else:
            self.done.set_result(None)

    def _let_go_of_memory(self) -> None:
        """From here on nothing but the copies themselves keeps it."""
        self._memory = None
        self._by_address = {}

    def wait_until_copied(self) -> None:
        """Return when nothing is left to copy. One more thread copies: what is waited for is done sooner.

        It is not this thread itself, since Ctrl-C, which may come here, must not end a copy that others rely on.
        """
        if len(self._parts) > 1:
            self._start_a_thread()  # or not, if there are no more to be had: the first one is there
        # Its error is raised for whoever waits for the save. A signal right before a wait is noticed after it.
        while concurrent.futures.wait([self.done], timeout=0.5).not_done:
            pass

    def _start_a_thread(self) -> bool:
        # Unlike `threading.Thread` this does not wait until the thread runs, which takes milliseconds.
        try:
            _thread.start_new_thread(self._work, ())
        except RuntimeError:  # there are no more to be had
            return False
        return True

    def _work(self) -> None:
        while True:
            try:
                part = self._parts.popleft()
            except IndexError:
                return
            try:
                if self._error is None:
                    part()
            except BaseException as error:
                self._error = error
            with self._changed:
                self._unfinished -= 1
                is_last = self._unfinished == 0
            if is_last:
                self._conclude()

    def _conclude(self) -> None:
        waiting, self._waiting = self._waiting, []
        with _lock:
            _under_way.discard(self)
        try:
            if self._error is not None:
                raise self._error
            for copy in waiting:
                copy.settle()
        except BaseException as error:
            waiting.clear()  # the error refers to this frame, and must not keep the copies
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


_under_way: set[Copies] = set()
_lock = threading.Lock()


def finish_copies() -> None:
    """Return when nothing is being copied any more. For whoever is about to change tensors that somebody may copy."""
    with _lock:
        waiting = list(_under_way)
    for copies in waiting:
        copies.wait_until_copied()


def _forget_in_forked_child() -> None:
    """The threads that copy are the parent's."""
    global _lock
    _lock = threading.Lock()
    _under_way.clear()


os.register_at_fork(after_in_child=_forget_in_forked_child)


class _Memory:
    """A block of memory that tensors are put into, one behind the other."""

    def __init__(self, lease: Lease, size: int, *, of_their_own: bool) -> None:
        self._lease = lease if of_their_own else None
        self._bytes = lease.tensor(0, size)
        self._size = size
        self._used = 0
        self._as: dict[torch.dtype, torch.Tensor] = {}

    def twin_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like this one, whose elements are whatever was in memory."""
        begin, nbytes = self._used, bytes_of(tensor)
        self._used += nbytes if self._lease is None else aligned(nbytes)
        if nbytes == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if self._lease is not None:
            return twin_over(self._lease.tensor(begin, nbytes), tensor)
        typed = self._as.get(tensor.dtype)
        if typed is None:
            whole = self._size // tensor.element_size() * tensor.element_size()
            typed = self._as[tensor.dtype] = self._bytes[:whole].view(tensor.dtype)
        strides = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        return typed.as_strided(tensor.size(), strides, begin // tensor.element_size())


def _copy_whole(copy: Copy) -> None:
    source = copy.source
    if bytes_of(source) <= SMALL_TENSOR and is_plain_contiguous(source):
        move_small(copy.twin.data_ptr(), source.data_ptr(), bytes_of(source))
    elif bytes_of(source) and not source.untyped_storage().nbytes():
        raise copy.torn()  # its memory was taken away, which torch does not look for
    else:
        transfer(source, copy.twin, non_blocking=source.device.type != "cpu")


def _in_parts(copies: Iterable[Copy], moment: Moment) -> Iterator[_Part]:
    """What can be done one after the other, or by several threads."""
    others: list[Copy] = []
    for copy in copies:
        nbytes = bytes_of(copy.source)
        if nbytes <= SMALL_TENSOR or not is_plain_contiguous(copy.source):
            others.append(copy)
            continue
        for begin in range(0, nbytes, COPY_AT_ONCE):
            yield functools.partial(copy.move, begin, min(COPY_AT_ONCE, nbytes - begin))

    def copy_others() -> None:
        with moment.device_copies():
            for copy in others:
                _copy_whole(copy)

    if others:
        yield copy_others
