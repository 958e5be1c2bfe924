"""What a manager notes in the metadata of a checkpoint, and what it needs to know of one without opening it again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from holdfast._base.json_objects import are_sizes
from holdfast._formats.native.names import is_generation
from holdfast._formats.native.record import Record, repairs_in

NOTE = "holdfast"
"""The member of a checkpoint's metadata that belongs to the manager."""


def noted_metadata(
    run: str,
    step: int,
    metrics: Mapping[str, Any] | None = None,
    reason: str = "",
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The ``metadata`` for ``save`` by which a run knows its own checkpoints again.

    Metrics are numbers or tensors with one element. JSON has no infinities and no NaN, so these are noted as str.

    >>> noted_metadata("a", 500, {"loss": float("nan")}, metadata={"git": "1a2b3c"})
    {'holdfast': {'run': 'a', 'step': 500, 'metrics': {'loss': 'nan'}, 'reason': ''}, 'git': '1a2b3c'}
    """
    if metadata is not None and NOTE in metadata:
        raise ValueError(f"metadata has a member {NOTE!r}, which belongs to the manager; call it something else")
    numbers = {name: _number(name, value) for name, value in (metrics or {}).items()}
    stored = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
    return {NOTE: {"run": run, "step": step, "metrics": stored, "reason": reason}, **(metadata or {})}


def _number(name: str, value: Any) -> float:
    if not isinstance(name, str):
        raise TypeError(f"the name of a metric must be a str, not {name!r}")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TypeError(f"the metric {name!r} must be a number or a tensor with one element: {error}") from error


@dataclass(frozen=True)
class Summary:
    """What the record of a checkpoint says, in short."""

    identity: str
    """The id of the save."""
    record_bytes: int
    nbytes: int
    """Of all its files."""
    saved_at: str
    run: str
    """Empty if no manager saved it."""
    step: int | None
    """As the manager that saved it knew it; its folder may be called something else by now."""
    metrics: Mapping[str, Any]
    metadata: Mapping[str, Any]
    """What the user gave."""
    repaired: str
    """What was rebuilt of it, as ``columns, record``; empty if nothing was."""

    @staticmethod
    def of(record: Record, record_bytes: int) -> Summary:
        """The summary of a record."""
        metadata = dict(record.metadata) if isinstance(record.metadata, dict) else {}
        note = _note_in(metadata)
        metrics = note.get("metrics")
        return Summary(
            identity=record.generation,
            record_bytes=record_bytes,
            nbytes=record_bytes + record.nbytes,
            saved_at=str(record.written.get("time", "")),
            run=note.get("run", ""),
            step=note.get("step"),
            metrics=metrics if isinstance(metrics, dict) else {},
            metadata={name: value for name, value in metadata.items() if name != NOTE or not note},
            repaired=", ".join(dict.fromkeys(repair.what for repair in repairs_in(record.written))),
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> Summary | None:
        """What ``to_json`` gave; None for anything else."""
        if Summary.__dataclass_fields__.keys() != stored.keys():
            return None
        is_valid = (
            isinstance(stored["identity"], str)
            and is_generation(stored["identity"])
            and are_sizes([stored["record_bytes"], stored["nbytes"]])
            and isinstance(stored["saved_at"], str)
            and isinstance(stored["run"], str)
            and (stored["step"] is None or are_sizes([stored["step"]]))
            and isinstance(stored["metrics"], dict)
            and isinstance(stored["metadata"], dict)
            and isinstance(stored["repaired"], str)
        )
        return Summary(**stored) if is_valid else None

    def time(self) -> datetime | None:
        """When it was saved, if that is known for all time zones."""
        try:
            found = datetime.fromisoformat(self.saved_at)
            return None if found.tzinfo is None else found.astimezone(timezone.utc)
        except (ValueError, OverflowError):  # such as the first hour of the year 1, somewhere in the east
            return None

    def numbers(self) -> dict[str, float]:
        """The metrics, as they were given to the manager."""
        found = {}
        for name, value in self.metrics.items():
            if value in ("nan", "inf", "-inf") or (isinstance(value, (int, float)) and not isinstance(value, bool)):
                with suppress(OverflowError):  # no manager noted that
                    found[name] = float(value)
        return found


def _note_in(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """The manager's part of the metadata; nothing if it is not from a manager, whatever its name is."""
    note = metadata.get(NOTE)
    is_ours = isinstance(note, dict) and isinstance(note.get("run"), str) and are_sizes([note.get("step")])
    return note if is_ours and note is not None else {}
