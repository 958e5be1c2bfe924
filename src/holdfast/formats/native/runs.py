"""Runs of bytes that lie side by side in a file as well as in memory.

They are columns and not objects, since a checkpoint may have very many small tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.tuning import STRAIGHT_FROM

Numbers = npt.NDArray[np.int64]


class Runs(NamedTuple):
    """Columns of the same length, with a row for each run of bytes."""

    file: Numbers
    begin: Numbers
    nbytes: Numbers
    address: Numbers
    """Where in memory the bytes go; 0 if nobody wants them, but they are to be checked."""
    key: Numbers
    """Which of the names that whoever made this has a list of."""

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int, int]]) -> Runs:
        """Columns of these rows: file, begin, nbytes, address, key."""
        return cls(*np.array(rows, np.int64).reshape(-1, 5).T)

    @classmethod
    def joined(cls, parts: Sequence[Runs]) -> Runs:
        """All of these."""
        filled = [part for part in parts if len(part.file)] or list(parts[:1])
        return filled[0] if len(filled) == 1 else cls(*map(np.concatenate, zip(*filled, strict=True)))

    def chosen(self, rows: npt.NDArray[np.bool_] | Numbers) -> Runs:
        """Some of the rows."""
        return Runs(*(column[rows] for column in self))

    def part(self, begin: Numbers, end: Numbers) -> Runs:
        """What lies from ``begin`` to ``end`` of each."""
        address = np.where(self.address == 0, 0, self.address + (begin - self.begin))
        return Runs(self.file, begin, end - begin, address, self.key)


def bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory that somebody else keeps alive."""
    return np.frombuffer(memoryview((ctypes.c_ubyte * nbytes).from_address(address)), np.uint8)


def straight_and_rest(runs: Runs, file_bytes: Numbers, block_bytes: int) -> tuple[Runs, Runs]:
    """Whole blocks that are worth being read straight to where they go, and all that is left."""
    ends = runs.begin + runs.nbytes
    first = -(-runs.begin // block_bytes) * block_bytes
    last = np.where(ends == file_bytes[runs.file], ends, ends // block_bytes * block_bytes)
    straight = last - first >= STRAIGHT_FROM
    if not straight.any():
        return runs.chosen(straight), runs
    long, begin, end = runs.chosen(straight), first[straight], last[straight]
    heads, tails = long.part(long.begin, begin), long.part(end, long.begin + long.nbytes)
    rest = Runs.joined([runs.chosen(~straight), heads.chosen(heads.nbytes > 0), tails.chosen(tails.nbytes > 0)])
    return long.part(begin, end), rest


def cut_at(runs: Runs, step: int) -> Runs:
    """The same bytes, cut wherever the position in the file is a multiple of ``step``."""
    first, last = runs.begin // step, (runs.begin + runs.nbytes - 1) // step
    counts = last - first + 1
    if len(counts) == int(counts.sum()):
        return runs
    whole = runs.chosen(np.repeat(np.arange(len(counts)), counts))
    number = np.arange(len(whole.begin)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    begin = np.maximum(whole.begin, number * step)
    return whole.part(begin, np.minimum(whole.begin + whole.nbytes, (number + 1) * step))
