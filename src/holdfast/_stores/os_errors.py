"""Calls on descriptors do not say which file it was that failed. Here they do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Errors of the system in this block are about the file at ``path``.

    >>> with naming("/checkpoints/step-1"):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    OSError: [Errno 28] No space left on device: '/checkpoints/step-1'
    """
    try:
        yield
    except OSError as error:
        raise named(error, path) from error


def named(error: OSError, path: str) -> OSError:
    """The error, with the path if it has none."""
    return error if error.filename is not None else OSError(error.errno, error.strerror, path)


def some(written: int) -> int:
    """How many bytes the system says that it has written. None at all is an error, or a loop would ask for ever.

    >>> some(5)
    5
    >>> some(0)
    Traceback (most recent call last):
    OSError: [Errno 5] the file system takes no more bytes, and does not say why
    """
    if written <= 0:
        raise OSError(errno.EIO, "the file system takes no more bytes, and does not say why")
    return written
