"""The contract of stores: where the files of one checkpoint live. Flat names and bytes, nothing about tensors.

``docs/stores.md`` shows how to write one; ``holdfast.testing.StoreConformance`` tests whether it keeps the contract.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

from holdfast._base.tuning import READ_BYTES
from holdfast.errors import CommitConflictError, DamagedCheckpointError, HoldfastError, UnsafePathError

Buffer: TypeAlias = Any
"""Contiguous memory: bytes, bytearray, memoryview, numpy array. Writable where something is read into it."""


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a store."""

    name: str
    size: int


Listing: TypeAlias = list[Listed]


class Sink(Protocol):
    """An object that is being written. It may be a ``BufferedSink`` too."""

    def write(self, buffer: Buffer) -> None:
        """Append all bytes of ``buffer``. The caller may change its memory afterwards."""


class Reader(Protocol):
    """An object that is open for reading. Any number of threads may read from it at once.

    It may be a ``CachedReader``, a ``SharedReader`` and a ``PiecewiseReader`` too.
    """

    @property
    def size(self) -> int:
        """How many bytes the object has."""

    def read_into(self, begin: int, buffer: Buffer) -> None:
        """Fill all of ``buffer`` with the bytes from ``begin`` on.

        Raises ``DamagedCheckpointError`` if the object ends before that.
        """


# What sinks and readers may be able to do besides, to be faster. Whoever has the methods has the ability; a class that
# extends the protocol is checked by type checkers, and recognised a little faster.


@runtime_checkable
class BufferedSink(Protocol):
    """A sink that lends the memory it writes from, which saves a copy."""

    def write(self, buffer: Buffer) -> None:
        """As that of every sink."""

    def buffer(self) -> memoryview | None:
        """Memory to be filled with the next bytes, of any length; None if ``write`` serves as well."""

    def advance(self, count: int) -> None:
        """So many bytes of the buffer are filled, from its beginning on, and are the next ones of the object."""


@runtime_checkable
class InPlaceSink(BufferedSink, Protocol):
    """A sink that can write from memory of others, as long as nobody changes it, which saves all copies."""

    def write_in_place(self, view: memoryview) -> bool:
        """Take the next bytes, which stay as they are until the sink is closed. False if it cannot: none is taken."""


@runtime_checkable
class CachedReader(Protocol):
    """A reader that knows which bytes can be had without waiting."""

    def is_cached(self, begin: int, size: int) -> bool | None:
        """Whether these bytes can be had without waiting; None if nobody knows."""

    def read_cached(self, begin: int, buffer: Buffer) -> bool:
        """Fill the buffer if that needs no waiting. If not, False, and the buffer may hold anything."""


@runtime_checkable
class SharedReader(Protocol):
    """A reader that can keep what it reads for other processes of this machine."""

    def read_shared(self, begin: int, buffer: Buffer) -> None:
        """As ``read_into``, for bytes that other processes of this machine will want too."""


@runtime_checkable
class PiecewiseReader(Protocol):
    """A reader that fills memory bit by bit, and decides for itself how large the bits are."""

    def read_in_pieces(
        self, begin: int, memory: memoryview, step: int, *, shared: bool = False
    ) -> Iterator[tuple[int, int]]:
        """As ``fill_in_pieces`` does with other readers."""


FillInPieces: TypeAlias = Callable[..., Iterator[tuple[int, int]]]
"""Takes where to begin, memory, the size of a step, and whether the bytes are shared."""


def filling_from(reader: Reader) -> FillInPieces:
    """``fill_in_pieces`` of one reader. What the reader is able to do is found out now, and not with every call."""
    if hasattr(reader, "read_in_pieces"):
        own: FillInPieces = reader.read_in_pieces
        return own
    cached = reader if isinstance(reader, CachedReader) else None
    return partial(_fill_in_pieces, reader, cached)


def fill_in_pieces(
    reader: Reader, begin: int, memory: memoryview, step: int, *, shared: bool = False
) -> Iterator[tuple[int, int]]:
    """Fill memory with the bytes of an object from ``begin`` on. Yields from where to where it has just been filled.

    What is cached comes in pieces of ``step`` bytes, so that whoever sums them up finds them in the processor's own
    cache; for the rest a disk works better with one large request. ``shared`` if others will want the same bytes.
    """
    return filling_from(reader)(begin, memory, step, shared=shared)


def _fill_in_pieces(
    reader: Reader, cached: CachedReader | None, begin: int, memory: memoryview, step: int, *, shared: bool = False
) -> Iterator[tuple[int, int]]:
    done = 0
    while cached is not None and memory.nbytes >= step and done < memory.nbytes:
        end = min(done + step, memory.nbytes)
        if not cached.read_cached(begin + done, memory[done:end]):
            break
        yield done, end
        done = end
    if done < memory.nbytes:
        if shared and isinstance(reader, SharedReader):
            reader.read_shared(begin + done, memory[done:])
        else:
            reader.read_into(begin + done, memory[done:])
        yield done, memory.nbytes


