"""Whether what several ranks hold is the same everywhere, found out with one number that the ranks add up.

Every rank has a digest of each thing that others hold too. The lowest of its holders counts it as often as there are
others, with the opposite sign. If all have the same digest, everything cancels out and the sum is 0. If not, it is some
other number, as far as hashes of 128 bits are different.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

_PRIME = (1 << 127) - 1


def share_of_copy(name: str, digest: bytes, *, copies: int, is_first: bool) -> int:
    """What one rank adds for one thing, by the name that all its holders have for it.

    >>> shares = [share_of_copy("a", b"x", copies=3, is_first=first) for first in (True, False, False)]
    >>> added_up(shares)
    0
    >>> added_up([*shares, share_of_copy("b", b"x", copies=2, is_first=True)]) == 0
    False
    """
    hasher = xxhash.xxh3_128(name.encode("utf-8", "surrogatepass"))
    hasher.update(b"\0")
    hasher.update(digest)
    return hasher.intdigest() * (1 - copies if is_first else 1) % _PRIME


def added_up(shares: Iterable[int]) -> int:
    """The sum of shares, and of such sums: 0 if all copies are equal."""
    return sum(shares) % _PRIME
