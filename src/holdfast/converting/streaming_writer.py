"""A writer of DCP checkpoints for tensors whose elements are not in memory."""

from __future__ import annotations

from holdfast.storage.blobs import Elements
from holdfast.storage.writer import _FileSystemWriter
from holdfast.stores.filesystem import AnyPath


class StreamingWriter(_FileSystemWriter):
    """Asks for the elements of each tensor when it is written. ``memory`` is for those on their way to the disk."""

    def __init__(self, folder: AnyPath, elements: Elements, memory: int) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # nothing is on a device
        self._elements = elements
        self._memory_budget = memory
