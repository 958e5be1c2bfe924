"""Calls on descriptors do not say which file it was that failed. Here they do."""

from __future__ import annotations

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
