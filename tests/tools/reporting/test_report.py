"""Reports as files, in notebooks, and by the command."""

from __future__ import annotations

import html
import importlib
import json
import os
import re
import subprocess
import sys
import webbrowser
from pathlib import Path
from unittest import mock

import pytest
import torch

import holdfast
from holdfast._cli.main import run
from holdfast._tools.reporting.assets import as_data, asset, is_report, page
from holdfast._tools.reporting.report import SCRIPTS, STYLES, make_report


@pytest.fixture
def path(tmp_path: Path) -> Path:
    holdfast.save({"model": {"weight": torch.ones(4, 3)}, "step": 5}, tmp_path / "ckpt")
    return tmp_path / "ckpt"


def test_a_saved_page_is_the_page(path: Path, tmp_path: Path) -> None:
    report = make_report(path)

    written = report.save(tmp_path / "page.html")

    assert written.read_text(encoding="utf-8") == report.html
    assert is_report(written)
    assert not is_report(path / "holdfast.json")
    assert not is_report(tmp_path / "nothing.html")
    assert "1 tensors" in str(report)


def test_a_page_that_cannot_be_written_leaves_the_old_one(path: Path, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("old")
    report = make_report(path)

    with (
        mock.patch.object(os, "fsync", side_effect=OSError(28, "No space left on device")),
        pytest.raises(OSError, match="No space left"),
    ):
        report.save(tmp_path / "page.html")

    assert (tmp_path / "page.html").read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ckpt", "page.html"]


def test_a_notebook_gets_the_page_in_a_frame_of_its_own(path: Path) -> None:
    report = make_report(path)

    shown = report._repr_html_()

    found = re.fullmatch(r'<iframe srcdoc="([^"]*)" sandbox="allow-scripts" [^>]*></iframe>', shown)
    assert found is not None
    assert html.unescape(found.group(1)) == report.html


def test_a_notebook_can_draw_it(path: Path, tmp_path: Path, open_page) -> None:
    (tmp_path / "notebook.html").write_text(f"<!doctype html><body>{make_report(path)._repr_html_()}</body>")
    opened = open_page(tmp_path / "notebook.html")

    frame = opened.page.frame_locator("iframe")
    frame.locator("#theme").click()  # which is not remembered there
    assert frame.locator("h1").text_content().endswith("/ckpt")


def test_a_checkpoint_makes_its_own_report(path: Path, tmp_path: Path) -> None:
    with holdfast.open(path) as ckpt:
        ckpt.report(tmp_path / "page.html")

        assert is_report(tmp_path / "page.html")
        assert ckpt.report().facts["totals"]["tensors"] == 1


def test_every_file_of_the_page_is_in_it() -> None:
    folder = Path(str(importlib.import_module("holdfast._tools.reporting").__path__[0])) / "page"

    assert {file.name for file in folder.iterdir()} == {"report.html", *STYLES, *SCRIPTS}


def test_what_is_put_into_a_page_is_not_searched_for_places() -> None:
    data = {"<!-- holdfast:scripts -->": "</script><!-- holdfast:styles -->"}

    text = page("report.html", title="<b>&", styles=["base.css"], scripts=["dom.js"], data=data)

    assert text.count("<style>") == 1
    assert text.count("<script") == 2
    assert "<title>&lt;b&gt;&amp;</title>" in text
    assert json.loads(as_data(data)) == data
    assert "<" not in as_data(data)
    assert asset("dom.js") in text


def test_the_command_writes_a_page(path: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert run(["report", str(path)]) == 0
    assert re.fullmatch(r"ckpt\.html \(\d+\.\d KB\)\n", capsys.readouterr().out)
    assert run(["report", str(path), "-o", "other.html", "--json", "--verify", "--statistics", "none"]) == 0
    answer = json.loads(capsys.readouterr().out)

    assert answer["report"] == "other.html"
    assert answer["bytes"] == (tmp_path / "other.html").stat().st_size
    assert answer["totals"]["tensors"] == 1
    assert answer["verified"]["ok"] is True
    assert is_report(tmp_path / "ckpt.html")


def test_the_command_replaces_reports_only(path: Path, tmp_path: Path, capsys) -> None:
    target = tmp_path / "page.html"
    target.write_text("my thesis")

    assert run(["report", str(path), "-o", str(target)]) == 2
    assert "is not a report of holdfast" in capsys.readouterr().err
    assert target.read_text() == "my thesis"
    assert run(["report", str(path), "-o", str(target), "--force"]) == 0
    assert run(["report", str(path), "-o", str(target)]) == 0
    assert run(["report", str(path), "-o", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert run(["report", str(tmp_path / "nothing"), "-o", str(tmp_path / "new.html")]) == 2

    assert not (tmp_path / "new.html").exists()


def test_the_command_tells_of_damage_by_its_status(path: Path, tmp_path: Path) -> None:
    [data] = path.glob("data-*")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)

    assert run(["report", str(path), "-o", str(tmp_path / "page.html"), "--verify", "--quiet"]) == 1
    assert is_report(tmp_path / "page.html")


def test_the_command_opens_a_browser_if_asked(path: Path, tmp_path: Path) -> None:
    with mock.patch.object(webbrowser, "open") as opened:
        run(["report", str(path), "-o", str(tmp_path / "page.html")])
        assert not opened.called
        run(["report", str(path), "-o", str(tmp_path / "page.html"), "--open"])

    opened.assert_called_once_with((tmp_path / "page.html").as_uri())


def test_a_report_takes_no_torch(path: Path, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from holdfast._cli.main import run\n"
        "sys.exit(run(['report', sys.argv[1], '-o', sys.argv[2], '--compare', sys.argv[1], '--verify']))"
    )

    subprocess.run([sys.executable, "-c", program, str(path), str(tmp_path / "page.html")], check=True, timeout=120)

    assert is_report(tmp_path / "page.html")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_folder_whose_name_is_no_text_has_a_page(path: Path, tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad-\xff"))
    path.rename(odd)

    written = make_report(odd).save(tmp_path / "page.html")

    assert "/bad-? · Holdfast report</title>" in written.read_text(encoding="utf-8")


def test_a_page_in_a_folder_that_is_not_there_is_refused_before_anything_is_read(path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing/page\.html cannot be written: there is no folder .*/missing"):
        make_report(path).save(tmp_path / "missing" / "page.html")
    with mock.patch("holdfast._tools.reporting.report.make_report") as made:
        assert run(["report", str(path), "-o", str(tmp_path / "missing" / "page.html")]) == 2

    assert not made.called
