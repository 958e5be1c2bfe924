"""How far a load has come, and what becomes of that which an error left half read."""

from __future__ import annotations

from typing import Protocol


class HalfRead(Protocol):
    """Something that is being read into the state."""

    def clear(self) -> bool:
        """Leave zeros where there may be a part of it. False if nothing was read yet."""


class Progress:
    """Counts the items of one rank."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.applied = 0
        self.bytes_read = 0
        self._under_way: dict[int, HalfRead] = {}
        self._cleared = 0

    def begin(self, reading: HalfRead) -> None:
        """Something is going to be read straight into the state."""
        self._under_way[id(reading)] = reading

    def end(self, reading: HalfRead, items: int) -> None:
        """It is there, whole and undamaged."""
        del self._under_way[id(reading)]
        self.applied += items

    def clear_what_is_half_read(self) -> None:
        """After an error, when nothing is being read any more."""
        self._cleared += sum(reading.clear() for reading in self._under_way.values())
        self._under_way = {}

    def how_far(self) -> str:
        """What had already happened to the state when reading failed."""
        return how_far(self.applied, self.total, self._cleared)


def how_far(applied: int, total: int, cleared: int = 0) -> str:
    """What had already happened to the state when reading failed."""
    zeros = f" {cleared} tensor(s) that were being read are zero now." if cleared else ""
    if applied == 0:
        return f"None of the {total} item(s) of this rank had been loaded.{zeros}"
    return (
        f"{applied} of {total} item(s) of this rank had been loaded already: the state is a mix of old and new.{zeros}"
    )
