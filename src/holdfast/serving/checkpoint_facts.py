"""What the list shows of one checkpoint."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

from holdfast.errors import HoldfastError
from holdfast.formats.native.names import RECORD, generation_of
from holdfast.formats.native.record import LARGEST_RECORD, decode_record
from holdfast.manager.steps import StepInfo, step_of
from holdfast.manager.summaries import Summary
from holdfast.progress import size
from holdfast.serving.shelf import Format, SeenFolder
from holdfast.stores.store import Store

State: TypeAlias = Literal["committed", "set aside", "damaged"]

_NUMBER = re.compile(r"[0-9]{1,15}")
_WRITTEN = re.compile(rb'\n"written":(\{[^\n]*\}),\n')
_HEAD_BYTES = 1 << 18


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


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint that is there, whole or not."""

    name: str
    state: State
    format: Format
    identity: str
    """Another one if other content is under this name; empty if that cannot be told."""
    step: int | None
    nbytes: int
    saved_at: datetime | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = False
    why: str = ""
    """Why it is set aside, or what is damaged."""
    writing: Writing = field(default_factory=Writing)

    def to_json(self) -> dict[str, Any]:
        """As the page gets it."""
        return {
            "name": self.name,
            "quoted": quoted(self.name),
            "state": self.state,
            "format": self.format,
            "identity": self.identity,
            "step": self.step,
            "bytes": self.nbytes,
            "saved_at": None if self.saved_at is None else self.saved_at.isoformat(),
            "metrics": {name: value if math.isfinite(value) else str(value) for name, value in self.metrics.items()},
            "metadata": {name: _as_text(value) for name, value in self.metadata.items()},
            "pinned": self.pinned,
            "why": self.why,
            "world_size": self.writing.world_size,
            "phases": dict(self.writing.phases),
        }


def quoted(name: str) -> str:
    """A name as a part of a URL. Names of files need not be texts.

    >>> quoted("step 1/é")
    'step%201%2F%C3%A9'
    """
    return quote(os.fsencode(name), safe="")


def facts_of_step(info: StepInfo, seen: SeenFolder, store: Store) -> CheckpointFacts:
    """The facts of a step of a run."""
    state: State = "committed" if info.is_usable else "damaged" if info.damage is not None else "set aside"
    facts = CheckpointFacts(
        name=info.name,
        state=state,
        format="native",
        identity=info.identity,
        step=info.step,
        nbytes=info.nbytes or seen.nbytes,
        saved_at=info.saved_at,
        metrics=info.metrics,
        metadata=info.metadata,
        pinned=info.pinned,
        why=info.damage or info.set_aside or "",
        writing=Writing() if info.damage is not None else writing_noted_in(store),
    )
    return _with_missing_files(facts, seen)


def facts_of_other(seen: SeenFolder, store: Store | None) -> CheckpointFacts | None:
    """The facts of a checkpoint that is no step of a run; None if there is none."""
    found = seen.format
    if found is None:
        return None
    if found == "native" and store is not None:
        return _facts_of_native(seen, store)
    newest = max((file.changed_at for file in seen.files if file.changed_at is not None), default=None)
    return CheckpointFacts(
        name=seen.name,
        state="committed",
        format=found,
        identity=f"{newest}-{seen.nbytes}-{len(seen.files)}",
        step=number_in(seen.name),
        nbytes=seen.nbytes,
        saved_at=None if newest is None else datetime.fromtimestamp(newest, timezone.utc),
    )


def number_in(name: str) -> int | None:
    """The step that a name ends in, perhaps: programs name folders in many ways.

    >>> number_in("checkpoint-500"), number_in("epoch=3-step=70.ckpt"), number_in("final")
    (500, 70, None)
    """
    found = _NUMBER.findall(name)
    return int(found[-1]) if found else None


def writing_noted_in(store: Store) -> Writing:
    """How a record says that it was written, from its first lines: the rest of it may be large."""
    try:
        with store.reader(RECORD) as reader:
            head = bytearray(min(_HEAD_BYTES, reader.size))
            reader.read_into(0, head)
        found = _WRITTEN.search(head)
        return Writing() if found is None else Writing.of(json.loads(found.group(1)))
    except (OSError, HoldfastError, ValueError, RecursionError):
        return Writing()


def _facts_of_native(seen: SeenFolder, store: Store) -> CheckpointFacts | None:
    facts = CheckpointFacts(seen.name, "damaged", "native", "", number_in(seen.name), seen.nbytes)
    try:
        record_bytes = store.size(RECORD)
        if record_bytes is None:
            return None
        if record_bytes > LARGEST_RECORD:
            return replace(facts, why=f"{store.path_of(RECORD)} is too large for a record: {record_bytes} bytes")
        content = store.read(RECORD)
        record = decode_record(content, store.path_of(RECORD))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (HoldfastError, OSError) as error:
        return replace(facts, why=str(error))
    summary = Summary.of(record, len(content))
    facts = replace(
        facts,
        state="committed",
        identity=summary.identity,
        step=summary.step if summary.step is not None else step_of(seen.name) or number_in(seen.name),
        nbytes=summary.nbytes,
        saved_at=summary.time(),
        metrics=summary.numbers(),
        metadata=summary.metadata,
        writing=Writing.of(record.written),
    )
    return _with_missing_files(facts, seen)


def _with_missing_files(facts: CheckpointFacts, seen: SeenFolder) -> CheckpointFacts:
    """A record without its files is no checkpoint. That much can be told without reading them."""
    if facts.state == "damaged":
        return facts
    present = sum(file.size for file in seen.files if file.name == RECORD or generation_of(file.name) == facts.identity)
    if present == facts.nbytes:
        return facts
    what = "more" if present > facts.nbytes else "fewer"
    why = f"its files have {what} bytes than its record says: {size(present)} of {size(facts.nbytes)}"
    return replace(facts, state="damaged", why=why)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
