"""What makes written bytes survive a loss of power."""

from __future__ import annotations

import io
import os
from typing import Any


def flush_to_disk(stream: Any) -> None:
    """Make what was written to a stream durable. Nothing may be written to it afterwards."""
    complete = getattr(stream, "complete", None)
    (stream.flush if complete is None else complete)()
    try:
        descriptor = stream.fileno()
    except (AttributeError, io.UnsupportedOperation, OSError):
        return  # not a file of this machine: closing it is what makes it durable
    os.fsync(descriptor)
