"""The digests of blocks."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast._formats.native.blocks import count_blocks, digest_blocks


@given(st.binary(max_size=300), st.integers(1, 64))
def test_every_block_has_the_lower_32_bits_of_its_hash(data, block):
    expected = [xxhash.xxh3_64(data[at : at + block]).intdigest() % 2**32 for at in range(0, len(data), block)]
    assert digest_blocks(data, block).tolist() == expected
    assert len(expected) == count_blocks(len(data), block)


@pytest.mark.parametrize("data", [np.arange(100, dtype=np.float32), memoryview(b"x" * 400), bytearray(400)])
def test_any_memory_can_be_digested(data):
    assert digest_blocks(data, 128).tolist() == digest_blocks(bytes(data), 128).tolist()


def test_a_known_digest():
    """So that nobody changes the hash function without noticing: all checkpoints would seem damaged."""
    assert digest_blocks(b"holdfast", 4096).tolist() == [xxhash.xxh3_64_intdigest(b"holdfast") & 0xFFFFFFFF]
    assert digest_blocks(b"", 4096).tolist() == []
    assert f"{digest_blocks(b'holdfast', 4096)[0]:08x}" == "d3ad850b"
