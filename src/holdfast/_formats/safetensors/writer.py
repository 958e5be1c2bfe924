"""Writes a safetensors file from front to back, never holding more than the piece that is being written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast._formats.safetensors.header import Header, plan_header


class SafetensorsWriter:
    """Writes the tensors that were announced, one by one, in the order of ``header.tensors``.

    >>> import io
    >>> file = io.BytesIO()
    >>> writer = SafetensorsWriter(file, [("weight", "U8", (4,))])
    >>> writer.write("weight", [b"ab", b"cd"])
    >>> writer.finish()
    >>> file.getvalue().endswith(b"abcd")
    True
    """

    def __init__(
        self,
        stream: Any,
        tensors: Iterable[tuple[str, str, tuple[int, ...]]],
        notes: Mapping[str, str] | None = None,
    ) -> None:
        self.header: Header
        self.header, start = plan_header(tensors, notes)
        self._stream = stream
        self._waiting = list(self.header.tensors)[::-1]
        stream.write(start)

    def write(self, name: str, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        """Write the bytes of the next tensor, which must be ``name``."""
        if not self._waiting or self._waiting[-1] != name:
            raise ValueError(f"{name!r} comes out of turn; next is {self._waiting[-1:] or 'the end'}")
        self._waiting.pop()
        written = 0
        for piece in pieces:
            self._stream.write(piece)
            written += memoryview(piece).nbytes
        expected = self.header.tensors[name].nbytes
        if written != expected:
            raise ValueError(f"{name!r} was announced with {expected} bytes and came with {written}")

    def finish(self) -> None:
        """All tensors were written; raises if not."""
        if self._waiting:
            raise ValueError(f"{len(self._waiting)} announced tensor(s) were not written: {self._waiting[:-11:-1]}")
