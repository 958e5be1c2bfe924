"""What the page of a run shows of one checkpoint."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from holdfast.errors import HoldfastError
from holdfast.formats.native.names import RECORD
from holdfast.formats.native.record import HEAD_BYTES, written_in
from holdfast.listing.entries import Entry
from holdfast.stores.store import Store


@dataclass(frozen=True)
class Writing:
    """How a checkpoint was written, as its record tells."""

    world_size: int | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the slowest rank, by phase."""

    @staticmethod
    def of(written: Any) -> Writing:
        """What can be understood of it: it is from a file that anybody may have written."""
        if not isinstance(written, dict):
            return Writing()
        ranks, phases = written.get("world_size"), written.get("phases")
        slowest = {
            str(name): max(seconds)
            for name, seconds in (phases.items() if isinstance(phases, dict) else ())
            if isinstance(seconds, list) and seconds and all(_is_number(one) for one in seconds)
        }
        return Writing(ranks if type(ranks) is int else None, slowest)

    @staticmethod
    def noted_in(store: Store) -> Writing:
        """How the record in a store says that it was written, from its first lines: the rest of it may be large."""
        try:
            with store.reader(RECORD) as reader:
                head = bytearray(min(HEAD_BYTES, reader.size))
                reader.read_into(0, head)
            return Writing.of(written_in(bytes(head)))
        except (OSError, HoldfastError):
            return Writing()


@dataclass(frozen=True)
class CheckpointFacts(Entry):
    """A checkpoint that is there, whole or not."""

    writing: Writing = field(default_factory=Writing)

    @staticmethod
    def of(entry: Entry, writing: Writing) -> CheckpointFacts:
        """What is listed of it, and how it was written."""
        return CheckpointFacts(**vars(entry), writing=writing)

    def to_json(self) -> dict[str, Any]:
        """As the page gets it."""
        return {
            **super().to_json(),
            "quoted": quoted(self.name),
            "metadata": {name: _as_text(value) for name, value in self.metadata.items()},
            "world_size": self.writing.world_size,
            "phases": dict(self.writing.phases),
        }


def quoted(name: str) -> str:
    """A name as a part of a URL. Names of files need not be texts.

    >>> quoted("step 1/é")
    'step%201%2F%C3%A9'
    """
    return quote(os.fsencode(name), safe="")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
