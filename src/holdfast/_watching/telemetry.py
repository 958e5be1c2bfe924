"""Spans for OpenTelemetry: one for each call, within the span that the program is in, and one for each of its phases.

Spans go somewhere only if the program has set OpenTelemetry up, and then it has imported it. So this module never does,
and costs nothing where it is not used. It needs the API package alone.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

from holdfast._base.texts import plain
from holdfast._version import __version__
from holdfast._watching.event import Event
from holdfast._watching.subscribers import Subscription

_API = "opentelemetry.trace"
_PROVIDER = "OTEL_PYTHON_TRACER_PROVIDER"
"""The environment variable by which it is set up without being imported."""


def begin(verb: str, began: float) -> Subscription | None:
    """The span of a call, as something that wants the call's events; None if spans go nowhere."""
    if _API not in sys.modules and _PROVIDER not in os.environ:
        return None
    try:
        api = importlib.import_module(_API)
        tracer = api.get_tracer("holdfast", __version__)
        span = tracer.start_span(f"holdfast.{verb}", start_time=_nanoseconds(began))
        return Subscription(_Span(api, tracer, span)) if span.is_recording() else None
    except Exception:  # a program without spans is better than one that does not save
        return None


class _Span:
    """The span of a call that is under way."""

    def __init__(self, api: Any, tracer: Any, span: Any) -> None:
        self._api = api
        self._tracer = tracer
        self._span = span

    def __call__(self, event: Event) -> None:
        span = self._span
        if not event.is_whole:
            within = self._api.set_span_in_context(self._span)
            span = self._tracer.start_span(f"holdfast.{event.name}", within, start_time=_nanoseconds(event.began))
        span.set_attributes(_attributes(event))
        if event.error is not None:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, event.error))
        span.end(_nanoseconds(event.began + event.seconds))


def _attributes(event: Event) -> dict[str, str | int | float]:
    values = {
        "path": event.path,
        "step": event.step,
        "rank": event.rank,
        "world_size": event.world_size,
        "bytes": event.nbytes,
        "slowest_rank": event.slowest_rank,
        **{f"detail.{name}": _single(plain(value)) for name, value in event.detail.items()},
    }
    return {f"holdfast.{name}": value for name, value in values.items() if value is not None}


def _single(value: Any) -> Any:
    """Attributes are not trees."""
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
