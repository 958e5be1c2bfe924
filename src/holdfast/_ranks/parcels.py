"""Bytes from one rank of a group to another, each parcel with a note that says what it is.

The sender decides what comes next; a receiver takes parcels until it is sent the end. So a sender
that fails can say so at any time, and nobody is left waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from holdfast._compat.groups import device_of_messages
from holdfast._ranks.shared_steps import Attempt, Collectives

_NO_MORE = -1


@dataclass(frozen=True)
class Note:
    """What is written on a parcel."""

    number: int
    """Which of the things that the receiver expects this is a part of."""
    nbytes: int
    """The size of the parcel."""
    left: int
    """How many bytes of the same thing are still to come."""


class Parcels:
    """The way between the coordinator of ``ranks``, who sends, and every other rank, which receives."""

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks
        self._device = device_of_messages(ranks.group)

    def send(self, rank: int, note: Note, content: torch.Tensor) -> None:
        """Send bytes, which must be in contiguous CPU memory."""
        try:
            self._send(rank, torch.tensor([note.number, note.nbytes, note.left]))
        finally:
            # A Ctrl-C that comes while the note is on its way must not keep back what the note announces.
            if note.nbytes:
                self._send(rank, content)

    def end(self, ranks: Iterable[int]) -> None:
        """Send ranks the end: nothing else will come. One that cannot be reached does not keep it from the others."""
        attempts = [Attempt(partial(self._send, rank, torch.tensor([_NO_MORE, 0, 0]))) for rank in ranks]
        for attempt in attempts:
            attempt.resume_failure()

    def arriving(self) -> Iterator[tuple[Note, torch.Tensor]]:
        """What the coordinator sends to this rank, until there is no more."""
        while True:
            number, nbytes, left = self._receive(3, torch.int64).tolist()
            if number == _NO_MORE:
                return
            content = self._receive(nbytes, torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
            yield Note(number, nbytes, left), content

    def _send(self, rank: int, content: torch.Tensor) -> None:
        send: Any = dist.send
        send(content.to(self._device), group=self._ranks.group, group_dst=rank)

    def _receive(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        place = torch.empty(count, dtype=dtype, device=self._device)
        receive: Any = dist.recv
        receive(place, group=self._ranks.group, group_src=self._ranks.coordinator_rank)
        return place.cpu()
