"""The ranks of one call: they come together, make sure that they are in the same call, and leave together.

They talk over a connection of their own, so that a save or load neither disturbs the program's process group nor needs
one that works on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from holdfast.coordination.collectives import Collectives
from holdfast.coordination.linked import LinkedCollectives
from holdfast.coordination.private_group import private_group_of
from holdfast.errors import CheckpointException, HoldfastError, RankDisagreementError


@contextmanager
def meeting(call: str, process_group: dist.ProcessGroup | None = None) -> Iterator[Collectives]:
    """The ranks of a process group (all by default), or this process alone if there is no group.

    ``call`` says what is called, with all that must be the same on all ranks. If a step fails on some rank, all ranks
    leave the ``with`` block with that rank's exception.
    """
    try:
        if _is_alone():
            yield Collectives(None, False, 0)
            return
        with private_group_of(process_group, "calls").round() as link:
            ranks = LinkedCollectives(link)
            _refuse_different_calls(ranks.all_gather_object(call))
            yield ranks
    except CheckpointException as error:
        cause = _first_cause(error)
        raise cause from (None if _is_alone() else error)


def _refuse_different_calls(calls: list[str]) -> None:
    if len(set(calls)) > 1:
        views = dict(enumerate(calls))
        raise RankDisagreementError(
            f"the ranks are in different calls: {views}. All ranks of a group must call the same, with the same "
            "arguments, in the same order.",
            views=views,
        )


def _first_cause(error: CheckpointException) -> BaseException:
    """The exception of the lowest rank that failed, telling which rank that was."""
    rank, (cause, _) = next(iter(error.failures.items()))
    others = sorted(set(error.failures) - {rank})
    where = f"on rank {rank}" + (f"; rank(s) {others} failed too" if others else "")
    if _is_alone():
        return cause
    if isinstance(cause, HoldfastError):
        return _told(cause, where)
    if sys.version_info >= (3, 11):
        cause.add_note(f"[{where}]")
    return cause


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())


def _told(cause: HoldfastError, where: str) -> HoldfastError:
    message = f"{cause.message} [{where}]"
    told: Any = type(cause)(message, **cause.fields)
    return told  # type: ignore[no-any-return]
