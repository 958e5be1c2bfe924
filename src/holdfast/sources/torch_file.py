"""Files that ``torch.save`` wrote."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from holdfast.boxes import Box
from holdfast.errors import DamagedCheckpointError, NotACheckpointError, RefusedPickleError, UnsupportedValueError
from holdfast.formats.crc import crc32
from holdfast.formats.dcp.known_names import Known
from holdfast.formats.dcp.safe_pickle import load
from holdfast.formats.dcp.stored_tensors import StoredArchive, StoredTensors, check_crc
from holdfast.formats.dcp.value_names import find_plain
from holdfast.formats.dcp.zip_layout import LOCAL_MAGIC, Entry, damaged, read_directory
from holdfast.formats.native.refs import TensorRef
from holdfast.formats.native.torch_elements import as_array
from holdfast.formats.torch_file.reading import DESCRIPTION, read_torch_file
from holdfast.sources.file_regions import read_into_array
from holdfast.sources.opened_states import open_state
from holdfast.sources.source import Request, Source, check_requests
from holdfast.storage.filling import narrowed

_PIECE = 1 << 20


class TorchFileSource(Source):
    """A state that was saved by ``torch.save`` as a dict. Of the file only the description is read to open it.

    >>> import tempfile, torch, numpy as np
    >>> file = tempfile.mkdtemp() + "/model.pt"
    >>> torch.save({"w": torch.tensor([[1, 2], [3, 4]]).T, "epochs": (1, 2)}, file)
    >>> source = TorchFileSource(file)
    >>> source.tree["epochs"]
    (1, 2)
    >>> column = np.empty((2, 1), source.tensors["w"].dtype.carrier)
    >>> _ = source.read([Request("w", (0, 1), (2, 1), column)])
    >>> column.tolist()
    [[3], [4]]
    """

    format = "torch"

    def __init__(self, path: str | Path, *, allow_pickle: bool = False) -> None:
        self.location = str(path)
        with open(path, "rb", buffering=0) as stream:
            self._version = _version_of(stream)
            is_archive = stream.read(len(LOCAL_MAGIC)) == LOCAL_MAGIC
            self._file = _MappedFile(stream, self.location) if is_archive else None
            self.identity = self._file.identity if self._file is not None else _digest(stream)
        state = self._load(allow_pickle)
        if not isinstance(state, dict):
            raise UnsupportedValueError(
                f"{path} holds a {type(state).__module__}.{type(state).__qualname__}, and a checkpoint is a dict. "
                'Save it as torch.save({"name": it}, path).',
                key="",
            )
        opened = open_state(state, self.location)
        self._tree, self._refs, self._tensors = opened.tree, opened.refs, opened.tensors
        self._unchecked: dict[int, tuple[str, Entry]] = {}
        if self._file is not None:
            self._check_what_is_not_read_later(self._file)

    @property
    def tensors(self) -> Mapping[str, TensorRef]:
        """Every stored tensor that is nothing but its elements, by its key."""
        return self._refs

    @property
    def tree(self) -> Any:
        """The saved state. Tensors of other kinds (sparse or quantized, say) are values in it."""
        return self._tree

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Nothing: there is no place for it in such a file."""
        return {}

    def chunks(self, key: str) -> list[Box]:
        """The whole tensor."""
        shape = self._refs[key].shape
        return [Box((0,) * len(shape), shape)]

    def read(self, requests: Sequence[Request], *, verify: bool = True) -> int:
        """Fill the memory of all requests. With ``verify`` a tensor's storage is read as a whole, the first time."""
        check_requests(requests, self._refs)
        total = 0
        with self._opened_again() as stream:
            for request in requests:
                tensor = self._tensors[request.key]
                if verify:
                    total += self._check_once(stream, tensor)
                total += self._read_one(stream, tensor, request)
        return total

    def close(self) -> None:
        """Let go of the file."""
        self._tensors = {}
        self._file = None

    def _load(self, allow_pickle: bool) -> Any:
        if self._file is not None:
            try:
                return self._file.load()
            except RefusedPickleError:
                # torch may know more names than we do. What it makes of them is checked as a whole, and now.
                self._file = None
        return read_torch_file(self.location, allow_pickle=allow_pickle, verify=True)

    def _check_what_is_not_read_later(self, file: _MappedFile) -> None:
        """Compare everything with its CRC but the bytes of tensors, which are compared when they are read."""
        later = {file.position_of(tensor.untyped_storage()) for tensor in self._tensors.values()}
        with self._opened_again() as stream:
            for name, entry in file.entries.items():
                if entry.offset in later:
                    self._unchecked[entry.offset] = name, entry
                else:
                    _check(stream, name, entry, self.location)

    def _check_once(self, stream: BinaryIO, tensor: torch.Tensor) -> int:
        position = None if self._file is None else self._file.position_of(tensor.untyped_storage())
        if position is None or position not in self._unchecked:
            return 0
        name, entry = self._unchecked[position]
        _check(stream, name, entry, self.location)
        self._unchecked.pop(position, None)
        return entry.length

    def _read_one(self, stream: BinaryIO, tensor: torch.Tensor, request: Request) -> int:
        region = Box(request.offsets, request.sizes)
        position = None if self._file is None else self._file.position_of(tensor)
        if position is not None and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return read_into_array(
                stream, position, tuple(tensor.shape), region, request.into, source=self.location, key=request.key
            )
        request.into[...] = as_array(narrowed(tensor, *region))
        return request.into.nbytes

    @contextmanager
    def _opened_again(self) -> Iterator[BinaryIO]:
        """The file that was opened first; an error if it was changed since then, or if there is another one."""
        try:
            stream = open(self.location, "rb", buffering=0)  # noqa: SIM115 - closed below
        except FileNotFoundError as error:
            raise self._changed() from error
        with stream:
            if _version_of(stream) != self._version:
                raise self._changed()
            yield stream

    def _changed(self) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"{self.location} is not the file any more that was opened: something has replaced or changed it. Open "
            "it again.",
            file=self.location,
            key=None,
            expected=self._version,
            found=None,
        )


