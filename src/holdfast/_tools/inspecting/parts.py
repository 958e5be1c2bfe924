"""Tensors in parts of bounded size: large ones cut, small ones together, so that each read is worth its while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from holdfast._base.boxes import Box, cut, volume
from holdfast._base.tuning import COUNTED_ELEMENT_BYTES, COUNTED_TOGETHER, MEMORY_BUDGET, READERS, SMALLEST_BUDGET
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.source import ReadRequest, Source, WholeReads
from holdfast._tools.inspecting.numbers import Array


class TensorPart(NamedTuple):
    """A box of a tensor."""

    ref: TensorRef
    box: Box

    @property
    def nbytes(self) -> int:
        """Of its elements as they are stored."""
        return volume(self.box.sizes) * self.ref.dtype.itemsize


@dataclass
class Lot:
    """Parts that are read together."""

    parts: list[TensorPart] = field(default_factory=list)
    elements: int = 0

    @property
    def nbytes(self) -> int:
        """Of all elements as they are stored."""
        return sum(part.nbytes for part in self.parts)


def elements_at_once(memory: int | None, threads: int) -> int:
    """How many elements each of some threads may count with at once."""
    budget = max(SMALLEST_BUDGET, MEMORY_BUDGET if memory is None else memory)
    return max(1024, budget // (COUNTED_ELEMENT_BYTES * threads))


def threads_for(nbytes: int) -> int:
    """How many threads are worth it."""
    return max(1, min(READERS, nbytes >> 22))


def lots_of(refs: Iterable[TensorRef], most: int) -> Iterator[Lot]:
    """All elements of these tensors, in lots of up to ``most`` elements."""
    waiting = Lot()
    for ref in refs:
        for box in cut(Box((0,) * len(ref.shape), ref.shape), most):
            count = volume(box.sizes)
            if waiting.parts and (waiting.elements + count > most or len(waiting.parts) >= COUNTED_TOGETHER):
                yield waiting
                waiting = Lot()
            waiting.parts.append(TensorPart(ref, box))
            waiting.elements += count
    if waiting.parts:
        yield waiting


def read_parts(source: Source, parts: Iterable[TensorPart], memory: int | None) -> list[Array]:
    """The bits of all parts."""
    arrays: list[Array] = []
    requests: list[ReadRequest] = []
    wholes: dict[str, Array] = {}
    for part in parts:
        array = np.empty(part.box.sizes, part.ref.dtype.carrier)
        arrays.append(array)
        if part.box.sizes == part.ref.shape and part.ref.key not in wholes:
            wholes[part.ref.key] = array  # which takes far less work for each of many small ones
        elif array.size:
            requests.append(ReadRequest(part.ref.key, tuple(part.box.offsets), tuple(part.box.sizes), array))
    source.read_many(requests, WholeReads.into(wholes), memory=memory)
    return arrays
