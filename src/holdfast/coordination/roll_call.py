"""Who is where: every rank notes how far it has come, so that a rank that is waited for in vain can be named."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

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
