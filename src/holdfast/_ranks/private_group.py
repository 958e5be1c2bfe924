"""A connection between the ranks of a process group that nobody else uses.

Background saves need to talk while the program goes on talking: on the same group their messages would get mixed up.
This one is made from the store of the program's group, is known to nobody, and outlives
``torch.distributed.destroy_process_group``, so that a save that is still running then can finish.

Saves are rounds. Every message of a round begins with an exchange of headers, by which each rank also learns whether
the others are still in the round: one that has failed and left, or whose writer died, is noticed at once instead of
being waited for.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from holdfast._compat.groups import (
    backends_take_another_timeout,
    connection_of_its_own,
    default_group,
    set_backend_timeout,
    store_of,
    stores_in_use,
    timeout_of,
)
from holdfast._ranks.failures import wrap_exception
from holdfast._ranks.interrupts import interrupts_wait
from holdfast._ranks.transfers import Parcel, PostedTransfers, over_backend
from holdfast.errors import CheckpointException, ConnectionLostError, MissingRanksError, RankLeftError

_SHORTEST_PATIENCE = timedelta(seconds=5)
"""Connecting is not instant on a busy machine."""


class Link(Protocol):
    """How one rank reaches the others of its group. Ranks here are positions in the group."""

    rank: int
    members: tuple[int, ...]
    """The global ranks of the group."""

    def all_gather(self, payload: bytes) -> list[bytes]:
        """What every rank gave, on every rank."""
        ...

    def gather(self, payload: bytes, root: int) -> list[bytes] | None:
        """What every rank gave, on ``root`` alone."""
        ...

    def scatter(self, payloads: list[bytes] | None, root: int) -> bytes:
        """The n-th of ``root``'s payloads on rank n."""
        ...

    def broadcast(self, payload: bytes | None, root: int) -> bytes:
        """What ``root`` gave, on every rank."""
        ...


class _Phase(IntEnum):
    """Where a rank is, in the headers that the ranks exchange."""

    IN_ROUND = 0
    FINISHED = 1
    FAILED = 2


