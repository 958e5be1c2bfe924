"""What writes one format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast._tools.converting.outgoing import Outgoing
from holdfast.errors import UnsupportedValueError

_MOST_SHOWN = 20


class Target(ABC):
    """Writes what goes out in one format."""

    format: str
    is_file: bool = False
    """Whether the result is a file; a folder otherwise."""
    has_flat_keys: bool = False
    """Whether the format knows nothing but keys. The tree of what goes out is a flat dict then."""
    keeps_ties: bool = False
    """Whether a tensor that has several names is stored once. Elsewhere it is stored once for every name."""
    arrays_are_tensors: bool = False
    """Whether numpy arrays that a source holds as values are written as tensors."""
    keeps_per_rank: bool = False
    """Whether the format knows values that every rank had of its own. Elsewhere they become lists, by rank."""

    def refuse(self, outgoing: Outgoing) -> None:  # noqa: B027 - a format may take everything
        """Raise for everything that the format cannot hold, before anything is written."""

    @abstractmethod
    def write(self, outgoing: Outgoing, place: Path) -> Written:
        """Write everything to ``place``, a path where nothing is yet and which nobody else looks at.

        It will be renamed when it is complete: no part of it may say where it is. All is durable on return. Every
        tensor must have been taken from ``outgoing`` from front to back.
        """


@dataclass(frozen=True)
class Written:
    """What was written."""

    files: Sequence[str]
    """Their names in the folder, or the name of the only one."""
    nbytes: int
    keys: Mapping[str, str] = field(default_factory=dict)
    """How the result calls things, where that differs from the keys of what went out."""


def refuse_values(outgoing: Outgoing, format_name: str, refused: dict[str, str], advice: str) -> None:
    """Raise one error for all values that a format cannot hold: ``refused`` says why for each key."""
    if not refused:
        return
    lines = [f"  {key}: {why}" for key, why in list(refused.items())[:_MOST_SHOWN]]
    if len(refused) > _MOST_SHOWN:
        lines.append(f"  and {len(refused) - _MOST_SHOWN} more (see the field `keys` of this error)")
    keys = list(refused)
    raise UnsupportedValueError(
        f"{len(keys)} value(s) of {outgoing.source.location} cannot be stored in {format_name}, so nothing was "
        "written:\n" + "\n".join(lines) + f"\n{advice}",
        key=keys[0],
        keys=keys,
    )
