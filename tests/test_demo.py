"""The demo runs, and its checks find what they are there to find."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import holdfast

DEMO = Path(__file__).parent.parent / "demo"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the demo, whose modules find each other because they are in one folder."""
    monkeypatch.syspath_prepend(str(DEMO))
    for name in ("checks", "fingerprint"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("checks")


@pytest.mark.parametrize(
    ("starts", "blamed"),
    [
        ([(0, {3, 6}), (6, {9}), (9, {12})], []),
        ([(0, {3, 6}), (9, set()), (9, set())], []),  # one was committed and the job was killed before it said so
        ([(0, {3, 6}), (3, {6, 9}), (9, set())], [2]),
        ([(0, {3}), (3, {6}), (0, set())], [3]),
        ([(0, {3}), (None, set())], [2]),
    ],
)
def test_a_start_that_goes_back_behind_a_committed_step_is_found(
    checks: ModuleType, starts: list[tuple[int | None, set[int]]], blamed: list[int]
) -> None:
    problems = checks.lost_steps(starts)

    assert [re.findall(r"start (\d)", problem) for problem in problems] == [[str(number)] for number in blamed]


def test_losses_that_differ_by_more_than_rounding_are_found(checks: ModuleType) -> None:
    curves = {"A": {1: 1.0, 2: 1.0, 3: 1.0}, "D": {1: 1.0 + 1e-7, 2: 1.001}}

    problems = checks.compare_losses(curves, range(1, 4))

    assert [problem.partition(":")[0] for problem in problems] == ["step 2", "step 3"]


def test_the_page_of_the_demo_compares_the_first_step_with_the_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(DEMO))
    with holdfast.CheckpointManager(tmp_path / "run", every_steps=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": torch.full((2,), float(step))})

    importlib.import_module("run").write_report(tmp_path / "run", tmp_path / "pages" / "report.html")

    text = (tmp_path / "pages" / "report.html").read_text()
    assert "<html" in text
    assert "step-00000001" in text
    assert "step-00000003" in text
    assert "step-00000002" not in text


@pytest.mark.long
def test_the_demo_ends_well(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO / "run.py"), "--out", str(tmp_path), "--report", str(tmp_path / "report.html")],
        capture_output=True,
        text=True,
        timeout=280,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "restored step 12, finished" in done.stdout
    assert "killed twice, with no committed step lost" in done.stdout
    assert done.stdout.rstrip().endswith(str(tmp_path / "report.html"))
    assert "<html" in (tmp_path / "report.html").read_text()
