"""The page of a report in a real browser: what people see, click and type."""

from __future__ import annotations

import fnmatch
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast._tools.reporting.assets import page as page_of
from holdfast._tools.reporting.assets import write_page
from holdfast._tools.reporting.report import SCRIPTS, STYLES, make_report
from tests.browser import PHONE, OpenedPage
from tests.rank_pool import RankPool

Open = Callable[..., OpenedPage]

LONG = "long." + "x" * 1500
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def layer(number: int) -> dict[str, Any]:
        moved = 0.5 * (step == 200 and number == 1)
        return {
            "up": torch.randn(64, 32, generator=generator) + moved,
            "down": torch.randn(32, 64, generator=generator).bfloat16(),
        }

    layers = {str(number): layer(number) for number in range(4)}
    whole = {"model": {"layers": layers, "norm": torch.ones(64)}, "optim": {"lr": 0.1 * step}, "step": step}
    whole["model"]["norm"][3] = math.nan
    if step == 100:
        whole["old"] = torch.zeros(10)
    else:
        whole["new"] = torch.arange(20)
        whole["model"]["layers"]["3"]["up"] = torch.zeros(10, 10)
        whole["model"]["layers"]["2"]["down"] = whole["model"]["layers"]["2"]["down"].float()
    return whole


def save_sharded(path: Path) -> None:
    mesh = init_device_mesh("cpu", (4,))
    weight = distribute_tensor(torch.randn(40, 8), mesh, [Shard(0)])
    wide = distribute_tensor(torch.randn(6, 64), mesh, [Shard(1)])
    holdfast.save({"model": {"weight": weight, "wide": wide}, "only": torch.ones(3)}, path)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Path:
    """A folder with reports of several checkpoints."""
    folder = tmp_path_factory.mktemp("pages")
    for step in (100, 200):
        with holdfast.CheckpointManager(folder / "run", every_steps=100) as manager:
            manager.save(step, state(step), metrics={"loss": 100 / step}, metadata={"git": "1a2b3c"})
    one, two = folder / "run" / "step-00000100", folder / "run" / "step-00000200"
    make_report(two, statistics="*", verify=True).save(folder / "plain.html")
    make_report(two, compare=one).save(folder / "compared.html")
    ranks(4).run(save_sharded, folder / "sharded")
    make_report(folder / "sharded").save(folder / "sharded.html")
    return folder


def rows(page: Any) -> list[str]:
    """The names in the rows that can be seen, from above."""
    return page.evaluate(
        "[...document.querySelectorAll('#rows .row')].sort((a, b) => a.offsetTop - b.offsetTop)"
        ".map((row) => row.querySelector('.key').textContent)"
    )


def row(page: Any, name: str) -> Any:
    return page.locator("#rows .row").filter(has=page.locator(".key", has_text=re.compile(f"^{re.escape(name)}$")))


def test_the_summary_says_what_it_is(pages: Path, open_page: Open) -> None:
    opened = open_page(pages / "plain.html")
    page = opened.page

    assert page.title() == "run/step-00000200 · Holdfast report"
    assert page.text_content("h1") == "run/step-00000200"
    summary = page.inner_text("#summary")
    for text in ("intact: all digests agree", "step 200", "1 rank", "loss", "0.5", "git", "1a2b3c", "1 tensor has"):
        assert text in summary
    with holdfast.open(pages / "run" / "step-00000200") as ckpt:
        tensors = sum(hasattr(value, "nbytes") for value in ckpt.values())
    assert f"Tensors\n{tensors}\n2 values" in summary
    opened.screenshot("report-laptop", full_page=True)


