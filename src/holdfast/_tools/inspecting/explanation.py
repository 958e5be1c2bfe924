"""Whether a checkpoint would load into a state, and why not: the answer of ``holdfast.explain``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast._base.texts import some_of

_MOST_SHOWN = 8


@dataclass(frozen=True)
class Explanation:
    """What ``load`` would do, or refuse. Keys are those of the state, but for what is only in the checkpoint."""

    path: str
    target: str
    """What it would be loaded into: ``the state``, or another checkpoint."""
    format: str
    refusal: str = ""
    """What ``load`` would raise; empty if it would load."""
    read: tuple[str, ...] = ()
    """Keys of the state that have a stored counterpart."""
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    """Stored keys that have no place in the state, and are not allowed."""
    shapes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """The stored shape, and that in the state."""
    dtypes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    uncovered: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    transformed: tuple[str, ...] = ()
    left_as_they_are: tuple[str, ...] = ()
    """Keys of the state that the checkpoint lacks, and may lack."""
    passed_over: tuple[str, ...] = ()
    """Stored keys that have no place in the state, and need none."""
    untouched: tuple[str, ...] = ()
    """Keys of the state that are not to be loaded."""
    not_requested: tuple[str, ...] = ()
    """Stored keys of parts that the state does not have."""
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    """What would help."""

    @property
    def ok(self) -> bool:
        """Whether it would load."""
        return not self.refusal

    def __str__(self) -> str:
        verdict = "would load" if self.ok else "would NOT load"
        lines = [f"{self.path} ({self.format}) {verdict} into {self.target}"]
        if self.refusal:
            lines += [f"  {line}" for line in self.refusal.splitlines()]
        else:
            lines.append(f"  {len(self.read):,} keys would be read")
        renamed = [f"{old} -> {new}" for old, new in self.renamed.items()]
        cast = [f"{key} ({old} -> {new})" for key, (old, new) in self.cast.items()]
        for headline, keys in [
            ("renamed", renamed),
            ("cast", cast),
            ("made by a transform", self.transformed),
            ("missing, would stay as they are", self.left_as_they_are),
            ("unexpected, would be passed over", self.passed_over),
            ("not to be loaded", self.untouched),
            ("in the checkpoint, not asked for", self.not_requested),
        ]:
            if keys:
                lines.append(f"  {headline}: {len(keys):,}: {some_of(keys, _MOST_SHOWN)}")
        lines += [f"  note: {note}" for note in self.notes]
        if self.hints:
            lines.append("  What would help:")
            lines += [f"    {hint}" for hint in self.hints]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """All fields as plain data."""
        pairs = ("shapes", "dtypes", "cast")
        plain = {
            name: list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
            for name, value in vars(self).items()
            if name not in pairs
        }
        shapes = {key: [list(saved), list(current)] for key, (saved, current) in self.shapes.items()}
        others = {name: {key: list(pair) for key, pair in getattr(self, name).items()} for name in ("dtypes", "cast")}
        return {"ok": self.ok, **plain, "shapes": shapes, **others}
