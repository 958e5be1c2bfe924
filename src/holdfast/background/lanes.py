"""Which background saves wait for which.

Each process group has a lane of its own, and all its ranks put their saves into it in the same order; so the saves of a
group never get in each other's way, and groups never wait for each other.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

import torch.distributed as dist

from holdfast.background.queues import Claim, SaveQueue
from holdfast.coordination.private_group import PrivateGroup, forget_private_group, private_group_of


@dataclass(eq=False)
class Lane:
    """What the background saves of one group of ranks share. ``link`` is None for a process that saves alone."""

    link: PrivateGroup | None
    queue: SaveQueue = field(default_factory=SaveQueue)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, *, alone: bool) -> Lane:
        """The lane of a process group, or of this process alone. The same one each time."""
        link = None if alone else private_group_of(group)
        with _lock:
            if link not in _lanes:
                _close_lanes_of_destroyed_groups()
                _lanes[link] = cls(link)
            return _lanes[link]


_lanes: dict[PrivateGroup | None, Lane] = {}
_lock = threading.Lock()


def all_lanes() -> list[Lane]:
    """The lanes that are in use, or were."""
    with _lock:
        return list(_lanes.values())


def wait_for_conflicting_saves(claim: Claim) -> None:
    """Return when no background save of this process uses what ``claim`` names."""
    for lane in all_lanes():
        lane.queue.wait_for(claim)


def _close_lanes_of_destroyed_groups() -> None:
    for link, lane in list(_lanes.items()):
        if link is not None and link.is_orphaned() and lane.queue.is_idle():
            del _lanes[link]
            forget_private_group(link)


def _start_anew_in_forked_child() -> None:
    """A forked child has copies of the lanes, without the threads that work on them. Somebody may hold the lock."""
    global _lock
    _lock = threading.Lock()
    _lanes.clear()


os.register_at_fork(after_in_child=_start_anew_in_forked_child)
