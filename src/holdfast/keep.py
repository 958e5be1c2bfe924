"""Which checkpoints of a run to keep: ``keep.last(3) | keep.best(1, "loss") | keep.every(1000)``.

``docs/retention.md`` says what each of them keeps, and what is never deleted.
"""

from __future__ import annotations

from holdfast._manager.retention import Policy, best, every, everything, last, newer_than

__all__ = ["Policy", "best", "every", "everything", "last", "newer_than"]
