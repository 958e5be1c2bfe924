"""Steps that make something of all ranks count at once, and what the ranks do if such a step fails.

Only who commits knows whether it may have happened: what others see may be old, as on network disks that remember what
a folder held some seconds ago. So the one who commits says it to all, and without its word nothing is undone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast._base.commits import Commit
from holdfast._ranks.failures import PackedFailure, pack_failure, unpack_failure, wrap_exception
from holdfast.errors import CheckpointException

if TYPE_CHECKING:
    from holdfast._ranks.shared_steps import Collectives

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class _Failed:
    """What the others are sent after a failure."""

    failure: PackedFailure
    may_have_happened: bool


def commit_for_all(
    ranks: Collectives,
    step: str,
    map_fun: Callable[[], T],
    commit_fun: Callable[[list[T], Commit], R],
    undo: Callable[[], None],
) -> R:
    """Run ``map_fun`` everywhere and ``commit_fun`` on the coordinator, which notes when its commit may have happened.

    If it fails and the commit surely has not happened, ``undo`` is called on every rank. All ranks raise.
    """
    commit = Commit()
    raised: list[BaseException] = []

    def attempt(values: list[T]) -> R | _Failed:
        try:
            return commit_fun(values, commit)
        except BaseException as error:
            raised.append(error)
            return _Failed(pack_failure(wrap_exception(error)), commit.may_have_happened)

    try:
        outcome = ranks.all_reduce(step, map_fun, attempt)
    except BaseException:
        if ranks.is_coordinator and not commit.may_have_happened:
            undo()
        raise
    if isinstance(outcome, _Failed):
        if not outcome.may_have_happened:
            undo()
        raise _same_for_all(ranks, step, {ranks.coordinator_rank: outcome.failure}, raised)
    return outcome


def commit_on_each(
    ranks: Collectives,
    step: str,
    commit_fun: Callable[[], Any],
    may_have_happened: Callable[[], bool],
    undo: Callable[[], None],
) -> None:
    """Run ``commit_fun`` everywhere, of which one or several ranks commit; ``may_have_happened`` is asked after it.

    If it failed on some rank and surely nothing is committed by any, ``undo`` is called on every rank. All ranks raise.
    """
    raised: list[BaseException] = []

    def attempt() -> tuple[PackedFailure | None, bool]:
        try:
            commit_fun()
        except BaseException as error:
            raised.append(error)
            return pack_failure(wrap_exception(error)), may_have_happened()
        return None, may_have_happened()

    outcomes = ranks.all_gather(step, attempt)
    failures = {rank: failure for rank, (failure, _) in enumerate(outcomes) if failure is not None}
    if failures:
        if not any(in_doubt for _, in_doubt in outcomes):
            undo()
        raise _same_for_all(ranks, step, failures, raised)


def _same_for_all(
    ranks: Collectives, step: str, failures: dict[int, PackedFailure], raised: list[BaseException]
) -> BaseException:
    """What is raised on all ranks alike. Ctrl-C and exit stay what they are where they happened."""
    if raised:
        error = raised.pop()  # which leads to the frame that has the list
        if not isinstance(error, Exception):
            return error
        if not ranks.use_dist:  # there is nobody else, so it need not have come through a pickle
            return _with_cause(CheckpointException(step, {0: wrap_exception(error)}), error)
    unpacked = {rank: unpack_failure(failure) for rank, failure in failures.items()}
    return _with_cause(CheckpointException(step, unpacked), next(iter(unpacked.values()))[0])


def _with_cause(error: CheckpointException, cause: BaseException) -> CheckpointException:
    error.__cause__ = cause
    return error
