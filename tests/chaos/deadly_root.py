"""A folder of checkpoints that kills the process which uses it, at a chosen operation of its stores.

A SIGKILL hurts most where something is about to be written, half written, or just written. Operations are counted in
each process by itself.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast._stores.file_sink import FileSink
from holdfast._stores.local_store import LocalStore
from holdfast._stores.roots import LocalRoot
from holdfast._stores.store import Store

Operation = Literal["create", "write", "commit", "delete", "sync"]

_seen: Counter[Operation] = Counter()


@dataclass(frozen=True)
class Deadly:
    """At which operation somebody dies, and who."""

    operation: Operation
    number: int
    moment: Literal["before", "half", "after"] = "before"
    """``half``: of a write, half of the bytes are there when the kill comes; of a deletion, half of the files are gone;
    of a commit, the content is there under another name."""
    place: Literal["program", "writer"] = "program"
    """Which process counts its operations: that of the rank, or its writer process."""
    victim: Literal["program", "writer", "both"] = "program"


class DeadlyRoot(LocalRoot):
    """A local folder with one deadly operation."""

    def __init__(self, path: Path, deadly: Deadly | None) -> None:
        super().__init__(path)
        self._deadly = deadly
        self._store = DeadlyStore(path, deadly)

    def child(self, name: str) -> Store:
        return DeadlyStore(self.folder / name, self._deadly)


class DeadlyStore(LocalStore):
    """A local folder with one deadly operation. It is sent to writer processes, as all stores are."""

    def __init__(self, path: Path, deadly: Deadly | None) -> None:
        super().__init__(path)
        self._deadly = deadly
        self._program = os.getpid()

    @contextmanager
    def create(self, name: str, size: int | None = None, memory: int | None = None) -> Iterator[FileSink]:
        with self._danger("create"), super().create(name, size, memory) as sink:
            yield _DeadlySink(sink, self)  # type: ignore[misc]

    def commit(self, name: str, content: bytes, *, replaces: bytes | None) -> None:
        with self._danger("commit") as moment:
            if moment == "half":
                self.put(f".{name}.0badc0de.tmp", content)
                self.kill()
            super().commit(name, content, replaces=replaces)

    def delete(self, names: Iterable[str]) -> None:
        names = list(names)
        with self._danger("delete") as moment:
            if moment == "half":
                super().delete(names[: len(names) // 2])
                self.kill()
            super().delete(names)

    def sync(self) -> None:
        with self._danger("sync"):
            super().sync()

    @contextmanager
    def _danger(self, operation: Operation) -> Iterator[str | None]:
        moment = self.moment_of(operation)
        if moment == "before":
            self.kill()
        yield moment
        if moment == "after":
            self.kill()

    def moment_of(self, operation: Operation) -> str | None:
        """When to die during this operation, if at all."""
        _seen[operation] += 1
        deadly = self._deadly
        if deadly is None or (deadly.operation, deadly.number) != (operation, _seen[operation]):
            return None
        here = "program" if os.getpid() == self._program else "writer"
        return deadly.moment if deadly.place == here else None

    def kill(self) -> None:
        """Kill with the one signal that nothing can be done about."""
        assert self._deadly is not None
        writer = [] if self._deadly.place == "program" else [os.getpid()]
        victims = {"program": [self._program], "writer": writer, "both": [self._program, *writer]}
        for pid in victims[self._deadly.victim]:
            os.kill(pid, signal.SIGKILL)


class _DeadlySink:
    """Passes everything on to the sink of a file, as far as it comes."""

    def __init__(self, sink: FileSink, store: DeadlyStore) -> None:
        self._sink = sink
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def write(self, buffer: Any) -> None:
        moment = self._store.moment_of("write")
        if moment == "half":
            view = memoryview(buffer).cast("B")
            self._sink.write(view[: len(view) // 2])
        if moment in ("before", "half"):
            self._store.kill()
        self._sink.write(buffer)
        if moment == "after":
            self._store.kill()

    def buffer(self) -> memoryview | None:
        return self._sink.buffer()

    def advance(self, count: int) -> None:
        moment = self._store.moment_of("write")
        if moment in ("before", "half"):
            self._store.kill()
        self._sink.advance(count)
        if moment == "after":
            self._store.kill()