def test_the_map_can_be_pointed_at_clicked_and_walked_by_keys(pages: Path, open_page: Open) -> None:
    page = open_page(pages / "plain.html").page
    crumbs = page.locator("#crumbs")
    assert crumbs.inner_text() == "all"
    page.hover("#treemap", position={"x": 60, "y": 60})
    assert re.match(r"model\.layers\.\d\.(up|down) · 8\.2 KB · ", page.text_content("#treemap-status") or "")

    page.click("#treemap", position={"x": 60, "y": 60})
    page.click("#treemap", position={"x": 60, "y": 60})

    assert re.fullmatch(r"all\s*/\s*model\s*/\s*layers", crumbs.inner_text())
    page.click("#treemap", position={"x": 60, "y": 60})
    page.click("#treemap", position={"x": 60, "y": 60})
    assert re.fullmatch(r"model\.layers\.\d\.(up|down)", page.text_content("#panel .key") or "")
    crumbs.get_by_role("button", name="all").click()
    assert crumbs.inner_text() == "all"

    page.focus("#treemap")
    page.keyboard.press("ArrowRight")
    assert (page.text_content("#treemap-status") or "").startswith("model · ")
    page.keyboard.press("Enter")
    assert "model" in crumbs.inner_text()
    page.keyboard.press("Backspace")
    assert crumbs.inner_text() == "all"


def test_search_finds_names_and_patterns_and_filters_are_taken_together(pages: Path, open_page: Open) -> None:
    page = open_page(pages / "plain.html").page
    with holdfast.open(pages / "run" / "step-00000200") as ckpt:
        keys = list(ckpt)

    page.fill("#search", "LAYERS up")
    assert rows(page) == [key for key in keys if "layers" in key and "up" in key]
    page.fill("#search", "model.*.down")
    assert rows(page) == [key for key in keys if fnmatch.fnmatchcase(key, "model.*.down")]
    page.fill("#search", "model.layers.?")
    assert rows(page) == [key for key in keys if key.startswith("model.layers.")]
    page.fill("#search", "nothing like it")
    assert rows(page) == []
    assert "Nothing has all of these." in page.inner_text("#rows")
    assert (page.text_content("#matches") or "").startswith("0 of ")
    page.fill("#search", "")
    assert "model" in rows(page)

    page.select_option("#filter-dtype", "bfloat16")
    assert rows(page) == [f"model.layers.{number}.down" for number in (0, 1, 3)]
    page.fill("#search", "3")
    assert rows(page) == ["model.layers.3.down"]
    page.fill("#search", "")
    page.select_option("#filter-dtype", "")
    page.select_option("#filter-kind", "value")
    assert rows(page) == ["optim.lr", "step"]
    page.select_option("#filter-kind", "")
    page.select_option("#filter-size", "1000")
    page.select_option("#filter-order", "size")
    found = rows(page)
    assert "new" not in found
    assert set(found[:4]) == {f"model.layers.{n}.up" for n in range(3)} | {"model.layers.2.down"}


def test_the_tree_opens_and_closes_by_pointer_and_keys(pages: Path, open_page: Open) -> None:
    page = open_page(pages / "plain.html").page

    assert "layers" in rows(page)
    row(page, "layers").click()
    assert "0" not in rows(page)
    assert row(page, "layers").get_attribute("aria-expanded") == "false"
    row(page, "layers").click()
    assert "0" in rows(page)
    row(page, "norm").click()

    assert page.text_content("#panel .key") == "model.norm"
    assert row(page, "norm").get_attribute("aria-selected") == "true"
    page.focus("#rows")
    page.keyboard.press("Escape")
    assert "Choose an entry" in page.inner_text("#panel")

    page.keyboard.press("/")
    page.keyboard.type("norm")
    assert rows(page) == ["model.norm"]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.text_content("#panel .key") == "model.norm"
    page.keyboard.press("Escape")
    assert "Choose an entry" in page.inner_text("#panel")
    page.fill("#search", "")
    page.focus("#rows")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    assert rows(page)[:2] == ["model", "optim.lr"]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    active = page.get_attribute("#rows", "aria-activedescendant")

    assert page.text_content(f"#{active} .key") == "layers"


