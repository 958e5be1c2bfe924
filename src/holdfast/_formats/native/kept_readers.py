"""Readers of files that are far away, kept from when a table is read until the data of its file have been.

To open such a file is a request, and its table is read before anybody knows what of its data is wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from holdfast._stores.store import Reader


class KeptReaders:
    """Readers by the names of their files. They are closed when no call that may want them goes on any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._kept: dict[str, tuple[Reader, ExitStack]] = {}

    @contextmanager
    def during_call(self) -> Iterator[None]:
        """Keep readers until the end of this block, and of others that other threads are in."""
        with self._lock:
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                kept = [] if self._calls else list(self._kept.values())
                if not self._calls:
                    self._kept = {}
            with ExitStack() as all_of_them:
                for _, opened in kept:
                    all_of_them.push(opened)

    def keep(self, name: str, reader: Reader, opened: ExitStack) -> None:
        """Keep a reader, which is closed with what it was opened with. If a call goes on; else that is left open."""
        with self._lock:
            if self._calls and name not in self._kept:
                self._kept[name] = reader, opened.pop_all()

    def find(self, name: str) -> Reader | None:
        """The reader of a file, if one is kept."""
        with self._lock:
            kept = self._kept.get(name)
        return None if kept is None else kept[0]
