"""The elements of tensors as bytes in row-major order: at once, in pieces, or of thousands of small ones."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from holdfast._base.boxes import Box, cut, place_of
from holdfast._base.tuning import PIECE_BYTES, SMALL_TENSOR
from holdfast._compat.tensors import LESS_THAN_A_BYTE, PACKED
from holdfast._formats.native.numpy_types import has_gaps, without_gaps

# The elements of a tensor as bytes in row-major order, whatever it looks like in memory.


_ONLY_AS_BYTES = LESS_THAN_A_BYTE | PACKED


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or its bytes if some torch has no copy for its dtype (numbers of fewer than 8 bits)."""
    return tensor.view(torch.uint8) if tensor.dtype in _ONLY_AS_BYTES else tensor


def as_plain_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a contiguous, ordinary CPU tensor; the very same memory where they already are one."""
    plain = tensor.detach()
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    if plain.is_quantized:
        plain = plain.int_repr()
    return copyable(plain).cpu().resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements as bytes. A view where possible, so the tensor must not change while it is in use."""
    plain = as_plain_cpu(tensor)
    if plain.numel() == 0:
        return memoryview(b"")
    return bytes_in_place(plain).data


def bytes_in_place(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of an ordinary, contiguous CPU tensor that has elements."""
    # Not `reshape`: a single element may have any stride and count as contiguous, and could not be viewed as bytes.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    array: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array


# Thousands of small tensors at a time: their bytes are moved by address, without a view or an array for each.
#
# A view of a tensor costs several times what it costs to copy a kilobyte.


_PLAIN = (torch.Tensor, torch.nn.Parameter)

Numbers = npt.NDArray[np.int64]

_REAL = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8})
"""Types that are neither complex nor quantized, so that there are questions that need not be asked."""

# Unlike `ctypes.memmove` this keeps Python's lock, which takes longer to give away and to get back than the copy.
move_small = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def is_plain_contiguous(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor holds its elements just so: on the CPU, in row-major order, without gaps.

    >>> is_plain_contiguous(torch.zeros(2, 3)), is_plain_contiguous(torch.zeros(2, 3).T)
    (True, False)
    """
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and (tensor.dtype in _REAL or not (tensor.is_conj() or tensor.is_quantized))
        and has_its_memory(tensor)
    )


def has_its_memory(tensor: torch.Tensor) -> bool:
    """Whether the storage of a contiguous tensor is as large as its elements are. Torch does not look when it writes.

    Whoever saves memory gives that of tensors back for a while, by making their storages smaller. Some tensors of
    torch's own making never have any.

    >>> tensor = torch.zeros(2, 3)
    >>> _ = tensor.untyped_storage().resize_(0)
    >>> has_its_memory(tensor)
    False
    """
    nbytes = tensor.nbytes
    if nbytes == 0:
        return True  # no bytes need no memory
    if offset := tensor.storage_offset():
        nbytes += int(offset) * tensor.itemsize
    return tensor.untyped_storage().nbytes() >= nbytes and tensor.data_ptr() != 0


def plain_addresses(values: Sequence[Any]) -> list[int]:
    """Where the elements of tensors begin that are plain and contiguous and have bytes; 0 for all other values.

    The same as to ask ``is_plain_contiguous`` for each, without a call for each.

    >>> plain_addresses([torch.zeros(2, 3).T, torch.zeros(0), None])
    [0, 0, 0]
    """
    strided = torch.strided
    return [
        value.data_ptr()
        if type(value) in _PLAIN
        and value.is_cpu
        and value.layout is strided
        and not value.is_nested
        and value.is_contiguous()
        and not value.is_neg()
        and (value.dtype in _REAL or not (value.is_conj() or value.is_quantized))
        and 0 < value.nbytes <= value.untyped_storage().nbytes()
        and (not value.storage_offset() or has_its_memory(value))
        else 0
        for value in values
    ]


