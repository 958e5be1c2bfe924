"""The shapes of all tensors of a checkpoint as columns, to check columns of boxes of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import prod

import numpy as np
import numpy.typing as npt

from holdfast._formats.native.blocks import refuse
from holdfast._formats.native.refs import TensorRef, TensorRefs

Numbers = npt.NDArray[np.int64]


class TensorShapes:
    """The sizes of tensors, by tensor number."""

    def __init__(self, tensors: Sequence[TensorRef]) -> None:
        columns = TensorRefs.of(tensors)
        likes, kinds = columns.likes, columns.kinds
        of_kind = np.array([(len(like.shape), like.dtype.itemsize, prod(like.shape)) for like in likes], np.int64)
        self.dimensions, self.itemsizes, self.elements = of_kind.reshape(-1, 3)[kinds].T.copy()
        self._first = starts_of(self.dimensions)
        sizes = np.fromiter(chain.from_iterable(like.shape for like in likes), np.int64)
        dimensions = of_kind.reshape(-1, 3)[:, 0]
        self._sizes = sizes[numbers_of(starts_of(dimensions), dimensions, kinds)]

    def __len__(self) -> int:
        return len(self.dimensions)

    def volumes(self, tensor: Numbers, offsets: Numbers, sizes: Numbers, source: str) -> tuple[Numbers, Numbers]:
        """The number of elements of boxes, which must be inside of their tensors and not empty, and where in the
        offsets and sizes those of each box begin."""
        per_box = self.dimensions[tensor]
        first = starts_of(per_box)
        if not len(offsets) == len(sizes) == int(first[-1]):
            refuse(source, "has the wrong number of offsets or sizes", int(first[-1]), len(sizes))
        volumes = np.ones(len(per_box), np.int64)
        for ndim in np.unique(per_box).tolist():
            rows = np.flatnonzero(per_box == ndim)
            steps = np.arange(ndim)
            numbers = first[rows, None] + steps
            box_offsets, box_sizes = offsets[numbers], sizes[numbers]
            shape = self._sizes[self._first[tensor[rows], None] + steps]
            if np.any(box_sizes < 1) or np.any(box_offsets + box_sizes > shape):
                refuse(source, "has chunks that are empty or outside of their tensor", "inside", "outside")
            volumes[rows] = box_sizes.prod(axis=1)
        return volumes, first


def starts_of(counts: Numbers) -> Numbers:
    """Where the first of each begins, if so many of each follow each other, and where the last one ends.

    >>> starts_of(np.array([2, 3])).tolist()
    [0, 2, 5]
    """
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def numbers_of(first: Numbers, counts: Numbers, chosen: Numbers) -> Numbers:
    """Which numbers are those of chosen rows, given where those of each row begin and how many they are.

    >>> numbers_of(np.array([0, 2, 5]), np.array([2, 3]), np.array([1, 0])).tolist()
    [2, 3, 4, 0, 1]
    """
    counts = counts[chosen]
    begins: Numbers = np.repeat(first[chosen] - (np.cumsum(counts) - counts), counts)
    return begins + np.arange(len(begins))
