"""A checkpoint of any format, as something to read from: what it holds, and regions of its tensors.

Nothing here, and nothing that reads our own format, needs torch.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from holdfast._base.boxes import Box, place_of, volume
from holdfast._formats.native.read_plan import bytes_at
from holdfast._formats.native.refs import TensorRef
from holdfast._stores.filesystem import AnyPath, FileSystemBase
from holdfast._stores.local_filesystem import FileSystem

S = TypeVar("S", bound="Source")


class ArrayDestination(ABC):
    """Something that is read into and is not an array: it has as much of an array's ways as that takes."""

    def __init__(self, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self.ndim = len(self.shape)
        self.size = volume(self.shape)
        self.itemsize = self.dtype.itemsize
        self.nbytes = self.size * self.itemsize

    @abstractmethod
    def __getitem__(self, place: Any) -> Any:
        """A part of it."""

    @abstractmethod
    def transpose(self, order: Sequence[int], /) -> Any:
        """The same with its dimensions in another order."""

    @abstractmethod
    def __setitem__(self, place: Any, carriers: Any) -> None:
        """Take elements, perhaps from several threads at once."""


Into: TypeAlias = npt.NDArray[Any] | ArrayDestination


class DiscardingArray(ArrayDestination):
    """For what is only read to be checked.

    >>> place = DiscardingArray((2, 3), "<u4")
    >>> place[0:1] = [1, 2, 3]
    >>> place[0:1].shape, place.transpose((1, 0)).shape
    ((1, 3), (3, 2))
    """

    def __getitem__(self, place: Any) -> DiscardingArray:
        return DiscardingArray(np.broadcast_to(np.zeros((), self.dtype), self.shape)[place].shape, self.dtype)

    def transpose(self, order: Sequence[int], /) -> DiscardingArray:
        return DiscardingArray([self.shape[dim] for dim in order], self.dtype)

    def __setitem__(self, place: Any, carriers: Any) -> None:
        pass


@dataclass(frozen=True, eq=False)
class ReadRequest:
    """A region of a stored tensor, and the memory to put it into.

    >>> import numpy as np
    >>> ReadRequest("weight", offsets=(2, 0), sizes=(2, 4), into=np.empty((2, 4), "<u4")).sizes
    (2, 4)
    """

    key: str
    offsets: tuple[int, ...]
    """Where the region begins in the whole tensor."""
    sizes: tuple[int, ...]
    into: Into
    """Of shape ``sizes`` and with elements of the stored dtype's ``carrier``; strides may be any."""


class WholeReads(NamedTuple):
    """Whole tensors that are put, byte by byte, to where memory begins: columns, since there may be very many."""

    keys: Sequence[str]
    addresses: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    """Of the tensor, and so of the memory. None has zero."""

    @classmethod
    def into(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> WholeReads:
        """Whole tensors that go into these dense arrays, which stay alive."""
        filled = {key: array for key, array in arrays.items() if array.size}
        addresses = [array.__array_interface__["data"][0] for array in filled.values()]
        nbytes = [array.nbytes for array in filled.values()]
        return cls(list(filled), np.array(addresses, np.int64), np.array(nbytes, np.int64))

    def requests(self, tensors: Mapping[str, TensorRef]) -> list[ReadRequest]:
        """The same as requests."""
        return [
            _whole_request(tensors[key], address, nbytes)
            for key, address, nbytes in zip(self.keys, self.addresses.tolist(), self.nbytes.tolist(), strict=True)
        ]


def _whole_request(ref: TensorRef, address: int, nbytes: int) -> ReadRequest:
    memory = bytes_at(address, nbytes).view(ref.dtype.carrier).reshape(ref.shape)
    return ReadRequest(ref.key, (0,) * len(ref.shape), ref.shape, memory)


class ChunkPlace(NamedTuple):
    """Where a chunk is stored: which box of a tensor it is, and in which file."""

    offsets: tuple[int, ...]
    """Where the box begins in the whole tensor."""
    sizes: tuple[int, ...]
    file: str
    """The name of the file inside of the checkpoint."""
    begin: int | None
    """Where in the file its bytes begin; None if they are not contiguous."""
    nbytes: int
    """What it takes in the file. Formats that wrap every chunk in an archive have some bytes around the elements."""
    rank: int | None
    """Who wrote it, where the name of the file says so."""


class ByteStream(Protocol):
    """The bytes of a tensor in row-major order, to be asked for from front to back, by one thread at a time."""

    def fill(self, begin: int, memory: memoryview, /) -> None:
        """Fill memory with the bytes from ``begin`` on, in whole elements."""

    def finish(self) -> None:
        """All was asked for. Raises if it does not add up to its checksums."""


class Source(ABC):
    """An open checkpoint. It is read by any number of calls, also from several threads, until it is closed."""

    location: str
    """Where it is, for messages."""
    format: str
    """``native``, ``dcp``, ``safetensors`` or ``torch``."""
    identity: str
    """Which save it is: equal on all ranks that see the same one."""
    checks_parts: bool = True
    """Whether parts of a chunk are compared with digests as well as the whole, or there are no digests at all."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, TensorRef]:
        """Every stored tensor, by its key."""

    @property
    @abstractmethod
    def tree(self) -> Any:
        """The saved state: plain containers and values, with a ``TensorRef`` in place of every tensor.

        Values are read when this is first asked for. Formats that know nothing but keys have a flat dict.
        """

    @property
    @abstractmethod
    def metadata(self) -> Mapping[str, Any]:
        """What the user noted."""

    @property
    def provenance(self) -> Mapping[str, Any]:
        """What is known about how and when it was written."""
        return {}

    @abstractmethod
    def chunks(self, key: str) -> Sequence[Box]:
        """The boxes in which a tensor is stored."""

    @abstractmethod
    def chunk_places(self, key: str) -> Sequence[ChunkPlace]:
        """The same boxes, with the files that they are stored in and who wrote them."""

    @abstractmethod
    def files(self) -> list[tuple[str, int]]:
        """The checkpoint's own files that are there, by their names in it, and the bytes that they have on disk."""

    @abstractmethod
    def read(self, requests: Sequence[ReadRequest], *, verify: bool = True, memory: int | None = None) -> int:
        """Fill the memory of all requests. Returns how many bytes were read for that.

        With ``verify`` all that has a digest is compared with it. ``memory`` is what may be allocated besides, where
        the format can do with less than it would like. If it raises, some requests may have been filled, but none with
        what is damaged.
        """

    def read_many(
        self,
        requests: Sequence[ReadRequest],
        wholes: WholeReads,
        *,
        verify: bool = True,
        memory: int | None = None,
        shared: bool = False,
    ) -> int:
        """Fill the memory of all requests and of whole tensors, which must stay alive meanwhile.

        ``shared`` if other ranks are reading as well, which may want the same bytes.
        """
        return self.read([*requests, *wholes.requests(self.tensors)], verify=verify, memory=memory)

    def stream(
        self, key: str, *, memory: int, scratch: str | os.PathLike[str] | None = None
    ) -> AbstractContextManager[ByteStream] | None:
        """A tensor that is too large to be read at once, for a ``with`` block.

        None where parts of it are as good as the whole for ``read``: their digests are compared, or there are none.
        Otherwise the stream reads everything once and compares it in the end. ``memory`` is what it may allocate, and
        ``scratch`` a folder for what has to be unpacked.
        """
        return None

    def incomplete_positions(self, keys: Sequence[str]) -> list[int]:
        """Which of these tensors may be stored in part only, by position. Those that are one chunk are complete."""
        return [
            position
            for position, key in enumerate(keys)
            if [tuple(chunk.sizes) for chunk in self.chunks(key)] != [self.tensors[key].shape]
        ]

    def covered(self, key: str) -> Sequence[Box]:
        """Boxes that together have all that is stored of a tensor: its chunks, or fewer that are known to be filled."""
        return self.chunks(key)

    def verify(self) -> int:
        """Read everything, to see whether it is undamaged. Returns how many bytes that were."""
        return self.read(
            [
                ReadRequest(
                    ref.key, tuple(chunk.offsets), tuple(chunk.sizes), DiscardingArray(chunk.sizes, ref.dtype.carrier)
                )
                for ref in self.tensors.values()
                for chunk in self.chunks(ref.key)
            ]
        )

    def close(self) -> None:
        """Let go of what is open. The source cannot be read any more."""
        return

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_requests(requests: Sequence[ReadRequest], tensors: Mapping[str, TensorRef]) -> None:
    """Raise if a request asks for what is not stored, or into memory that does not fit it."""
    for request in requests:
        ref = tensors.get(request.key)
        if ref is None:
            raise KeyError(f"there is no tensor '{request.key}' in the checkpoint")
        if not _lies_inside(request.offsets, request.sizes, ref.shape):
            raise ValueError(
                f"'{request.key}' is of shape {list(ref.shape)} and has no region of sizes {list(request.sizes)} at "
                f"{list(request.offsets)}"
            )
        into = request.into
        if into.shape != tuple(request.sizes) or into.dtype != ref.dtype.carrier or not _is_writable(into):
            raise ValueError(
                f"'{request.key}' cannot be read into an array of {into.dtype} and shape {into.shape}: it takes a "
                f"writable one of {ref.dtype.carrier} and shape {tuple(request.sizes)}"
            )


def _is_writable(into: Any) -> bool:
    return not isinstance(into, np.ndarray) or into.flags.writeable


def _lies_inside(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    if not len(offsets) == len(sizes) == len(shape):
        return False
    return all(
        at >= 0 and size >= 0 and at + size <= whole for at, size, whole in zip(offsets, sizes, shape, strict=True)
    )


def part_of(array: Into, offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    """The part of an array at these offsets, in the array's own memory even if it is a single element.

    >>> import numpy as np
    >>> part_of(np.arange(6).reshape(2, 3), (0, 1), (2, 1)).tolist()
    [[1], [4]]
    """
    return array[place_of(offsets, sizes)]


# How large files are, on any file system that checkpoints of other formats are read from.


def sizes_of(fs: FileSystemBase, folder: AnyPath, names: Iterable[str]) -> list[tuple[str, int]]:
    """The files of these names in a folder that are there, and how many bytes each has."""
    found = []
    for name in names:
        with suppress(FileNotFoundError, NotADirectoryError):
            found.append((name, size_of(fs, fs.concat_path(folder, name))))
    return found


def size_of(fs: FileSystemBase, path: AnyPath) -> int:
    """How many bytes a file has."""
    if type(fs) is FileSystem:
        return os.stat(path).st_size
    with fs.create_stream(path, "rb") as stream:
        return stream.seek(0, os.SEEK_END)