class SmallTensors:
    """Tensors whose bytes are to be put one behind the other, many at once where they are small."""

    def __init__(self, values: Sequence[Any], addresses: Sequence[int], nbytes: Numbers) -> None:
        """Each comes with its address as ``plain_addresses`` has it, and with the bytes that it is to take."""
        self._values = values
        self._addresses = addresses
        self._begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(nbytes)])
        """Counted from the first, and the end of the last."""
        own = [value.nbytes if address else 0 for value, address in zip(values, addresses, strict=True)]
        # A tensor that is cut has other bytes than each of its parts.
        taken = (np.array(own, np.int64) == nbytes) & (nbytes > 0) & (nbytes <= SMALL_TENSOR)
        self._others = np.append(np.flatnonzero(~taken), len(taken))
        """The positions of those that have to be written in another way, and the end."""

    def gather(self, first: int, buffer: npt.NDArray[np.uint8]) -> tuple[int, int]:
        """Put the bytes of tensors into a buffer, beginning with the ``first`` of them.

        It ends before one that is not small or not plain, whose memory is no longer where it was, or for which there is
        no space. Returns how many there are, and how many bytes they take.

        >>> buffer, tensors = np.zeros(4, np.uint8), [torch.tensor([1, 2], dtype=torch.uint8), torch.zeros(3)]
        >>> SmallTensors(tensors, plain_addresses(tensors), np.array([2, 12])).gather(0, buffer), buffer.tolist()
        ((1, 2), [1, 2, 0, 0])
        """
        begins = self._begins
        fitting = int(np.searchsorted(begins, begins[first] + buffer.nbytes, "right")) - 1
        end = min(fitting, int(self._others[np.searchsorted(self._others, first)]))
        places = (begins[first : end + 1] + (buffer.ctypes.data - begins[first])).tolist()
        position = first
        for value, address, begin, behind in zip(
            self._values[first:end], self._addresses[first:end], places[:-1], places[1:], strict=True
        ):
            if value.data_ptr() != address:  # whoever has it may have given back its memory
                break
            move_small(begin, address, behind - begin)
            position += 1
        return position - first, int(begins[position] - begins[first])


def digest_of_small(tensor: torch.Tensor) -> bytes | None:
    """The digest of a small tensor that is contiguous; None if it is none.

    >>> digest_of_small(torch.zeros(2, dtype=torch.uint8)) == xxhash.xxh3_128_digest(bytes(2))
    True
    """
    if not is_plain_contiguous(tensor) or tensor.nbytes > SMALL_TENSOR:
        return None
    return xxhash.xxh3_128_digest(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))


# The elements of tensors and arrays as bytes in row-major order, in pieces of bounded size.


Bytes = npt.NDArray[np.uint8]


def tensor_pieces(tensor: torch.Tensor, largest: int = PIECE_BYTES, cast: torch.dtype | None = None) -> Iterator[Bytes]:
    """The elements of a local tensor. One view of its memory if they are contiguous there; else copies, part by part.

    >>> [piece.tolist() for piece in tensor_pieces(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T, largest=2)]
    [[1, 3], [2, 4]]
    """
    if is_plain_contiguous(tensor) and (cast is None or cast == tensor.dtype):
        if tensor.numel():
            yield bytes_in_place(tensor)
        return
    itemsize = tensor.element_size() if cast is None else max(cast.itemsize, tensor.element_size())
    for part in _parts(tensor, largest // itemsize):
        yield np.frombuffer(as_bytes(part if cast is None else part.to(cast)), np.uint8)


def array_pieces(array: npt.NDArray[Any], largest: int = PIECE_BYTES) -> Iterator[Bytes]:
    """The same for a numpy array. Gaps between the fields of a structure are zeros."""
    if array.flags.c_contiguous and not has_gaps(array.dtype):
        if array.size:
            yield array.reshape(-1).view(np.uint8)
        return
    for part in _parts(array, largest // array.itemsize):
        yield np.ascontiguousarray(without_gaps(part)).reshape(-1).view(np.uint8)


def _parts(array: Any, most: int) -> Iterator[Any]:
    """Parts of up to ``most`` elements, in row-major order, cut along the first dimensions."""
    shape = tuple(array.shape)
    if 0 in shape:
        return
    for offsets, sizes in cut(Box((0,) * len(shape), shape), most):
        # Not all kinds of tensors can be indexed.
        yield array if sizes == shape else array[place_of(offsets, sizes)]
