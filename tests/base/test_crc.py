"""CRC-32: zlib's sums, whoever takes them, and the sum of a whole from those of its parts."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from holdfast._base.crc import combined, crc32


@given(data=st.binary(max_size=500), start=st.integers(0, 2**32 - 1))
def test_the_sums_are_those_of_zlib(data: bytes, start: int) -> None:
    assert crc32(data, start) == zlib.crc32(data, start)
    assert crc32(memoryview(bytearray(data))) == zlib.crc32(data)


@given(first=st.binary(max_size=300), second=st.binary(max_size=300))
def test_two_parts_give_the_sum_of_the_whole(first: bytes, second: bytes) -> None:
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_long_parts_count_by_their_length() -> None:
    zeros = bytes(5_000_011)

    assert combined(zlib.crc32(b"before"), zlib.crc32(zeros), len(zeros)) == zlib.crc32(b"before" + zeros)
