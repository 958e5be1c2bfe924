"""The pickle in a ``torch.save`` file: the whole state, with a reference to an entry in the place of every storage.

A tensor whose bytes are not there yet is described by a stand-in on the meta device. So the description of a state of
any size can be written first, and the bytes one tensor at a time after it.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from holdfast._compat.tensors import describe_typed_storage, rebuild_tensor, rebuild_tensor_with_dtype, storage_identity
from holdfast._formats.archives.tensor_records import LEGACY_STORAGES
from holdfast._formats.archives.zip_writer import Output, ZipWriter

_PROTOCOL = 2
"""What ``torch.save`` writes."""


@dataclass(frozen=True)
class StoredBytes:
    """An entry of a file."""

    name: str
    nbytes: int
    source: torch.Tensor | torch.UntypedStorage
    """The stand-in of a tensor that is still to come, or a storage in memory."""


def describe(state: Any, stand_ins: Iterable[torch.Tensor]) -> tuple[bytes, list[StoredBytes]]:
    """The pickle of ``state``, and the entries that it refers to.

    The tensors in ``stand_ins`` are described as row-major tensors of their shape and dtype; other tensors that are
    found in the state are in memory, and are stored as they are.
    """
    stream = io.BytesIO()
    pickler = _Describer(stream, stand_ins)
    pickler.dump(state)
    return stream.getvalue(), pickler.entries


class _Reference:
    """The storage of a stand-in."""

    def __init__(self, stand_in: torch.Tensor) -> None:
        self.stand_in = stand_in


class _Describer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, stand_ins: Iterable[torch.Tensor]) -> None:
        super().__init__(stream, _PROTOCOL)
        self.entries: list[StoredBytes] = []
        self._stand_ins = {id(tensor): tensor for tensor in stand_ins}
        self._known: dict[int, tuple[str, Any]] = {}

    def reducer_override(self, value: Any) -> Any:
        if id(value) not in self._stand_ins:
            return NotImplemented
        shape, dtype = tuple(value.shape), value.dtype
        arguments: tuple[Any, ...] = (_Reference(value), 0, shape, _row_major(shape), False, OrderedDict())
        if dtype in LEGACY_STORAGES:
            return rebuild_tensor, arguments
        return rebuild_tensor_with_dtype, (*arguments, dtype)

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Reference):
            tensor = value.stand_in
            legacy = LEGACY_STORAGES.get(tensor.dtype)
            count = tensor.numel() if legacy else tensor.numel() * tensor.dtype.itemsize
            name = self._name(id(tensor), tensor.numel() * tensor.dtype.itemsize, tensor)
            return "storage", getattr(torch, legacy) if legacy else torch.UntypedStorage, name, "cpu", count
        if isinstance(value, torch.storage.TypedStorage):
            kind, untyped, count = describe_typed_storage(value)
            return "storage", kind, self._name_of(untyped), "cpu", count
        if isinstance(value, torch.UntypedStorage):
            return "storage", torch.UntypedStorage, self._name_of(value), "cpu", value.nbytes()
        return None

    def _name_of(self, storage: torch.UntypedStorage) -> str:
        return self._name(storage_identity(storage), storage.nbytes(), storage)

    def _name(self, identity: int, nbytes: int, source: torch.Tensor | torch.UntypedStorage) -> str:
        if identity not in self._known:
            number = str(len(self.entries))
            self._known[identity] = number, source  # kept alive: an identity must not be used again
            self.entries.append(StoredBytes(f"data/{number}", nbytes, source))
        return self._known[identity][0]


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


# What every ``torch.save`` file has beside the bytes of its tensors.


_ENVELOPE = 384
"""More than what an archive takes for an entry beside its content."""


def expected_size(description: bytes, entries: Sequence[StoredBytes]) -> int:
    """About how large a file will be, rather a little more."""
    return len(description) + sum(entry.nbytes + _ENVELOPE for entry in entries)


@contextmanager
def state_archive(output: Output, description: bytes) -> Iterator[ZipWriter]:
    """An archive whose entries are written in a ``with`` block. At its end the archive is complete.

    >>> import io
    >>> file = io.BytesIO()
    >>> with state_archive(file, b"\\x80\\x02K\\x07.") as archive:  # the pickle of 7
    ...     pass
    >>> torch.load(io.BytesIO(file.getvalue()))
    7
    """
    archive = ZipWriter(output)
    archive.add("data.pkl", description)
    archive.add("byteorder", sys.byteorder.encode())
    yield archive
    archive.add("version", b"3\n")
    archive.close()


def bytes_of_storage(storage: torch.UntypedStorage) -> memoryview:
    """The bytes of a storage that is in memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).numpy().data
