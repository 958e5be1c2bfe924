"""Places for chunks whose dimensions lie in another order in the file than in the tensor."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.boxes import Box
from holdfast.storage.chunk_reads import Buffer, Place, Wanted


def turned(wanted: Wanted, order: Sequence[int]) -> Wanted:
    """A region and its place, of a chunk with its dimensions in this order."""
    (offsets, sizes), place = wanted
    region = Box(tuple(offsets[dim] for dim in order), tuple(sizes[dim] for dim in order))
    return Wanted(region, _TurnedPlace(place, order))


class _TurnedPlace:
    """Puts the dimensions back into the order of the place."""

    def __init__(self, place: Place, order: Sequence[int]) -> None:
        self._place = place
        self._back = sorted(range(len(order)), key=order.__getitem__)
        self.memory: memoryview | None = None

    def put(self, start: Sequence[int], sizes: Sequence[int], read: Buffer, at: int, strides: Sequence[int]) -> None:
        """Hand on."""
        starts, lengths, steps = ([numbers[dim] for dim in self._back] for numbers in (start, sizes, strides))
        self._place.put(starts, lengths, read, at, steps)
