"""What a program and its writer process say to each other."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.coordination.collectives import Collectives
from holdfast.coordination.failures import PackedFailure, pack_failure, unpack_failure, wrap_exception
from holdfast.errors import CheckpointException
from holdfast.notices import add_note
from holdfast.watching import Event

Work = Callable[[Collectives, dict[str, Any]], Any]
"""Saves a state with the given ranks. Must be picklable to run in a writer process."""


@dataclass(frozen=True)
class Request:
    """Save this. ``members`` is None for a save of one process alone."""

    work: Work
    state: dict[str, Any]
    rank: int
    members: tuple[int, ...] | None
    coordinator_rank: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class Exchange:
    """The writer asks its program to talk to the other ranks: a method of ``Link`` and its arguments."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Advance:
    """So many more bytes are written. There is no answer to it."""

    nbytes: int


@dataclass(frozen=True)
class Enter:
    """A phase of the save begins. There is no answer to it."""

    phase: str


@dataclass(frozen=True)
class Told:
    """Something happened, for whoever watches. There is no answer to it."""

    event: Event


@dataclass(frozen=True)
class Answer:
    """What came of an exchange, or of the whole save: a value or an error."""

    value: Any = None
    error: PackedError | None = None

    def get(self) -> Any:
        """The value; raises the error."""
        if self.error is not None:
            raise self.error.unpacked()
        return self.value


@dataclass(frozen=True)
class PackedError:
    """An exception that always pickles. The errors of single ranks travel one by one, so that one odd one is alone."""

    whole: PackedFailure
    step: str | None = None
    by_rank: dict[int, PackedFailure] | None = None

    @classmethod
    def of(cls, error: BaseException) -> PackedError:
        """Pack an exception."""
        if isinstance(error, CheckpointException):
            by_rank = {rank: pack_failure(wrapped) for rank, wrapped in error.failures.items()}
            plain = CheckpointException(error.args[0], {})
            return cls(pack_failure(wrap_exception(plain)), str(error.args[0]), by_rank)
        return cls(pack_failure(wrap_exception(error)))

    def unpacked(self) -> BaseException:
        """The exception again; its text tells where it was raised."""
        if self.by_rank is not None and self.step is not None:
            return CheckpointException(self.step, {rank: unpack_failure(each) for rank, each in self.by_rank.items()})
        error, stack = unpack_failure(self.whole)
        where = "".join(traceback.format_list(stack))
        if where:
            add_note(error, f"Raised in the writer process:\n{where}")
        return error


def opened(data: bytes) -> Any:
    """A message from the other end."""
    return pickle.loads(data)  # noqa: S301 - sent by the program that started this process, or by its writer
