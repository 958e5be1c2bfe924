"""The ``keep`` arguments of a manager, put together."""

from __future__ import annotations

import functools

from holdfast.manager.retention import Policy, best, every, everything, last
from holdfast.manager.steps import Mode

KeepBest = tuple[int, str] | tuple[int, str, Mode]


def joined_policy(
    keep_last: int | None, keep_every: int | None, keep_best: KeepBest | None, keep: Policy | None
) -> Policy:
    """The policy that keeps what any of these keeps; everything if none is given.

    >>> str(joined_policy(3, None, (1, "loss"), None))
    'last 3, best 1 by loss'
    """
    if keep is not None and not isinstance(keep, Policy):
        raise TypeError(f"keep is a policy of holdfast.keep, as in keep=hf.keep.last(3), not {keep!r}")
    wanted: object = keep_best
    if wanted is not None and not (isinstance(wanted, (tuple, list)) and len(wanted) in (2, 3)):
        raise TypeError(
            f"keep_best is a number and a metric, as in (1, 'loss') or (1, 'score', 'max'), not {keep_best!r}"
        )
    given = [keep] if keep is not None else []
    if keep_last is not None:
        given.append(last(keep_last))
    if keep_every is not None:
        given.append(every(keep_every))
    if keep_best is not None:
        given.append(best(*keep_best))
    return functools.reduce(lambda one, other: one | other, given) if given else everything()


def most_kept(
    keep_last: int | None, keep_every: int | None, keep_best: KeepBest | None, keep: Policy | None
) -> int | None:
    """How many checkpoints there can be, pinned ones aside; None if nobody knows.

    >>> most_kept(3, None, (1, "loss"), None), most_kept(3, 1000, None, None)
    (4, None)
    """
    counts = [0 if keep_last is None else keep_last, 0 if keep_best is None else keep_best[0]]
    return None if keep is not None or keep_every is not None or not any(counts) else sum(counts)
