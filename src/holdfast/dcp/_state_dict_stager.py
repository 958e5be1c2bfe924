"""The stager below ``DefaultStager``, for programs that copy states by themselves."""

from __future__ import annotations

from holdfast._background.stagers import SnapshotTaker, host_memory, own_pool
from holdfast._formats.dcp.metadata import STATE_DICT_TYPE

__all__ = ["StateDictStager"]


class StateDictStager:
    """Copies states to host memory, which it keeps for the next one. Memory that is still in use is never reused.

    Tensors that are views of one memory are views of one memory in the copy. Strides and attributes that were set on
    tensors are kept. All tensors of a state are in one block, so whether they are worth pinning is decided once:
    ``pin_memory_min_bytes`` is accepted, and makes no difference.
    """

    def __init__(self, pin_memory: bool = False, share_memory: bool = False, pin_memory_min_bytes: int = 5) -> None:
        self.pin_memory = pin_memory
        self.share_memory = share_memory
        self.pin_memory_min_bytes = pin_memory_min_bytes
        memory = host_memory(pinned=pin_memory, shared=share_memory)
        self._taker = SnapshotTaker(own_pool(memory), exact=True)

    def stage(self, state_dict: STATE_DICT_TYPE, non_blocking: bool = False) -> STATE_DICT_TYPE:
        """A private copy. Complete when this returns, also with ``non_blocking``: copies always overlap."""
        return self._taker.take(state_dict)

    def close(self) -> None:
        """Let go of the memory."""
        self._taker.close()
