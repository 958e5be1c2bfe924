"""Where one item of a DCP checkpoint lies, and what its bytes must add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

SEAL_STATE_KEY = "holdfast_seal"
"""Name of the extra attribute in the stored index. Readers that do not know it ignore it."""


class Seal(NamedTuple):
    """What the bytes of a blob must add up to, kept in the index so that a swapped file is noticed too."""

    payload_offset: int
    """First payload byte (raw tensor data, or the whole blob), counted from the start of the blob."""
    payload_length: int
    payload_crc: int
    """CRC-32 of the payload."""
    envelope_crc: int
    """CRC-32 of all other bytes of the blob, in order."""


@dataclass
class _StorageInfo:
    """One stored item: ``length`` bytes at ``offset`` of the file ``relative_path``."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None = None
    seal: Seal | None = None

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "relative_path": self.relative_path,
            "offset": self.offset,
            "length": self.length,
        }
        if self.transform_descriptors is not None:
            state["transform_descriptors"] = list(self.transform_descriptors)
        if self.seal is not None:
            state[SEAL_STATE_KEY] = tuple(self.seal)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        seal = state.get(SEAL_STATE_KEY)
        self.__init__(  # type: ignore[misc]
            state["relative_path"],
            state["offset"],
            state["length"],
            state.get("transform_descriptors"),
            None if seal is None else Seal(*seal),
        )


@dataclass
class _StoragePrefix:
    """The start of the names of all files that one rank writes."""

    prefix: str
