"""Lines for people, and the log that they go to."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from holdfast._watching.calls import Call
from holdfast._watching.logs import line, time_span
from holdfast.watching import Event


def event(**changes: Any) -> Event:
    fields: dict[str, Any] = {"verb": "save", "path": "runs/a", "began": 0.0, "seconds": 1.8, "nbytes": 2_200_000_000}
    return Event(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"step": 500, "world_size": 4, "slowest_rank": 3, "detail": {"stalled": 0.012}},
            "step 500: saved 2.2 GB in 1.8 s (1.2 GB/s), stalled 12 ms, slowest rank 3",
        ),
        ({"slowest_rank": 0}, "saved 2.2 GB to runs/a in 1.8 s (1.2 GB/s)"),
        ({"step": 0, "nbytes": 0}, "step 0: saved in 1.8 s"),
        ({"verb": "load"}, "loaded 2.2 GB from runs/a in 1.8 s (1.2 GB/s)"),
        ({"verb": "restore", "step": 7, "nbytes": 0, "seconds": 75.0}, "step 7: restored in 1:15 min"),
        ({"verb": "delete", "step": 7, "nbytes": 1000, "seconds": 0.0}, "step 7: deleted 1.0 KB in 0.0 ms"),
        ({"verb": "preflight", "nbytes": 0}, "checked at runs/a in 1.8 s"),
        (
            {"step": 500, "error": "StorageFullError: rank 2 is out of space.\n\nTry this."},
            "step 500: save failed after 1.8 s: StorageFullError: rank 2 is out of space.",
        ),
        ({"error": "OSError: no"}, "save to runs/a failed after 1.8 s: OSError: no"),
        (
            {"phase": "write", "rank": 2, "world_size": 4, "slowest_rank": 0},
            "save.write of runs/a on rank 2: 2.2 GB in 1.8 s (1.2 GB/s), slowest rank 0",
        ),
        ({"phase": "plan", "nbytes": 0, "detail": {"stalled": 1}}, "save.plan of runs/a: in 1.8 s"),
        ({"phase": "write", "error": "OSError: no"}, "save.write of runs/a failed after 1.8 s: OSError: no"),
    ],
)
def test_a_line_tells_what_matters(changes: dict[str, Any], text: str) -> None:
    assert line(event(**changes)) == text


def test_time_spans_are_rounded_into_the_right_unit() -> None:
    spans = [0.0, 0.00994, 0.00996, 0.9994, 0.9996, 59.94, 59.96, 3599.4, 3599.6]

    assert [time_span(seconds) for seconds in spans] == [
        "0.0 ms",
        "9.9 ms",
        "10 ms",
        "999 ms",
        "1.0 s",
        "59.9 s",
        "1:00 min",
        "59:59 min",
        "1:00:00 h",
    ]


def saved(rank: int) -> None:
    with Call("save", "runs/a", 500, rank=rank, world_size=2) as call:
        with call.phase("write", nbytes=10):
            pass
        call.finish(nbytes=20, slowest_rank=1, loss=float("nan"))


def test_the_log_has_one_line_per_call_on_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "holdfast.events"):
        saved(0)
        saved(1)

    (record,) = caplog.records
    assert (record.name, record.levelno) == ("holdfast.events", logging.INFO)
    assert record.getMessage().startswith("step 500: saved 20 B in ")
    assert record.getMessage().endswith(", slowest rank 1")


def test_the_log_has_the_phases_and_the_other_ranks_for_those_who_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "holdfast.events"):
        saved(0)
        saved(1)

    assert [(record.event["phase"], record.event["rank"], record.levelname) for record in caplog.records] == [
        ("write", 0, "DEBUG"),
        ("", 0, "INFO"),
        ("write", 1, "DEBUG"),
        ("", 1, "DEBUG"),
    ]


def test_records_have_the_event_as_json(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "holdfast.events"):
        saved(0)

    told = json.loads(json.dumps(caplog.records[0].event, allow_nan=False))
    assert told["verb"] == "save"
    assert (told["step"], told["nbytes"], told["slowest_rank"], told["error"]) == (500, 20, 1, None)
    assert told["detail"] == {"loss": "nan"}
    assert set(told) == {
        *("verb", "phase", "path", "step", "rank", "world_size", "call", "call_began", "began", "seconds"),
        *("nbytes", "error", "slowest_rank", "detail"),
    }


def test_a_handler_that_fails_breaks_nothing() -> None:
    tried: list[str] = []

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tried.append(record.getMessage())
            raise OSError("the log server is gone")

    logger, handler = logging.getLogger("holdfast.events"), Broken()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        saved(0)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)

    assert len(tried) == 1


def test_details_become_json() -> None:
    detail = {"a": {1: (True, None, 1.5)}, "b": {"x"}, "c": object, "d": float("-inf")}

    assert event(detail=detail).as_dict()["detail"] == {
        "a": {"1": [True, None, 1.5]},
        "b": ["x"],
        "c": "<class 'object'>",
        "d": "-inf",
    }