def test_the_panel_draws_chunks_by_rank_and_each_rank_has_its_bars(pages: Path, open_page: Open) -> None:
    opened = open_page(pages / "sharded.html")
    page = opened.page
    boxes = "#panel svg.drawing rect"

    row(page, "weight").click()
    sizes = page.eval_on_selector_all(boxes, "all => all.map(box => box.getBBox()).map(box => [box.y, box.height])")
    assert len(sizes) == 4
    assert all(sizes[at][0] + sizes[at][1] == pytest.approx(sizes[at + 1][0], abs=0.1) for at in range(3))
    assert len(set(page.eval_on_selector_all(boxes, "all => all.map(box => box.getAttribute('fill'))"))) == 4
    assert [page.inner_text(f"#panel tbody tr:nth-child({n}) td:nth-child(2)") for n in (1, 4)] == [
        "[0:10, 0:8]",
        "[30:40, 0:8]",
    ]
    assert "ranks 0, 1, 2, 3" in page.inner_text("#panel")
    row(page, "wide").click()
    assert page.inner_text("#panel tbody tr:nth-child(2) td:nth-child(2)") == "[0:6, 16:32]"
    assert re.search(r"data-[0-9a-f]{16}-1-0\.safetensors @ [\d,]+", page.inner_text("#panel tbody tr:nth-child(2)"))
    opened.screenshot("report-sharded")

    assert page.locator("#balance .bar").count() == 4
    assert page.locator("#time .bar").count() == 4
    assert "write files" in page.inner_text("#time .legend")
    widths = page.eval_on_selector_all("#time .bar:first-child .fill", "all => all.map(fill => fill.style.width)")
    assert len(widths) == page.locator("#time .legend li").count() - 1  # the last one is to wait
    assert any(float(width.rstrip("%")) > 0 for width in widths)
    page.get_by_role("button", name="rank 2").click()

    assert page.input_value("#filter-rank") == "2"
    assert {"model.weight", "model.wide"} <= set(rows(page))


def page_of_facts(facts: dict[str, Any], path: Path) -> Path:
    return write_page(path, page_of("report.html", title="made up", styles=STYLES, scripts=SCRIPTS, data=facts))


def test_phases_begin_when_the_slowest_rank_has_ended_the_one_before(
    pages: Path, tmp_path: Path, open_page: Open
) -> None:
    facts = json.loads(json.dumps(make_report(pages / "sharded").facts))
    seconds = {"capture": [1, 3], "stage": [4, 1], "plan": [1, 1], "write": [2, 4]}  # copies are made without meeting
    facts["checkpoint"]["phases"] = seconds
    facts["placement"]["ranks"] = [[0, 2000, 2, 1], [1, 0, 0, 0]]
    page = open_page(page_of_facts(facts, tmp_path / "page.html")).page

    def bars(rank: int) -> list[tuple[float, float]]:
        """Begin and length of each, in tenths of the whole."""
        place = "fill => [fill, fill.parentElement].map(one => one.getBoundingClientRect())"
        found = page.eval_on_selector_all(
            f"#time .bar:nth-child({rank + 1}) .fill",
            f"all => all.map({place}).map(([own, all]) => [(own.left - all.left) / all.width, own.width / all.width])",
        )
        return [(round(begin * 10, 2), round(length * 10, 2)) for begin, length in found]

    assert bars(0) == [(0, 1), (1, 4), (5, 1), (6, 2)]
    assert bars(1) == [(0, 3), (3, 1), (5, 1), (6, 4)]
    assert "10.0 s without the commit, rank 1 was busy longest" in page.inner_text("#time")
    assert "8.00 s · waited 2.00 s" in page.inner_text("#time .bar:nth-child(1)")
    assert "9.00 s · waited 1.00 s" in page.inner_text("#time .bar:nth-child(2)")
    assert "10.0 s" in page.inner_text("#summary .tiles")
    assert re.search(r"wrote 2\.00 \S as much as the average, 1 rank wrote nothing", page.inner_text("#balance"))


