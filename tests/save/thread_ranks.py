"""Many ranks in one process, each a thread with what a rank would have: the real planning, writing and commit.

A rank's part of a tensor is given with the rule that divides it, as a background save has it: private copies of parts.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

from holdfast._base.boxes import Box
from holdfast._base.divisions import Division
from holdfast._formats.native.encoding import SLOT
from holdfast._formats.tensor_bytes import tensor_pieces
from holdfast._layout.descriptions import TensorDescription, digest_pieces
from holdfast._ranks.shared_steps import Collectives
from holdfast._save.capture import Captured
from holdfast._save.captured_copies import CopiedTensor
from holdfast.errors import CheckpointException

T = TypeVar("T")


class Table:
    """Where the threads put their messages."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.slots: list[Any] = [None] * world_size

    def exchange(self, rank: int, payload: Any) -> list[Any]:
        self.slots[rank] = payload
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


class ThreadRanks(Collectives):
    """A rank that is a thread. It counts the bytes that it sends and gets."""

    def __init__(self, table: Table, rank: int) -> None:
        super().__init__(None, False, 0)
        self.use_dist = True
        self.rank, self.world_size = rank, table.world_size
        self.is_coordinator = rank == 0
        self._table = table
        self.messages = self.sent = self.received = 0

    def global_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.world_size))

    def _exchange(self, value: Any, *, sends: bool = True, gets: Callable[[list[bytes]], list[bytes]]) -> list[bytes]:
        payload = pickle.dumps(value)
        found = gets(self._table.exchange(self.rank, payload))
        self.messages += 1
        self.sent += len(payload) if sends else 0
        self.received += sum(map(len, found))
        return found

    def broadcast_object(self, object: T | None) -> T:
        (found,) = self._exchange(object, sends=self.is_coordinator, gets=lambda all_: all_[:1])
        return pickle.loads(found)

    def gather_object(self, object: T) -> list[T] | None:
        found = self._exchange(object, gets=lambda all_: all_ if self.is_coordinator else [])
        return list(map(pickle.loads, found)) if self.is_coordinator else None

    def all_gather_object(self, object: T) -> list[T]:
        return list(map(pickle.loads, self._exchange(object, gets=lambda all_: all_)))

    def scatter_object(self, object_list: list[T] | None) -> T:
        (found,) = self._exchange(object_list, sends=self.is_coordinator, gets=lambda all_: all_[:1])
        return pickle.loads(found)[self.rank]

    def barrier(self) -> None:
        self._table.barrier.wait()


def on_ranks(world_size: int, body: Callable[[ThreadRanks], T]) -> list[T]:
    """What a body returns on each of so many ranks."""
    table = Table(world_size)

    def run(rank: int) -> T:
        try:
            return body(ThreadRanks(table, rank))
        except CheckpointException:  # as all ranks do
            raise
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(run, range(world_size)))


def held_by(rank: int, division: Division, shape: Sequence[int], world_size: int) -> Box | None:
    """The box that a rank has; None if it has none, or one without elements."""
    parts, _ = np.nonzero(division.ranks_with(world_size=world_size) == rank)
    if not len(parts):
        return None
    offsets, sizes = division.boxes(shape, parts[:1])
    return Box(tuple(offsets[0].tolist()), tuple(sizes[0].tolist())) if sizes.all() else None


def captured_on(
    rank: int,
    world_size: int,
    tensors: Mapping[str, tuple[torch.Tensor, Division | None]],
    values: Mapping[str, Any] | None = None,
    *,
    own: Mapping[str, Any] | None = None,
) -> Captured:
    """What a rank has of a state of whole tensors, given with their rules, and plain values."""
    descriptions: list[TensorDescription] = []
    local: dict[str, CopiedTensor] = {}
    tree: dict[str, Any] = dict(values or {})
    for key, (full, division) in tensors.items():
        rule = division if division is not None else Division(copies=((world_size, 1),))
        box = held_by(rank, rule, full.shape, world_size)
        boxes = () if box is None else (box,)
        parts = tuple(
            (each, full[tuple(slice(a, a + n) for a, n in zip(*each, strict=True))].clone()) for each in boxes
        )
        digests = tuple(digest_pieces(tensor_pieces(part)) for _, part in parts) if rule.copies else ()
        dtype = str(full.dtype).removeprefix("torch.")
        kind = "sharded" if rule.cuts else "replicated"
        descriptions.append(
            TensorDescription(key, dtype, tuple(full.shape), kind, boxes, digests=digests, division=rule)
        )
        local[key] = CopiedTensor(key, parts)
        tree[key] = {"$": "tensor", "key": key}
    slots = {name: {"$": SLOT, "name": name} for name in own or {}}
    return Captured({**tree, **slots}, own or {}, descriptions, local)
