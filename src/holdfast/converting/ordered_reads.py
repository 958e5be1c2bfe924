"""A tensor that several threads read part by part, each part when the one before it has been read."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, ExitStack

from holdfast.sources.source import ByteStream


class OrderedReads:
    """Gives threads their turn. Whoever has part of the bytes to read must have been started before all that follow."""

    def __init__(self, opening: AbstractContextManager[ByteStream], nbytes: int) -> None:
        self._opening = opening
        self._nbytes = nbytes
        self._turn = threading.Condition()
        self._position = 0
        self._is_stopped = False
        self._stream: ByteStream | None = None
        self._open = ExitStack()

    def fill(self, begin: int, memory: memoryview) -> None:
        """Fill memory with the bytes from ``begin`` on, when those before have been read."""
        with self._turn:
            self._turn.wait_for(lambda: self._position == begin or self._is_stopped)
            if self._is_stopped:
                raise RuntimeError("an earlier part of the tensor was not read")
        try:
            self._read(begin, memory)
        except BaseException:
            self.stop()
            raise
        with self._turn:
            self._position += memory.nbytes
            self._turn.notify_all()

    def stop(self) -> None:
        """Nobody waits any longer: what is to be read before will not be."""
        with self._turn:
            self._is_stopped = True
            self._turn.notify_all()

    def close(self) -> None:
        """Let go of files. Nobody reads any more."""
        self._open.close()

    def _read(self, begin: int, memory: memoryview) -> None:
        if self._stream is None:
            self._stream = self._open.enter_context(self._opening)
        self._stream.fill(begin, memory)
        if begin + memory.nbytes == self._nbytes:
            self._stream.finish()
            self._open.close()