class _MappedFile:
    """A zip archive of torch in memory: pages of the file, which are read when they are touched."""

    def __init__(self, stream: BinaryIO, source: str) -> None:
        self._source = source
        self._mapped = _mapped(stream)
        self._start = torch.frombuffer(self._mapped, dtype=torch.uint8).data_ptr()
        view = memoryview(self._mapped)
        self.entries = read_directory(
            lambda offset, length: bytes(view[offset : offset + length]), len(view), source=source
        )
        if DESCRIPTION not in self.entries:
            raise NotACheckpointError(
                f"{source} is not a checkpoint: it is a zip archive, but not one that torch.save wrote. Give a file of "
                "torch.save, or one of another format.",
                path=source,
                found=sorted(self.entries)[:10],
            )

    @property
    def identity(self) -> str:
        """A digest of all that the archive says about itself, CRCs of its content included."""
        return hashlib.blake2b(repr(sorted(self.entries.items())).encode(), digest_size=16).hexdigest()

    def load(self) -> Any:
        """The state, made without running anything that the file names."""
        entry = self.entries[DESCRIPTION]
        description = self._mapped[entry.offset : entry.offset + entry.length]
        check_crc(description, entry, DESCRIPTION, source=self._source, key=None)
        archive = StoredArchive(self._mapped, source=self._source, key=None, verify=False)  # type: ignore[arg-type]
        tensors = StoredTensors(archive, share=True)

        def find(module: str, name: str) -> Known | None:
            return find_plain(module, name) or tensors.find(module, name)

        def on_cpu(reference: Any) -> Any:
            if isinstance(reference, tuple) and len(reference) == 5:
                reference = (*reference[:3], "cpu", reference[4])
            return tensors.reference(reference)

        return load(description, find, source=self._source, persistent_load=on_cpu)

    def position_of(self, memory: torch.Tensor | torch.UntypedStorage) -> int | None:
        """Where in the file this memory is; None if it is somewhere else."""
        position = memory.data_ptr() - self._start
        return position if 0 <= position < len(self._mapped) else None


def _mapped(stream: BinaryIO) -> mmap.mmap:
    """A private mapping: whoever writes to a tensor of the state does not write to the file."""
    if os.name != "posix":
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    # Nobody is going to write to most of it, so a file that is larger than the memory must not be refused.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    return mmap.mmap(stream.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _check(stream: BinaryIO, name: str, entry: Entry, source: str) -> None:
    if entry.crc is None:
        return
    stream.seek(entry.offset)
    found, left = 0, entry.length
    while left and (piece := stream.read(min(left, _PIECE))):
        found = crc32(piece, found)
        left -= len(piece)
    if left or found != entry.crc:
        raise damaged(source, name, "wrong CRC-32", f"{entry.crc:08x}", f"{found:08x}")


def _version_of(stream: BinaryIO) -> tuple[int, ...]:
    status = os.fstat(stream.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _digest(stream: BinaryIO) -> str:
    digest = hashlib.blake2b(digest_size=16)
    stream.seek(0)
    while piece := stream.read(_PIECE):
        digest.update(piece)
    return digest.hexdigest()
