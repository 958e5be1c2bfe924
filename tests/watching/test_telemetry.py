"""Spans, as OpenTelemetry's own SDK records them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from holdfast._watching import telemetry as telemetry_module
from holdfast._watching.calls import Call, Update
from holdfast.watching import Event, subscribe


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield kept
    provider.shutdown()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_call_is_a_span_and_its_phases_are_spans_within(exporter: InMemorySpanExporter) -> None:
    events: list[Event] = []
    with subscribe(events.append), Call("save", "runs/a", 500, rank=1, world_size=2) as call:
        with call.phase("write", nbytes=10) as seen:
            seen.detail["files"] = ["a", "b"]
        call.finish(nbytes=20, slowest_rank=1, stalled=0.5, loss=float("inf"), nothing=None)

    spans = by_name(exporter)
    assert list(spans) == ["holdfast.save.write", "holdfast.save"]
    phase, whole = spans["holdfast.save.write"], spans["holdfast.save"]
    assert phase.parent is not None
    assert phase.parent.span_id == whole.context.span_id
    assert whole.parent is None
    common = {"holdfast.path": "runs/a", "holdfast.step": 500, "holdfast.rank": 1, "holdfast.world_size": 2}
    assert dict(phase.attributes or {}) == {**common, "holdfast.bytes": 10, "holdfast.detail.files": '["a", "b"]'}
    assert dict(whole.attributes or {}) == {
        **common,
        "holdfast.bytes": 20,
        "holdfast.slowest_rank": 1,
        "holdfast.detail.stalled": 0.5,
        "holdfast.detail.loss": "inf",
    }
    for span, event in zip((phase, whole), events, strict=True):
        assert span.status.is_ok or span.status.is_unset
        assert span.start_time == pytest.approx(event.began * 1e9, abs=2000)
        assert span.end_time == pytest.approx((event.began + event.seconds) * 1e9, abs=2000)


def test_a_call_belongs_to_the_span_that_the_program_is_in_also_when_it_ends_elsewhere(
    exporter: InMemorySpanExporter,
) -> None:
    with trace.get_tracer("program").start_as_current_span("training step"):
        call = Call("save", "a")

    def write() -> None:
        with call.phase("write"):
            pass
        call.finish()

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()

    spans = by_name(exporter)
    whole, phase = spans["holdfast.save"], spans["holdfast.save.write"]
    assert whole.parent is not None
    assert phase.parent is not None
    assert whole.parent.span_id == spans["training step"].context.span_id
    assert phase.parent.span_id == whole.context.span_id


def test_calls_that_overlap_have_spans_of_their_own(exporter: InMemorySpanExporter) -> None:
    one, two = Call("save", "one"), Call("save", "two")
    for call in (one, two, two, one):
        with call.phase("write"):
            pass
    one.finish()
    two.finish()

    spans = exporter.get_finished_spans()
    wholes = {span.context.span_id: span.attributes["holdfast.path"] for span in spans if span.parent is None}
    assert sorted(wholes.values()) == ["one", "two"]
    for span in spans:
        if span.parent is not None:
            assert span.attributes["holdfast.path"] == wholes[span.parent.span_id]


def test_failures_are_marked(exporter: InMemorySpanExporter) -> None:
    with pytest.raises(OSError, match="no room"), Call("save", "a") as call, call.phase("write"):
        raise OSError("no room")

    for span in exporter.get_finished_spans():
        assert span.status.status_code is trace.StatusCode.ERROR
        assert span.status.description == "OSError: no room"
    assert len(exporter.get_finished_spans()) == 2


def test_events_that_came_from_another_process_are_spans_too(exporter: InMemorySpanExporter) -> None:
    sent: list[Update] = []
    call = Call("save", "a")
    away: Call = pickle.loads(pickle.dumps(call))  # its span stays at home
    away.send_to(sent.append)
    with away.phase("write"):
        pass
    assert exporter.get_finished_spans() == ()

    for update in sent:
        call.receive(update)
    call.finish()

    assert list(by_name(exporter)) == ["holdfast.save.write", "holdfast.save"]


def test_spans_that_are_not_sampled_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider(sampler=ALWAYS_OFF))

    assert telemetry_module.begin("save", 0.0) is None


def test_a_provider_that_fails_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(TracerProvider):
        def get_tracer(self, *args: object, **kwargs: object) -> trace.Tracer:
            raise RuntimeError("broken")

    monkeypatch.setattr(trace, "_TRACER_PROVIDER", Broken())

    assert telemetry_module.begin("save", 0.0) is None


def test_opentelemetry_is_imported_by_programs_and_not_by_us() -> None:
    program = """
import json, sys
from holdfast._watching.calls import Call
Call("save", "a").finish()
before = "opentelemetry" in sys.modules
import os
os.environ["OTEL_PYTHON_TRACER_PROVIDER"] = "sdk_tracer_provider"
Call("save", "a").finish()
print(json.dumps([before, "opentelemetry.sdk.trace" in sys.modules]))
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)

    assert json.loads(done.stdout) == [False, True]
