"""Reads a ``torch.save`` file, without running code that the file names. It is never mapped into memory."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch

from holdfast._base.crc import crc32
from holdfast._base.tuning import STREAM_BYTES
from holdfast._formats.archives.zip_layout import LOCAL_MAGIC, ZipEntry, damaged, read_directory
from holdfast._formats.torch_file.claims import Claims
from holdfast._formats.torch_file.reserved_memory import DESCRIPTION, ReservedFile
from holdfast._stores.file_reader import FileReader, open_file
from holdfast.errors import CheckpointNotFoundError, DamagedCheckpointError, RefusedPickleError, UnsupportedValueError

# Files of ``torch.save`` from before torch 1.6: pickles one behind the other, and then the elements.


_PICKLES = 5
"""A magic number, a version, what the machine was like, the state, and the keys of storages in their order."""
_SIZE_BYTES = 8
"""In front of the elements of each storage stands their number."""


def check_legacy_file(file: Path) -> None:
    """Raise if a file asks for more memory than it has bytes for, which torch would reserve before it looks."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        claims = Claims()
        bounded = cast("IO[bytes]", _Bounded(stream, size))
        try:
            for _ in range(_PICKLES):
                claims.follow(bounded)
                _compare(file, size, claims.reserved)
        except (ValueError, LookupError, TypeError) as error:
            raise _damaged(file, f"it cannot be understood: {error!s:.200}", "a torch.save file", error) from error
        left = size - stream.tell()
    largest: dict[str, int] = {}
    for storage in claims.storages:
        largest[storage.key] = max(storage.nbytes, largest.get(storage.key, 0))
    wanted = sum(largest.values()) + _SIZE_BYTES * len(largest)
    if wanted > left:
        why = f"its tensors take {wanted} bytes by what it says, and there are {left} for them"
        raise _damaged(file, why, wanted, left)


def _compare(file: Path, size: int, reserved: int) -> None:
    if reserved > size:
        raise _damaged(file, f"it asks for {reserved} bytes of memory and has {size} itself", size, reserved)


def _damaged(file: Path, why: str, expected: Any, found: Any) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{file} is damaged, or not a file that torch.save wrote: {why}. Copy it again from where it came from.",
        file=str(file),
        key=None,
        expected=expected,
        found=found if isinstance(found, int) else type(found).__name__,
    )


class _Bounded:
    """A file of which no more bytes are asked for than there are: a read reserves memory for all that is asked for."""

    def __init__(self, stream: IO[bytes], size: int) -> None:
        self._stream = stream
        self._size = size
        self.tell = stream.tell
        self.readline = stream.readline

    def read(self, count: int) -> bytes:
        """As many bytes as there are, at most."""
        return self._stream.read(max(0, min(count, self._size - self._stream.tell())))


# Whether the storages that a ``torch.save`` file describes are as large as the entries that hold them.
#
# Elements are read from the file by the size that the description claims, which torch does not compare: a wrong one
# would show bytes of something else as elements.


def check_storage_sizes(description: bytes, entries: Mapping[str, ZipEntry], *, source: str) -> None:
    """Compare the sizes that ``description`` claims with those of the file's ``entries``."""
    claims = Claims()
    try:
        claims.follow(io.BytesIO(description))
    except (ValueError, LookupError, TypeError):  # torch says what is wrong with it, in its own words
        pass
    for storage in claims.storages:
        name = f"data/{storage.key}"
        if name in entries and storage.item_size is not None and entries[name].length != storage.nbytes:
            raise damaged(source, name, "another number of bytes than described", storage.nbytes, entries[name].length)
    there = sum(entry.length for entry in entries.values())
    if claims.reserved > there:
        raise damaged(source, "data.pkl", "more memory asked for than the file has bytes", there, claims.reserved)


_REFUSED = re.compile(r"(?:Unsupported (?:global|class)|GLOBAL|Trying to instantiate class)\W+(?:GLOBAL )?([\w.]+)")


