"""The ranks of one call: they come together, make sure that they are in the same call, and leave together."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import torch.distributed as dist
import xxhash

from holdfast._base.notices import add_note
from holdfast._ranks.differences import named_ranks
from holdfast._ranks.exchanges import Exchanges, Join, as_list, entries_of
from holdfast._ranks.private_group import PrivateGroup, private_group_of
from holdfast._ranks.roll_call import Progressing
from holdfast._ranks.shared_steps import Attempt, Collectives, join_failures, pack_attempt, unpack_message
from holdfast._ranks.transfers import GroupTransfers, Transfers
from holdfast.errors import CheckpointException, HoldfastError, RankDisagreementError, RankLeftError, RemoteError

# Collectives over a link of our own instead of a process group of the program.


T = TypeVar("T")


class LinkedCollectives(Collectives):
    """The same steps as on a process group; only the way that the messages take is another."""

    def __init__(self, link: Exchanges, coordinator_rank: int = 0) -> None:
        super().__init__(None, False, coordinator_rank)
        self._connection = link
        self._unconfirmed: str | None = None
        self.use_dist = True
        self.rank = link.rank
        self.world_size = len(link.members)
        self.coordinator_rank = coordinator_rank
        self.is_coordinator = self.rank == coordinator_rank
        self.global_coordinator_rank = link.members[coordinator_rank]

    def compare_later(self, call: str) -> None:
        """Have the next exchange find out whether all ranks are in the same call, along with what else it is for."""
        self._unconfirmed = call

    @property
    def _link(self) -> Exchanges:
        """The connection, between ranks that are in the same call."""
        if self._unconfirmed is not None:
            call, self._unconfirmed = self._unconfirmed, None
            refuse_different_calls(self, call)
        return self._connection

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
        self._link.combine(b"", b"".join)

    def different_views(self, view: str) -> dict[int, str]:
        """What each rank sees, if that is not the same everywhere; nothing if it is. Of very many ranks, some."""
        if self._link.combine(_digest(view), _the_same):
            return {}
        return self._views(view)

    def _views(self, view: str) -> dict[int, str]:
        own = json.dumps([[self.rank, view]]).encode()
        return dict(json.loads(self._link.combine(own, _some_views)))

    def combine(self, step: str, map_fun: Callable[[], T], join: Callable[[list[T]], T], *, last: bool = False) -> T:
        """Run ``map_fun`` everywhere, join what neighbours have, and theirs in turn, and give all ranks the result."""
        mine = Attempt(map_fun)

        def join_messages(messages: list[bytes]) -> bytes:
            opened = [unpack_message(message, self.rank) for message in messages]
            if any(failures for _, failures in opened):
                failed = [message for message, (_, failures) in zip(messages, opened, strict=True) if failures]
                return join_failures(failed)
            return pack_attempt(Attempt(lambda: join([value for value, _ in opened])), self.rank)

        joined = self._combined(pack_attempt(mine, self.rank), join_messages, last=last)
        return cast(T, self._conclude(step, [mine], {self.coordinator_rank: joined})[0])

    def _combined(self, message: bytes, join: Join, *, last: bool = False) -> bytes:
        call, self._unconfirmed = self._unconfirmed, None
        if call is None:
            return self._connection.combine(message, join, last=last)
        # Ranks that are in other calls send something else, which begins with the digest of that call, too.
        joined = self._connection.combine(_digest(call) + message, partial(_joined_if_same, join), last=last)
        if not joined:
            refuse_different(self._views(call))
        return joined[_DIGEST:]

    def _all_failures(self, message: bytes) -> bytes:
        return self._combined(message, join_failures)

    def _decided_for_all(
        self, message: bytes, function: Callable[[list[Any]], bytes]
    ) -> tuple[Attempt[bytes] | None, bytes]:
        if self.coordinator_rank:
            return super()._decided_for_all(message, function)
        gathered = self._link.ask(as_list([message]))
        decided = None if gathered is None else self._decide(list(entries_of(gathered)), function)
        return decided, self._link.answer(None if decided is None else self._reply(decided))

    def _decided_for_each(
        self, message: bytes, function: Callable[[list[Any]], list[bytes]]
    ) -> tuple[Attempt[list[bytes]] | None, bytes]:
        if self.coordinator_rank:
            return super()._decided_for_each(message, function)
        gathered = self._link.ask(as_list([message]))
        decided = None if gathered is None else self._decide(list(entries_of(gathered)), function)
        replies = None if decided is None else as_list(self._replies(decided))
        return decided, self._link.answer(replies, split=True)

    def transfers(self, group: dist.ProcessGroup | None = None) -> Transfers:
        """A way to send bytes to other ranks: over the ranks' own connection, or over a group of the program."""
        if group is not None:
            link = self._link
            return GroupTransfers(group, link.members, link.wait_elsewhere if isinstance(link, PrivateGroup) else None)
        if not isinstance(self._link, Transfers):
            raise TypeError(f"a {type(self._link).__name__} carries messages, and no bytes of tensors")
        return self._link


