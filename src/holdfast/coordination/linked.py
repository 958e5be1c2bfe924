"""Collectives over a link of our own instead of a process group of the program."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar, cast

from holdfast.coordination.collectives import Collectives
from holdfast.coordination.private_group import Link

T = TypeVar("T")


class LinkedCollectives(Collectives):
    """The same steps as on a process group; only the way that the messages take is another."""

    def __init__(self, link: Link, coordinator_rank: int = 0) -> None:
        super().__init__(None, False, coordinator_rank)
        self._link = link
        self.use_dist = True
        self.rank = link.rank
        self.world_size = len(link.members)
        self.coordinator_rank = coordinator_rank
        self.is_coordinator = self.rank == coordinator_rank
        self.global_coordinator_rank = link.members[coordinator_rank]

    def get_rank(self) -> int:
        """The rank in the group."""
        return self.rank

    def get_world_size(self) -> int:
        """How many ranks there are."""
        return self.world_size

    def global_ranks(self) -> tuple[int, ...]:
        """The ranks of the group, as the whole job counts them."""
        return self._link.members

    def broadcast_object(self, object: T | None) -> T:
        """The coordinator's object, on every rank."""
        payload = pickle.dumps(object) if self.is_coordinator else None
        return cast(T, _opened(self._link.broadcast(payload, self.coordinator_rank)))

    def gather_object(self, object: T) -> list[T] | None:
        """All ranks' objects on the coordinator, None elsewhere."""
        gathered = self._link.gather(pickle.dumps(object), self.coordinator_rank)
        return None if gathered is None else [_opened(payload) for payload in gathered]

    def all_gather_object(self, object: T) -> list[T]:
        """All ranks' objects on every rank."""
        return [_opened(payload) for payload in self._link.all_gather(pickle.dumps(object))]

    def scatter_object(self, object_list: list[T] | None) -> T:
        """The coordinator's n-th object on rank n."""
        payloads = [pickle.dumps(item) for item in object_list or []] if self.is_coordinator else None
        return cast(T, _opened(self._link.scatter(payloads, self.coordinator_rank)))

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._link.all_gather(b"")


def _opened(payload: bytes) -> Any:
    return pickle.loads(payload)  # noqa: S301 - sent by another rank of this job
