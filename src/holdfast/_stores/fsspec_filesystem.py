"""Everything that fsspec reaches: object stores, memory, remote disks, named by URLs."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations
from fsspec.utils import get_protocol

from holdfast._stores import local_filesystem as local
from holdfast._stores.filesystem import AnyPath, FileSystemBase
from holdfast.errors import HoldfastError, InconsistentStorageError, MissingPackageError

# Every package behind fsspec has exceptions of its own. Callers know what to do about an ``OSError`` with a path.


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


# Where renaming is copying and deleting, as in object stores, a file is made in one piece instead: an object exists
# once its upload is complete, and not before.


_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "cos", "obs", "tos", "b2", "oci", "swift"}


class FsspecFileSystem(FileSystemBase):
    """A file system of fsspec. Paths are URLs, chained ones too.

    Example:
        >>> files = FsspecFileSystem()
        >>> folder = files.init_path("memory://run/step-1/")
        >>> files.put(files.concat_path(folder, "notes"), b"all well")
        >>> files.ls(folder)
        ['/run/step-1/notes']
    """

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.fs: Any = None
        self._url = ""
        self._root = ""

    def init_path(self, path: AnyPath, **kwargs: Any) -> str:
        """Connect to where ``path`` is. ``kwargs`` are options of its protocol, and stay until others are given."""
        if kwargs:
            self.options = kwargs
        url = _without_end_slash(os.fspath(path))
        try:
            self.fs, root = url_to_fs(url, **self.options)
        except ImportError as error:
            raise MissingPackageError(
                f"{url} needs a package that is not installed: {error}", install=_package_of(get_protocol(url))
            ) from error
        self._url, self._root = url, root.rstrip("/")
        return url

    @property
    def puts_atomically(self) -> bool:  # type: ignore[override]
        """True for object stores, and where fsspec can only rename by copying and deleting."""
        return not _renames_in_one_step(self._connected())

    @contextmanager
    def create_stream(self, path: AnyPath, mode: str) -> Iterator[io.IOBase]:
        """Open a file. If writing it fails, nothing of it is left."""
        inner = self.inner(path)
        self._forget_listings(inner)  # which also hold sizes, and these decide how much is read
        with only_os_errors(os.fspath(path)):
            stream = self._connected().open(inner, mode)
        if "r" in mode:
            with stream:
                yield cast(io.IOBase, stream)
            return
        try:
            yield cast(io.IOBase, stream)
            with only_os_errors(os.fspath(path)):
                stream.close()
        except BaseException:
            _abandon(stream)
            with suppress(Exception):
                self._connected().rm_file(inner)
            raise

    def concat_path(self, path: AnyPath, suffix: str) -> str:
        """The URL of a file in a folder."""
        return f"{os.fspath(path).rstrip('/')}/{suffix}" if os.fspath(path) != "/" else f"/{suffix}"

    def rename(self, path: AnyPath, new_path: AnyPath) -> None:
        """Rename, in one step on a disk."""
        if self._disk is not None:
            self._disk.rename(self.inner(path), self.inner(new_path))
            return
        with only_os_errors(os.fspath(path)):
            self._connected().mv(self.inner(path), self.inner(new_path))

    def put(self, path: AnyPath, content: bytes) -> None:
        """Make or replace a file."""
        with only_os_errors(os.fspath(path)):
            self._connected().pipe_file(self.inner(path), content)

    def mkdir(self, path: AnyPath) -> None:
        """Make the folder, where there are such things."""
        if self._disk is not None:
            self._disk.mkdir(self.inner(path))
            return
        with only_os_errors(os.fspath(path)):
            self._connected().makedirs(self.inner(path), exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Any text whose protocol fsspec knows, installed or not; text without one is a local path to fsspec."""
        if not isinstance(checkpoint_id, str):
            return False
        protocol = get_protocol(checkpoint_id)
        return protocol in fsspec.available_protocols() or protocol in fsspec.registry

    def exists(self, path: AnyPath) -> bool:
        """Whether there is something at ``path`` now. What most of fsspec calls so is false after any error."""
        inner = self.inner(path)
        self._forget_listings(inner)
        with only_os_errors(os.fspath(path)):
            return self._type_of(inner) is not None

    def rm_file(self, path: AnyPath) -> None:
        """Delete a file."""
        with only_os_errors(os.fspath(path)):
            self._connected().rm_file(self.inner(path))

    def ls(self, path: AnyPath) -> list[str]:
        """Paths of what is in a folder now. An object that stands for the folder itself is not in it."""
        folder = self.inner(path)
        self._forget_listings(folder)
        with only_os_errors(os.fspath(path)):
            found = [str(name).rstrip("/") for name in self._connected().ls(folder, detail=False)]
            inside = [name for name in found if name != folder]
            if found and not inside and self._type_of(folder) == "file":
                raise NotADirectoryError(f"{path} is a file")
        return inside

    @contextmanager
    def lock_folder(self, path: AnyPath) -> Iterator[None]:
        """Lock folders of disks; others have no locks."""
        if self._disk is None:
            yield
            return
        with self._disk.lock_folder(self.inner(path)):
            yield

    def sync_folder(self, path: AnyPath) -> None:
        """Make names on a disk durable. Elsewhere an answer to a request means that it is done."""
        if self._disk is not None:
            self._disk.sync_folder(self.inner(path))

    @property
    def _disk(self) -> local.FileSystem | None:
        """How to handle names, if this is a disk of this machine."""
        return local.FileSystem() if isinstance(self._connected(), LocalFileSystem) else None

    def _type_of(self, inner: str) -> str | None:
        """A file or a directory; None if there is nothing."""
        fs = self._connected()
        try:
            return str(fs.info(inner)["type"])
        except (FileNotFoundError, NotADirectoryError):
            # An empty bucket is there, and has no information of its own.
            return "directory" if "/" not in inner.strip("/") and fs.exists(inner) else None

    def _connected(self) -> Any:
        if self.fs is None:
            raise ValueError("the file system has no path yet; call init_path first")
        return self.fs

    def inner(self, path: AnyPath) -> str:
        """The path as fsspec calls it behind the protocol. For a chained URL only the first call knows it."""
        text = os.fspath(path)
        if self._url and (text == self._url or text.startswith(f"{self._url.rstrip('/')}/")):
            return self._root + text[len(self._url.rstrip("/")) :].rstrip("/")
        return str(self._connected()._strip_protocol(text))

    def _forget_listings(self, inner: str) -> None:
        """Other ranks and other programs write here too, and fsspec would answer from memory."""
        self._connected().invalidate_cache(inner)


def _renames_in_one_step(fs: Any) -> bool:
    """As disks do, near or far. Some object stores have a move of their own, which is still not a rename."""
    if isinstance(fs, DirFileSystem):  # which shows a folder of another one as the root
        return _renames_in_one_step(fs.fs)
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    return type(fs).mv is not fsspec.AbstractFileSystem.mv and not protocols & _OBJECT_STORES


def _package_of(protocol: str) -> str:
    """What fsspec takes the protocol from, which is the name of the package as a rule."""
    path: str = known_implementations.get(protocol, {}).get("class", protocol)
    return path.split(".")[0]


def _without_end_slash(url: str) -> str:
    shorter = url.rstrip("/")
    return url if shorter.endswith(":") or not shorter else shorter


def _abandon(stream: Any) -> None:
    """End a stream without completing its file: closing, which its finaliser would do too, completes uploads."""
    with suppress(Exception):
        stream.discard()
    try:
        stream.closed = True
    except AttributeError:  # a plain file, which is not an upload
        with suppress(Exception):
            stream.close()
