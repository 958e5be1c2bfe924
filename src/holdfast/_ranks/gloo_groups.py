"""Messages between the ranks of one small group, over gloo: frames of a fixed size, and whatever does not fit in one.

Every message is from one rank to one other. The next message from a rank is received in the order in which they were
sent, whatever it is about.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

_HEADER = struct.Struct("<B?xxiIIQ")
_FRAME = 512
"""Bytes. It makes no difference to gloo whether they are 50 or 500."""
_INLINE_BYTES = _FRAME - _HEADER.size

_FRAMES, _TRANSFERS, _NOTHING = range(3)
"""Tags. Nobody ever sends with the last one, or with a higher one."""

_FOR_EVER = timedelta(days=30)
"""Who waits is watched, and woken by ``hang_up``."""


class Frame(NamedTuple):
    """One message."""

    status: int
    round: int
    exchange: int
    payload: bytes = b""
    split: bool = False
    """Whether the payload is a list, of which each rank gets its own entry."""
    only: int = -1
    """The rank that the payload is for, if it is not for all."""


class GlooGroup:
    """Ranks that are connected to each other. ``members`` has the numbers by which they are called here."""

    def __init__(self, members: Sequence[int], rank: int, backend: Any) -> None:
        self.members = members
        self._rank = rank
        self._backend = backend
        self._inboxes: dict[int, tuple[bytearray, torch.Tensor]] = {}

    @classmethod
    def connect(cls, members: Sequence[int], rank: int, store: Store, patience: timedelta) -> GlooGroup:
        """Connect to all others, which do the same."""
        position = list(members).index(rank)
        return cls(members, rank, dist.ProcessGroupGloo(store, position, len(members), patience))

    def send(self, rank: int, frame: Frame) -> Callable[[], None]:
        """Begin to send; the function waits until it is sent. A rank that is not there yet can fetch it later."""
        works = []
        box = bytearray(_FRAME)
        payload = frame.payload
        _HEADER.pack_into(box, 0, frame.status, frame.split, frame.only, frame.round, frame.exchange, len(payload))
        box[_HEADER.size : _HEADER.size + min(len(payload), _INLINE_BYTES)] = payload[:_INLINE_BYTES]
        to = self.members.index(rank)
        works.append(self._backend.send([_over(box)], to, _FRAMES))
        if len(payload) > _INLINE_BYTES:
            works.append(self._backend.send([_over(bytearray(payload[_INLINE_BYTES:]))], to, _FRAMES))

        def wait() -> None:
            for work in works:
                work.wait(_FOR_EVER)
            # On the same machine, Linux wakes up whoever receives it on the processor of the sender, which it has to
            # wait for otherwise.
            _let_others_run()

        return wait

    def receive(self, rank: int) -> Callable[[], Frame]:
        """Be ready for the next message of a rank; the function waits for it. Only one at a time from each."""
        box, place = self._inboxes.get(rank) or self._new_inbox(rank)
        source = self.members.index(rank)
        work = self._backend.recv([place], source, _FRAMES)

        def wait() -> Frame:
            work.wait(_FOR_EVER)
            status, split, only, round_number, exchange, size = _HEADER.unpack_from(box)
            payload = bytes(memoryview(box)[_HEADER.size : _HEADER.size + min(size, _INLINE_BYTES)])
            if size > _INLINE_BYTES:
                rest = bytearray(size - _INLINE_BYTES)
                self._backend.recv([_over(rest)], source, _FRAMES).wait(_FOR_EVER)
                payload += rest
            return Frame(status, round_number, exchange, payload, split, only)

        return wait

    def _new_inbox(self, rank: int) -> tuple[bytearray, torch.Tensor]:
        box = bytearray(_FRAME)
        self._inboxes[rank] = box, _over(box)
        return self._inboxes[rank]

    def send_bytes(self, rank: int, content: torch.Tensor) -> Callable[[], None]:
        """Begin to send what is in contiguous memory; the function waits until it may be changed again."""
        work = self._backend.send([content], self.members.index(rank), _TRANSFERS)
        return lambda: work.wait(_FOR_EVER) and None

    def receive_bytes(self, rank: int, place: torch.Tensor) -> Callable[[], None]:
        """Be ready for as many bytes as there is place for; the function waits until they are there."""
        work = self._backend.recv([place], self.members.index(rank), _TRANSFERS)
        return lambda: work.wait(_FOR_EVER) and None

    def hang_up(self) -> None:
        """Close the connections, and have whoever waits for a message raise, here and at the other ends.

        Gloo closes all connections of a group when somebody has waited too long on one of them. That must be one that
        is still open: a rank that has hung up itself cannot be waited for.
        """
        backend = self._backend
        if backend is None:
            return
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1  # each has connections of its own
        for other in [each for each, rank in enumerate(self.members) if rank != self._rank]:
            for tag in range(_NOTHING, _NOTHING + interfaces):
                with suppress(Exception):
                    place = torch.empty(1, dtype=torch.uint8, device="cpu")
                    backend.recv([place], other, tag).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """End the connection."""
        self._backend = None


_let_others_run: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


def _over(memory: bytearray) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
