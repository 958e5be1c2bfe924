"""What is different between two checkpoints, for programs as fields and for people as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast._base.texts import in_short, plain
from holdfast._formats.native.refs import TensorRef
from holdfast._tools.inspecting.changes import Change
from holdfast._watching.progress import size, time_taken

_MOST_SHOWN = 20


@dataclass(frozen=True)
class ChangedTensor:
    """How far the elements of a tensor are from those that it had."""

    elements: int
    differing: int
    incomparable: int
    """Of the differing ones, those of which one is nan: they count for nothing below."""
    largest: float | int | None
    """The largest absolute difference of two elements."""
    norm: float
    """Of the difference."""
    norm_before: float
    relative: float | None
    """The one by the other."""

    @classmethod
    def of(cls, change: Change) -> ChangedTensor:
        """The same for people."""
        return cls(
            elements=change.elements,
            differing=change.differing,
            incomparable=change.incomparable,
            largest=change.largest,
            norm=change.norm,
            norm_before=change.norm_before,
            relative=change.relative,
        )

    def __str__(self) -> str:
        part = f"{self.differing / self.elements:.2%}" if self.elements else "0%"
        largest = "" if self.largest is None else f", by up to {self.largest:.4g}"
        relative = "" if self.relative is None else f", {self.relative:.3g} of its norm"
        nan = f", {self.incomparable:,} of them nan" if self.incomparable else ""
        return f"{self.differing:,} of {self.elements:,} elements differ ({part}){nan}{largest}{relative}"


@dataclass(frozen=True)
class DiffReport:
    """What is different between two checkpoints. Keys are those of the second one."""

    a: str
    b: str
    only_in_a: tuple[str, ...] = ()
    only_in_b: tuple[str, ...] = ()
    changed_shape: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    changed_dtype: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    changed_tensors: Mapping[str, ChangedTensor] = field(default_factory=dict)
    """Of the same shape, with elements that differ."""
    changed_values: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Before and after, as short texts."""
    equal: int = 0
    """Keys of which nothing differs."""
    compared: bool = True
    """Whether elements of tensors were compared."""
    bytes_read: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing is different."""
        return not (
            self.only_in_a
            or self.only_in_b
            or self.changed_shape
            or self.changed_dtype
            or self.changed_tensors
            or self.changed_values
        )

    def __str__(self) -> str:
        what = "keys are equal" if self.compared else "keys are alike; elements were not compared"
        lines = [
            f"{self.a}",
            f"{self.b}",
            f"  {self.equal:,} {what} ({size(self.bytes_read)} read in {time_taken(self.seconds)})",
        ]
        lines += _listed("only in the first", self.only_in_a)
        lines += _listed("only in the second", self.only_in_b)
        lines += _listed(
            "other shape", [f"{key}: {list(old)} -> {list(new)}" for key, (old, new) in self.changed_shape.items()]
        )
        lines += _listed("other dtype", [f"{key}: {old} -> {new}" for key, (old, new) in self.changed_dtype.items()])
        lines += _listed("other value", [f"{key}: {old} -> {new}" for key, (old, new) in self.changed_values.items()])
        lines += _listed("other elements", [f"{key}: {change}" for key, change in self.largest_first])
        return "\n".join(lines)

    @property
    def largest_first(self) -> list[tuple[str, ChangedTensor]]:
        """Changed tensors, those that changed most for their size first."""

        def weight(item: tuple[str, ChangedTensor]) -> float:
            relative = item[1].relative
            return float("-inf") if relative is None else -relative

        return sorted(self.changed_tensors.items(), key=weight)

    def to_json(self) -> dict[str, Any]:
        """All fields as plain data."""
        return {
            **vars(self),
            "ok": self.ok,
            "only_in_a": list(self.only_in_a),
            "only_in_b": list(self.only_in_b),
            "changed_shape": {key: [list(old), list(new)] for key, (old, new) in self.changed_shape.items()},
            "changed_dtype": {key: list(pair) for key, pair in self.changed_dtype.items()},
            "changed_tensors": {key: plain(vars(change)) for key, change in self.changed_tensors.items()},
            "changed_values": {key: list(pair) for key, pair in self.changed_values.items()},
        }


def shortly(value: Any) -> str:
    """A value of a checkpoint in a few words."""
    if isinstance(value, TensorRef):
        return f"a tensor of {value.dtype} {list(value.shape)}"
    return in_short(value)


def _listed(headline: str, rows: Sequence[str]) -> list[str]:
    if not rows:
        return []
    more = [f"    … and {len(rows) - _MOST_SHOWN:,} more"] if len(rows) > _MOST_SHOWN else []
    return [f"  {headline}: {len(rows):,}", *(f"    {row}" for row in rows[:_MOST_SHOWN]), *more]
