"""Bytes from rank to rank: memory of one rank is filled with what is in the memory of another.

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

        Returns when none of the memory is used any more. If it raises, which ends the call for all ranks, the memory
        stays alive for as long as something may still be written to it.
        """
        ...


WaitsFor: TypeAlias = Callable[[Sequence[int]], None]
"""Says whom a transfer waits for: all of them at once, if there are several."""

Wait: TypeAlias = Callable[[Callable[[WaitsFor], None]], None]
"""Waits for what a function does, as long as the ranks that it waits for make progress."""


def _wait_here(work: Callable[[WaitsFor], None]) -> None:
    work(lambda ranks: None)


class GroupTransfers:
    """Transfers over a process group of the program, such as one with a fast backend for the memory of devices.

    A backend that has nothing to do with host memory gets the bytes by way of its device. A group that lost a rank in
    the middle of a transfer is of no more use: its messages do not fit together any longer.
    """

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int], wait: Wait | None = None) -> None:
        """``members`` are the ranks of the call, by their numbers in the job.

        Without ``wait`` a rank is waited for as long as the group does.
        """
        known = set(dist.get_process_group_ranks(group))
        if not known.issuperset(members):
            raise ValueError(
                f"transfer_group has no rank {sorted(set(members) - known)} of those that load. Give a group of all "
                "of them, or none."
            )
        self._group = group
        self._members = members
        self._device = device_of_messages(group)
        self._wait = _wait_here if wait is None else wait

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
        current = _current_device(self._device)

        def work(waits_for: WaitsFor) -> None:
            # In a thread that holds on to the memory until the backend is done with it.
            if current is not None:
                torch.get_device_module(self._device).set_device(current)
            try:
                self._transfer(sends, receives, waits_for)
            except Exception as error:
                raise ConnectionLostError(
                    f"the transfer group lost its connection, as it happens when a rank dies: {error}. Check the logs "
                    "of the other ranks and restart the job; the checkpoints that were committed are not affected."
                ) from error

        self._wait(work)

    def _transfer(self, sends: Sequence[Parcel], receives: Sequence[Parcel], waits_for: WaitsFor) -> None:
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
        ranks = [rank for _, rank, _ in ordered]
        waits_for(list(dict.fromkeys(ranks)))  # backends may connect only now
        works = dist.batch_isend_irecv(operations)
        if len(works) == len(ranks):
            for rank, each in zip(ranks, works, strict=True):
                waits_for([rank])
                each.wait()
        else:  # the whole batch is one operation
            for each in works:
                each.wait()
        if self._device.type != "cpu":
            for (_, content), (_, _, tensor) in zip(receives, incoming, strict=True):
                torch.from_numpy(content).copy_(tensor)


def _current_device(device: torch.device) -> Any:
    """The device of that kind which this thread uses. Each thread has its own."""
    return None if device.type == "cpu" else torch.get_device_module(device).current_device()
