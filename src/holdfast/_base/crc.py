"""CRC-32 at the speed of memory, and the CRC of a whole from those of its parts.

The sums are zlib's. ISA-L takes them more than twice as fast; where there is no build of it, zlib itself does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

try:
    from isal.isal_zlib import crc32 as _fast_crc32
except ImportError:  # pragma: no cover - a matter of the platform
    from zlib import crc32 as _fast_crc32

crc32: Callable[..., int] = _fast_crc32
"""``zlib.crc32``, faster."""

_POLYNOMIAL = 0xEDB88320


def combined(first: int, second: int, second_length: int) -> int:
    """The CRC of two runs of bytes, one behind the other, from the CRCs of both.

    >>> combined(crc32(b"hold"), crc32(b"fast"), 4) == crc32(b"holdfast")
    True
    """
    return _applied(_passing(second_length), first) ^ second


@lru_cache(maxsize=256)
def _passing(length: int) -> tuple[int, ...]:
    """What so many zero bytes do to a CRC: a matrix over bits, as one number for each bit that it is applied to."""
    matrix = _one_zero_bit()
    whole: tuple[int, ...] = tuple(1 << bit for bit in range(32))
    bits = 8 * length
    while bits:
        if bits & 1:
            whole = _product(matrix, whole)
        matrix = _product(matrix, matrix)
        bits >>= 1
    return whole


def _one_zero_bit() -> tuple[int, ...]:
    return (_POLYNOMIAL, *(1 << bit for bit in range(31)))


def _product(outer: tuple[int, ...], inner: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_applied(outer, column) for column in inner)


def _applied(matrix: tuple[int, ...], vector: int) -> int:
    result, bit = 0, 0
    while vector:
        if vector & 1:
            result ^= matrix[bit]
        vector >>= 1
        bit += 1
    return result
