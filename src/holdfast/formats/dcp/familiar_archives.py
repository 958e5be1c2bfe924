"""Archives that differ from one seen before only in their elements and CRCs: they need not be taken apart again.

Of thousands of small tensors in a checkpoint most have the same dtype and shape, and then all bytes around their
elements are the same but for a few sums.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from holdfast.formats.dcp.zip_layout import (
    CENTRAL,
    CENTRAL_MAGIC,
    CRC_FOLLOWS,
    DESCRIPTOR,
    END,
    END_MAGIC,
    Entry,
    read_directory,
)

_MOST = 1024
"""Forms that are remembered. A model has a few dozen; where every tensor has its own, remembering them is no use."""
_CRC_IN_LINE = 16
_UNCHECKED = ".data/serialization_id"
"""An id of the content, which differs from archive to archive. Nothing is made of it."""


class Familiar(NamedTuple):
    """What is in an archive of a form that is known."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    elements: memoryview
    crc: int


class _Form(NamedTuple):
    """What archives of one form have in common."""

    same: tuple[tuple[int, int], ...]
    """The ranges that are the same in all of them."""
    content: bytes
    """What is in those."""
    dtype: torch.dtype
    sizes: tuple[int, ...]
    payload: Entry
    crc_at: int
    """Where the directory has the CRC of the elements."""


class FamiliarArchives:
    """Remembers a form for every length."""

    def __init__(self) -> None:
        self._forms: dict[int, _Form] = {}
        self._lengths: set[int] = set()  # a number for every small blob at most, of which the index has much more

    def recognize(self, blob: memoryview) -> Familiar | None:
        """What is in an archive, if its form is known."""
        form = self._forms.get(len(blob))
        if form is None or b"".join([blob[begin:end] for begin, end in form.same]) != form.content:
            return None
        offset, length, _ = form.payload
        crc = int.from_bytes(blob[form.crc_at : form.crc_at + 4], "little")
        return Familiar(form.dtype, form.sizes, blob[offset : offset + length], crc)

    def is_worth_learning(self, length: int) -> bool:
        """Whether there was one of that length before: forms that are met once are not worth remembering."""
        if length in self._lengths:
            return len(self._forms) < _MOST
        self._lengths.add(length)
        return False

    def remember(self, blob: memoryview, position: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        """Learn from a sound archive, whose elements are a row-major array at ``position``."""
        entries = read_directory(lambda at, length: bytes(blob[at : at + length]), len(blob), source="an archive")
        lines = _lines(blob)
        name = next((name for name, entry in entries.items() if entry.offset == position and entry.length), None)
        if name is None or name not in lines or entries[name].crc is None:
            return
        differing = []
        for other in {name, _UNCHECKED} & entries.keys() & lines.keys():
            entry, (crc_at, flags) = entries[other], lines[other]
            # With the CRC that may follow it, and the one in the directory.
            behind = DESCRIPTOR.size if flags & CRC_FOLLOWS else 0
            differing.append((entry.offset, entry.offset + entry.length + behind))
            differing.append((crc_at, crc_at + 4))
        edges = sorted([(0, 0), *differing, (len(blob), len(blob))])
        same = tuple((before, after) for (_, before), (after, _) in pairwise(edges) if after > before)
        content = b"".join([blob[begin:end] for begin, end in same])
        self._forms[len(blob)] = _Form(same, content, dtype, sizes, entries[name], lines[name][0])


def _lines(blob: memoryview) -> dict[str, tuple[int, int]]:
    """Where the directory has each CRC, and the flags of the entry; nothing if the archive is of no simple kind."""
    start = len(blob) - END.size
    if start < 0 or blob[start : start + 4] != END_MAGIC:
        return {}
    _, _, _, _, count, _, at, _ = END.unpack_from(blob, start)
    found = {}
    for _ in range(count):
        if at + CENTRAL.size > len(blob) or blob[at : at + 4] != CENTRAL_MAGIC:
            return {}
        header = CENTRAL.unpack_from(blob, at)
        names, extras, comments = header[10:13]
        name = bytes(blob[at + CENTRAL.size : at + CENTRAL.size + names])
        found[name.partition(b"/")[2].decode("latin-1")] = at + _CRC_IN_LINE, header[3]
        at += CENTRAL.size + names + extras + comments
    return found
