"""Bytes from rank to rank: memory of one rank is filled with what is in the memory of another.

Everybody knows beforehand what comes from whom, so that nothing but the bytes is sent: no headers, nothing pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from holdfast._compat.groups import device_of_messages
from holdfast.errors import ConnectionLostError

Bytes: TypeAlias = npt.NDArray[np.uint8]

_TAG = 0x484F
"""Of messages over a group of the program, to keep them apart from messages of the program."""


class Parcel(NamedTuple):
    """Contiguous memory, and the rank to which its bytes go, or from which they come."""

    rank: int
    content: Bytes


@runtime_checkable
class Transfers(Protocol):
    """A way to send bytes from rank to rank. Ranks are positions in the group of the call."""

    @property
    def neighbours(self) -> range:
        """The ranks that can all send each other bytes, this one among them."""
        ...

    @property
    def strides(self) -> Sequence[int]:
        """The tree of groups (see ``trees``) in each of which any two ranks can send each other bytes."""
        ...

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Send all and receive all; whoever has a parcel for another one is expected to, in the same order.

        Over a group of the program there is at most one parcel from each rank for each other one.

        Returns, or raises, when none of the memory is used any more. If a rank cannot be reached, the call is over for
        all of them.
        """
        ...


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

    @property
    def neighbours(self) -> range:
        """All ranks of the call."""
        return range(len(self._members))

    @property
    def strides(self) -> Sequence[int]:
        """One group of all."""
        return 1, len(self._members)

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Send all and receive all."""
        if not sends and not receives:
            return
        # In one batch, and by ascending ranks on both sides: backends without tags match messages by their order.
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