def test_a_thousand_ranks_fit_on_the_page(pages: Path, tmp_path: Path, open_page: Open) -> None:
    facts = json.loads(json.dumps(make_report(pages / "sharded").facts))
    ranks, number = 1000, list(holdfast.open(pages / "sharded")).index("model.weight")
    placement = facts["placement"]
    facts["entries"]["shapes"][facts["entries"]["shape"][number]] = [2000, 8]
    placement["files"] = [[f"data-{rank}", 64, rank] for rank in range(ranks)]
    placement["ranks"] = [[rank, 64 + 64 * (rank == 7), 1, 1] for rank in range(ranks)]
    placement["cuts"].append([[[2 * rank, 0], [2, 8]] for rank in range(ranks)])
    placement["lists"].append(list(range(ranks)))
    placement["cut"][number], placement["placed"][number] = len(placement["cuts"]) - 1, len(placement["lists"]) - 1
    placement["begins"] = None
    facts["checkpoint"]["phases"] = {"write": [1 + (rank == 77) for rank in range(ranks)]}
    page = open_page(page_of_facts(facts, tmp_path / "page.html")).page

    assert re.search(r"the busiest rank wrote 2\.00 \S as much as the average", page.inner_text("#balance"))
    assert page.locator("#balance svg rect").count() == ranks
    assert page.inner_text("#time .bar:first-child").startswith("rank 77")
    assert page.locator("#time .bar").count() == 20
    row(page, "weight").click()
    assert page.locator("#panel svg.drawing rect").count() == ranks
    assert "1000 ranks" in page.inner_text("#panel")
    assert page.locator("#panel tbody tr").count() == 100
    page.select_option("#filter-rank", "999")
    assert rows(page) == ["model.weight"]


def test_statistics_are_shown_and_nan_comes_first(pages: Path, open_page: Open) -> None:
    page = open_page(pages / "plain.html").page
    cards = page.locator("#statistics .histograms button")

    assert cards.first.locator(".key").text_content() == "model.norm"
    assert "1 NaN" in cards.first.inner_text()
    assert cards.count() == 10
    cards.first.click()

    assert page.text_content("#panel .key") == "model.norm"
    assert "1 NaN" in page.inner_text("#panel .notice")
    assert page.locator("#panel svg.histogram rect").count() == 1  # all others are one
    assert row(page, "norm").get_attribute("aria-selected") == "true"


def test_comparing_shows_what_changed(pages: Path, open_page: Open) -> None:
    opened = open_page(pages / "compared.html")
    page = opened.page
    chips = page.inner_text("#changes .chips")
    assert {text.strip() for text in chips.splitlines()} == {
        "3 with other values",
        "1 added",
        "1 removed",
        "1 of another shape",
        "1 of another dtype",
        "6 equal",
    }

    page.click("[data-change=changed]")
    assert rows(page) == ["model.layers.1.up", "optim.lr", "step"]
    row(page, "model.layers.1.up").click()
    panel = page.inner_text("#panel")
    assert "Change since run/step-00000100" in panel
    assert "2,048 differ (100 %)" in panel
    assert re.search(r"largest\s+0\.5\b", panel)
    opened.screenshot("report-compared")
    page.select_option("#filter-change", "removed")
    assert rows(page) == ["old"]
    row(page, "old").click()
    assert re.search(r"shape\s+10", page.inner_text("#panel"))
    page.select_option("#filter-change", "any")
    page.select_option("#filter-order", "change")
    assert rows(page)[0] == "model.layers.1.up"
    others = {"model.layers.3.up", "model.layers.2.down", "optim.lr", "step", "new", "old"}
    assert set(rows(page)) == {"model.layers.1.up", *others}
    assert re.search(r"step\s+100 → 200", page.inner_text("#changes .changed-values"))
    assert "0.5 (was 1)" in page.inner_text("#summary")
    page.click("#treemap")
    assert opened.requests == [(pages / "compared.html").as_uri()]  # nothing was asked of the network