class Store(ABC):
    """One checkpoint's folder, or prefix of object names.

    The names of objects have no slashes. All methods may be called by several threads, and by several processes
    that have each a store of the same place. A missing object is a ``FileNotFoundError``, a name that could lead out of
    the store an ``UnsafePathError`` and whatever else fails an ``OSError``; each names the object.
    """

    location: str
    """Where this is, for messages."""

    read_bytes: int = READ_BYTES
    """What a reader should be asked for at once, where bytes go straight to where they belong. More than the default
    is for stores to which every request is a long way, and whose readers need no memory besides."""

    @abstractmethod
    def create(self, name: str, size: int | None = None, memory: int | None = None) -> AbstractContextManager[Sink]:
        """Write a new object in a ``with`` block. If the name is taken, a ``FileExistsError`` is raised.

        At the end of the block the object is complete and its content durable; its name is durable after ``sync``.
        After an exception nothing of it is left. A kill may leave a part of it under its name.

        ``size`` is how many bytes will be written, if that is known; a ``ValueError`` if there were more or fewer.
        ``memory`` is how many bytes all buffers of the sink may take together; None leaves it to the store.
        """

    @abstractmethod
    def reader(self, name: str) -> AbstractContextManager[Reader]:
        """Open an object for a ``with`` block.

        If its name is replaced or deleted meanwhile, reading goes on or fails; bytes of another object never come.
        """

    @abstractmethod
    def size(self, name: str) -> int | None:
        """How many bytes an object has; None if there is no such object."""

    @abstractmethod
    def list(self) -> Listing:
        """All objects, those of others too, in no particular order. Nothing if there is no such place."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete objects. Those that do not exist are passed over; if one fails, the others are still deleted."""

    @abstractmethod
    def commit(self, name: str, content: bytes, *, replaces: bytes | None) -> None:
        """Make ``name`` appear, or replace it, in one step that is durable on return. Of all readers, everywhere and
        even after a kill, each sees all of the old content or all of the new.

        ``replaces`` is what was there when the save began, None if there was nothing. If something else is there now, a
        ``CommitConflictError`` is raised and nothing changes; of several that commit at once, one succeeds. After any
        other error the name may have either content: look what it is, in this process, before you remove what one of
        them needs. After an error that means no answer (see ``is_unanswered``) it may still change.
        """

    def sync(self) -> None:  # noqa: B027 - many stores need not do anything
        """Make the names of all objects durable that this store has created so far."""

    def put(self, name: str, content: Buffer) -> None:
        """Create an object with this content."""
        with self.create(name, memoryview(content).nbytes) as sink:
            sink.write(content)

    def read_into(self, name: str, begin: int, buffer: Buffer) -> None:
        """Fill all of ``buffer`` with the bytes of an object from ``begin`` on."""
        with self.reader(name) as reader:
            reader.read_into(begin, buffer)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """The bytes of an object from ``begin`` up to ``end``, or its last.

        Raises ``DamagedCheckpointError`` if the object ends before that.
        """
        with self.reader(name) as reader:
            end = reader.size if end is None else end
            if end > reader.size or begin > reader.size:  # before memory is taken for it: the number may be anything
                raise too_short(self.path_of(name), max(begin, end), reader.size)
            if not 0 <= begin <= end:
                raise ValueError(f"{self.path_of(name)} has no bytes from {begin} to {end}")
            content = bytearray(end - begin)
            reader.read_into(begin, content)
            return bytes(content)

    def path_of(self, name: str) -> str:
        """What an object is called in messages."""
        return f"{self.location}/{name}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location!r})"


def checked_name(name: str) -> str:
    """The name, if it is the name of an object in a store.

    >>> checked_name("../secrets")
    Traceback (most recent call last):
    holdfast.errors.UnsafePathError: '../secrets' is not a name inside of a checkpoint...
    """
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name or not _can_be_encoded(name):
        raise UnsafePathError(
            f"{name!r} is not a name inside of a checkpoint: those have no slashes and stay in their folder. "
            "If a checkpoint from elsewhere contains it, do not trust that checkpoint",
            name=name,
        )
    return name


def _can_be_encoded(name: str) -> bool:
    """False for texts with surrogates, other than those by which Python spells file names that are not UTF-8."""
    try:
        name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def too_short(path: str, expected: int, found: int) -> DamagedCheckpointError:
    """What to raise if an object ends too early. ``expected`` is how many bytes it should have at least."""
    return DamagedCheckpointError(
        f"{path} is too short: it has {found} bytes, and at least {expected} are needed. "
        "It was cut off or replaced; copy the checkpoint again, or load another one",
        file=path,
        key=None,
        expected=expected,
        found=found,
    )


def wrong_size(path: str, expected: int, found: int) -> ValueError:
    """What to raise if an object was created with another size than announced."""
    return ValueError(f"{path} was to get {expected} bytes and got {found}; it was not kept")


def conflict(path: str) -> CommitConflictError:
    """What to raise if another content is at a committed name than the one to be replaced."""
    return CommitConflictError(
        f"another save has changed {path} since this one began, so this one was not committed. "
        "Save to a place of its own, or once more if this state should replace the other one",
        path=path,
    )


# Errors after which a request may still be carried out, because nobody answered it.


_NO_ANSWER = {
    errno.ETIMEDOUT,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENETRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENOTCONN,
}


def is_unanswered(error: BaseException) -> bool:
    """Whether a request that ended in this error may have an effect later, so that a look at the place proves nothing.

    That is so for lost connections, for Ctrl-C while a thread of fsspec goes on with the request, and for errors of
    which nobody knows what they mean: those of packages behind fsspec that are not errors of the system.

    >>> is_unanswered(OSError(28, "No space left on device")), is_unanswered(TimeoutError())
    (False, True)
    """
    if isinstance(error, HoldfastError):
        return False
    if not isinstance(error, OSError) or isinstance(error, (TimeoutError, ConnectionError)):
        return True
    return error.errno is None or error.errno in _NO_ANSWER
