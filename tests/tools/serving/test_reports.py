from __future__ import annotations

import threading

import pytest

from holdfast._tools.serving.answers import Reports


def test_a_report_is_made_once_for_all_who_ask() -> None:
    made = []

    def make(on_progress):
        made.append(1)
        return f"report {len(made)}"

    with Reports() as reports:
        first, second = reports.job(("a", "1"), make), reports.job(("a", "1"), make)

        assert first.future.result() == second.future.result() == "report 1"
        assert reports.job(("a", "2"), make).future.result() == "report 2"


def test_a_report_that_failed_is_tried_again_once_that_was_reported() -> None:
    def fail(on_progress):
        raise OSError("the disk is gone")

    with Reports() as reports:
        failed = reports.job(("a", "1"), fail)
        assert isinstance(failed.future.exception(), OSError)
        assert reports.job(("a", "1"), fail) is failed
        reports.forget(("a", "1"))

        assert reports.job(("a", "1"), lambda on_progress: "it is back").future.result() == "it is back"


def test_only_the_last_few_reports_are_kept() -> None:
    with Reports(keep=2) as reports:
        for name in ("a", "b", "a", "c"):
            reports.job((name,), lambda on_progress: "report").future.result()
        reports.job(("c",), lambda on_progress: "report")

        assert [name for name in "abc" if reports.known((name,)) is not None] == ["a", "c"]


def test_progress_is_seen_while_a_report_is_made() -> None:
    told, go_on = threading.Event(), threading.Event()

    def make(on_progress):
        on_progress(30, 100)
        told.set()
        assert go_on.wait(60)
        return "done"

    with Reports() as reports:
        job = reports.job(("a",), make)
        assert told.wait(60)

        assert (job.done, job.total, job.ready_within(0)) == (30, 100, False)
        go_on.set()
        assert job.ready_within(60)


def test_closing_gives_up_a_report_that_is_being_made_and_those_that_wait() -> None:
    begun = threading.Event()

    def endless(on_progress):
        while True:
            begun.set()
            on_progress(1, 2)

    reports = Reports()
    endless_job, next_job = reports.job(("a",), endless), reports.job(("b",), endless)
    assert begun.wait(60)
    reports.close()

    assert endless_job.future.exception() is not None
    assert next_job.future.cancelled()
    with pytest.raises(RuntimeError):
        reports.job(("c",), endless)