def test_long_texts_take_no_more_room_than_they_need(tmp_path: Path, open_page: Open) -> None:
    group = "optim.param_groups.a_long_name_of_a_group_of_parameters.learning_rate"
    for name, rate in (("one", 0.1), ("two", 0.2)):
        metadata = {"config": "x " * 10_000, **{f"option {number}": number for number in range(200)}}
        holdfast.save({group: rate, "w": torch.ones(4, 4) * rate}, tmp_path / name, metadata=metadata)
    make_report(tmp_path / "two", compare=tmp_path / "one").save(tmp_path / "page.html")
    page = open_page(tmp_path / "page.html").page

    assert page.locator("#summary").bounding_box()["height"] < 800
    assert page.locator(".noted dd").first.bounding_box()["height"] < 200  # and the next one can be seen
    assert page.locator(".changed-values dt").bounding_box()["height"] < 30  # the key is in one line
    page.set_viewport_size({"width": 360, "height": 640})
    assert page.locator("#summary").bounding_box()["height"] < 1280
    assert page.locator(".changed-values dt").bounding_box()["height"] < 60


def test_light_and_dark_can_be_chosen(pages: Path, open_page: Open) -> None:
    def ground(page: Any) -> int:
        return sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]))

    opened = open_page(pages / "plain.html", dark=True)
    assert ground(opened.page) < 120
    opened.screenshot("report-laptop-dark", full_page=True)
    opened.page.click("#theme")
    assert ground(opened.page) > 650
    opened.page.click("#theme")
    assert ground(opened.page) < 120
    opened.page.reload()
    assert opened.page.evaluate("document.documentElement.dataset.theme") == "dark"

    assert ground(open_page(pages / "plain.html").page) > 650


@pytest.mark.parametrize("name", ["plain", "compared", "sharded"])
def test_a_phone_needs_no_sideways_scrolling(pages: Path, open_page: Open, name: str) -> None:
    opened = open_page(pages / f"{name}.html", size=PHONE)
    page = opened.page
    too_wide = "document.documentElement.scrollWidth - window.innerWidth"
    assert page.evaluate(too_wide) <= 0

    row(page, "norm" if name != "sharded" else "weight").click()
    assert page.locator("#panel").is_visible()
    assert page.evaluate(too_wide) <= 0
    opened.screenshot(f"report-{name}-phone-panel")
    page.locator("#panel .close").click()

    assert not page.locator("#panel").is_visible()
    if name == "compared":
        opened.screenshot("report-compared-phone", full_page=True)
    page.set_viewport_size({"width": 360, "height": 640})
    assert page.evaluate(too_wide) <= 0


def test_keys_are_shown_as_they_are_and_never_run(tmp_path: Path, open_page: Open) -> None:
    keys = [HOSTILE, "größe.ключ.鍵😀", LONG, "a\nb", "a.b", ""]
    tree = {key: torch.ones(2) for key in keys} | {"a": {"b": torch.zeros(3)}, "text": HOSTILE}
    holdfast.save(tree, tmp_path / "ckpt", metadata={HOSTILE: HOSTILE})
    make_report(tmp_path / "ckpt").save(tmp_path / "page.html")
    page = open_page(tmp_path / "page.html").page

    with holdfast.open(tmp_path / "ckpt") as ckpt:
        stored = list(ckpt)
    page.select_option("#filter-order", "name")
    shown = page.eval_on_selector_all("#rows .row .key", "all => all.map(key => key.title)")
    assert sorted(shown) == sorted(stored)
    page.fill("#search", "hacked")
    page.locator("#rows .row").first.click()
    assert "<script>window.hacked" in page.inner_text("#panel .key")
    page.fill("#search", "😀")
    assert len(rows(page)) == 1
    page.fill("#search", LONG[5:])
    page.locator("#rows .row").click()

    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    assert HOSTILE in page.inner_text("#summary")


def test_scripts_from_elsewhere_are_refused(pages: Path, tmp_path: Path, browser: Any) -> None:
    text = (pages / "plain.html").read_text()
    (tmp_path / "page.html").write_text(text.replace("</main>", "<script>window.hacked = 1</script></main>"))
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())

    assert page.text_content("h1") == "run/step-00000200"
    assert page.evaluate("window.hacked") is None
    page.close()


