"""Digests of the blocks that files are cut into."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast.errors import DamagedCheckpointError

Digests = npt.NDArray[np.uint32]


def count_blocks(nbytes: int, block_bytes: int) -> int:
    """How many blocks a file of ``nbytes`` has."""
    return -(-nbytes // block_bytes)


def digest_blocks(data: Any, block_bytes: int) -> Digests:
    """The digests of the blocks of ``data``, which begins with a block; the last one may be shorter.

    >>> digest_blocks(b"a" * 5000, 4096).shape
    (2,)
    """
    view = memoryview(data).cast("B")
    return as_digests(long_digests(view, 0, view.nbytes, block_bytes))


def long_digests(view: memoryview, begin: int, end: int, block_bytes: int) -> list[int]:
    """The digests of the blocks from ``begin`` to ``end``, with more bits than are compared. As cheap as can be."""
    digest = xxhash.xxh3_64_intdigest
    return [digest(view[at : at + block_bytes]) for at in range(begin, end, block_bytes)]


def as_digests(long: list[int]) -> Digests:
    """The bits of digests that are stored and compared.

    >>> as_digests([0x1234567890ABCDEF]) == 0x90ABCDEF
    array([ True])
    """
    return np.array(long, np.uint64).astype(np.uint32)


# How damage of a checkpoint is reported.


_MOST_TEXT = 200


def refuse(file: str, what: str, expected: Any, found: Any, key: str | None = None) -> NoReturn:
    """Raise for a file that is not what it must be. ``key`` is what it is needed for."""
    needed = "" if key is None else f"; it is needed for {key!r}"
    raise DamagedCheckpointError(
        f"{file} {what} (expected {_short(expected)}, found {_short(found)}{needed}). Copy the checkpoint again with "
        "all its files, or load another one.",
        file=file,
        key=key,
        expected=expected,
        found=found,
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"
