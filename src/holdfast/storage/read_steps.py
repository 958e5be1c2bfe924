"""Reading in several threads, with all else done in order by the thread that asked for it.

Planners belong to whoever wrote them and are not made for threads: they are asked for memory, and told that it is
filled, by the calling thread alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from holdfast.tuning import MEMORY_BUDGET, MEMORY_OF_A_READER, READ_BYTES, READERS, READS_UNDER_WAY, SMALLEST_ROOM


def read_size(memory: int | None, at_once: int = READS_UNDER_WAY) -> int:
    """How many bytes are read by each of the reads that are under way, if all must do with so much memory.

    >>> read_size(64 << 20) >> 20, read_size(1 << 20) >> 10, read_size(1 << 20, at_once=1) >> 10
    (4, 64, 512)
    """
    most = (MEMORY_BUDGET if memory is None else memory) // (MEMORY_OF_A_READER * at_once)
    return max(min(READ_BYTES, most) // SMALLEST_ROOM * SMALLEST_ROOM, SMALLEST_ROOM)


class Step(Protocol):
    """A part of a load."""

    def read(self) -> Any:
        """The part that any thread may do."""

    def finish(self, result: Any) -> None:
        """What follows, given what ``read`` returned. The steps are finished in their order, by one thread."""


def carry_out(steps: Iterable[Step], *, in_threads: bool) -> None:
    """Take all steps. The first error is raised when nothing is being read any more."""
    if not in_threads:
        for step in steps:
            step.finish(step.read())
        return
    import torch  # what is not filled by threads needs none

    # An inference tensor may only be filled in the mode that it was made in, which each thread has for itself.
    inference = torch.is_inference_mode_enabled()

    def read(step: Step) -> Any:
        with torch.inference_mode(inference):
            return step.read()

    with ThreadPoolExecutor(READERS, "holdfast-read") as pool:
        under_way: deque[tuple[Step, Future[Any]]] = deque()
        try:
            for step in steps:
                under_way.append((step, pool.submit(read, step)))
                if len(under_way) >= READS_UNDER_WAY:
                    _finish_first(under_way)
            while under_way:
                _finish_first(under_way)
        except BaseException:
            for _, future in under_way:
                future.cancel()
            raise


def _finish_first(under_way: deque[tuple[Step, Future[Any]]]) -> None:
    step, future = under_way.popleft()
    step.finish(future.result())
