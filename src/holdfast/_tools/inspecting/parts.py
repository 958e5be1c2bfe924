"""Tensors in parts of bounded size, and long work on them in several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from holdfast._base.boxes import Box, cut, volume
from holdfast._base.threads import some_threads, wait_for_all
from holdfast._base.tuning import COUNTED_ELEMENT_BYTES, COUNTED_TOGETHER, MEMORY_BUDGET, READERS, SMALLEST_BUDGET
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.source import Request, Source, WholeReads
from holdfast._tools.inspecting.numbers import Array

# Tensors in parts of bounded size: large ones cut, small ones together, so that each read is worth its while.


class Part(NamedTuple):
    """A box of a tensor."""

    ref: TensorRef
    box: Box

    @property
    def nbytes(self) -> int:
        """Of its elements as they are stored."""
        return volume(self.box.sizes) * self.ref.dtype.itemsize


@dataclass
class Lot:
    """Parts that are read together."""

    parts: list[Part] = field(default_factory=list)
    elements: int = 0

    @property
    def nbytes(self) -> int:
        """Of all elements as they are stored."""
        return sum(part.nbytes for part in self.parts)


def elements_at_once(memory: int | None, threads: int) -> int:
    """How many elements each of some threads may count with at once."""
    budget = max(SMALLEST_BUDGET, MEMORY_BUDGET if memory is None else memory)
    return max(1024, budget // (COUNTED_ELEMENT_BYTES * threads))


def threads_for(nbytes: int) -> int:
    """How many threads are worth it."""
    return max(1, min(READERS, nbytes >> 22))


def lots_of(refs: Iterable[TensorRef], most: int) -> Iterator[Lot]:
    """All elements of these tensors, in lots of up to ``most`` elements."""
    waiting = Lot()
    for ref in refs:
        for box in cut(Box((0,) * len(ref.shape), ref.shape), most):
            count = volume(box.sizes)
            if waiting.parts and (waiting.elements + count > most or len(waiting.parts) >= COUNTED_TOGETHER):
                yield waiting
                waiting = Lot()
            waiting.parts.append(Part(ref, box))
            waiting.elements += count
    if waiting.parts:
        yield waiting


def read_parts(source: Source, parts: Iterable[Part], memory: int | None) -> list[Array]:
    """The bits of all parts."""
    arrays: list[Array] = []
    requests: list[Request] = []
    wholes: dict[str, Array] = {}
    for part in parts:
        array = np.empty(part.box.sizes, part.ref.dtype.carrier)
        arrays.append(array)
        if part.box.sizes == part.ref.shape and part.ref.key not in wholes:
            wholes[part.ref.key] = array  # which takes far less work for each of many small ones
        elif array.size:
            requests.append(Request(part.ref.key, tuple(part.box.offsets), tuple(part.box.sizes), array))
    source.read_many(requests, WholeReads.into(wholes), memory=memory)
    return arrays


# Long work in several threads.


T = TypeVar("T")


def work_through(tasks: Iterable[T], work: Callable[[T], None], threads: int) -> None:
    """Do all tasks, each in one of some threads. The first error is raised when none of them works any more."""
    todo = _Shared(tasks)
    pool = some_threads(threads, "holdfast-inspect") if threads > 1 else None
    if pool is None:
        todo.do_all(work)
        return
    running: list[Future[None]] = []
    with pool:
        try:
            running += [pool.submit(todo.do_all, work) for _ in range(threads)]
            for thread in running:
                thread.result()
        finally:
            todo.stop()
            wait_for_all(running)


class _Shared(Generic[T]):
    """Tasks that several threads take from. When one of them fails, the others stop."""

    def __init__(self, tasks: Iterable[T]) -> None:
        self._tasks: Iterator[T] = iter(tasks)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._lock:
            return next(self._tasks)

    def do_all(self, work: Callable[[T], None]) -> None:
        try:
            for task in self:
                work(task)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        with self._lock:
            self._tasks = iter(())
