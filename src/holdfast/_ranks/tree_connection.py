"""How a rank is connected to the others of its tree, and what becomes of it when they cannot be reached.

The connection is made when it is needed. Whoever waits is watched over: if a rank that it waits for is missing, the
watch passes the verdict on and hangs up, which ends the wait. After a verdict the ranks connect anew at the next call,
unless one has died (``epochs.py``).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import Any, NoReturn, TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from holdfast import _settings as settings
from holdfast._compat.groups import connection_of_its_own
from holdfast._ranks.epochs import look_out
from holdfast._ranks.gloo_groups import Frame, GlooGroup
from holdfast._ranks.machines import ranks_per_machine
from holdfast._ranks.roll_call import RollCall, Verdict, Watch
from holdfast._ranks.trees import TreeGroup, groups_of, strides_of
from holdfast.errors import ConnectionLostError, MissingRanksError

T = TypeVar("T")

_LAST_WORDS = 1.0
"""Seconds in which ranks that wait for this one get its last message."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.2
"""Seconds between two looks at what the store has."""

_CONNECTING = timedelta(seconds=60)
"""How long gloo may take to connect ranks that are all there. It takes five times as long if one dies meanwhile."""

_GRACE = 30.0
"""Seconds at most in which ranks that gave up on a call may begin another one like it (see ``epochs.py``)."""


class Status(IntEnum):
    """What a message is: of ranks that are in the round, or of such that are not."""

    IN_ROUND = 0
    FINISHED = 1
    LEFT = 2
    """Some ranks have left. The payload is a list of them."""
    ABORTED = 3
    """Some ranks are missing. The payload is the verdict."""


class BeginAgain(Exception):
    """The connection had ended before this rank came, and the first exchange of its call is to be had on the next."""


