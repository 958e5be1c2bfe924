"""Watching what the library does: events of every phase, for callbacks, logs, traces and the terminal.

``docs/watching.md`` shows how. Nothing here needs torch, and nothing here can make a save fail.
"""

from __future__ import annotations

from holdfast._watching.event import Event, about
from holdfast._watching.progress_line import ProgressLine
from holdfast._watching.subscribers import Subscription, subscribe
from holdfast._watching.trace_file import trace_to

__all__ = ["Event", "ProgressLine", "Subscription", "about", "subscribe", "trace_to"]
