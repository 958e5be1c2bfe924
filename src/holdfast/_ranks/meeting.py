"""The ranks of one call: they come together, make sure that they are in the same call, and leave together."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar, cast

import torch.distributed as dist

from holdfast._base.notices import add_note
from holdfast._ranks.private_group import Link, private_group_of
from holdfast._ranks.shared_steps import Collectives
from holdfast._ranks.transfers import GroupTransfers, Transfers
from holdfast.errors import CheckpointException, HoldfastError, RankDisagreementError, RankLeftError, RemoteError

# Collectives over a link of our own instead of a process group of the program.


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

    def transfers(self, group: dist.ProcessGroup | None = None) -> Transfers:
        """A way to send bytes to other ranks: over the ranks' own connection, or over a group of the program."""
        if group is not None:
            return GroupTransfers(group, self._link.members)
        if not isinstance(self._link, Transfers):
            raise TypeError(f"a {type(self._link).__name__} carries messages, and no bytes of tensors")
        return self._link


def _opened(payload: bytes) -> Any:
    return pickle.loads(payload)  # noqa: S301 - sent by another rank of this job


# They talk over a connection of their own, so that a save or load neither disturbs the program's process group nor
# needs one that works on the CPU.


@contextmanager
def meeting(call: str, process_group: dist.ProcessGroup | None = None) -> Iterator[Collectives]:
    """The ranks of a process group (all by default), or this process alone if there is no group.

    ``call`` says what is called, with all that must be the same on all ranks. If a step fails on some rank, all ranks
    leave the ``with`` block with that rank's exception.
    """
    if not (dist.is_available() and dist.is_initialized()):
        with causes_instead_of_steps(alone=True):
            yield Collectives(None, False, 0)
        return
    refuse_outsider(process_group)
    with causes_instead_of_steps(alone=False), private_group_of(process_group, "calls").round(call) as link:
        ranks = LinkedCollectives(link)
        refuse_different_calls(ranks.all_gather_object(call))
        yield ranks


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


def refuse_different_calls(calls: list[str]) -> None:
    """Raise if the ranks are not in the same call."""
    if len(set(calls)) > 1:
        views = dict(enumerate(calls))
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
    where = f"on rank {rank}" + (f"; rank(s) {others} failed too" if others else "")
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