class TreeConnection:
    """The connection of one rank. Ranks here are positions in ``members``, the global ranks."""

    def __init__(
        self,
        rank: int,
        members: tuple[int, ...],
        store: Store,
        name: str,
        other_names: Sequence[str],
        largest: int,
        *,
        shows_signs: bool = True,
    ) -> None:
        """``name`` is what the connection is called in the store; ``other_names`` are those of the ranks' others.

        With ``shows_signs`` all bytes that the process moves in a call are signs that it gets on.
        """
        self.rank = rank
        self.members = members
        self._largest = largest
        self._leaf_size: int | None = None
        self._store: Store | None = None
        self._watch = Watch(rank, len(members), _weakly(self._give_up), is_outside=True, shows_signs=shows_signs)
        if len(members) > 1:
            # A connection to the store of its own: while gloo waits there for others, nobody else could use it.
            own = connection_of_its_own(store)
            self._store = PrefixStore(name, own)
            self._watch.open_roll = partial(RollCall.opened, own, rank, name, other_names)
        self._missed: list[Verdict] = []
        """Verdicts on calls in which this rank has not taken part, for all that is known."""
        self._has_met = False
        """Whether all ranks are known to be in this round."""
        self._groups: list[tuple[TreeGroup, GlooGroup]] | None = None
        self._top: tuple[TreeGroup, GlooGroup] | None = None
        """The group with the leader of this rank."""
        self._led: list[tuple[TreeGroup, GlooGroup]] = []
        self._broken: Exception | None = None
        self._verdict: Verdict | None = None
        self._ended_by: Verdict | None = None
        """What has ended the last round, if anything has."""
        self._woken = threading.Event()
        self._changing = threading.Lock()
        self._kept: list[Any] = []
        """Messages that others may still fetch."""
        self._kept_memory: list[Any] = []
        """Memory that may still be written to, by connections that have ended in the middle of something."""
        self._round_is_over = True

    def close(self) -> None:
        """End the connection."""
        self._watch.close()
        for _, gloo in self._groups or ():
            gloo.close()
        self._forget_groups()
        self._store = None
        self._kept = self._kept_memory = []

    def _forget_groups(self) -> None:
        self._groups, self._top, self._led = None, None, []

    def _frame(self, status: Status, payload: bytes = b"", *, split: bool = False, only: int = -1) -> Frame:
        return Frame(status, self._watch.call & 0xFFFFFFFF, self._watch.exchange & 0xFFFFFFFF, payload, split, only)

    def _connect(self) -> None:
        """Wait for the ranks that this one talks to, and connect to them."""
        if self._broken is not None:
            raise ConnectionLostError(
                f"an earlier call lost the connection to the other ranks ({self._broken}). Restart the job, or go on "
                "with the ranks that are left in a new process group; the checkpoints that were committed are not "
                "affected."
            ) from self._broken
        if self._groups is not None:
            return
        self._find_epoch()
        groups: list[tuple[TreeGroup, GlooGroup]] = []
        strides = strides_of(len(self.members), self._find_leaf_size(), self._largest)
        for tree in groups_of(self.rank, len(self.members), strides):
            work = partial(self._connected, tree, self._watch.epoch, self._goes_on())
            groups.append((tree, self._in_background(work, tree.members)))
        self._groups = groups
        self._kept_memory = []
        self._led = [(tree, gloo) for tree, gloo in groups if tree.leader == self.rank]
        self._top = groups[-1] if groups and groups[-1][0].leader != self.rank else None

    def _find_epoch(self) -> None:
        """Find out which connection the others make, or have made, and whether this rank's call is one of theirs."""
        if self._store is None:
            return
        watch, grace = self._watch, min(self._watch.timeout, _GRACE)
        look = partial(
            look_out, self._store, watch.epoch, watch.name, tuple(self._missed), grace, goes_on=self._goes_on()
        )
        outlook = self._in_background(look, (), patience=watch.timeout + grace)
        self._missed = list(outlook.missed)
        watch.move_to(outlook.epoch)
        if outlook.verdict is not None:
            self._end_with(outlook.verdict, came_late=True)
        watch.has_looked, watch.is_outside = True, False

    def _goes_on(self) -> Callable[[], bool]:
        """Whether the round goes on that is the present one now. For threads that nobody can interrupt."""
        watch, place = self._watch, self._watch.place
        return lambda: self._store is not None and self._verdict is None and watch.place == place

    def _find_leaf_size(self) -> int | None:
        """How many neighbouring ranks share a machine, as rank 0 knows it from the settings or from its launcher."""
        if len(self.members) > self._largest and self._leaf_size is None:
            assert self._store is not None
            key = "leaf"
            machine = settings.current().machine
            if 0 < self.rank <= self._largest:
                self._store.set(f"machine/{self.rank}", machine)
            if self.rank == 0:
                given = os.environ.get("LOCAL_WORLD_SIZE", "") if self._is_whole_job() else ""
                self._store.set(key, str(self._ranks_here(machine)) if machine else given)
            text = self._in_background(partial(self._get, key, self._goes_on()), [0])
            self._leaf_size = int(text) if text.isdigit() else 0
        return self._leaf_size

    def _ranks_here(self, machine: str) -> int:
        """How many of the first ranks are on the machine of rank 0, which was given its name."""
        others, goes_on = range(1, self._largest + 1), self._goes_on()
        found = self._in_background(lambda: [self._get(f"machine/{rank}", goes_on) for rank in others], others)
        return ranks_per_machine([machine, *found])

    def _is_whole_job(self) -> bool:
        return self.members == tuple(range(len(self.members)))

    def _get(self, key: str, goes_on: Callable[[], bool]) -> str:
        self._wait_for_keys([key], goes_on)
        assert self._store is not None
        return self._store.get(key).decode()

    def _connected(self, tree: TreeGroup, epoch: int, goes_on: Callable[[], bool]) -> GlooGroup:
        """Connect to a group. Gloo begins when all are there: it takes long to find out that one is not."""
        assert self._store is not None
        name = f"{epoch}/{tree.level}/{tree.leader}"
        self._store.set(f"{name}/here/{self.rank}", "")
        self._wait_for_keys([f"{name}/here/{rank}" for rank in tree.members], goes_on)
        return GlooGroup.connect(tree.members, self.rank, PrefixStore(name, self._store), _CONNECTING)

    def _wait_for_keys(self, keys: Sequence[str], goes_on: Callable[[], bool]) -> None:
        """Wait until the store has them, in slices: whoever waits for this may have given up.

        Torch has its stores wait with a timeout as well, and then writes to the program's output that they did.
        """
        pause = _SHORTEST_PAUSE
        while True:
            store = self._store
            if store is None or not goes_on():
                raise ConnectionLostError("the call is over")
            if store.check(list(keys)):
                return
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def _in_background(
        self, work: Callable[[], T], ranks: Sequence[int], patience: float | None = None, *, elsewhere: bool = False
    ) -> T:
        """Do in a thread what cannot be interrupted, and wait for it or for a verdict.

        With ``patience``, in seconds, no other rank is waited for, but the store. What fails ``elsewhere`` does not
        mean that this connection is lost.
        """
        outcome: list[T] = []
        failure: list[Exception] = []

        def run() -> None:
            try:
                outcome.append(work())
            except Exception as error:
                failure.append(error)
            finally:
                self._woken.set()

        end = None if patience is None else time.monotonic() + patience
        self._woken.clear()
        self._watch.waits_at_once = True
        self._watch.waits_for = [rank for rank in ranks if rank != self.rank]
        threading.Thread(target=run, name="holdfast-connect", daemon=True).start()
        try:
            while not outcome and not failure and self._verdict is None:
                if not self._woken.wait(None if end is None else max(end - time.monotonic(), 0)):
                    self._round_is_over = True
                    raise ConnectionLostError(
                        f"the store of the process group, by which ranks find each other, has not answered for "
                        f"{patience:g} s. Check the process that has it, which is rank 0 or the launcher."
                    )
                self._woken.clear()
        finally:
            self._watch.waits_for, self._watch.waits_at_once = (), False
        if self._verdict is not None:
            self._fail(self._verdict)
        if failure and elsewhere:
            raise failure[0]
        if failure:
            self._lost(failure[0], None)
        return outcome[0]

    # What happens when the others cannot be reached.

    def _begin(self, rank: int, begin: Callable[[], T]) -> T:
        try:
            return begin()
        except Exception as error:
            self._lost(error, rank)

    def _wait_for(self, ranks: Sequence[int], waits: Sequence[Callable[[], T]]) -> list[T]:
        """Wait for all of them, one after the other."""
        received = []
        watch = self._watch
        for number, (rank, wait) in enumerate(zip(ranks, waits, strict=True)):
            watch.waits_for = ranks[number:]
            try:
                received.append(wait())
            except Exception as error:
                self._kept.append(waits)  # gloo closes a connection whose message has nowhere to go
                self._lost(error, rank)
        watch.waits_for = ()
        return received

    def _give_up(self, verdict: Verdict) -> None:
        """The watch has found out that the call cannot go on: end the wait of the thread that is in it."""
        with self._changing:
            if verdict.epoch != self._watch.epoch:
                return  # which is another connection by now
            self._verdict = verdict
            groups = list(self._groups or ())
        self._pass_on(verdict, (), patience=_LAST_WORDS)
        for _, gloo in groups:
            gloo.hang_up()
        self._woken.set()

    def _pass_on(self, verdict: Verdict, known_to: Sequence[int], *, patience: float = 0.0) -> None:
        """Send a verdict to all that wait for this rank, or will."""
        frame, waits = self._frame(Status.ABORTED, verdict.packed()), []
        for tree, gloo in self._groups or ():
            ranks = tree.members if tree.leader == self.rank else [tree.leader]
            for rank in ranks:
                if rank != self.rank and rank not in known_to and rank not in verdict.missing:
                    with suppress(Exception):  # one that is gone does not keep it from the others
                        waits.append(gloo.send(rank, frame))
        self._kept.append(waits)  # some may fetch it only later
        if patience:
            # A wait cannot be given up without closing all connections, so somebody else does the waiting.
            thread = threading.Thread(target=_wait_for_all, args=(waits,), name="holdfast-last-words", daemon=True)
            thread.start()
            thread.join(patience)

    def _lost(self, error: Exception, rank: int | None) -> NoReturn:
        """A message to or from a rank failed: it has died, or has given up because of another one."""
        verdict = self._verdict or self._verdict_of_others()
        if verdict is None and rank is not None:
            text = f"its connection ended while it was waited for in {self._watch.name}, so it exited or was killed"
            verdict = self._watch.verdict({rank: text}, "died, or left", is_final=True)
            with suppress(Exception):  # the store may be gone
                verdict = self._watch.roll().pass_verdict(verdict)
            self._pass_on(verdict, ())
        if verdict is not None:
            self._fail(verdict, error)
        self._broken = error
        self._round_is_over = True
        raise ConnectionLostError(
            f"the connection to the other ranks is lost, as it happens when one of them dies: {error}. Check "
            "their logs and restart the job; the checkpoints that were committed are not affected."
        ) from error

    def _verdict_of_others(self) -> Verdict | None:
        with suppress(Exception):  # the store may be gone
            return self._watch.roll().verdict_on(self._watch.epoch)
        return None

    def _fail(self, verdict: Verdict, cause: Exception | None = None) -> NoReturn:
        """End the connection with a verdict, and the round, unless it has yet to begin for this rank."""
        watch = self._watch
        took_part = self._has_met or watch.has_looked
        if verdict.is_final or (verdict.call == watch.call and took_part):
            self._end_with(verdict, cause)
        # Others have given up on a call, which may be this one, before this rank came: or on the one before, which has
        # ended well here.
        if verdict.call >= watch.call:
            self._missed.append(verdict)
        is_in_round = self._has_met or verdict.call > watch.call
        self._leave_connection(verdict)
        if is_in_round:
            self._round_is_over = True
            raise self._missing(verdict) from cause
        raise BeginAgain

    def _end_with(self, verdict: Verdict, cause: Exception | None = None, *, came_late: bool = False) -> NoReturn:
        """End the round with a verdict."""
        self._round_is_over = True
        self._ended_by = verdict
        error = self._missing(verdict, came_late=came_late)
        if verdict.is_final:
            self._broken = error
        elif not came_late:
            self._leave_connection(verdict)
        raise error from cause

    def _leave_connection(self, verdict: Verdict) -> None:
        """All ranks may be there again for the next one."""
        self._kept.append(self._groups)
        with self._changing:
            self._forget_groups()
            self._verdict = None
            self._watch.is_outside = True
            self._watch.move_to(verdict.epoch + 1)

    def _missing(self, verdict: Verdict, *, came_late: bool = False) -> MissingRanksError:
        missing = "; ".join(f"rank {self.members[rank]} ({what})" for rank, what in verdict.missing.items())
        late, what_now = "", "Restart the job, or go on without them in a new process group."
        if not verdict.is_final:
            what_now = f"If they are alive, the next call can have them again. {what_now}"
        if came_late and not verdict.is_final:
            late = f"the other ranks gave up on this call before this rank ({self.members[self.rank]}) joined it: "
        return MissingRanksError(
            f"{late}ranks that all others wait for {verdict.reason}: {missing}. Check their logs. {what_now} The "
            "checkpoints that were committed are not affected.",
            ranks=[self.members[rank] for rank in verdict.missing],
        )

    def _refuse_if_over(self) -> None:
        """Raise if the round has ended: again what has ended it, if a rank was lost in the midst of a step."""
        if not self._round_is_over:
            return
        if self._ended_by is not None:
            raise self._missing(self._ended_by)
        if self._broken is not None:
            self._connect()
        raise RuntimeError("a private group is used outside of a round")


def _weakly(method: Callable[[Verdict], None]) -> Callable[[Verdict], None]:
    """Call a method as long as its object is there: the thread that does must not keep it."""
    reference = weakref.WeakMethod(method)

    def call(verdict: Verdict) -> None:
        bound = reference()
        if bound is not None:
            bound(verdict)

    return call


def _wait_for_all(waits: Sequence[Callable[[], Any]]) -> None:
    for wait in waits:
        with suppress(Exception):
            wait()