class PrivateGroup:
    """The connection. Not made before it is needed, because making it waits for all ranks."""

    def __init__(
        self,
        rank: int,
        members: tuple[int, ...],
        store: Store,
        name: str,
        timeout: timedelta,
        *,
        call_the_roll: bool = False,
    ) -> None:
        self.rank = rank
        self.members = members
        # Weak, because the store may be a server: it must end with the group that it belongs to.
        self._origin = weakref.ref(store)
        # A connection to the store of its own: while this one waits for the others, nobody else could use it.
        self._store: Store | None = PrefixStore(name, connection_of_its_own(store))
        self._timeout = timeout
        self._roll: RollCall | None = None
        if call_the_roll:
            self._roll = RollCall(PrefixStore(name, connection_of_its_own(store)), rank, len(members))
        self._backend: Any = None
        self._transfers: PostedTransfers | None = None
        self._broken: Exception | None = None
        self._round_is_over = True
        self._turn = threading.Lock()
        self._thread_in_round: int | None = None

    @contextmanager
    def round(self, name: str = "a save") -> Iterator[PrivateGroup]:
        """One save, or whatever else it is called. All ranks must have the same rounds in the same order.

        Threads have their rounds one after the other: their messages would get mixed up otherwise.
        """
        if self._thread_in_round == threading.get_ident():
            raise RuntimeError(
                f"{name} is called within another call to Holdfast of the same ranks, such as by a state_dict() that "
                "is being saved. Call it before or afterwards."
            )
        with self._turn:
            self._thread_in_round = threading.get_ident()
            try:
                with self._only_round(name):
                    yield self
            finally:
                self._thread_in_round = None

    @contextmanager
    def _only_round(self, name: str) -> Iterator[None]:
        self._round_is_over = False
        if self._roll is not None:
            self._roll.begin(name)
        try:
            yield
        except BaseException:
            self._leave(_Phase.FAILED)
            raise
        self._leave(_Phase.FINISHED)

    def is_orphaned(self) -> bool:
        """Whether the process group that this one goes with no longer exists."""
        return all(not self.is_of(store) for store in stores_in_use())

    def is_of(self, store: Store) -> bool:
        """Whether this is the connection of the group with that store."""
        return self._origin() is store

    def close(self) -> None:
        """End the connection."""
        self._backend = self._transfers = None
        self._roll = None

    @interrupts_wait()
    def all_gather(self, payload: bytes) -> list[bytes]:
        """What every rank gave, on every rank."""
        sizes = self._open_exchange(len(payload))
        mine = _padded(payload, max(sizes))
        received = [torch.empty_like(mine) for _ in sizes]
        self._run(lambda backend: backend.allgather([received], [mine]))
        return [_payload(box, size) for box, size in zip(received, sizes, strict=True)]

    @interrupts_wait()
    def gather(self, payload: bytes, root: int) -> list[bytes] | None:
        """What every rank gave, on ``root`` alone."""
        sizes = self._open_exchange(len(payload))
        options = dist.GatherOptions()
        options.rootRank = root
        mine = _padded(payload, max(sizes))
        received = [torch.empty_like(mine) for _ in sizes] if self.rank == root else []
        self._run(lambda backend: backend.gather([received] if received else [], [mine], options))
        if self.rank != root:
            return None
        return [_payload(box, size) for box, size in zip(received, sizes, strict=True)]

    @interrupts_wait()
    def scatter(self, payloads: list[bytes] | None, root: int) -> bytes:
        """The n-th of ``root``'s payloads on rank n."""
        largest = max(map(len, payloads)) if payloads else 0
        width = self._open_exchange(largest)[root]
        options = dist.ScatterOptions()
        options.rootRank = root
        # A length of its own goes in front of each, for the ranks know only the largest.
        boxed = [_padded(len(each).to_bytes(8, "little") + each, width + 8) for each in payloads or []]
        received = torch.empty(width + 8, dtype=torch.uint8, device="cpu")
        self._run(lambda backend: backend.scatter([received], [boxed] if self.rank == root else [], options))
        length = int.from_bytes(_payload(received, 8), "little")
        return _payload(received[8:], length)

    @interrupts_wait()
    def broadcast(self, payload: bytes | None, root: int) -> bytes:
        """What ``root`` gave, on every rank."""
        size = self._open_exchange(len(payload or b""))[root]
        box = _padded(payload or b"", size)
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        self._run(lambda backend: backend.broadcast([box], options))
        return _payload(box, size)

    @interrupts_wait()
    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Send bytes to some ranks and receive bytes of some, all of which expect that and are in the round."""
        if self._transfers is None:
            if self._backend is None:
                raise RuntimeError("the ranks have not met yet, so that there is no connection to send bytes over")
            self._transfers = over_backend(self._backend)
        self._transfers.exchange(sends, receives)

    def _open_exchange(self, size: int) -> list[int]:
        """Send the others how much comes, and learn the same of them; an error if one is not in the round any more."""
        if self._round_is_over:
            raise RuntimeError("a private group is used outside of a round")
        if self._roll is not None and self._broken is None:
            self._roll.note()
        headers = self._exchange_headers(_Phase.IN_ROUND, size)
        absent = [rank for rank, (phase, _) in enumerate(headers) if phase is not _Phase.IN_ROUND]
        if absent:
            self._round_is_over = True
            self._report_absent(absent)
        return [size for _, size in headers]

    def _report_absent(self, absent: list[int]) -> NoReturn:
        names = ", ".join(map(str, absent))
        error = RankLeftError(
            f"rank {names} gave up the save or load before all ranks had finished it. Its own error says why. Of a "
            "save, the earlier checkpoint is still there, or the new one if it was committed just before. Try again.",
            ranks=absent,
        )
        raise CheckpointException("write", {rank: wrap_exception(error) for rank in absent})

    @interrupts_wait()
    def _leave(self, phase: _Phase) -> None:
        """Meet the others at the end of the round, or signal to those that are still in it that this rank is not."""
        if self._round_is_over:
            return
        self._round_is_over = True
        try:
            self._exchange_headers(phase, 0)
        except Exception:
            # The save is over either way. The next one will say that the connection is lost.
            return

    def _exchange_headers(self, phase: _Phase, size: int) -> list[tuple[_Phase, int]]:
        mine = torch.tensor([int(phase), size], dtype=torch.int64, device="cpu")
        received = [torch.empty(2, dtype=torch.int64, device="cpu") for _ in self.members]
        self._run(lambda backend: backend.allgather([received], [mine]))
        return [(_Phase(int(header[0])), int(header[1])) for header in received]

    def _run(self, operation: Any) -> None:
        if self._broken is not None:
            raise ConnectionLostError(
                f"an earlier call lost the connection to the other ranks ({self._broken}). Restart the job; the "
                "checkpoints that were committed are not affected."
            ) from self._broken
        try:
            if self._backend is None and self._store is not None:
                self._backend = self._connected(self._store)
                self._store = None  # it has served its purpose
            operation(self._backend).wait()
        except Exception as error:
            self._broken = error
            self._name_the_missing(error)
            raise ConnectionLostError(
                f"the connection to the other ranks is lost, as it happens when one of them dies: {error}. Check "
                "their logs and restart the job; the checkpoints that were committed are not affected."
            ) from error

    def _connected(self, store: Store) -> Any:
        """Wait for all ranks, then connect to them.

        Gloo waits five times its timeout for a rank that dies in the midst of connecting, so it gets a shorter one,
        which begins when all are there. Where gloo would keep that one for good, a wait that is too long for a rank
        that died is better than one that is too short for a rank that is slow.
        """
        store.set(_here(self.rank), "")
        store.wait([_here(rank) for rank in range(len(self.members))], self._timeout)
        patience = self._timeout
        if backends_take_another_timeout():
            patience = max(self._timeout / 5, min(self._timeout, _SHORTEST_PATIENCE))
        backend: Any = dist.ProcessGroupGloo(store, self.rank, len(self.members), patience)
        set_backend_timeout(backend, self._timeout)
        return backend

    def _name_the_missing(self, error: Exception) -> None:
        """Raise an error that says who was waited for, if that is known."""
        missing: dict[int, str] = {}
        if self._roll is not None:
            with suppress(Exception):  # a store that is gone cannot answer, and the error is there already
                missing = self._roll.missing()
        if missing:
            waited_for = "; ".join(f"rank {self.members[rank]} ({what})" for rank, what in missing.items())
            raise MissingRanksError(
                f"ranks that all others wait for did not join within {self._timeout.total_seconds():g} s, or "
                f"exited: {waited_for}. Check their logs and restart the job. The connection is lost: {error}",
                ranks=[self.members[rank] for rank in missing],
            ) from error


_groups: dict[tuple[int, str, str], PrivateGroup] = {}
_lock = threading.Lock()


def private_group_of(group: dist.ProcessGroup | None, purpose: str = "background") -> PrivateGroup:
    """The private connection between the ranks of ``group``, or of all ranks. The same one each time for a purpose."""
    group = default_group() if group is None else group
    store = store_of(group)
    with _lock:
        _close_orphans(purpose)
        # The store distinguishes a group from one of the same name before a re-initialization.
        key = (id(store), group.group_name, purpose)
        if key not in _groups or not _groups[key].is_of(store):
            members = tuple(dist.get_process_group_ranks(group))
            name = f"holdfast/{group.group_name}/{purpose}"
            # Background saves go on when the program has taken its store down, and must not depend on it.
            call_the_roll = purpose != "background"
            _groups[key] = PrivateGroup(
                dist.get_rank(group), members, store, name, timeout_of(group), call_the_roll=call_the_roll
            )
        return _groups[key]


def _close_orphans(purpose: str) -> None:
    """End connections whose process groups no longer exist. Background saves that need theirs end them later."""
    if purpose != "background":
        for key in [key for key, known in _groups.items() if key[2] == purpose and known.is_orphaned()]:
            _groups.pop(key).close()


def forget_private_group(group: PrivateGroup) -> None:
    """End one connection."""
    with _lock:
        for key in [key for key, known in _groups.items() if known is group]:
            del _groups[key]
    group.close()


def forget_private_groups() -> None:
    """End all connections, at the end of the program."""
    with _lock:
        for group in _groups.values():
            group.close()
        _groups.clear()


def _start_anew_in_forked_child() -> None:
    """A forked child has copies of the connections without the threads that serve them; somebody may hold the lock.

    Ending such a connection would wait for its threads for ever, so it is left as it is, and kept from being freed.
    """
    global _lock
    _lock = threading.Lock()
    for group in _groups.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group._backend))
    _groups.clear()


os.register_at_fork(after_in_child=_start_anew_in_forked_child)
atexit.register(forget_private_groups)  # they have threads, which must not outlive the interpreter


def _here(rank: int) -> str:
    return f"here/{rank}"


def _padded(payload: bytes, width: int) -> torch.Tensor:
    """``payload`` in a tensor of ``width`` bytes, and at least one: gloo does not send empty tensors."""
    box = torch.zeros(max(width, 1), dtype=torch.uint8, device="cpu")
    if payload:
        box[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return box


def _payload(box: torch.Tensor, size: int) -> bytes:
    return box[:size].numpy().tobytes()


# Who is where: every rank notes how far it has come, so that a rank that is waited for in vain can be named.


_PATIENCE = timedelta(seconds=5)
"""With a store that does not answer. The call has failed by then, and must not hang because of its message."""

_LATENESS = 1.0
"""Seconds in which a rank that is alive, and was about to come, has come."""


class RollCall:
    """Notes of all ranks of a group, in a store that all of them reach.

    Every rank has one note, which says what it has come to: the number of its call, the number of the exchange in that
    call, and what the call is.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._call = 0
        self._exchange = 0
        self._name = ""

    def begin(self, name: str) -> None:
        """This rank begins its next call."""
        self._call += 1
        self._exchange = 0
        self._name = name

    def note(self) -> None:
        """This rank has come to the next exchange of its call."""
        self._exchange += 1
        with suppress(Exception):  # notes are for messages, and a call can do without them if the store is gone
            self._store.set(_key(self._rank), json.dumps([self._call, self._exchange, self._name]))

    def missing(self) -> dict[int, str]:
        """The ranks that have not come as far as this one, and what is known of them."""
        self._store.set_timeout(_PATIENCE)
        found = self._behind()
        if len(found) > 1:  # one of them is to blame, and others may only be late
            time.sleep(_LATENESS)
            found = self._behind()
        return found

    def _behind(self) -> dict[int, str]:
        found = {}
        for rank in range(self._size):
            if not self._store.check([_key(rank)]):
                found[rank] = "it has not called anything that all ranks have to call"
                continue
            call, exchange, name = json.loads(self._store.get(_key(rank)))
            if call < self._call:
                found[rank] = f"it has not come back to Holdfast since {name}"
            elif call == self._call and exchange < self._exchange:
                found[rank] = f"it was last seen in {name}, busy or dead"
        return found


def _key(rank: int) -> str:
    return f"at/{rank}"
