"""Which connection the ranks of a group make next, after verdicts have ended earlier ones.

Connections are counted, and calls on each of them. A verdict ends a connection for all ranks; at its next call each of
them makes the next one, whose first call that is. So ranks that were missing are in step again, whatever they missed.

A rank that comes and finds verdicts on calls in which it did not take part has left out these calls, or is late:

- If none of them is about a call like its own (verb, path, step), it has left them out. It joins the others.
- Else its call may be one that the others gave up on, or a later one that looks the same, such as a save to the same
  path. What the others call next decides: if that looks the same, this is taken for it (so a call that is tried again
  meets the late rank); if it does not, this rank is late, and its call fails here as it did everywhere. If they call
  nothing for a while it is late, too: they may well wait for it outside of Holdfast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from holdfast._ranks.roll_call import Verdict, verdict_in
from holdfast.errors import ConnectionLostError

_PAUSE = 0.1
"""Seconds between two looks at what the others call."""


class Outlook(NamedTuple):
    """What a rank does that is to connect to the others."""

    epoch: int
    """The connection to make, at this call or the next."""
    missed: Sequence[Verdict]
    """What later calls have to know."""
    verdict: Verdict | None = None
    """What this call fails with."""


def look_out(
    store: Store, epoch: int, call: str, missed: Sequence[Verdict], grace: float, goes_on: Callable[[], bool]
) -> Outlook:
    """Find the connection that has not ended, and whether a call belongs on it; ``epoch`` is the first to look at.

    For up to ``grace`` seconds it is waited for what the others call, where that decides.

    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> look_out(store, 0, "save to a", (), 0.0, lambda: True).epoch
    0
    >>> _ = store.compare_set("verdict/0", "", Verdict({1: "?"}, "", name="save to a").packed().decode())
    >>> look_out(store, 0, "save to a", (), 0.0, lambda: True).verdict.missing  # late
    {1: '?'}
    >>> look_out(store, 0, "save to b", (), 0.0, lambda: True)
    Outlook(epoch=1, missed=(), verdict=None)
    """
    end = time.monotonic() + grace
    known = list(missed)
    while True:
        while (verdict := verdict_in(store, epoch)) is not None:
            known.append(verdict)
            if verdict.is_final:
                return Outlook(epoch, known, verdict)
            epoch += 1
        alike = [number for number, verdict in enumerate(known) if verdict.name == call]
        if not alike:
            _announce(store, epoch, call)
            return Outlook(epoch, ())
        announced = _announced(store, epoch)
        if announced == call:
            return Outlook(epoch, ())
        if announced is not None or time.monotonic() >= end:
            return Outlook(epoch, known[alike[0] + 1 :], known[alike[0]])
        if not goes_on():
            raise ConnectionLostError("the call is over")
        time.sleep(_PAUSE)


def _announce(store: Store, epoch: int, call: str) -> None:
    """Say what is called first on a connection, if nobody has. On the very first one, nobody can be late."""
    if epoch:
        store.compare_set(_key(epoch), "", call)


def _announced(store: Store, epoch: int) -> str | None:
    return store.get(_key(epoch)).decode() if store.check([_key(epoch)]) else None


def _key(epoch: int) -> str:
    return f"{epoch}/call"
