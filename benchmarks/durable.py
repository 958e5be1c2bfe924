"""Makes durable what others have only written."""

from __future__ import annotations

import os
from pathlib import Path


def sync_tree(folder: Path) -> None:
    """Flush all files, all folders, and the name of the folder itself."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(os.path.join(place, name))
        _sync(place)
    _sync(folder.parent)


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
