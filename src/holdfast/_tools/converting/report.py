"""What a conversion did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast._base.patterns import dotted
from holdfast._base.texts import some_of
from holdfast._watching.progress import size, time_taken

_MOST_SHOWN = 10
_FEW = 3


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion or an export did."""

    source: str
    destination: str
    to: str
    """The format that was written."""
    tensors: int
    """Names of tensors. Tied tensors have several."""
    values: int
    elements: int
    """Of all tensors that were written: of tied ones once if the format stores them once, and else for every name."""
    bytes_read: int
    bytes_written: int
    """Of all files."""
    files: Sequence[str]
    digest: str
    """Of all keys, dtypes, shapes and elements: the same for the same content in every format."""
    checked: bool
    """Whether everything was read back and compared before it got its name."""
    seconds: float
    part: str = ""
    """The part of the state that was taken for the model, without which its keys are now."""
    left_out: Sequence[str] = ()
    """Keys of the source that were not written."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Old keys and new ones."""
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """New keys of tensors whose elements are of another type now: which one they were of, and are."""
    elements_left_out: int = 0
    """Of tensors of the source that were not written under any name."""
    unused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Patterns that fit nothing, by the option that they were given to: ``"rename"`` or ``"cast"``."""
    not_compared: Sequence[str] = ()
    """Keys of values whose classes do not say whether two of them are equal."""

    def __str__(self) -> str:
        lines = [
            f"{self.source} → {self.destination} ({self.to}): {_count(self.tensors, 'tensor')} with "
            f"{_count(self.elements, 'element')}, {_count(self.values, 'value')}, {size(self.bytes_written)} in "
            f"{_count(len(self.files), 'file')}, {time_taken(self.seconds)}"
        ]
        if self.part:
            lines.append(f"  the model is '{self.part}'")
        lines += [f"  {line}" for line in _renames(self.renamed)]
        if self.cast:
            casts = [f"{key} ({old} → {new})" for key, (old, new) in self.cast.items()]
            lines.append(f"  cast: {some_of(casts, _MOST_SHOWN)}")
        if self.left_out:
            lines.append(f"  left out: {_by_part(self.left_out)}")
        for option, patterns in self.unused.items():
            lines.append(f"  {option} matches nothing: {some_of([repr(text) for text in patterns], _MOST_SHOWN)}")
        if self.not_compared:
            lines.append(f"  cannot be compared: {some_of(self.not_compared, _MOST_SHOWN)}")
        proof = "read back and compared" if self.checked else "not read back"
        lines.append(f"  {proof}; content {self.digest}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON."""
        plain = asdict(self)
        plain["files"], plain["left_out"] = list(self.files), list(self.left_out)
        plain["not_compared"] = list(self.not_compared)
        plain["unused"] = {option: list(patterns) for option, patterns in self.unused.items()}
        plain["cast"] = {key: list(types) for key, types in self.cast.items()}
        return plain


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _renames(renamed: Mapping[str, str]) -> list[str]:
    """What was taken off in front of keys in a line for each, and all other new names.

    >>> _renames({"model.w": "w", "model.b": "b", "head": "out"})
    ["'model.' taken off 2 keys", 'renamed: head → out']
    """
    taken_off = Counter(old[: -len(new)] for old, new in renamed.items() if old.endswith(f".{new}"))
    lines = [f"'{prefix}' taken off {_count(count, 'key')}" for prefix, count in taken_off.items()]
    others = [f"{old} → {new}" for old, new in renamed.items() if not old.endswith(f".{new}")]
    return [*lines, f"renamed: {some_of(others, _MOST_SHOWN)}"] if others else lines


def _by_part(keys: Sequence[str]) -> str:
    """A few keys by their names, and many by the parts of the state that they are in.

    >>> _by_part(["step"]), _by_part(["optim.0.step", "optim.0.mean", "optim.1.step", "optim.1.mean", "step"])
    ('step', '5 keys of optim, step')
    """
    if len(keys) <= _FEW:
        return ", ".join(keys)
    parts = list(dict.fromkeys(dotted(key).partition(".")[0] for key in keys))
    return f"{_count(len(keys), 'key')} of {some_of(parts, _MOST_SHOWN)}"
