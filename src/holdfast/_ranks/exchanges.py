"""What ranks say to each other: all of it is a question that goes up a tree of ranks, and an answer that comes down.

So every exchange costs each rank a message to its leader and one from it, and no rank goes on before all have asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from holdfast._ranks.interrupts import interrupts_wait

Join = Callable[[list[bytes]], bytes]
"""Makes one payload of those of neighbouring ranks, which are in the order of the ranks. It must not fail."""

_SIZE = 8
"""Bytes of the number in front of each entry of a list."""


class Link(Protocol):
    """How one rank reaches the others of its group. Ranks here are positions in the group."""

    rank: int
    members: tuple[int, ...]
    """The global ranks of the group."""

    def ask(self, payload: bytes, join: Join | None = None, *, last: bool = False) -> bytes | None:
        """Send what this rank has up the tree, joined on the way (put together as it is, without ``join``).

        Rank 0 gets what all have, the others get None. Each of them has to ``answer`` next. If this is the ``last``
        exchange, the round is over with its answer.
        """
        ...

    def answer(self, payload: bytes | None, *, only: int | None = None, split: bool = False) -> bytes:
        """What rank 0 gives, on every rank. The others may give anything.

        With ``only`` that rank alone gets it. With ``split`` rank 0 gives a list (``as_list``) with an entry for each
        rank, which gets its own.
        """
        ...


class Exchanges:
    """The usual exchanges, made of questions and answers. A mixin for links."""

    rank: int
    members: tuple[int, ...]

    def ask(self, payload: bytes, join: Join | None = None, *, last: bool = False) -> bytes | None:
        """See ``Link``."""
        raise NotImplementedError

    def answer(self, payload: bytes | None, *, only: int | None = None, split: bool = False) -> bytes:
        """See ``Link``."""
        raise NotImplementedError

    @interrupts_wait()
    def combine(self, payload: bytes, join: Join, *, last: bool = False) -> bytes:
        """What all ranks gave, joined, on every rank."""
        return self.answer(self.ask(payload, join, last=last))

    @interrupts_wait()
    def gather(self, payload: bytes, root: int) -> list[bytes] | None:
        """What every rank gave, on ``root`` alone."""
        joined = self.ask(as_list([payload]))
        answer = self.answer(joined if root else b"", only=root)
        if self.rank != root:
            return None
        return list(entries_of(answer if joined is None or root else joined))

    @interrupts_wait()
    def all_gather(self, payload: bytes) -> list[bytes]:
        """What every rank gave, on every rank."""
        return list(entries_of(self.answer(self.ask(as_list([payload])))))

    @interrupts_wait()
    def broadcast(self, payload: bytes | None, root: int) -> bytes:
        """What ``root`` gave, on every rank."""
        mine = payload or b"" if self.rank == root else b""
        if root:
            return self.answer(self.ask(mine))
        self.ask(b"")
        return self.answer(mine)

    @interrupts_wait()
    def scatter(self, payloads: Sequence[bytes] | None, root: int) -> bytes:
        """The n-th of ``root``'s payloads on rank n."""
        mine = as_list(payloads or ()) if self.rank == root else b""
        if root:
            return self.answer(self.ask(mine), split=True)
        self.ask(b"")
        return self.answer(mine, split=True)


def as_list(entries: Sequence[bytes]) -> bytes:
    """Payloads as one. Lists that are put together are one list.

    >>> list(entries_of(as_list([b"a", b""]) + as_list([b"bcd"])))
    [b'a', b'', b'bcd']
    """
    return b"".join(part for entry in entries for part in (len(entry).to_bytes(_SIZE, "little"), entry))


def entries_of(encoded: bytes) -> Iterator[bytes]:
    """The payloads of a list."""
    for begin, end in _places_in(encoded):
        yield encoded[begin:end]


def split_list(encoded: bytes, counts: Sequence[int]) -> list[bytes]:
    """Cut a list into lists of so many entries each.

    >>> [list(entries_of(part)) for part in split_list(as_list([b"a", b"b", b"c"]), [2, 1])]
    [[b'a', b'b'], [b'c']]
    """
    ends = [end for _, end in _places_in(encoded)]
    if len(ends) != sum(counts):
        raise ValueError(f"a list of {len(ends)} entries was given for {sum(counts)} ranks")
    parts, at, number = [], 0, 0
    for count in counts:
        number += count
        end = ends[number - 1] if count else at
        parts.append(encoded[at:end])
        at = end
    return parts


def _places_in(encoded: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(encoded):
        begin = at + _SIZE
        at = begin + int.from_bytes(encoded[at:begin], "little")
        yield begin, at
