"""What does not fit between a DCP checkpoint and the state to load into: what is refused, and what is converted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from holdfast._base.notices import warn_caller
from holdfast._base.texts import listed
from holdfast._formats.dcp.metadata import Metadata
from holdfast._settings import OnFinding
from holdfast._state.mismatches import MOST_SHOWN, Mismatches

_ADVICE = "HOLDFAST_DTYPE_CHANGE=error|warn|ignore, or DefaultLoadPlanner(dtype_change=...), says what happens."


class LoadProblems(Mismatches):
    """Mismatches in the words of torch's DCP, which programs match, and conversions that may be allowed."""

    def __init__(self, stored_keys: Iterable[str]) -> None:
        super().__init__(stored_keys=list(stored_keys))
        self._conversions: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def note_dtype(self, key: str, saved: torch.dtype, current: torch.dtype) -> None:
        """The tensor will be converted from ``saved`` to ``current``, if that is allowed."""
        self._conversions[key] = (saved, current)

    def raise_or_warn(self, dtype_change: OnFinding) -> None:
        """Raise with everything that stands in the way; warn of conversions that are allowed."""
        if dtype_change == "error":
            self.dtypes.update(self._conversions)
        elif dtype_change == "warn":
            self.dtypes.update({key: pair for key, pair in self._conversions.items() if not torch.can_cast(*pair)})
        self.raise_if_any("The checkpoint")
        if self._conversions and dtype_change == "warn":
            lines = [self.dtype_line(key, *pair) for key, pair in self._conversions.items()]
            headline = f"{len(lines)} tensor(s) are converted to another dtype while loading:"
            warn_caller("\n".join([headline, *listed(lines, MOST_SHOWN), _ADVICE]))

    def missing_line(self, key: str, near: str) -> str:
        return f"Missing key in checkpoint state_dict: {key}.{near}"

    def shape_line(self, key: str, saved: Any, current: Any) -> str:
        return f"Size mismatch between saved {saved} and current: {current} for {key}"

    def dtype_line(self, key: str, saved: Any, current: Any) -> str:
        loss = "" if torch.can_cast(saved, current) else " (values would be destroyed)"
        return super().dtype_line(key, saved, current) + loss


def unloaded_under(prefixes: Iterable[Any], wanted: Iterable[str], metadata: Metadata) -> list[str]:
    """Stored keys below one of the asked-for top-level keys that have no place in the state."""
    heads = {str(prefix) for prefix in prefixes}
    known = set(wanted)
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    return [key for key in metadata.state_dict_metadata if key not in known and paths.get(key, (None,))[0] in heads]
