"""One exception class per cause, each with fields to act on and a message that ends in what to do next.

Every class here survives pickling, because errors travel between ranks. ``HoldfastError`` catches all of them. A
collective call of ``holdfast.dcp`` raises a ``CheckpointException`` on every rank, which carries the errors of the
ranks that failed; ``holdfast.save`` and ``load`` raise the error itself on every rank.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

WRAPPED_EXCEPTION = tuple[BaseException, traceback.StackSummary]


class HoldfastError(Exception):
    """Base of everything that Holdfast raises. Fields are plain attributes, listed and annotated by each class.

    Fields of all of them: ``rank``, the rank that failed, if several worked together; None otherwise.
    """

    rank: int | None = None

    def __init__(self, message: str, **fields: Any) -> None:
        known = _fields_of(type(self))
        if not known >= fields.keys():
            unknown = ", ".join(sorted(fields.keys() - known))
            raise TypeError(f"{type(self).__name__} has no field {unknown}; it has {', '.join(sorted(known))}")
        super().__init__(message)
        self.message = message
        self.fields = fields
        for name, value in fields.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        # KeyError and OSError print their arguments in their own way; a mixed-in base must not change the text.
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields)


def _rebuild(cls: type[HoldfastError], message: str, fields: dict[str, Any]) -> HoldfastError:
    return cls(message, **fields)


def _fields_of(cls: type[HoldfastError]) -> set[str]:
    """What a class and those that it extends annotate."""
    own = (base for base in cls.__mro__ if issubclass(base, HoldfastError))
    return {name for base in own for name in inspect.get_annotations(base)}


class CheckpointNotFoundError(HoldfastError, FileNotFoundError):
    """Nothing that could be loaded is at this path. Fields: ``path``."""

    path: str


class CheckpointExistsError(HoldfastError, RuntimeError):
    """A checkpoint is in the way: one that may not be overwritten, or one of another format. Fields: ``path``."""

    path: str


class NotAFolderError(HoldfastError, NotADirectoryError):
    """A file is where the folder of a checkpoint should be. Fields: ``path`` (of the file)."""

    path: str


class DamagedCheckpointError(HoldfastError):
    """Stored bytes are not the bytes that were saved. Fields: ``file``, ``key``, ``expected``, ``found``."""

    file: str
    key: str | None
    expected: Any
    found: Any


class UnsupportedVersionError(HoldfastError):
    """A checkpoint of a format that this version of Holdfast cannot read. Fields: ``file``, ``version``."""

    file: str
    version: str


class UnsafePathError(HoldfastError):
    """A name inside a checkpoint points outside of it. Fields: ``name``."""

    name: str


class RefusedPickleError(HoldfastError):
    """A stored value would need code that Holdfast does not run by itself. Fields: ``key``, ``global_name``."""

    key: str | None
    global_name: str


class NewerFormatError(RefusedPickleError):
    """A checkpoint names a record or dtype of torch that is not known: most likely a newer torch wrote it.

    Fields: ``file``, ``key``, ``global_name`` (the record, field or dtype that is not known).
    """

    file: str


class StateMismatchError(HoldfastError, RuntimeError, ValueError):
    """The checkpoint and the state to load into do not fit; lists every problem at once.

    Fields: ``missing`` (keys), ``shapes`` (key to ``(saved, current)``), ``dtypes`` (key to ``(saved, current)``),
    ``kinds`` (key to text), ``uncovered`` (key to text), ``unexpected`` (stored keys without a place in the state).
    """

    missing: Sequence[str] = ()
    shapes: Mapping[str, tuple[Any, Any]] = MappingProxyType({})
    dtypes: Mapping[str, tuple[Any, Any]] = MappingProxyType({})
    kinds: Mapping[str, str] = MappingProxyType({})
    uncovered: Mapping[str, str] = MappingProxyType({})
    unexpected: Sequence[str] = ()


class ReplicaMismatchError(HoldfastError, ValueError):
    """Ranks hold different things under one key, of which only one can be stored. Fields: ``keys`` (key to text)."""

    keys: Mapping[str, str]


class InvalidPlanError(HoldfastError, ValueError):
    """The chunks that the ranks want to write do not tile a tensor exactly. Fields: ``problems``."""

    problems: Sequence[str]


class UnsupportedTensorError(HoldfastError, ValueError):
    """A tensor of a kind that has no bytes to store. Fields: ``key``, ``kind``; ``keys``, if there are several."""

    key: str
    kind: str
    keys: Sequence[str] = ()


class PartitionedParameterError(UnsupportedTensorError):
    """Parameters whose elements DeepSpeed ZeRO-3 keeps elsewhere. Fields: ``key``, ``kind``, and ``keys``, all."""


class UnsupportedValueError(HoldfastError, TypeError):
    """Values that cannot be stored. Fields: ``key`` (of the first), and ``keys`` where all of them were looked for."""

    key: str
    keys: Sequence[str] = ()


class IncompleteSaveError(HoldfastError, RuntimeError):
    """Planned items were not written, so nothing was committed. Fields: ``missing`` (item names)."""

    missing: Sequence[str]


class IncompleteLoadError(HoldfastError, RuntimeError):
    """Fewer or more elements were loaded than the state has. Fields: ``expected``, ``found``."""

    expected: int
    found: int


class RankDisagreementError(HoldfastError, RuntimeError):
    """Ranks are in different calls, or look at different checkpoints. Fields: ``views`` (rank to text)."""

    views: Mapping[int, str]


class RemoteError(HoldfastError):
    """Stands in for an exception of another rank that could not travel. Fields: ``type_name``, ``text``."""

    type_name: str
    text: str


class CheckpointException(HoldfastError):
    """A collective step failed; raised on every rank with the errors of all ranks that failed.

    ``msg`` is the name of the step (``"plan"``, ``"write"`` or ``"read"``). ``failures`` maps each failing rank to its
    exception and stack. Unlike the class of the same name in torch this is an ``Exception``, so that ``except
    Exception`` in a training loop sees it.
    """

    def __init__(self, msg: str, failures: dict[int, WRAPPED_EXCEPTION]) -> None:
        super().__init__(msg)
        self.args = (msg, failures)  # as the class of torch has them
        self._failures = failures

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, self.__dict__

    @property
    def failures(self) -> dict[int, WRAPPED_EXCEPTION]:
        """The exception and stack of every rank that failed."""
        return self._failures

    def __str__(self) -> str:
        parts = [f"CheckpointException ranks:{self._failures.keys()}\n"]
        for rank, (error, stack) in self._failures.items():
            parts.append(f"Traceback (most recent call last): (RANK {rank})\n")
            if stack is not None:
                parts.extend(traceback.format_list(stack))
            parts.extend(traceback.format_exception_only(type(error), value=error))
        return "".join(parts)


class SnapshotError(HoldfastError, TypeError):
    """A part of the state cannot be copied, so it could change under a background save. Fields: ``key``."""

    key: str


class RankLeftError(HoldfastError, RuntimeError):
    """Another rank gave up a save or load that needs all ranks. Fields: ``ranks``."""

    ranks: list[int]


class ConnectionLostError(HoldfastError, RuntimeError):
    """The ranks can no longer reach each other."""


class MissingRanksError(ConnectionLostError):
    """Ranks did not join a call that needs all of them, made no progress in it, or died. Fields: ``ranks``, as the job
    counts them."""

    ranks: Sequence[int]


class UnguardedScriptError(HoldfastError, RuntimeError):
    """A writer process would have to run the whole main script to get a class from it. Fields: ``script``."""

    script: str


class WriterProcessError(HoldfastError, RuntimeError):
    """The process that writes a checkpoint in the background ended. Fields: ``exit_code``, ``path``."""

    exit_code: int | None
    path: str | None


class MissingPackageError(HoldfastError, ImportError, ValueError):
    """Something needs a package that is not installed. Fields: ``install``, what to give to ``pip install``."""

    install: str


class UncommittedCheckpointError(CheckpointNotFoundError):
    """A save was cut off here before it was committed, so there is nothing to load. Fields: ``path``."""


class NotACheckpointError(HoldfastError, ValueError):
    """There is something at this path, but no checkpoint of a known format. Fields: ``path``, ``found``."""

    path: str
    found: Any


class CommitConflictError(HoldfastError, RuntimeError):
    """Another save committed to the same place first, so nothing was changed. Fields: ``path``."""

    path: str


class WorldSizeError(HoldfastError, RuntimeError):
    """Each rank stored a value of its own, and now there are more or fewer ranks.

    Fields: ``key``, ``saved`` and ``current``, the numbers of ranks.
    """

    key: str
    saved: int
    current: int


class OptimizerMismatchError(HoldfastError, ValueError):
    """The parameter groups of a stored optimizer do not fit those of the live one. Fields: ``problems``."""

    problems: Sequence[str]


class UnsupportedStateError(HoldfastError, TypeError):
    """A live object of a kind that cannot be saved or loaded. Fields: ``kind``."""

    kind: str


class UnreadablePickleError(HoldfastError):
    """A pickle that the user allowed cannot be loaded here. Fields: ``key``."""

    key: str


class UnknownKeyError(HoldfastError, KeyError):
    """A checkpoint has no such entry. Fields: ``key``, ``path``, ``near`` (entries that may be meant)."""

    key: str
    path: str
    near: Sequence[str]


class ReplacedCheckpointError(HoldfastError, RuntimeError):
    """Another save has replaced a checkpoint while it was read. Fields: ``path``; ``opened``, ``found`` (their ids)."""

    path: str
    opened: str
    found: str


class TornSnapshotError(HoldfastError, RuntimeError):
    """Something changed a tensor while a background save was copying it. Fields: ``key``."""

    key: str


class SaveInProgressError(HoldfastError, RuntimeError):
    """A background save was asked for while an earlier one had not ended. Fields: ``pending``, how many there are."""

    pending: int


class PreflightError(HoldfastError, RuntimeError):
    """Saves as they are asked for would not go well. Fields: ``problems`` (all that was found), ``report``."""

    problems: Sequence[Any]
    report: Any


class StorageFullError(HoldfastError, OSError):
    """There is no space left for a checkpoint. Nothing was committed, and what was written is removed again.

    Fields: ``path``; ``rank``, the lowest of ``ranks``, which could not write; ``needed`` and ``free``, in bytes, None
    if that is not known; ``deleted``, the checkpoints that were deleted to make space.
    """

    errno = 28  # ENOSPC, for programs that look for it
    path: str
    ranks: Sequence[int]
    needed: int | None
    free: int | None
    deleted: Sequence[str]


class InconsistentStorageError(HoldfastError, OSError):
    """A storage says that an object has so many bytes and gives others. Fields: ``file``, ``expected``, ``found``."""

    errno = 5  # EIO, for programs that look for it
    file: str
    expected: int
    found: int


class OtherProcessError(HoldfastError, RuntimeError):
    """A background save is that of the process that began it, and no process forked from it learns how it ends.

    Fields: ``owner``, the id of the process that saves; ``process``, that of the one that asked.
    """

    owner: int
    process: int


class RunInUseError(HoldfastError, RuntimeError):
    """Another job that is alive saves to the same folder. Fields: ``path``; ``host``, ``pid`` and ``since`` of it."""

    path: str
    host: str
    pid: int
    since: str


class RunTakenError(HoldfastError, RuntimeError):
    """Another job has taken over the folder that this one was saving to, so this one must no longer save there.

    Fields: ``path``; ``host``, ``pid``, ``since`` of that job, None if it has ended already.
    """

    path: str
    host: str | None
    pid: int | None
    since: str | None


class NotDeletedError(HoldfastError, RuntimeError):
    """A checkpoint that was to be deleted is still there. Fields: ``path``, ``reason``."""

    path: str
    reason: str


class UnreadableCheckpointError(HoldfastError, OSError):
    """A checkpoint of a run could not be looked at, so it is unknown whether it is the one to take.

    Fields: ``path``, ``step``, ``reason`` (what the system said).
    """

    path: str
    step: int
    reason: str


class NoUsableCheckpointError(HoldfastError, RuntimeError):
    """A run has checkpoints, and none of them can be restored. Fields: ``path``, ``steps``."""

    path: str
    steps: Sequence[int]
