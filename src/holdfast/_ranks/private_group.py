"""A connection between the ranks of a process group that nobody else uses.

Background saves need to talk while the program goes on talking: on the same group their messages would get mixed up.
This one is made from the store of the program's group, is known to nobody, and outlives
``torch.distributed.destroy_process_group``, so that a save that is still running then can finish.

Calls are rounds. In a round the ranks have exchanges: questions that go up a tree of ranks and answers that come down,
by which each rank also learns whether the others are still in the round: one that has failed and left, or whose writer
died, is noticed at once instead of being waited for. So is a rank that has died. One that makes no progress is noticed
after a while, by the notes that the ranks leave in the store.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from holdfast import _settings as settings
from holdfast._compat.groups import default_group, store_of, stores_in_use, timeout_of
from holdfast._ranks.exchanges import Exchanges, Join, entries_of, split_list
from holdfast._ranks.failures import wrap_exception
from holdfast._ranks.gloo_groups import Frame, GlooGroup
from holdfast._ranks.interrupts import interrupts_wait
from holdfast._ranks.roll_call import Progressing, Verdict
from holdfast._ranks.transfers import Parcel
from holdfast._ranks.tree_connection import BeginAgain, Status, TreeConnection
from holdfast._ranks.trees import LARGEST_GROUP, TreeGroup, strides_of
from holdfast.errors import CheckpointException, RankLeftError

T = TypeVar("T")

_MOST_NAMED = 64
"""How many ranks that left are named."""


class PrivateGroup(TreeConnection, Exchanges):
    """The connection. Not made before it is needed, because making it waits for all ranks."""

    def __init__(
        self,
        rank: int,
        members: tuple[int, ...],
        store: Store,
        name: str,
        timeout: timedelta,
        *,
        other_names: Sequence[str] = (),
        largest: int | None = None,
        in_background: bool = False,
    ) -> None:
        """``timeout`` is for calls that have none of their own; ``other_names`` are those of the ranks' other links.

        In the background the process goes on with other things, whose bytes say nothing about a call.
        """
        largest = LARGEST_GROUP if largest is None else largest
        super().__init__(rank, members, store, name, other_names, largest, shows_signs=not in_background)
        self.timeout = timeout
        # Weak, because the store may be a server: it must end with the group that it belongs to.
        self._origin = weakref.ref(store)
        self._next_answer: Callable[[], Frame] | None = None
        self._question_sent: Callable[[], None] | None = None
        self._is_asked = False
        self._asked_as = Status.IN_ROUND
        """What the question was sent as that is to be answered."""
        self._question: tuple[Frame, Join | None] | None = None
        self._join_error: Exception | None = None
        self._turn = threading.Lock()
        self._thread_in_round: int | None = None

    @contextmanager
    def round(
        self, name: str = "a save", *, timeout: float | None = None, progress: Progressing | None = None
    ) -> Iterator[PrivateGroup]:
        """One save, or whatever else it is called. All ranks must have the same rounds in the same order.

        ``timeout`` is how many seconds a rank may be waited for that makes no progress, which ``progress`` counts.
        Threads have their rounds one after the other: their messages would get mixed up otherwise.
        """
        if self.is_in_round_here():
            raise RuntimeError(
                f"{name} is called within another call to Holdfast of the same ranks, such as by a state_dict() that "
                "is being saved. Call it before or afterwards."
            )
        patience = self._patience(timeout)
        with self._turn:
            self._thread_in_round = threading.get_ident()
            try:
                with self._only_round(name, patience, progress):
                    yield self
            finally:
                self._thread_in_round = None

    @contextmanager
    def _only_round(self, name: str, patience: float, progress: Progressing | None) -> Iterator[None]:
        self._round_is_over = self._is_asked = self._has_met = False
        self._verdict = self._ended_by = self._join_error = None
        self._next_answer = self._question_sent = None
        self._watch.begin(name, patience, progress)
        try:
            try:
                yield
            except BaseException:
                self._leave(Status.LEFT)
                raise
            self._leave(Status.FINISHED)
        finally:
            self._watch.end()

    def _patience(self, timeout: float | None) -> float:
        """How many seconds a rank that makes no progress is waited for."""
        if timeout is not None:
            settings.check("timeout", timeout)
        chosen = settings.current().timeout if timeout is None else timeout
        return chosen or self.timeout.total_seconds()

    def is_in_round_here(self) -> bool:
        """Whether the thread that asks is in a round."""
        return self._thread_in_round == threading.get_ident()

    def is_orphaned(self) -> bool:
        """Whether the process group that this one goes with no longer exists."""
        return all(not self.is_of(store) for store in stores_in_use())

    def is_of(self, store: Store) -> bool:
        """Whether this is the connection of the group with that store."""
        return self._origin() is store

    # Questions and answers.

    @interrupts_wait()
    def ask(self, payload: bytes, join: Join | None = None, *, last: bool = False) -> bytes | None:
        """See ``Link``."""
        self._refuse_if_over()
        if self._is_asked:
            raise RuntimeError("a question was not answered, and here is the next one")
        self._question = self._frame(Status.FINISHED if last else Status.IN_ROUND, payload), join
        return self._asked()

    def _asked(self) -> bytes | None:
        """Ask the question that is to be answered next, again if it is the first one and others were ahead."""
        assert self._question is not None
        while True:
            with suppress(BeginAgain):
                asked = self._ask(*self._question)
                if asked is None:
                    return None
                if asked.status != self._asked_as:
                    self._answer(asked)
                    self._react(asked)
                self._has_met = True
                return asked.payload

    @interrupts_wait()
    def answer(self, payload: bytes | None, *, only: int | None = None, split: bool = False) -> bytes:
        """See ``Link``."""
        if not self._is_asked:
            raise RuntimeError("a private group is given an answer without a question")
        frame = None
        if self.rank == 0:
            whole = payload or b""
            if split and sum(1 for _ in entries_of(whole)) != len(self.members):
                raise ValueError(f"there is not one payload for each of {len(self.members)} ranks")
            frame = self._frame(self._asked_as, whole, split=split, only=-1 if only is None else only)
        while True:
            with suppress(BeginAgain):
                answer = self._answer(frame)
                self._react(answer)
                self._has_met, self._question = True, None
                return answer.payload
            self._asked()

    def _ask(self, mine: Frame, join: Join | None) -> Frame | None:
        """Collect the questions of those that this rank leads, and pass them on. What all ask, on rank 0."""
        self._is_asked = False
        self._connect()
        self._watch.exchange += 1
        self._is_asked, self._asked_as = True, Status(mine.status)
        question = self._frame(Status(mine.status), mine.payload)
        for tree, gloo in self._led:
            others = tree.members[1:]
            waits = [self._begin(rank, partial(gloo.receive, rank)) for rank in others]
            frames = self._wait_for(others, waits)
            question = self._joined(tree, [question, *frames], join)
        if self._top is None:
            return question
        tree, gloo = self._top
        self._next_answer = self._begin(tree.leader, partial(gloo.receive, tree.leader))
        self._question_sent = self._begin(tree.leader, partial(gloo.send, tree.leader, question))
        return None

    def _joined(self, tree: TreeGroup, frames: Sequence[Frame], join: Join | None) -> Frame:
        """One question out of those of the members of a group."""
        for frame in frames:
            if frame.status == Status.ABORTED:
                return frame
            if (frame.round, frame.exchange) != (frames[0].round, frames[0].exchange):
                raise RuntimeError(
                    f"the ranks are not in the same exchange: {[(each.round, each.exchange) for each in frames]}. "
                    "This is a bug in Holdfast; please report it."
                )
        if all(frame.status == frames[0].status for frame in frames) and frames[0].status != Status.LEFT:
            payloads = [frame.payload for frame in frames]
            try:
                return self._frame(Status(frames[0].status), b"".join(payloads) if join is None else join(payloads))
            except Exception as error:  # such as a writer process that has died: to be raised when all know
                self._join_error = error
                return self._frame(Status.LEFT, json.dumps([self.rank]).encode())
        absent: list[int] = []
        for member, frame in zip(tree.members, frames, strict=True):
            if frame.status == Status.LEFT:
                absent += json.loads(frame.payload)
            elif frame.status == Status.FINISHED:
                absent += tree.led_by(member)[:_MOST_NAMED]
        return self._frame(Status.LEFT, json.dumps(sorted(absent)[:_MOST_NAMED]).encode())

    def _answer(self, answer: Frame | None) -> Frame:
        """Pass an answer on to those that this rank leads. What it says to this rank."""
        if self._top is not None:
            tree, _ = self._top
            assert self._next_answer is not None
            assert self._question_sent is not None
            answer, _ = self._wait_for([tree.leader] * 2, [self._next_answer, self._question_sent])
            self._next_answer = self._question_sent = None
        assert answer is not None
        self._is_asked = False
        if answer.status == Status.ABORTED:
            self._pass_on(Verdict.unpacked(answer.payload), () if self._top is None else (self._top[0].leader,))
            return answer
        own, sent, receivers = answer, [], []
        for tree, gloo in reversed(self._led):
            own, *parts = self._parts(tree, own)
            for rank, part in zip(tree.members[1:], parts, strict=True):
                sent.append(self._begin(rank, partial(gloo.send, rank, part)))
                receivers.append(rank)
        self._wait_for(receivers, sent)
        if own.split:
            (payload,) = entries_of(own.payload)
            return own._replace(payload=payload)
        return own

    def _parts(self, tree: TreeGroup, answer: Frame) -> list[Frame]:
        """An answer as the members of a group get it."""
        if answer.split:
            counts = [len(tree.led_by(member)) for member in tree.members]
            return [answer._replace(payload=part) for part in split_list(answer.payload, counts)]
        if answer.only >= 0:
            empty = answer._replace(payload=b"")
            return [answer if answer.only in tree.led_by(member) else empty for member in tree.members]
        return [answer] * len(tree.members)

    def _react(self, frame: Frame) -> None:
        """Raise if the round is over before this rank is done."""
        if frame.status == Status.FINISHED:
            self._round_is_over = True
        if frame.status == Status.LEFT:
            self._round_is_over = True
            if self._join_error is not None:
                raise self._join_error
            self._report_absent(json.loads(frame.payload))
        if frame.status == Status.ABORTED:
            self._fail(Verdict.unpacked(frame.payload))

    def _report_absent(self, absent: list[int]) -> NoReturn:
        names = ", ".join(map(str, absent))
        error = RankLeftError(
            f"rank {names} gave up the save or load before all ranks had finished it. Its own error says why. Of a "
            "save, the earlier checkpoint is still there, or the new one if it was committed just before. Try again.",
            ranks=absent,
        )
        raise CheckpointException("write", {rank: wrap_exception(error) for rank in absent})

    @interrupts_wait()
    def _leave(self, status: Status) -> None:
        """Meet the others at the end of the round, or signal to those that are still in it that this rank is not."""
        if self._round_is_over:
            return
        self._round_is_over = True
        with suppress(Exception):
            # The call is over either way. The next one will say that the connection is lost.
            own = json.dumps([self.rank]).encode() if status == Status.LEFT else b""
            if self._is_asked:  # something has interrupted it between a question and its answer
                with suppress(BeginAgain):
                    answer = self._answer(self._frame(Status.LEFT, own) if self.rank == 0 else None)
                    if answer.status != Status.IN_ROUND:
                        return
            while True:
                with suppress(BeginAgain):
                    asked = self._ask(self._frame(status, own), None)
                    self._answer(asked)
                    return

    # Bytes from one rank to another.

    @property
    def neighbours(self) -> range:
        """The ranks that can all send each other bytes: those of a group at the lowest level of the tree."""
        leaf = self.strides[1]
        first = self.rank // leaf * leaf
        return range(first, min(first + leaf, len(self.members)))

    @property
    def strides(self) -> Sequence[int]:
        """The tree. Only after an exchange of messages, before which it may not be known."""
        return strides_of(len(self.members), self._leaf_size, self._largest)

    @interrupts_wait()
    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """See ``Transfers``. Only after an exchange of messages in the same round, which has connected the ranks.

        Several parcels for one rank arrive in the order in which they were sent.
        """
        if not sends and not receives:
            return
        self._refuse_if_over()
        waits = [
            (rank, self._begin(rank, partial(begin, self._group_with(rank), rank, torch.from_numpy(content))))
            for begin, parcels in ((GlooGroup.receive_bytes, receives), (GlooGroup.send_bytes, sends))
            for rank, content in parcels
        ]
        try:
            for rank, wait in waits:
                self._wait_for([rank], [wait])
                self._watch.transfers += 1
        except Exception:
            # The others of them may be under way: gloo goes on to fill their memory, and to read from it, until all
            # ranks have left this connection, which they have when there is another one.
            self._kept_memory.append(waits)
            raise

    @interrupts_wait()
    def wait_elsewhere(self, work: Callable[[Callable[[Sequence[int]], None]], None]) -> None:
        """Do what waits for ranks of this group by other means, in a thread that may go on for longer than this.

        ``work`` gets a function by which it says whom it waits for: all of them at once, if there are several. What it
        needs must belong to it: if this raises, nobody knows when the thread ends.
        """
        self._refuse_if_over()
        goes_on = self._goes_on()

        def waits_for(ranks: Sequence[int]) -> None:
            if goes_on():
                self._watch.transfers += 1
                self._watch.waits_at_once, self._watch.waits_for = len(ranks) > 1, ranks

        self._in_background(partial(work, waits_for), (), elsewhere=True)

    def _group_with(self, rank: int) -> GlooGroup:
        """The only group that another rank and this one are both in."""
        for tree, gloo in self._groups or ():
            if rank in tree.members:
                return gloo
        raise RuntimeError(f"rank {rank} is no neighbour of {self.rank}, or no exchange has connected them yet")


_groups: dict[tuple[int, str, str], PrivateGroup] = {}
_lock = threading.Lock()
_PURPOSES = ("calls", "background")


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
            name, *others = (f"holdfast/{group.group_name}/{each}" for each in dict.fromkeys((purpose, *_PURPOSES)))
            _groups[key] = PrivateGroup(
                dist.get_rank(group),
                members,
                store,
                name,
                timeout_of(group),
                other_names=others,
                in_background=purpose == "background",
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
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _groups.clear()


os.register_at_fork(after_in_child=_start_anew_in_forked_child)
atexit.register(forget_private_groups)  # they have threads, which must not outlive the interpreter
