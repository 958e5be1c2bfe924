"""Reads a ``torch.save`` file: mapped into memory where possible, without running code that the file names."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import CheckpointNotFoundError, DamagedCheckpointError, RefusedPickleError, UnsupportedValueError
from holdfast.formats.crc import crc32
from holdfast.formats.dcp.zip_layout import LOCAL_MAGIC, Entry, damaged, read_directory
from holdfast.formats.torch_file.storages import check_storage_sizes

DESCRIPTION = "data.pkl"

_PIECE = 1 << 20
_REFUSED = re.compile(r"(?:Unsupported (?:global|class)|GLOBAL|Trying to instantiate class)\W+(?:GLOBAL )?([\w.]+)")


def read_torch_file(path: str | os.PathLike[str], *, allow_pickle: bool, verify: bool) -> dict[Any, Any]:
    """The dict in a file that ``torch.save`` wrote, with all tensors on the CPU.

    Tensors are pages of the file until they are touched; only files from before torch 1.6 are read into memory.
    ``allow_pickle`` lets the file run whatever code it names: for trusted authors only.
    """
    file = Path(path)
    if not file.is_file():
        what = "it is a folder" if file.is_dir() else "the path does not exist"
        raise CheckpointNotFoundError(
            f"no torch.save file at {file}: {what}. Give the path of a file that torch.save wrote.", path=str(file)
        )
    can_be_mapped = _is_archive(file)
    if can_be_mapped:
        _check_archive(file, verify=verify)
    state = _load(file, mmap=can_be_mapped, allow_pickle=allow_pickle)
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


def _load(file: Path, *, mmap: bool, allow_pickle: bool) -> Any:
    try:
        return torch.load(file, map_location="cpu", mmap=mmap, weights_only=not allow_pickle)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if allow_pickle and not isinstance(error, (pickle.UnpicklingError, EOFError)):
            raise  # code that the file names was run, and this may be its own error
        names = [] if allow_pickle else _refused_names(file, error, is_archive=mmap)
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


def _crc(stream: Any, entry: Entry) -> int:
    stream.seek(entry.offset)
    crc, left = 0, entry.length
    while left and (piece := stream.read(min(left, _PIECE))):
        crc = crc32(piece, crc)
        left -= len(piece)
    return crc
