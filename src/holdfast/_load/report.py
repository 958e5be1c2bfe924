"""What a load did: the same on all ranks, for programs as fields and for people as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast._base.html_tables import page, table
from holdfast._watching.progress import size

_MOST_SHOWN = 5


KEY_LISTS = (
    *("read", "renamed", "cast", "transformed", "missing"),
    *("unexpected", "untouched", "not_requested"),
)
"""What of a report says what became of which keys."""


@dataclass(frozen=True)
class LoadReport:
    """What a load did, over all ranks together."""

    path: str
    format: str
    """``native``, ``dcp``, ``safetensors`` or ``torch``."""
    identity: str
    """Which save it was."""
    read: Sequence[str]
    """Keys of the state that got their stored tensor or value."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Stored keys that went to another key of the state."""
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Keys whose elements were converted: the stored dtype, and the new one."""
    transformed: Sequence[str] = ()
    """Keys that got what a function made of the checkpoint."""
    missing: Sequence[str] = ()
    """Keys of the state that the checkpoint does not have. They were allowed to be missing and stay as they were."""
    unexpected: Sequence[str] = ()
    """Stored keys for which the state has no place. They were allowed, and not loaded."""
    untouched: Sequence[str] = ()
    """Keys of the state that were not to be loaded."""
    not_requested: Sequence[str] = ()
    """Stored keys of other parts of the checkpoint than those in the state."""
    changed_settings: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Hyper-parameters of optimizers that are others now: what they were in the state, and what was stored."""
    notes: Sequence[str] = ()
    """Remarks on what was not simply read, such as parameters that were matched by position, and on repairs."""
    bytes_read: int = 0
    """From storage, by all ranks together."""
    bytes_received: int = 0
    """From other ranks that had read them, by all ranks together."""
    elements: int = 0
    """That were written, in the tensors of all ranks together: every element of them, and each one once."""
    seconds: float = 0.0
    """By the slowest rank."""
    world_size: int = 1
    slowest_rank: int = 0
    """The one whose reading took longest."""

    @classmethod
    def merged(cls, reports: Sequence[LoadReport], **numbers: Any) -> LoadReport:
        """The reports of several ranks as one, with the numbers of all of them."""

        def every(name: str) -> list[str]:
            return list(dict.fromkeys(key for report in reports for key in getattr(report, name)))

        def joined(name: str) -> dict[str, Any]:
            return {key: value for report in reversed(reports) for key, value in getattr(report, name).items()}

        if len(reports) == 1:
            return replace(reports[0], **numbers)
        changes: dict[str, Any] = {
            name: joined(name) if isinstance(getattr(reports[0], name), Mapping) else every(name)
            for name in (*KEY_LISTS, "notes", "changed_settings")
        }
        return replace(reports[0], **changes, **numbers)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        ranks = f" on {self.world_size:,} ranks" if self.world_size > 1 else ""
        read = f"{size(self.bytes_read)} in {self.seconds:.2f} s{ranks}"
        facts = f"{len(self.read):,} keys, {self.elements:,} elements, {read}"
        rows = [(headline, f"{len(keys):,}", _some(keys)) for headline, keys in self._lists() if keys]
        tables = [table(["", "", ""], rows, numbers=[1])] if rows else []
        if self.notes:
            tables.append(table(["notes"], [[note] for note in self.notes], total=len(self.notes)))
        return page(f"loaded from {self.path} ({self.format})", facts, *tables)

    def _lists(self) -> list[tuple[str, Sequence[str]]]:
        """What became of keys, other than that they were read."""
        renamed = [f"{old} -> {new}" for old, new in self.renamed.items()]
        cast = [f"{key} ({old} -> {new})" for key, (old, new) in self.cast.items()]
        return [
            ("renamed", renamed),
            ("cast", cast),
            ("transformed", self.transformed),
            ("settings changed", [f"{key} ({old} -> {new})" for key, (old, new) in self.changed_settings.items()]),
            ("missing, left as they were", self.missing),
            ("unexpected, not loaded", self.unexpected),
            ("untouched", self.untouched),
            ("in the checkpoint, not asked for", self.not_requested),
        ]

    def __str__(self) -> str:
        sent = f", {self.bytes_received:,} received from other ranks" if self.bytes_received else ""
        rate = f", {self.bytes_read / self.seconds / 1e6:,.0f} MB/s" if self.bytes_read and self.seconds else ""
        ranks = f" on {self.world_size} ranks" if self.world_size > 1 else ""
        lines = [
            f"loaded {len(self.read)} key{_s(self.read)} from {self.path} ({self.format}){ranks}",
            f"  {self.elements:,} elements, {self.bytes_read:,} bytes read{sent} in {self.seconds:.2f} s{rate}",
        ]
        for headline, keys in self._lists():
            if keys:
                lines.append(f"  {headline}: {len(keys)}: {_some(keys)}")
        lines.extend(f"  note: {note}" for note in self.notes)
        return "\n".join(lines)


def _s(keys: Sequence[str]) -> str:
    return "" if len(keys) == 1 else "s"


def _some(keys: Sequence[str]) -> str:
    shown = ", ".join(keys[:_MOST_SHOWN])
    return shown if len(keys) <= _MOST_SHOWN else f"{shown}, …"
