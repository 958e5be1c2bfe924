"""Digests of the blocks that files are cut into."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

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
    digest = xxhash.xxh3_64_intdigest
    low = 0xFFFFFFFF
    return np.fromiter(
        (digest(view[at : at + block_bytes]) & low for at in range(0, view.nbytes, block_bytes)),
        dtype=np.uint32,
        count=count_blocks(view.nbytes, block_bytes),
    )
