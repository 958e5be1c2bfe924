"""The elements of tensors and arrays as bytes in row-major order, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast.boxes import Box, cut, place_of
from holdfast.formats.native.numpy_padding import has_gaps, without_gaps
from holdfast.planning.local_bytes import as_bytes, bytes_in_place
from holdfast.planning.small_tensors import lies_ready
from holdfast.tuning import PIECE_BYTES

Bytes = npt.NDArray[np.uint8]


def tensor_pieces(tensor: torch.Tensor, largest: int = PIECE_BYTES, cast: torch.dtype | None = None) -> Iterator[Bytes]:
    """The elements of a local tensor. One view of its memory if they lie there just so; else copies, part by part.

    >>> [piece.tolist() for piece in tensor_pieces(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T, largest=2)]
    [[1, 3], [2, 4]]
    """
    if lies_ready(tensor) and (cast is None or cast == tensor.dtype):
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
