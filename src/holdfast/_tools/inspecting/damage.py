"""What was found wrong with a stored checkpoint, and the whole result of looking for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast._base.texts import some_of
from holdfast._formats.native.record import Repair
from holdfast._watching.progress import size, time_taken
from holdfast.errors import HoldfastError


@dataclass(frozen=True)
class Damage:
    """Something in a checkpoint that is not as it was saved."""

    file: str
    """The name of the file inside of the checkpoint."""
    problem: str
    """What is wrong with it, in words that go on after its name."""
    keys: tuple[str, ...] = ()
    """The tensors and values that have bytes there, and so cannot be trusted. None for bytes that belong to none."""
    begin: int | None = None
    """Where in the file it is."""
    end: int | None = None
    expected: str | None = None
    found: str | None = None

    @classmethod
    def from_error(cls, error: HoldfastError, file: str, keys: Sequence[str] = (), **where: int) -> Damage:
        """What an error says that was raised by reading."""
        fields = error.fields
        own = [fields["key"]] if isinstance(fields.get("key"), str) and fields["key"] else []
        return cls(
            file=file,
            problem=f"cannot be read: {error.message}",
            keys=tuple(dict.fromkeys([*keys, *own])),
            expected=_text(fields.get("expected")),
            found=_text(fields.get("found")),
            **where,
        )

    def __str__(self) -> str:
        place = "" if self.begin is None else f", bytes {self.begin:,} to {self.end:,}"
        is_said = self.expected is None or "(expected " in self.problem
        expected = "" if is_said else f" (expected {self.expected}, found {self.found})"
        needed = ""
        if self.keys:
            needed = f"; in there: {some_of(self.keys)}"
        return f"{self.file}{place}: {self.problem}{expected}{needed}"

    def to_json(self) -> dict[str, Any]:
        """All fields as plain data."""
        return {**vars(self), "keys": list(self.keys)}


@dataclass(frozen=True)
class VerifyReport:
    """What is known about a checkpoint after all of it was read."""

    path: str
    format: str
    """``native``, ``dcp``, ``safetensors`` or ``torch``."""
    identity: str
    """Which save it is; empty if that is no longer known."""
    tensors: int
    """That were looked at."""
    keys: int
    """All tensors and values that it has."""
    bytes_read: int
    seconds: float
    checked: str
    """How much of it has digests that were compared: ``all``, ``some`` or ``none``."""
    why: str
    """What that means, in words."""
    damage: tuple[Damage, ...] = ()
    doubts: tuple[str, ...] = ()
    """What is odd, or cannot be vouched for, and need not be damage."""
    repairs: tuple[Repair, ...] = ()
    """What was rebuilt of it, as noted in it; the doubts say what follows."""
    extra: tuple[str, ...] = ()
    """Files that are beside it and not part of it. They do no harm."""

    @property
    def ok(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.damage

    @property
    def damaged_keys(self) -> list[str]:
        """All keys that damage touches."""
        return list(dict.fromkeys(key for damage in self.damage for key in damage.keys))

    def __str__(self) -> str:
        rate = f", {size(self.bytes_read / self.seconds)}/s" if self.seconds > 0 else ""
        verdict = "DAMAGED" if self.damage else "no damage found, but there are doubts" if self.doubts else "intact"
        lines = [
            f"{self.path} ({self.format}): {verdict}",
            f"  {self.keys:,} keys, {self.tensors:,} tensors, {size(self.bytes_read)} read in "
            f"{time_taken(self.seconds)}{rate}",
            f"  digests: {self.checked}. {self.why}",
        ]
        if self.damage:
            keys = self.damaged_keys
            places = f"{len(self.damage):,} place{' is' if len(self.damage) == 1 else 's are'} damaged"
            lines.append(f"  {places}, which touches {len(keys):,} key{'' if len(keys) == 1 else 's'}:")
            lines += [f"    {damage}" for damage in self.damage]
        lines += [f"  doubt: {doubt}" for doubt in self.doubts]
        if self.extra:
            lines.append(f"  beside it, not part of it: {some_of(self.extra)}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """All fields as plain data."""
        return {
            **vars(self),
            "ok": self.ok,
            "damage": [damage.to_json() for damage in self.damage],
            "doubts": list(self.doubts),
            "repairs": [repair.to_json() for repair in self.repairs],
            "extra": list(self.extra),
        }


def _text(value: Any) -> str | None:
    return None if value is None else str(value)[:200]
