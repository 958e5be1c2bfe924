"""A ``torch.save`` file as addresses: memory that stands for the file, and holds nothing of it until that is wanted.

Tensors are made on that memory without reading a byte of theirs, and their addresses say where in the file they are.
The file itself is never mapped: on network disks a mapped page can turn into a killed process.
"""

from __future__ import annotations

import gc
import hashlib
import mmap
import os
import platform
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, Protocol

import torch

from holdfast._formats.archives.known_names import AllowedName
from holdfast._formats.archives.safe_pickle import load
from holdfast._formats.archives.stored_tensors import StoredArchive, StoredTensors, check_crc
from holdfast._formats.archives.value_names import find_plain
from holdfast._formats.archives.zip_layout import ZipEntry, read_directory
from holdfast.errors import NotACheckpointError

DESCRIPTION = "data.pkl"
_ELEMENTS = "data/"
_ALIGNMENT = 16
"""Elements in another order are copied when a tensor is made of them, so they must be there by then."""


class OpenFile(Protocol):
    """The bytes of the file."""

    @property
    def size(self) -> int:
        """How many bytes there are."""

    def read_into(self, begin: int, buffer: Any, /) -> None:
        """Fill the buffer with the bytes from ``begin`` on."""


class ReservedFile:
    """A zip archive of torch."""

    def __init__(self, file: OpenFile, source: str) -> None:
        self._source = source
        self.entries = read_directory(lambda offset, length: _read(file, offset, length), file.size, source=source)
        if DESCRIPTION not in self.entries:
            raise NotACheckpointError(
                f"{source} is not a checkpoint: it is a zip archive, but not one that torch.save wrote. Give a file of "
                "torch.save, or one of another format.",
                path=source,
                found=sorted(self.entries)[:10],
            )
        self._memory = reserved(file.size)
        self._start = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._hidden: set[int | None] = set()
        self._in_use = threading.Lock()

    @property
    def identity(self) -> str:
        """A digest of all that the archive says about itself, CRCs of its content included."""
        return hashlib.blake2b(repr(sorted(self.entries.items())).encode(), digest_size=16).hexdigest()

    def load(self, file: OpenFile) -> Any:
        """The state, made without running anything that the file names. The elements of its tensors are not there."""
        description = _read(file, *self.entries[DESCRIPTION][:2])
        check_crc(description, self.entries[DESCRIPTION], DESCRIPTION, source=self._source, key=None)
        archive = _Archive(self._memory, self.entries, self._source)
        for name, entry in self.entries.items():
            if not name.startswith(_ELEMENTS) or entry.offset % _ALIGNMENT:
                self.fill(file, entry.offset, entry.offset + entry.length)
        if archive.byte_order != sys.byteorder:
            self.fill(file, 0, file.size)
        tensors = StoredTensors(archive, share=True)

        def find(module: str, name: str) -> AllowedName | None:
            return find_plain(module, name) or tensors.find(module, name)

        def on_cpu(reference: Any) -> Any:
            if isinstance(reference, tuple) and len(reference) == 5:
                reference = (*reference[:3], "cpu", reference[4])
            return tensors.reference(reference)

        return load(description, find, source=self._source, persistent_load=on_cpu)

    def fill_hidden(self, file: OpenFile, seen: Iterable[torch.Tensor], values: Iterable[Any]) -> set[int]:
        """Read all that is in none of the ``seen`` tensors, or somewhere inside of the ``values`` as well.

        Returns where the entries begin that are there for good now.
        """
        later = {self.position_of(tensor.untyped_storage()) for tensor in seen}
        later -= {self.position_of(storage) for storage in _storages_in(values)}
        hidden = {entry.offset for entry in self.entries.values()} - later
        for entry in self.entries.values():
            if entry.offset in hidden:
                self.fill(file, entry.offset, entry.offset + entry.length)
        self._hidden |= hidden
        return hidden

    def position_of(self, memory: torch.Tensor | torch.UntypedStorage) -> int | None:
        """Where in the file this memory is; None if it is somewhere else."""
        position = memory.data_ptr() - self._start
        return position if 0 <= position < len(self._memory) else None

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """Where in the file the first element of a tensor is; None if it has none, or they are there for good."""
        if tensor.numel() == 0 or self.position_of(tensor.untyped_storage()) in self._hidden:
            return None
        return self.position_of(tensor)

    @contextmanager
    def present(self, file: OpenFile, tensor: torch.Tensor) -> Iterator[None]:
        """The elements of a tensor are there inside of a ``with`` block, one thread at a time."""
        begin = self.place_of(tensor)
        if begin is None:
            yield
            return
        reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        end = begin + reach * tensor.dtype.itemsize
        with self._in_use:
            self.fill(file, begin, end)
            try:
                yield
            finally:
                self._release(begin, end)

    def fill(self, file: OpenFile, begin: int, end: int) -> None:
        """Read a part of the file into the memory that stands for it."""
        if end > begin:
            file.read_into(begin, memoryview(self._memory)[begin:end])

    def _release(self, begin: int, end: int) -> None:
        """Give whole pages back. They read as zeros until they are filled again."""
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)


class _Archive(StoredArchive):
    """The archive in the memory that stands for it."""

    def __init__(self, memory: mmap.mmap, entries: Mapping[str, ZipEntry], source: str) -> None:
        self.source = source
        self.key = None
        self._verify = False
        self._view = memoryview(memory)
        self._entries = dict(entries)


def _storages_in(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """The storages of all tensors that values of any kind refer to, in whatever container."""
    waiting, known = list(values), set()
    while waiting:
        value = waiting.pop()
        if id(value) in known or isinstance(value, (type, ModuleType, FunctionType)):
            continue
        known.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.layout == torch.strided:
                yield value.untyped_storage()
            if value.is_quantized and value.qscheme() == torch.per_channel_affine:
                waiting += [value.q_per_channel_scales(), value.q_per_channel_zero_points()]
        elif isinstance(value, torch.UntypedStorage):
            yield value
        waiting += gc.get_referents(value)


def _read(file: OpenFile, begin: int, length: int) -> bytes:
    content = bytearray(length)
    file.read_into(begin, content)
    return bytes(content)


def reserved(size: int) -> mmap.mmap:
    """Addresses without memory behind them: pages appear when they are written to."""
    if os.name != "posix":
        return mmap.mmap(-1, size)
    # Hardly any of it is going to be used at once, so a file that is larger than the memory must not be refused.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _no_reserve() -> int:
    """The flag for that, which Python has no name for before 3.13; 0 where it is not known."""
    is_common = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64", "AMD64", "arm64", "riscv64")
    found: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if is_common else 0)
    return found


_NO_RESERVE = _no_reserve()
