"""The pages in a real browser."""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Iterator

import pytest

import holdfast
from holdfast._manager.steps import set_aside
from holdfast._tools.reporting import report
from holdfast._tools.serving import RunServer, answers, serve
from holdfast.stores import LocalStore
from tests.browser import PHONE
from tests.manager.managed import a_run, file_of, state_of
from tests.tools.serving.slow_job import SlowJob

STEPS = range(100, 1300, 100)
ODD_METRIC = "loss <img src=x onerror=alert(1)> é"


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[RunServer]:
    """A run with all sorts of checkpoints, which stays as it is."""
    root = tmp_path_factory.mktemp("pages") / "run größe <script>"
    with holdfast.CheckpointManager(root, background=False, save_at_end=False) as manager:
        for step in STEPS:
            loss = 3 * math.exp(-step / 400) + (0.3 if step > 1000 else 0)
            metrics = {"loss": loss, "accuracy": 1 - loss / 4, ODD_METRIC: math.nan if step == 500 else step / 3}
            manager.save(step, state_of(step), metrics=metrics, metadata={"note": "<script>alert(2)</script>"})
        manager.pin(400)
    set_aside(LocalStore(root / "step-00000600"), "its weights are noise")
    os.truncate(file_of(root, 800, "data-*"), 100)
    with serve(root) as server:
        yield server


def row(page, step: int):
    return page.locator("#rows tr:not(.details-row)").filter(has=page.get_by_text(f"step {step:,}", exact=True))


def chart(page, title: str):
    return page.locator("figure.chart").filter(has=page.get_by_text(title, exact=True))


def expect(found):
    from playwright.sync_api import expect

    expect.set_options(timeout=60_000)  # a busy machine is no defect of a page
    return expect(found)


