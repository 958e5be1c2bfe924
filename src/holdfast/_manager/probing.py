"""Small objects by which ranks find out what they may do at a place, and whether it is the same place for all."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress

from holdfast._manager.preflight_report import Problem
from holdfast._stores.roots import Root

_RECORD = "record"
_FOLDER = re.compile(r"preflight-[0-9a-f]{12}")
_OBJECT = re.compile(rf"{_RECORD}|(?:rank|measured)-[0-9]+|\.{_RECORD}\.[0-9a-f]{{8}}\.tmp")


class Probe:
    """A sub-folder of a root that looks like a checkpoint and is none. Every rank writes one object to it."""

    def __init__(self, root: Root, token: str, rank: int) -> None:
        self.name = folder_of_probe(token)
        self.store = root.child(self.name)
        self._root = root
        self._token = token
        self._rank = rank

    def write(self) -> None:
        """What a rank does in a save: write a new object, flush it, read it again."""
        name, content = _name(self._rank), self._content(self._rank)
        self.store.put(name, content)
        self.store.sync()
        if self.store.read(name) != content:
            raise OSError(f"{self.store.path_of(name)} does not hold what was written to it")

    def commit(self) -> None:
        """What the coordinator does in a save: put a record in place, and replace it."""
        first, second = self._content(self._rank), self._content(self._rank) * 2
        self.store.commit(_RECORD, first, replaces=None)
        self.store.commit(_RECORD, second, replaces=first)
        if self.store.read(_RECORD) != second:
            raise OSError(f"{self.store.path_of(_RECORD)} does not hold what was committed to it")

    def seen(self, writers: Collection[int]) -> frozenset[int]:
        """The ranks whose objects are to be seen from here, as they wrote them."""
        return frozenset(rank for rank in writers if self._sees(rank))

    def delete(self) -> None:
        """Delete what this rank wrote."""
        self.store.delete([_name(self._rank), _RECORD])

    def forget(self) -> None:
        """Remove the folder, when all ranks have deleted what they wrote."""
        with suppress(FileNotFoundError):  # another rank was faster
            self._root.remove(self.name)

    def _content(self, rank: int) -> bytes:
        return f"{self._token}: rank {rank} was here\n".encode()

    def _sees(self, rank: int) -> bool:
        try:
            return self.store.read(_name(rank)) == self._content(rank)
        except (OSError, ValueError):
            return False


def folder_of_probe(token: str) -> str:
    """The name of the folder of a probe.

    >>> folder_of_probe("0123456789ab")
    'preflight-0123456789ab'
    """
    return f"preflight-{token}"


def is_probe(folder: str) -> bool:
    """Whether a folder is called like that of a probe."""
    return _FOLDER.fullmatch(folder) is not None


def remove_probe(root: Root, folder: str) -> None:
    """Remove what a probe left when it was killed, and the folder if nothing else is in it."""
    store = root.child(folder)
    store.delete([listed.name for listed in store.list() if _OBJECT.fullmatch(listed.name)])
    root.remove(folder)


def name_of_measured(rank: int) -> str:
    """What a rank writes to measure how fast that is."""
    return f"measured-{rank}"


def _name(rank: int) -> str:
    return f"rank-{rank}"


def find_unshared_disks(location: str, seen: Mapping[int, frozenset[int]]) -> Iterator[Problem]:
    """Ranks that do not see what the others see, given for each rank the ranks whose objects it sees.

    Most ranks are taken to be right; of groups of the same size, the one with the lowest rank.

    >>> both = frozenset({0, 2})
    >>> [problem.ranks for problem in find_unshared_disks("/run", {0: both, 1: frozenset({1}), 2: both})]
    [(1,)]
    """
    groups: dict[frozenset[int], list[int]] = {}
    for rank in sorted(seen):
        groups.setdefault(seen[rank], []).append(rank)
    right = max(groups, key=lambda sees: (len(groups[sees]), -groups[sees][0]), default=frozenset())
    for sees, ranks in groups.items():
        hidden, extra = sorted(right - sees), sorted(sees - right)
        if hidden:
            text = (
                f"{_named(ranks)} cannot see what {_named(hidden)} wrote to {location}, so the place is not shared. "
                "All ranks need a path on a disk that all of them have mounted."
            )
            yield Problem("shared", tuple(ranks), text)
        elif extra:
            text = (
                f"what {_named(extra)} wrote to {location} can be read by {_named(ranks)} and not by "
                f"{_named(groups[right])}. Check the permissions (umask), and what is mounted there."
            )
            yield Problem("shared", tuple(extra), text)


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
