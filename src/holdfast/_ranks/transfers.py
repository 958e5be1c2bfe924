"""Bytes from rank to rank: memory that is filled on one rank with what lies in the memory of another.

Everybody knows beforehand what comes from whom, so that nothing but the bytes is sent: no headers, nothing pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from holdfast._compat.groups import device_of_messages
from holdfast.errors import ConnectionLostError

Bytes: TypeAlias = npt.NDArray[np.uint8]

LARGEST_CELL = 32
"""The most ranks that send each other bytes. Each of them is connected to each other."""

_TAG = 0x484F
"""Of messages over a group of the program, so that they do not get mixed up with messages of the program."""


class Parcel(NamedTuple):
    """Contiguous memory, and the rank to which its bytes go, or from which they come."""

    rank: int
    content: Bytes


@runtime_checkable
class Transfers(Protocol):
    """A way to send bytes from rank to rank. Ranks are positions in the group of the call."""

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Send all and receive all; each rank has at most one parcel for each other one, which expects it.

        Returns, or raises, when none of the memory is used any more. A rank that cannot be reached is passed over from
        then on, so that those that can be reached get what they wait for.
        """
        ...


def cell_of(rank: int, size: int, largest: int = LARGEST_CELL) -> range:
    """The ranks that a rank exchanges bytes with, itself among them.

    >>> cell_of(1, 8), cell_of(33, 40)
    (range(0, 8), range(32, 40))
    """
    first = rank // largest * largest
    return range(first, min(first + largest, size))


Posted: TypeAlias = Callable[[], object]
"""Waits for a message that is under way."""


class PostedTransfers:
    """Transfers over anything that can begin to send and to receive a tensor of bytes."""

    def __init__(
        self,
        send: Callable[[int, torch.Tensor], Posted],
        receive: Callable[[int, torch.Tensor], Posted],
    ) -> None:
        self._send = send
        self._receive = receive
        self._lost: dict[int, Exception] = {}

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Send all and receive all."""
        posted: list[tuple[int, Posted]] = []
        for begin, parcels in ((self._receive, receives), (self._send, sends)):
            for rank, content in parcels:
                if rank not in self._lost:
                    try:
                        posted.append((rank, begin(rank, torch.from_numpy(content))))
                    except Exception as error:
                        self._lost[rank] = error
        for rank, wait in posted:
            try:
                wait()
            except Exception as error:
                self._lost.setdefault(rank, error)
        lost = sorted({parcel.rank for parcel in (*sends, *receives)} & self._lost.keys())
        if lost:
            cause = self._lost[lost[0]]
            raise ConnectionLostError(
                f"the connection to rank {', '.join(map(str, lost))} is lost, as it happens when a rank dies: {cause}. "
                "Check its log and restart the job; the checkpoints that were committed are not affected."
            ) from cause


def over_backend(backend: Any) -> PostedTransfers:
    """Transfers over a backend of gloo."""
    return PostedTransfers(
        lambda rank, content: backend.send([content], rank, _TAG).wait,
        lambda rank, content: backend.recv([content], rank, _TAG).wait,
    )


class GroupTransfers:
    """Transfers over a process group of the program, such as one with a fast backend for the memory of devices.

    A backend that has nothing to do with host memory gets the bytes by way of its device.
    """

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int]) -> None:
        """``members`` are the ranks of the call, by their numbers in the job."""
        known = set(dist.get_process_group_ranks(group))
        if not known.issuperset(members):
            raise ValueError(
                f"transfer_group has no rank {sorted(set(members) - known)} of those that load. Give a group of all "
                "of them, or none."
            )
        self._group = group
        self._members = members
        self._device = device_of_messages(group)

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Send all and receive all."""
        if not sends and not receives:
            return
        # In one batch, and by ascending ranks on both sides: so do backends want it that know no tags.
        outgoing = [(dist.isend, rank, torch.from_numpy(content).to(self._device)) for rank, content in sends]
        incoming = [
            (dist.irecv, rank, torch.empty(content.nbytes, dtype=torch.uint8, device=self._device))
            if self._device.type != "cpu"
            else (dist.irecv, rank, torch.from_numpy(content))
            for rank, content in receives
        ]
        ordered = sorted([*outgoing, *incoming], key=lambda entry: entry[1])
        operations = [
            dist.P2POp(operation, tensor, self._members[rank], self._group, _TAG) for operation, rank, tensor in ordered
        ]
        try:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        except Exception as error:
            raise ConnectionLostError(
                f"the transfer group lost its connection, as it happens when a rank dies: {error}. Check the logs of "
                "the other ranks and restart the job; the checkpoints that were committed are not affected."
            ) from error
        if self._device.type != "cpu":
            for (_, content), (_, _, tensor) in zip(receives, incoming, strict=True):
                torch.from_numpy(content).copy_(tensor)