def test_damage_is_the_first_thing_to_see(tmp_path: Path, open_page: Open) -> None:
    holdfast.save({"weight": torch.ones(500), "step": 3}, tmp_path / "ckpt")
    [data] = (tmp_path / "ckpt").glob("data-*")
    content = bytearray(data.read_bytes())
    content[-2] ^= 1
    data.write_bytes(content)
    make_report(tmp_path / "ckpt", verify=True).save(tmp_path / "page.html")
    page = open_page(tmp_path / "page.html").page

    assert "damaged: 1 place" in page.inner_text("#summary .chips")
    assert data.name in page.inner_text("#summary .notice")
    row(page, "weight").click()
    assert "Damaged" in page.inner_text("#panel .notice")

    make_report(tmp_path / "ckpt").save(tmp_path / "page.html")  # which reads it for the statistics
    page.reload()
    assert "1 tensor cannot be read" in page.inner_text("#summary .chips")
    assert data.name in page.inner_text("#summary .notice")
    row(page, "weight").click()
    assert data.name in page.inner_text("#panel .notice")


def test_a_tensor_that_became_nan_has_changed_most(tmp_path: Path, open_page: Open) -> None:
    for name, broken in (("before", 2.0), ("after", math.nan)):
        change = 0.5 * (name == "after")
        holdfast.save({"a": torch.ones(4) + change, "b": torch.full((3,), broken), "c": torch.ones(5)}, tmp_path / name)
    make_report(tmp_path / "after", compare=tmp_path / "before").save(tmp_path / "page.html")
    page = open_page(tmp_path / "page.html").page

    assert re.split(r"\s+", page.inner_text(".changed-bars .bars").strip()) == ["b", "3", "NaN", "a", "50", "%"]
    row(page, "b").click()
    assert re.search(r"relative\s+3 NaN", page.inner_text("#panel"))
    page.select_option("#filter-order", "change")
    assert rows(page) == ["b", "a", "c"]


@pytest.mark.parametrize("saved", [{"step": 3}, {}, {"none": torch.zeros(0, 4)}], ids=["values", "nothing", "empty"])
def test_a_checkpoint_without_bytes_has_a_page(tmp_path: Path, open_page: Open, saved: Any) -> None:
    holdfast.save(saved, tmp_path / "ckpt")
    make_report(tmp_path / "ckpt", verify=True, compare=tmp_path / "ckpt").save(tmp_path / "page.html")
    page = open_page(tmp_path / "page.html").page

    assert rows(page) == (list(saved) or ["(no name)"])
    assert not page.locator("#sizes").is_visible()
    assert "Nothing changed" in page.inner_text("#changes")


def test_a_hundred_thousand_tensors_can_be_searched(tmp_path: Path, open_page: Open) -> None:
    one = torch.zeros(4, 2)
    layers = {f"layers.{n}.experts.{m}.{name}": one + 0 for n in range(50) for m in range(500) for name in "abcd"}
    holdfast.save({"model": layers}, tmp_path / "ckpt")
    report = make_report(tmp_path / "ckpt")
    assert len(report.html) < 6_000_000
    opened = open_page(report.save(tmp_path / "page.html"))
    page = opened.page

    assert "100,000" in page.inner_text("#summary")
    page.fill("#search", "layers.17.experts.3 c")
    assert page.text_content("#matches") == "111 of 100,000 entries, 3.6 KB"
    assert rows(page)[0] == "model.layers.17.experts.3.c"
    page.fill("#search", "*.experts.499.d")
    assert (page.text_content("#matches") or "").startswith("50 of ")
    page.select_option("#filter-order", "name")
    page.fill("#search", "")
    assert (page.text_content("#matches") or "").startswith("100,000 of ")
    page.focus("#rows")
    page.keyboard.press("End")
    assert rows(page)[-1] == "model.layers.9.experts.99.d"
    assert page.locator("#rows .row").count() < 100
    page.evaluate("window.scrollTo(0, 0)")
    opened.screenshot("report-100000")
