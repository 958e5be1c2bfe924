"""What the kinds of remote storage do each in their own way: one folder of objects, or prefix of their names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import NamedTuple

from holdfast.stores.store import Listing, Sink
from holdfast.tuning import READ_BYTES


class Found(NamedTuple):
    """An object, as it was when it was looked at."""

    size: int
    version: object
    """Equal for the same content, and another one after it was replaced, as far as its storage can tell."""


class RemoteFolder(ABC):
    """The objects of one folder, by their names, which have been checked.

    All methods may be called by several threads. They may fail with anything, of which ``FsspecStore`` makes errors
    that say where; ``create`` has the caller's errors to keep apart, and so makes them itself.
    """

    read_bytes: int = READ_BYTES
    """As that of stores."""

    @abstractmethod
    def find(self, name: str) -> Found | None:
        """What there is now; None if there is nothing."""

    @abstractmethod
    def open(self, name: str) -> tuple[Found, bytes] | None:
        """What there is now and its beginning: all of a small object, in one step; None if there is nothing."""

    @abstractmethod
    def read_into(self, name: str, found: Found, begin: int, memory: memoryview) -> None:
        """Fill the memory, which lies within the object. Raises ``was_replaced`` if it is not that object any more."""

    @abstractmethod
    def create(self, name: str, size: int | None) -> AbstractContextManager[Sink]:
        """Write a new object, as ``Store.create`` does. A name that is taken is a ``FileExistsError``."""

    @abstractmethod
    def compare_and_put(self, name: str, content: bytes, replaces: bytes | None) -> bool:
        """Put an object in place of another one, or of none; False if something else is there."""

    @abstractmethod
    def list(self) -> Listing:
        """All objects."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete an object; a ``FileNotFoundError`` may say that there is none."""

    def sync(self) -> None:  # noqa: B027 - an answer to a request means that it is done
        """Make names durable, where that is a separate act."""