_MOST_VIEWS = 32
"""How many ranks are shown when they see different things."""


_DIGEST = 16
"""Bytes."""


def _digest(text: str) -> bytes:
    return xxhash.xxh3_128_digest(text.encode())


def _joined_if_same(join: Join, messages: list[bytes]) -> bytes:
    """What messages of ranks that are in the same call have behind its digest, joined. Nothing if they are not."""
    first = messages[0][:_DIGEST]
    if not first or any(message[:_DIGEST] != first for message in messages):
        return b""
    return first + join([message[_DIGEST:] for message in messages])


def _the_same(digests: list[bytes]) -> bytes:
    """The digest that all have, or nothing."""
    return digests[0] if len(set(digests)) == 1 else b""


def _some_views(encoded: list[bytes]) -> bytes:
    """Views of the lowest ranks, and of one rank at least for each that there is."""
    views = [entry for part in encoded for entry in json.loads(part)]
    if len(views) > _MOST_VIEWS:
        first = {text: rank for rank, text in reversed(views)}
        views.sort(key=lambda entry: (first[entry[1]] != entry[0], entry[0]))
        views = sorted(views[:_MOST_VIEWS])
    return json.dumps(views).encode()


def _opened(payload: bytes) -> Any:
    return pickle.loads(payload)  # noqa: S301 - sent by another rank of this job


# They talk over a connection of their own, so that a save or load neither disturbs the program's process group nor
# needs one that works on the CPU.


@contextmanager
def meeting(
    call: str,
    process_group: dist.ProcessGroup | None = None,
    *,
    timeout: float | None = None,
    progress: Progressing | None = None,
    compare_later: bool = False,
) -> Iterator[Collectives]:
    """The ranks of a process group (all by default), or this process alone if there is no group.

    ``call`` says what is called, with all that must be the same on all ranks. If a step fails on some rank, all ranks
    leave the ``with`` block with that rank's exception. If one is missing, or makes no ``progress`` for ``timeout``
    seconds, all others leave it with an error that names it. With ``compare_later`` their first exchange finds out
    whether they are in the same call: for those that call nothing of the program before, which may wait for others.
    """
    if not (dist.is_available() and dist.is_initialized()):
        with causes_instead_of_steps(alone=True):
            yield Collectives(None, False, 0)
        return
    refuse_outsider(process_group)
    link = private_group_of(process_group, "calls")
    with causes_instead_of_steps(alone=False), link.round(call, timeout=timeout, progress=progress):
        ranks = LinkedCollectives(link)
        if compare_later:
            ranks.compare_later(call)
        else:
            refuse_different_calls(ranks, call)
        yield ranks


@contextmanager
def drop_in_meeting(
    verb: str, process_group: dist.ProcessGroup | None, *, alone: bool, place: object = None, coordinator_rank: int = 0
) -> Iterator[Collectives]:
    """The ranks of a call of ``holdfast.dcp``. What fails in a step stays a ``CheckpointException``.

    ``place`` is said of ranks that are missing, and tells calls apart. It is not compared: ranks may have different
    paths to the same folder.

    They meet as all others do, so that whoever is missing is named. Where that is not possible, the messages go over
    the program's own process group: in a call within another one, and with groups that have no store.
    """
    ranks = Collectives(process_group, not alone, coordinator_rank)  # complains of a rank that is not in the group
    link = None if alone else _link_if_possible(process_group)
    if link is None or link.is_in_round_here():
        yield ranks
        return
    with link.round(verb if place is None else f"{verb} ({place})"):
        linked = LinkedCollectives(link, coordinator_rank)
        linked.group = process_group
        refuse_different_calls(linked, verb)
        yield linked


