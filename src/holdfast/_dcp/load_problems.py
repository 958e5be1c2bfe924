"""What does not fit between a checkpoint and the state to load into, collected first and told all at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import torch

from holdfast._base.notices import warn_caller
from holdfast._formats.dcp.metadata import Metadata
from holdfast._settings import OnFinding
from holdfast.errors import StateMismatchError

_MOST_SHOWN = 30


class LoadProblems:
    """Collects what is wrong, key by key."""

    def __init__(self, stored_keys: Iterable[str]) -> None:
        self._stored_keys = list(stored_keys)
        self.missing: list[str] = []
        self.shapes: dict[str, tuple[torch.Size, torch.Size]] = {}
        self.kinds: dict[str, str] = {}
        self.uncovered: dict[str, str] = {}
        self.dtypes: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        self._destructive: list[str] = []

    def note_dtype(self, key: str, saved: torch.dtype, current: torch.dtype) -> None:
        """The tensor will be converted from ``saved`` to ``current``."""
        self.dtypes[key] = (saved, current)
        if not torch.can_cast(saved, current):
            self._destructive.append(key)

    def raise_or_warn(self, dtype_change: OnFinding) -> None:
        """Raise with everything that stands in the way; warn of conversions that are allowed."""
        refused = {"ignore": [], "warn": self._destructive, "error": list(self.dtypes)}[dtype_change]
        lines = [*self._fatal_lines(), *(self._dtype_line(key) for key in refused)]
        if lines:
            raise StateMismatchError(
                _joined(f"The checkpoint does not fit the state to load into ({len(lines)} problem(s)):", lines)
                + "\nNothing was changed.",
                missing=self.missing,
                shapes=self.shapes,
                dtypes={key: self.dtypes[key] for key in refused},
                kinds=self.kinds,
                uncovered=self.uncovered,
            )
        if self.dtypes and dtype_change == "warn":
            converted = [self._dtype_line(key) for key in self.dtypes]
            warn_caller(
                _joined(f"{len(converted)} tensor(s) are converted to another dtype while loading:", converted)
                + "\nHOLDFAST_DTYPE_CHANGE=error|warn|ignore, or DefaultLoadPlanner(dtype_change=...), says what "
                "happens."
            )

    def _fatal_lines(self) -> list[str]:
        suggestions = near_misses(self.missing, self._stored_keys)
        return [
            *(f"Missing key in checkpoint state_dict: {key}.{suggestions.get(key, '')}" for key in self.missing),
            *(
                f"Size mismatch between saved {saved} and current: {current} for {key}"
                for key, (saved, current) in self.shapes.items()
            ),
            *(f"{key}: {text}" for key, text in self.kinds.items()),
            *(f"{key}: {text}" for key, text in self.uncovered.items()),
        ]

    def _dtype_line(self, key: str) -> str:
        saved, current = self.dtypes[key]
        loss = " (values would be destroyed)" if key in self._destructive else ""
        return f"dtype of {key}: saved {saved}, current {current}{loss}"


def _joined(headline: str, lines: list[str]) -> str:
    shown = [f"  {line}" for line in lines[:_MOST_SHOWN]]
    if len(lines) > _MOST_SHOWN:
        shown.append(f"  … and {len(lines) - _MOST_SHOWN} more")
    return "\n".join([headline, *shown])


def near_misses(missing: list[str], stored: list[str]) -> dict[str, str]:
    """Stored keys that may be meant; looked up for the first few missing ones only, since searching is slow."""
    found: dict[str, str] = {}
    by_tail: dict[str, str] = {}
    for key in stored:
        by_tail.setdefault(_tail(key), key)
    for key in missing[:_MOST_SHOWN]:
        near = by_tail.get(_tail(key)) or next(
            iter(difflib.get_close_matches(key, stored[:5000], n=1, cutoff=0.7)), None
        )
        if near not in (None, key):  # a key that is there and was renamed is no help
            found[key] = f" (did you mean '{near}'?)"
    return found


_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")


def _tail(key: str) -> str:
    """The key without what wrappers put into it."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def unloaded_under(prefixes: Iterable[Any], wanted: Iterable[str], metadata: Metadata) -> list[str]:
    """Stored keys below one of the asked-for top-level keys that have no place in the state."""
    heads = {str(prefix) for prefix in prefixes}
    known = set(wanted)
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    return [key for key in metadata.state_dict_metadata if key not in known and paths.get(key, (None,))[0] in heads]