def test_the_list_shows_every_checkpoint_and_what_is_wrong_with_it_sorted_and_filtered(served, open_page) -> None:
    opened = open_page(served.url)
    page = opened.page

    expect(page.locator("#rows tr")).to_have_count(len(STEPS))
    expect(page.locator("h1")).to_have_text("run größe <script>")
    expect(row(page, 400)).to_contain_text("pinned")
    expect(row(page, 600)).to_contain_text("set aside")
    expect(row(page, 800)).to_contain_text("damaged")
    row(page, 800).get_by_role("button", name="Details of step 800").click()
    expect(page.locator("tr.details-row")).to_contain_text("fewer bytes")
    expect(page.locator("tr.details-row")).to_contain_text("<script>alert(2)</script>")
    assert page.locator("#rows tr").first.inner_text().strip().startswith("step 1,200")
    assert {re.sub(r"(//[^/]+/).*", r"\1", url) for url in opened.requests} == {served.url}
    page.evaluate("scrollTo(0, 0)")
    opened.screenshot("serve-laptop", full_page=True)

    page.get_by_role("button", name="accuracy").click()
    expect(page.locator("#rows tr").first).to_contain_text("step 100")
    page.get_by_label("Filter checkpoints").fill("noise")
    expect(page.locator("#rows tr")).to_have_count(1)
    expect(page.locator("#count")).to_have_text(f"1 of {len(STEPS)}")
    page.get_by_label("Filter checkpoints").fill("nothing like this")
    expect(page.locator("#empty")).to_have_text("None of them matches.")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_phone_shows_it_all_without_scrolling_sideways(served, open_page, dark) -> None:
    opened = open_page(served.url, size=PHONE, dark=dark)
    page = opened.page
    expect(page.locator("#rows tr")).to_have_count(len(STEPS))
    opened.screenshot(f"serve-phone-{'dark' if dark else 'light'}")
    row(page, 1100).get_by_role("button", name="Details of step 1,100").tap()

    expect(page.locator("tr.details-row")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    opened.screenshot(f"serve-phone-list-{'dark' if dark else 'light'}")


def test_a_click_opens_the_report_in_the_chosen_colours_and_a_link_leads_back(served, open_page) -> None:
    page = open_page(served.url).page
    page.get_by_role("button", name="Colours").click()
    page.get_by_role("button", name="Colours").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    row(page, 1200).get_by_role("link").click()

    expect(page).to_have_url(f"{served.url}c/step-00001200")
    expect(page.get_by_text("model.weight").first).to_be_visible()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.get_by_role("link", name="All checkpoints").click()
    expect(page.locator("#rows tr")).to_have_count(len(STEPS))


def test_two_that_are_ticked_are_compared(served, open_page) -> None:
    opened = open_page(served.url, dark=True)
    page = opened.page
    for step in (1200, 300, 700):  # of three, the first one gives way
        row(page, step).get_by_role("checkbox").check()
    expect(page.locator("#compare-bar")).to_contain_text("step 300 and step 700")
    expect(row(page, 1200).get_by_role("checkbox")).not_to_be_checked()
    opened.screenshot("serve-compare-dark")
    page.get_by_role("link", name="Compare").click()

    expect(page).to_have_url(f"{served.url}c/step-00000700?compare=step-00000300")
    expect(page.get_by_text("What changed")).to_be_visible()


def test_a_chart_shows_values_by_pointer_and_keys_and_opens_a_report(served, open_page) -> None:
    opened = open_page(served.url)
    loss = chart(opened.page, "loss")
    expect(loss.locator(".readout")).to_contain_text("best 0.24625 at step 1,000")
    box = loss.locator("svg").bounding_box()
    opened.page.mouse.move(box["x"] + 53, box["y"] + 60)

    expect(loss.locator(".readout")).to_have_text("step 100: 2.3364")
    opened.screenshot("serve-chart")
    opened.page.mouse.click(box["x"] + 53, box["y"] + 60)
    expect(opened.page).to_have_url(f"{served.url}c/step-00000100")

    page = opened.page
    page.go_back()
    loss.locator("svg").focus()
    for key in ("End", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    expect(loss.locator(".readout")).to_have_text("step 1,000: 0.24625 · best")
    page.keyboard.press("Home")
    expect(loss.locator(".readout")).to_have_text("step 100: 2.3364")
    page.keyboard.press("Enter")

    expect(page).to_have_url(f"{served.url}c/step-00000100")


def test_a_chart_has_a_logarithmic_scale_another_best_and_gaps(served, open_page) -> None:
    page = open_page(served.url).page
    loss = chart(page, "loss")
    before = loss.locator("polyline").first.get_attribute("points")
    loss.get_by_role("button", name="log").click()
    assert loss.locator("polyline").first.get_attribute("points") != before
    loss.get_by_role("button", name="best: lowest").click()

    expect(loss.locator(".readout")).to_contain_text("best 2.3364 at step 100")
    expect(chart(page, "accuracy").get_by_role("button", name="best: highest")).to_be_visible()
    odd = chart(page, ODD_METRIC)  # has a value that is no number
    expect(odd.locator("polyline")).to_have_count(2)
    expect(odd.locator(".no-number")).to_have_count(1)


def test_a_running_save_is_shown_and_becomes_a_checkpoint_without_reloading(tmp_path, open_page) -> None:
    a_run(tmp_path, 100)
    with serve(tmp_path) as server, SlowJob(tmp_path, 200) as job:
        opened = open_page(server.url)
        page = opened.page
        page.evaluate("window.wasNotReloaded = true")
        job.wait()
        save = page.locator("article.save")
        expect(save).to_contain_text("step 200")
        expect(save).to_contain_text(re.compile("being written|no bytes for"))
        expect(save).to_contain_text(re.compile(r"[0-9.]+ MB of about 25\.2 MB"))
        expect(row(page, 200)).to_contain_text("being written")
        part = float(save.get_by_role("progressbar").get_attribute("aria-valuenow"))
        assert 30 <= part < 100
        expect(page.locator("#tiles")).to_contain_text(f"process {job.process.pid}")
        opened.screenshot("serve-live")
        for word in ("go", "go"):
            job.say(word)
            job.wait()
        job.say("go")

        expect(row(page, 200)).to_contain_text("committed")
        expect(page.locator("#ended")).to_contain_text("step 200 was committed")
        expect(save).to_have_count(0)
        assert page.evaluate("window.wasNotReloaded")
        expect(page.locator("figure.chart")).not_to_have_count(0)
        opened.screenshot("serve-live-committed")


def test_a_checkpoint_that_is_deleted_leaves_the_list_and_the_comparison(tmp_path, open_page) -> None:
    a_run(tmp_path, 100, 200)
    with serve(tmp_path) as server:
        page = open_page(server.url).page
        row(page, 100).get_by_role("checkbox").check()
        row(page, 200).get_by_role("checkbox").check()
        with holdfast.CheckpointManager(
            tmp_path, keep=holdfast.keep.last(2), background=False, save_at_end=False
        ) as manager:
            manager.save(300, state_of(300))

        expect(row(page, 300)).to_be_visible()
        expect(row(page, 100)).to_have_count(0)
        expect(page.locator("#compare-bar")).to_contain_text("step 200 and …")
        expect(row(page, 200).get_by_role("checkbox")).to_be_checked()


def test_a_folder_without_checkpoints_waits_for_the_first(tmp_path, open_page) -> None:
    with serve(tmp_path) as server:
        page = open_page(server.url).page
        expect(page.locator("#empty")).to_contain_text("no checkpoint here yet")
        a_run(tmp_path, 100)

        expect(row(page, 100)).to_be_visible()


def test_a_page_whose_server_has_stopped_says_so(tmp_path, open_page) -> None:
    a_run(tmp_path, 100)
    with serve(tmp_path) as server:
        opened = open_page(server.url)
        expect(opened.page.locator("#pulse")).to_have_text("live")

    expect(opened.page.locator("#pulse")).to_contain_text("does not answer since")
    expect(row(opened.page, 100)).to_be_visible()
    opened.errors[:] = [error for error in opened.errors if "ERR_CONNECTION_REFUSED" not in error]


def test_a_report_that_takes_long_appears_by_itself(tmp_path, open_page, monkeypatch) -> None:
    a_run(tmp_path, 100)
    begun, go_on, made = threading.Event(), threading.Event(), report.make_report

    def slow_report(place, *, on_progress, **options):
        on_progress(3_000_000, 4_000_000)
        begun.set()
        assert go_on.wait(60)
        return made(place, **options)

    monkeypatch.setattr(report, "make_report", slow_report)
    monkeypatch.setattr(answers, "_PATIENCE", 0.0)
    with serve(tmp_path) as server:
        page = open_page(f"{server.url}c/step-00000100").page
        expect(page.locator("h1")).to_have_text("Reading step-00000100")
        assert begun.wait(60)
        expect(page.locator("#far")).to_have_text("3.0 MB of 4.0 MB read")
        go_on.set()

        expect(page.get_by_text("model.weight").first).to_be_visible()