def _link_if_possible(process_group: dist.ProcessGroup | None) -> PrivateGroup | None:
    try:
        return private_group_of(process_group, "calls")
    except Exception:  # a group of a kind that torch does not make itself
        return None


def own_place(process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank and the number of ranks, before they have met."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(process_group), dist.get_world_size(process_group)


def refuse_outsider(process_group: dist.ProcessGroup | None) -> None:
    """Raise if this rank is not in the group that was given."""
    if process_group is not None and dist.get_rank(process_group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the process group that was given. Only the ranks of the group make "
            "this call."
        )


def refuse_different_calls(ranks: Collectives, call: str) -> None:
    """Raise if the ranks are not in the same call."""
    views = ranks.different_views(call)
    if views:
        refuse_different(views)


def refuse_different(views: dict[int, str]) -> NoReturn:
    """Raise for ranks that are in these calls."""
    raise RankDisagreementError(
        f"the ranks are in different calls: {views}. All ranks of a group must call the same, with the same "
        "arguments, in the same order.",
        views=views,
    )


@contextmanager
def causes_instead_of_steps(*, alone: bool) -> Iterator[None]:
    """What a user can act on is why a rank failed, so that is what is raised, and not that a step did."""
    try:
        yield
    except CheckpointException as error:
        _forget_this_place(error)
        if alone:
            _raise_as_it_was(_taken_out_of(error))
        raise _first_cause(error) from error


def _forget_this_place(error: CheckpointException) -> None:
    """Take the frames of this module out of a traceback: they were called by those that have the error at hand."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace


def _taken_out_of(error: CheckpointException) -> BaseException:
    """The only cause of an error that nobody will see.

    The traceback of the cause will lead to the error. If that led back to the cause, they would keep alive all that
    both refer to, such as the state that is being saved, until the garbage collector comes along.
    """
    _, (cause, _) = error.failures.popitem()
    error.__cause__ = None
    return cause


def _raise_as_it_was(cause: BaseException) -> NoReturn:
    """Raise an exception again, with the cause and context that it has, and not with those of this place."""
    before = cause.__cause__, cause.__context__, cause.__suppress_context__
    try:
        raise cause
    finally:
        cause.__cause__, cause.__context__, cause.__suppress_context__ = before
        del cause


def _first_cause(error: CheckpointException) -> Exception:
    """The exception of the lowest rank that failed, naming that rank."""
    rank, (cause, _) = next(iter(error.failures.items()))
    others = sorted(set(error.failures) - {rank})
    named = str(others) if len(others) <= 8 else f"[{named_ranks(others)}]"
    where = f"on rank {rank}" + (f"; rank(s) {named} failed too" if others else "")
    if isinstance(cause, HoldfastError) and not isinstance(cause, CheckpointException):
        return _with_rank(cause, rank, where)
    if not isinstance(cause, Exception):
        # Ctrl-C, or the end of a program, is meant for the rank where it happens, and not for the others.
        return RankLeftError(f"rank {rank} was interrupted ({cause!r}), so the call ended on all ranks", ranks=[rank])
    _put_in_place_of(cause, error, rank)
    add_note(cause, f"[{where}]")
    return cause


def _put_in_place_of(cause: Exception, error: CheckpointException, rank: int) -> None:
    """Have a copy of the cause in the error of the step, which will be the cause of the cause: there is no circle."""
    try:
        twin: BaseException = copy.copy(cause)
    except Exception:  # it came from another rank in the same way, so this is hardly possible
        twin = RemoteError(str(cause), type_name=type(cause).__name__, text=str(cause))
    error.failures[rank] = twin, error.failures[rank][1]
    if error.__cause__ is cause:
        error.__cause__ = twin


def _with_rank(cause: HoldfastError, rank: int, where: str) -> HoldfastError:
    named: Any = type(cause)(f"{cause.message} [{where}]", **{"rank": rank, **cause.fields})
    return named  # type: ignore[no-any-return]
