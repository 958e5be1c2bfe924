"""What is noted in a checkpoint about the program that wrote it."""

from __future__ import annotations

import platform
import sys
from datetime import datetime, timezone
from typing import Any

import numpy as np

from holdfast.version import __version__


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
