"""What is noted in a checkpoint about the program that wrote it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np

from holdfast._version import __version__

_OPTIMIZERS = "optimizers"
_MOST_OPTIMIZERS = 256
"""More are not noted: the beginning of a record has to be short. There are programs with one per parameter."""


def noted_optimizers(of_ranks: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """What to note about optimizers, given their classes by key on every rank. Those that ranks differ in are not.

    >>> noted_optimizers([{"optim": "a.Adam"}, {"optim": "a.Adam", "other": "a.SGD"}])
    {'optimizers': {'optim': 'a.Adam', 'other': 'a.SGD'}}
    """
    classes: dict[str, set[str]] = {}
    for rank in of_ranks:
        for key, name in rank.items():
            classes.setdefault(key, set()).add(name)
    alike = {key: next(iter(names)) for key, names in classes.items() if len(names) == 1}
    return {_OPTIMIZERS: alike} if 0 < len(alike) <= _MOST_OPTIMIZERS else {}


def optimizers_noted(written: Mapping[str, Any]) -> dict[str, str]:
    """The classes of the optimizers of a checkpoint by key, as far as they were noted."""
    noted = written.get(_OPTIMIZERS)
    if not isinstance(noted, Mapping):
        return {}
    return {key: name for key, name in noted.items() if isinstance(name, str)}


def stamp(world_size: int) -> dict[str, Any]:
    """When, by how many ranks, and with which versions something was written.

    >>> sorted(stamp(1))[:3]
    ['by', 'numpy', 'platform']
    """
    noted: dict[str, Any] = {
        "by": f"holdfast {__version__}",
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "world_size": world_size,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": sys.platform,
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        noted["torch"] = str(torch.__version__)
    return noted
