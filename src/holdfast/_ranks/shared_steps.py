"""How ranks agree: steps that run on every rank and fail on every rank alike.

A step is a function that each rank runs, followed by an exchange of what came out of it. An exception on any rank
becomes one ``CheckpointException`` on all of them. What crosses between ranks is pickled here, inside the guarded
part of the step, so that neither a result nor an exception that resists pickling can leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch.distributed as dist

from holdfast._ranks.failures import (
    MOST_FAILURES,
    PackedFailure,
    is_wrapped_exception,
    pack_failure,
    unpack_failure,
    wrap_exception,
)
from holdfast._ranks.packing import pack, unpack
from holdfast._ranks.transfers import GroupTransfers, Transfers
from holdfast.errors import WRAPPED_EXCEPTION, CheckpointException, RemoteError

Failures: TypeAlias = dict[int, WRAPPED_EXCEPTION]

T = TypeVar("T")
R = TypeVar("R")


class Attempt(Generic[T]):
    """The outcome of a function call: a value or a wrapped exception, never a raised one."""

    value: T

    def __init__(self, function: Callable[[], T]) -> None:
        self.failure: WRAPPED_EXCEPTION | None = None
        self._interruption: BaseException | None = None
        try:
            self.value = function()
        except BaseException as error:  # carried to all ranks, then raised again where it came from
            self._note(error)
            # The exception refers to this frame. With a way back to it, it would keep the caller's state alive until
            # the garbage collector comes along.
            del self, function

    @classmethod
    def ended(cls, error: BaseException | None) -> Attempt[None]:
        """The outcome of code that has run already."""
        attempt = cls.__new__(cls)
        attempt.failure = attempt._interruption = None
        attempt.value = None  # type: ignore[assignment]
        if error is not None:
            attempt._note(error)
        return attempt  # type: ignore[return-value]

    def _note(self, error: BaseException) -> None:
        self.failure = wrap_exception(error)
        if not isinstance(error, Exception):
            self._interruption = error

    def forget_failure(self) -> None:
        """Everybody has heard of it. An interruption is still to be resumed."""
        self.failure = None

    def resume_interruption(self) -> None:
        """Let Ctrl-C and exit do on their own rank what they would have done without us."""
        if self._interruption is not None:
            error, self.failure, self._interruption = self._interruption, None, None
            try:
                raise error
            finally:
                del error

    def resume_failure(self) -> None:
        """Raise what the function raised, if it did, and forget it: whoever has this attempt is on its way."""
        if self.failure is None:
            return
        error = self.failure[0]
        self.failure = self._interruption = None
        try:
            raise error
        finally:
            del error


class _StepFailed(Exception):
    """Some ranks failed; raised and caught on the coordinator only."""

    def __init__(self, failures: Failures) -> None:
        self.failures = failures


def failures_of(results: list[Any]) -> Failures:
    """The wrapped exceptions among ``results``, by position."""
    return {rank: result for rank, result in enumerate(results) if is_wrapped_exception(result)}


def pack_failures(failures: Failures) -> bytes:
    """Failures as a message."""
    return pack(("failures", {rank: pack_failure(wrapped) for rank, wrapped in failures.items()}))


def join_failures(messages: list[bytes]) -> bytes:
    """One message of the failures that several report, of which most report none, by nothing at all.

    Only those of the lowest ranks are kept in full: a disk that is full is so for a thousand ranks.
    """
    reported = [message for message in messages if message]
    if len(reported) < 2:
        return reported[0] if reported else b""
    found: dict[int, PackedFailure | None] = {}
    for message in reported:
        found.update(unpack(message)[1])
    ordered = sorted(found.items())
    return pack(("failures", {rank: each if n < MOST_FAILURES else None for n, (rank, each) in enumerate(ordered)}))


def pack_attempt(attempt: Attempt[Any], rank: int) -> bytes:
    """An outcome as a message. A value that does not pickle turns it into a failure of ``rank``."""
    if attempt.failure is None:
        packing = Attempt(lambda: pack(("value", attempt.value)))
        if packing.failure is None:
            return packing.value
        attempt.failure, attempt._interruption = packing.failure, packing._interruption
    return pack_failures({rank: attempt.failure})


def unpack_message(message: bytes, blamed: int) -> tuple[Any, Failures]:
    """The value of a message and the failures it reports, of which one is empty. One that does not open is one."""
    if not message:
        return None, {}
    try:
        kind, content = unpack(message)
    except Exception as error:
        return None, {blamed: wrap_exception(error)}
    if kind == "value":
        return content, {}
    packed = cast("dict[int, PackedFailure | None]", content)
    return None, {rank: _unpacked(rank, failure) for rank, failure in packed.items()}


def _unpacked(rank: int, failure: PackedFailure | None) -> WRAPPED_EXCEPTION:
    if failure is not None:
        return unpack_failure(failure)
    text = f"rank {rank} failed too, as more than {MOST_FAILURES} ranks did; its own log says why"
    return wrap_exception(RemoteError(text, type_name="", text=text))


class Collectives:
    """The ranks of one call. Works alike with a process group, a subgroup, or no group at all."""

    def __init__(self, group: dist.ProcessGroup | None, use_dist: bool, coordinator_rank: int) -> None:
        self.group = group
        self.use_dist = use_dist
        self.coordinator_rank = coordinator_rank
        if use_dist:
            self.rank = dist.get_rank(group)
            self.world_size = dist.get_world_size(group)
            if self.rank < 0:
                raise RuntimeError("this rank is not part of the process group that was given for the checkpoint")
            if not 0 <= coordinator_rank < self.world_size:
                raise ValueError(
                    f"coordinator rank {coordinator_rank} is not in a group of {self.world_size} ranks; "
                    "it is counted inside the group"
                )
            self.global_coordinator_rank = (
                dist.get_global_rank(group, coordinator_rank) if group is not None else coordinator_rank
            )
        else:
            self.rank, self.world_size, self.global_coordinator_rank = 0, 1, 0
        self.is_coordinator = not use_dist or self.rank == coordinator_rank

    def global_ranks(self) -> tuple[int, ...]:
        """The ranks of the group, by their numbers in the whole job."""
        if not self.use_dist:
            return (0,)
        if self.group is None:
            return tuple(range(self.world_size))
        return tuple(dist.get_process_group_ranks(self.group))

    def get_rank(self) -> int:
        """This rank's number in the group."""
        return self.rank

    def get_world_size(self) -> int:
        """How many ranks take part."""
        return self.world_size

    # Plain exchanges: whatever is given must pickle. The steps below only ever pass bytes.

    def broadcast_object(self, object: T | None) -> T:
        """The coordinator's object, on every rank."""
        box = [object]
        if self.use_dist:
            dist.broadcast_object_list(box, src=self.global_coordinator_rank, group=self.group)
        return cast(T, box[0])

    def gather_object(self, object: T) -> list[T] | None:
        """All ranks' objects on the coordinator, None elsewhere."""
        if not self.use_dist:
            return [object]
        gathered = cast("list[T]", [None] * self.world_size) if self.is_coordinator else None
        dist.gather_object(object, gathered, dst=self.global_coordinator_rank, group=self.group)
        return gathered

    def all_gather_object(self, object: T) -> list[T]:
        """All ranks' objects on every rank."""
        if not self.use_dist:
            return [object]
        gathered = cast("list[T]", [None] * self.world_size)
        dist.all_gather_object(gathered, object, group=self.group)
        return gathered

    def scatter_object(self, object_list: list[T] | None) -> T:
        """The coordinator's n-th object on rank n."""
        if not self.use_dist:
            if object_list is None:
                raise AssertionError("the coordinator has nothing to hand out")
            return object_list[0]
        received: list[Any] = [None]
        dist.scatter_object_list(
            received,
            object_list if self.is_coordinator else None,
            src=self.global_coordinator_rank,
            group=self.group,
        )
        return cast(T, received[0])

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.use_dist:
            dist.barrier(self.group)

    def different_views(self, view: str) -> dict[int, str]:
        """What each rank sees, if that is not the same everywhere; nothing if it is. Of very many ranks, some."""
        views = dict(enumerate(self.all_gather_object(view)))
        return views if len(set(views.values())) > 1 else {}

    def transfers(self, group: dist.ProcessGroup | None = None) -> Transfers:
        """A way to send bytes to other ranks, over ``group`` if one is given."""
        group = group or self.group or dist.group.WORLD
        if not self.use_dist or group is None:
            raise RuntimeError("a process alone has nobody to send bytes to")
        return GroupTransfers(group, self.global_ranks())

    # Steps: functions on every rank whose errors reach every rank.

    def reduce_scatter(self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], list[R]]) -> R:
        """Run ``map_fun`` everywhere, ``reduce_fun`` on the coordinator, and give each rank its own result."""
        if not self.use_dist:
            return self._alone(step, lambda: reduce_fun([map_fun()])[0])

        def answers(values: list[T]) -> list[bytes]:
            results = list(reduce_fun(values))
            if len(results) != self.world_size:
                raise ValueError(f"the step '{step}' made {len(results)} results for {self.world_size} ranks")
            return [pack(("value", result)) for result in results]

        mine = Attempt(map_fun)
        decided, reply = self._decided_for_each(pack_attempt(mine, self.rank), answers)
        value, failures = unpack_message(reply, self.rank)
        # Every rank got a reply of its own, so the others do not know yet if one of them could not be opened.
        known = self._all_failures(pack_failures(failures) if failures else b"")
        self._conclude(step, [mine, decided], {self.coordinator_rank: known})
        return cast(R, value)

    def all_reduce(self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], R]) -> R:
        """Run ``map_fun`` everywhere, ``reduce_fun`` on the coordinator, and give its result to all ranks."""
        if not self.use_dist:
            return self._alone(step, lambda: reduce_fun([map_fun()]))
        mine = Attempt(map_fun)
        decided, reply = self._decided_for_all(
            pack_attempt(mine, self.rank), lambda values: pack(("value", reduce_fun(values)))
        )
        return cast(R, self._conclude(step, [mine, decided], {self.coordinator_rank: reply})[0])

    def combine(self, step: str, map_fun: Callable[[], T], join: Callable[[list[T]], T], *, last: bool = False) -> T:
        """Run ``map_fun`` everywhere, join what neighbours have, and theirs in turn, and give all ranks the result.

        ``join`` gets values in the order of the ranks, and may be given its own results: how often it is called, and
        where, is left to the connection. After the ``last`` exchange of a call the ranks need not meet again to leave.
        """
        return self.all_reduce(step, map_fun, join)

    def all_gather(self, step: str, map_fun: Callable[[], T]) -> list[T]:
        """Run ``map_fun`` everywhere and give all results to all ranks."""
        if not self.use_dist:
            return [self._alone(step, map_fun)]
        mine = Attempt(map_fun)
        messages = self.all_gather_object(pack_attempt(mine, self.rank))
        return cast("list[T]", self._conclude(step, [mine], dict(enumerate(messages))))

    def step(self, name: str) -> Step:
        """A ``with`` block that every rank runs: all ranks leave it together, and all fail if one fails.

        with ranks.step("write"):
            files = write(chunks)
        """
        return Step(self, name)

    def conclude_step(self, step: str, mine: Attempt[None]) -> None:
        """Exchange how a step went that all ranks have run, and raise if it failed on one of them."""
        if not self.use_dist:
            self._raise_alone(step, mine)
            return
        self._conclude(step, [mine], {self.coordinator_rank: self._all_failures(self._failure_in(mine))})

    def own_error_first(self, step: str, map_fun: Callable[[], T]) -> T:
        """Run ``map_fun`` everywhere; each rank keeps its own result, and all fail if one fails.

        For the caller's own code: where it raises, its very exception goes on. Ranks where it did not raise get the
        ``CheckpointException``.
        """
        if not self.use_dist:
            return map_fun()
        result: list[T] = []
        mine = Attempt(lambda: result.append(map_fun()))
        known = self._all_failures(self._failure_in(mine))
        mine.resume_failure()
        self._conclude(step, [mine], {self.coordinator_rank: known})
        return result[0]

    def broadcast(self, step: str, map_fun: Callable[[], T]) -> T:
        """Run ``map_fun`` on the coordinator alone and give its result to all ranks."""
        if not self.use_dist:
            return self._alone(step, map_fun)
        mine = Attempt(map_fun) if self.is_coordinator else None
        message = self.broadcast_object(None if mine is None else pack_attempt(mine, self.rank))
        return cast(T, self._conclude(step, [mine], {self.coordinator_rank: message})[0])

    def _alone(self, step: str, function: Callable[[], T]) -> T:
        attempt = Attempt(function)
        self._raise_alone(step, attempt)
        return attempt.value

    def _raise_alone(self, step: str, attempt: Attempt[Any]) -> None:
        attempt.resume_interruption()
        if attempt.failure is None:
            return
        failures = {0: attempt.failure}
        attempt.failure = None
        try:
            raise CheckpointException(step, failures) from failures[0][0]
        finally:
            del failures

    # How outcomes travel. A connection of another kind may have shorter ways.

    def _failure_in(self, attempt: Attempt[Any]) -> bytes:
        """What there is to be reported to others."""
        return b"" if attempt.failure is None else pack_failures({self.rank: attempt.failure})

    def _all_failures(self, message: bytes) -> bytes:
        """What all ranks have to report."""
        return join_failures(self.all_gather_object(message))

    def _decided_for_all(
        self, message: bytes, function: Callable[[list[Any]], bytes]
    ) -> tuple[Attempt[bytes] | None, bytes]:
        """Gather outcomes, run ``function`` on the coordinator, and give its result to all, or who failed."""
        decided = self._decide(self.gather_object(message), function)
        reply = None if decided is None else self._reply(decided)
        return decided, self.broadcast_object(reply)

    def _decided_for_each(
        self, message: bytes, function: Callable[[list[Any]], list[bytes]]
    ) -> tuple[Attempt[list[bytes]] | None, bytes]:
        """The same with a result for each rank."""
        decided = self._decide(self.gather_object(message), function)
        return decided, self.scatter_object(None if decided is None else self._replies(decided))

    def _reply(self, decided: Attempt[bytes]) -> bytes:
        return decided.value if decided.failure is None else self._verdict(decided)

    def _replies(self, decided: Attempt[list[bytes]]) -> list[bytes]:
        return decided.value if decided.failure is None else [self._verdict(decided)] * self.world_size

    def _decide(self, messages: list[bytes] | None, function: Callable[[list[Any]], R]) -> Attempt[R] | None:
        """On the coordinator, which has the outcomes, run ``function`` on the values if no rank failed."""
        if messages is None:
            return None
        gathered = messages

        def run() -> R:
            opened = [unpack_message(message, rank) for rank, message in enumerate(gathered)]
            failures = {rank: wrapped for _, found in opened for rank, wrapped in found.items()}
            if failures:
                raise _StepFailed(failures)
            return function([value for value, _ in opened])

        return Attempt(run)

    def _verdict(self, decided: Attempt[Any]) -> bytes:
        assert decided.failure is not None
        error = decided.failure[0]
        return pack_failures(error.failures if isinstance(error, _StepFailed) else {self.rank: decided.failure})

    def _conclude(self, step: str, attempts: list[Attempt[Any] | None], messages: dict[int, bytes]) -> list[Any]:
        """Open what came back, by sender: the values, or this step's exception on every rank."""
        made = [attempt for attempt in attempts if attempt is not None]
        for attempt in made:
            attempt.forget_failure()  # it is in the messages; its frames lead to the callers, who have the attempt
        for attempt in made:
            attempt.resume_interruption()
        opened = [unpack_message(message, sender) for sender, message in messages.items()]
        failures = {rank: wrapped for _, found in opened for rank, wrapped in found.items()}
        if failures:
            ordered = dict(sorted(failures.items()))
            try:
                raise CheckpointException(step, ordered) from next(iter(ordered.values()))[0]
            finally:
                # The exception refers to this frame, and whoever raises one of the failures to the exception.
                del opened, failures, ordered
        return [value for value, _ in opened]


class Step:
    """What ``Collectives.step`` returns."""

    def __init__(self, ranks: Collectives, name: str) -> None:
        self._ranks = ranks
        self._name = name

    def __enter__(self) -> None:
        """Nothing is exchanged before the block has run."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        mine: Attempt[None] = Attempt.ended(error)
        try:
            self._ranks.conclude_step(self._name, mine)
        except BaseException as raised:
            if raised is not error and raised.__context__ is error:
                raised.__context__ = None  # the cause is named already, and a second way to it is a circle
            raise
        finally:
            del error, trace, mine
