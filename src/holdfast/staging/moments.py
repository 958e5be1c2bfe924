"""The moment at which a copy was asked for, as an accelerator sees it.

Work that was submitted before must be done before elements are copied, also if another thread copies them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch


class Moment:
    """A moment."""

    def __init__(self, event: Any) -> None:
        self._event = event

    @classmethod
    def now(cls) -> Moment:
        """This one."""
        if not torch.accelerator.is_available():
            return cls(None)
        event = torch.Event(torch.accelerator.current_accelerator())
        event.record()
        return cls(event)

    def device_copies(self) -> Any:
        """Copies inside of the ``with`` block come after this moment, and are complete at its end."""
        return nullcontext() if self._event is None else _OnSideStream(self._event)


class _OnSideStream:
    """Copies that the program's own stream does not wait for."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self._stream = torch.Stream(torch.accelerator.current_accelerator())

    def __enter__(self) -> None:
        self._stream.wait_event(self._event)
        self._stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._stream.__exit__(*error)
        self._stream.synchronize()
