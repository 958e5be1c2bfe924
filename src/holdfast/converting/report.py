"""What a conversion did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast.progress import size, time_taken

_MOST_SHOWN = 10


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion or an export did."""

    source: str
    destination: str
    to: str
    """The format that was written."""
    tensors: int
    values: int
    elements: int
    """Of all tensors; each was written once."""
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

    def __str__(self) -> str:
        lines = [
            f"{self.source} → {self.destination} ({self.to}): {_count(self.tensors, 'tensor')} with "
            f"{_count(self.elements, 'element')}, {_count(self.values, 'value')}, {size(self.bytes_written)} in "
            f"{_count(len(self.files), 'file')}, {time_taken(self.seconds)}"
        ]
        if self.part:
            lines.append(f"  the model is '{self.part}'")
        if self.renamed:
            lines.append(f"  renamed: {_shown([f'{old} → {new}' for old, new in self.renamed.items()])}")
        if self.cast:
            lines.append(f"  cast: {_shown([f'{key} ({old} → {new})' for key, (old, new) in self.cast.items()])}")
        if self.left_out:
            lines.append(f"  left out: {_shown(self.left_out)}")
        proof = "read back and compared" if self.checked else "not read back"
        lines.append(f"  {proof}; content {self.digest}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON."""
        plain = asdict(self)
        plain["files"], plain["left_out"] = list(self.files), list(self.left_out)
        plain["cast"] = {key: list(types) for key, types in self.cast.items()}
        return plain


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _shown(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _MOST_SHOWN} more" if len(texts) > _MOST_SHOWN else ""
    return ", ".join(texts[:_MOST_SHOWN]) + more
