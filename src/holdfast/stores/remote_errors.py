"""Every package behind fsspec has exceptions of its own. Callers know what to do about an ``OSError`` with a path."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import HoldfastError, InconsistentStorageError


@contextmanager
def only_os_errors(path: str) -> Iterator[None]:
    """What fails in this block is an ``OSError`` that names the path.

    >>> with only_os_errors("s3://bucket/run"):
    ...     raise KeyError("strange")
    Traceback (most recent call last):
    OSError: s3://bucket/run: KeyError: 'strange'
    """
    try:
        yield
    except HoldfastError:
        raise
    except OSError as error:
        if path in str(error):
            raise
        raise _naming(error, path) from error
    except Exception as error:
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error


def _naming(error: OSError, path: str) -> OSError:
    """The same kind of error about the path. Those of fsspec often have a text and no number."""
    if error.errno is not None:
        return OSError(error.errno, error.strerror or type(error).__name__, path)
    kind: type[OSError] = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return kind(f"{path}: {str(error) or type(error).__name__}")


def was_replaced(path: str) -> OSError:
    """What to raise if an object is another one than when it was opened."""
    return OSError(errno.ESTALE, "was replaced while it was read; open it again", path)


def no_such_object(path: str) -> FileNotFoundError:
    """What to raise if there is nothing."""
    return FileNotFoundError(errno.ENOENT, "there is no such object", path)


def name_is_taken(path: str) -> FileExistsError:
    """What to raise if a new object is not new."""
    return FileExistsError(errno.EEXIST, "exists already", path)


def other_length(path: str, expected: int, found: int, begin: int | None = None) -> InconsistentStorageError:
    """What to raise if a storage gives more or fewer bytes than it says that there are, and the object is the same."""
    asked = f"it has {expected} bytes" if begin is None else f"there are {expected} bytes from byte {begin} on"
    return InconsistentStorageError(
        f"{path}: the storage says that {asked}, and reading them gives {found}. Something between here and the "
        "bytes changes them (a cache, a proxy, compression on the way), or they are not all there: look at the object "
        "with the storage's own tools, and try again",
        file=path,
        expected=expected,
        found=found,
    )
