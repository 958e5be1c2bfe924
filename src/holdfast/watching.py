"""Watching what the library does: events of every phase, and what is made of them.

``calls.py`` makes the events. Callbacks (``subscribers.py``), the log (``logs.py``), OpenTelemetry (``telemetry.py``)
and trace files (``trace_file.py``) get them. Nothing here needs torch, and nothing here can make a save fail.
"""

from __future__ import annotations

from holdfast._watching.calls import Call, Phase
from holdfast._watching.event import Event, about
from holdfast._watching.subscribers import Subscription, subscribe
from holdfast._watching.trace_file import trace_to

__all__ = ["Call", "Event", "Phase", "Subscription", "about", "subscribe", "trace_to"]