class OpenTorchFile:
    """The dict in a file, with tensors whose elements are only there when they are asked for."""

    def __init__(self, state: dict[Any, Any], file: FileReader | None, memory: ReservedFile | None) -> None:
        self.state = state
        self._file = file
        self._memory = memory

    def split(self, leaves: Iterable[Any], is_asked_for: Callable[[Any], bool]) -> None:
        """Of these parts of the state some are tensors that will be asked for. All others are read now."""
        if self._file is not None and self._memory is not None:
            asked: list[Any] = []
            values: list[Any] = []
            for leaf in leaves:
                (asked if is_asked_for(leaf) else values).append(leaf)
            self._memory.fill_hidden(self._file, asked, values)

    def place_of(self, tensor: torch.Tensor) -> tuple[FileReader, int] | None:
        """The file and where in it the first element of a tensor is; None if its elements are in memory."""
        position = None if self._memory is None else self._memory.place_of(tensor)
        return None if position is None or self._file is None else (self._file, position)

    @contextmanager
    def present(self, tensor: torch.Tensor) -> Iterator[None]:
        """The elements of a tensor, or of a view of one, are there inside of a ``with`` block."""
        if self._file is None or self._memory is None:
            yield
        else:
            with self._memory.present(self._file, tensor):
                yield

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def open_torch_file(path: str | os.PathLike[str], *, allow_pickle: bool, verify: bool) -> OpenTorchFile:
    """The dict in a file that ``torch.save`` wrote, of which as little as possible is in memory.

    With ``verify`` the whole file is read once, to compare it with its CRCs. Files from before torch 1.6, and such with
    objects that only torch knows to make, are read into memory.
    """
    source = _existing(path)
    if not _is_archive(source):
        return OpenTorchFile(read_torch_file(path, allow_pickle=allow_pickle, verify=verify), None, None)
    _check_archive(source, verify=verify)
    file = open_file(str(source))
    try:
        memory = ReservedFile(file, str(source))
        return OpenTorchFile(_a_dict(memory.load(file), source), file, memory)
    except RefusedPickleError:
        file.close()
        return OpenTorchFile(_a_dict(_load(source, is_archive=True, allow_pickle=allow_pickle), source), None, None)
    except BaseException:
        file.close()
        raise


def read_torch_file(path: str | os.PathLike[str], *, allow_pickle: bool, verify: bool) -> dict[Any, Any]:
    """The dict in a file that ``torch.save`` wrote, with all tensors on the CPU.

    ``allow_pickle`` lets the file run whatever code it names: for trusted authors only.
    """
    file = _existing(path)
    is_archive = _is_archive(file)
    if is_archive:
        _check_archive(file, verify=verify)
    elif not allow_pickle:  # code that is trusted may reserve what it likes
        check_legacy_file(file)
    return _a_dict(_load(file, is_archive=is_archive, allow_pickle=allow_pickle), file)


def _existing(path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    if not file.is_file():
        what = "it is a folder" if file.is_dir() else "the path does not exist"
        raise CheckpointNotFoundError(
            f"no torch.save file at {file}: {what}. Give the path of a file that torch.save wrote.", path=str(file)
        )
    return file


def _a_dict(state: Any, file: Path) -> dict[Any, Any]:
    if not isinstance(state, dict):
        raise UnsupportedValueError(
            f"{file} holds a {type(state).__module__}.{type(state).__qualname__}, and a checkpoint is a dict. "
            'Save it as torch.save({"name": it}, path).',
            key="",
        )
    return state


def _is_archive(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(LOCAL_MAGIC)) == LOCAL_MAGIC


def _load(file: Path, *, is_archive: bool, allow_pickle: bool) -> Any:
    try:
        return torch.load(file, map_location="cpu", mmap=False, weights_only=not allow_pickle)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if allow_pickle and not isinstance(error, (pickle.UnpicklingError, EOFError)):
            raise  # code that the file names was run, and this may be its own error
        names = [] if allow_pickle else _refused_names(file, error, is_archive=is_archive)
        if names:
            raise RefusedPickleError(
                f"{file} holds objects that only code can rebuild: {', '.join(names)}. If you trust its author, allow "
                "the classes with torch.serialization.add_safe_globals([TheClass]), or everything with "
                "allow_pickle=True (--allow-pickle, HOLDFAST_ALLOW_PICKLE=1).",
                key=None,
                global_name=names[0],
            ) from error
        raise DamagedCheckpointError(
            f"{file} is damaged, or not a file that torch.save wrote ({type(error).__name__}: {str(error)[:200]}). "
            "Copy it again from where it came from.",
            file=str(file),
            key=None,
            expected="a torch.save file",
            found=type(error).__name__,
        ) from error


def _refused_names(file: Path, error: Exception, *, is_archive: bool) -> list[str]:
    """What the file wants to use and torch does not allow; empty if that is not why loading failed."""
    if is_archive:
        try:
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
        except Exception:  # torch could not even look through it
            return []
    match = _REFUSED.search(str(error))
    return [match[1]] if match else []


def _check_archive(file: Path, *, verify: bool) -> None:
    """Compare all entries with the sizes that are claimed for them, and with ``verify`` with their CRCs."""
    with file.open("rb", buffering=0) as stream:

        def read_at(offset: int, length: int) -> bytes:
            stream.seek(offset)
            return stream.read(length)

        size = os.fstat(stream.fileno()).st_size
        entries = read_directory(read_at, size, source=str(file))
        if DESCRIPTION in entries:
            where = entries[DESCRIPTION]
            check_storage_sizes(read_at(where.offset, where.length), entries, source=str(file))
        for name, entry in entries.items() if verify else ():
            if entry.crc is not None and (found := _crc(stream, entry)) != entry.crc:
                raise damaged(str(file), name, "wrong CRC-32", f"{entry.crc:08x}", f"{found:08x}")


def _crc(stream: Any, entry: ZipEntry) -> int:
    stream.seek(entry.offset)
    crc, left = 0, entry.length
    while left and (piece := stream.read(min(left, STREAM_BYTES))):
        crc = crc32(piece, crc)
        left -= len(piece)
    return crc
