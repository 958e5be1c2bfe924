"""``holdfast stat``, ``verify``, ``diff`` and ``explain``: answers, exit statuses, and what runs without torch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from tests.native_files import spoil_table

STEP = "runs/a/step-00000300"


# --- stat ------------------------------------------------------------------------------------------------------------


def test_stat_tells_who_saved_what(cli, prepared):
    found = cli("stat", STEP, "--json").json

    assert (found["format"], found["tensors"], found["keys"], found["elements"]) == ("native", 4, 5, 212)
    assert found["parts"]["model"] == {"tensors": 4, "elements": 212, "bytes": 848, "values": 0}
    assert found["dtypes"] == {"float32": 212}
    assert found["written"]["world_size"] == 1
    assert found["metadata"]["holdfast"]["step"] == 300
    on_disk = sum(file.stat().st_size for file in (prepared / STEP).iterdir() if file.name != "run.json")
    assert found["bytes_on_disk"] == on_disk
    text = cli("stat", STEP).out
    for word in ("world_size   1", "212 elements in 4 tensors", "seconds by rank", "write"):
        assert word in text


def test_stat_finds_what_is_not_finite(cli, tmp_path):
    good = {"w": torch.ones(3), "n": torch.arange(3)}
    holdfast.save(good, tmp_path / "good")
    holdfast.save({**good, "bad": torch.tensor([1, math.nan, math.inf, -math.inf])}, tmp_path / "bad")

    assert cli("stat", tmp_path / "good", "--finite").status == 0
    assert "all elements are finite" in cli("stat", tmp_path / "good", "--finite").out
    assert cli("stat", tmp_path / "bad").status == 0  # nobody looked
    ran = cli("stat", tmp_path / "bad", "--finite")
    assert ran.status == 1
    assert "1 nan, 2 inf" in ran.out
    assert cli("stat", tmp_path / "bad", "--finite", "--json").json["not_finite"] == {"bad": [1, 2]}


# --- verify ----------------------------------------------------------------------------------------------------------


def test_verify_ends_with_one_if_something_is_damaged(cli, prepared):
    assert cli("verify", STEP).status == 0
    data = next((prepared / STEP).glob("data-*"))
    content = bytearray(data.read_bytes())
    content[-2] ^= 4
    data.write_bytes(content)

    ran = cli("verify", STEP, "runs/a/step-00000200", "--json")

    assert ran.status == 1
    assert [report["ok"] for report in ran.json["reports"]] == [False, True]
    [damage] = ran.json["reports"][0]["damage"]
    assert damage["file"] == data.name
    assert set(damage["keys"]) == {"model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"}
    text = cli("verify", STEP).out
    assert "DAMAGED" in text
    assert data.name in text
    assert cli("verify", STEP, "--include", "step").status == 0


def test_verify_of_nothing_is_an_error(cli, prepared):
    ran = cli("verify", "nothing-here")
    assert (ran.status, ran.out) == (2, "")
    assert "no checkpoint at" in ran.err
    assert cli("verify", "nothing-here", "--json").json["error"]["type"] == "CheckpointNotFoundError"


def test_without_tables_verify_does_not_claim_to_have_compared(cli, prepared):
    [report] = cli("verify", "damaged", "--json").json["reports"]
    assert (report["ok"], report["checked"]) == (False, "none")
    assert "its table" in report["damage"][0]["problem"]
    assert len(report["damage"][0]["keys"]) == 4


# --- diff ------------------------------------------------------------------------------------------------------------


def test_diff_tells_what_changed_and_ends_with_one(cli, prepared):
    same = cli("diff", "runs/a/step-00000200", "dcp", "--json")
    assert (same.status, same.json["ok"], same.json["equal"]) == (0, True, 5)

    ran = cli("diff", "runs/a/step-00000100", "runs/a/step-00000200", "--json")
    assert ran.status == 1
    assert ran.json["changed_values"] == {"step": ["100", "200"]}
    assert ran.json["changed_tensors"]["model.1.bias"]["differing"] == 4
    assert cli("diff", "runs/a/step-00000100", "runs/a/step-00000200", "--exclude", "*").status == 2
    only = cli("diff", "dcp", "model.safetensors", "--include", "*.0.*", "--json").json
    assert (only["only_in_a"], only["only_in_b"]) == (["model.0.weight", "model.0.bias"], [])


def test_diff_takes_other_names_and_refuses_nonsense(cli, prepared):
    names = ("--rename", "0=model.0", "--rename", "1=model.1")
    assert cli("diff", "model.safetensors", "model.pt", *names, "--exclude", "step").status == 0
    assert cli("diff", "model.safetensors", "model.pt", "--rename", "0").status == 2
    assert cli("diff", "dcp", "model.pt", "--memory", "1KB").status == 2


# --- explain ---------------------------------------------------------------------------------------------------------


def test_explain_takes_functions_files_and_checkpoints(cli, prepared, monkeypatch):
    monkeypatch.syspath_prepend(str(prepared))
    for target in ("model.py:make_state", "model:make_state", "dcp"):
        ran = cli("explain", STEP, target)
        assert ran.status == 0, ran.err
        assert "would load into" in ran.out
    sys.modules.pop("model", None)
    ran = cli("explain", "model.safetensors", "model.py:make_state", "--json")
    assert (ran.status, ran.json["ok"]) == (1, False)
    assert ran.json["missing"] == ["model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias", "step"]
    assert "rename={'0': 'model.0', '1': 'model.1'}" in ran.json["hints"][0]
    names = ("--rename", "0=model.0", "--rename", "1=model.1", "--allow-missing", "step")
    assert cli("explain", "model.safetensors", "model.py:make_state", *names).status == 0


@pytest.mark.parametrize("target", ["nothing.py:make_state", "model.py:nothing", "no_such_module:f", "no-such-place"])
def test_explain_of_what_there_is_not_is_an_error(cli, prepared, target):
    ran = cli("explain", STEP, target)
    assert ran.status == 2
    assert target.partition(":")[0] in ran.err


# --- without torch ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [STEP, "hf-model", "model.safetensors"])
def test_looking_needs_no_torch(prepared, place):
    program = """
import sys
sys.modules["torch"] = None
from holdfast._cli.main import run
place = sys.argv[1]
for words in (["show"], ["show", "--statistics"], ["stat", "--finite"], ["verify"]):
    assert run([words[0], place, *words[1:]]) == 0, words
assert run(["diff", place, place]) == 0
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, place], capture_output=True, text=True, check=False, timeout=60, cwd=prepared
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "line",
    [
        ["show", "dcp"],
        ["stat", "model.pt"],
        ["verify", "dcp"],
        ["diff", STEP, "model.pt"],
        ["explain", STEP, "hf-model"],
    ],
)
def test_what_needs_torch_says_so(prepared, line):
    program = "import sys; sys.modules['torch'] = None; from holdfast._cli.main import run; sys.exit(run(sys.argv[1:]))"
    ran = subprocess.run([sys.executable, "-c", program, *line], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "needs torch, which is not installed" in ran.stderr
    assert "defect" not in ran.stderr


# --- nothing, and errors of the user ---------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [["verify", STEP], ["diff", STEP, "dcp"], ["show", STEP]])
def test_patterns_that_mean_nothing_are_an_error(cli, prepared, line):
    ran = cli(*line, "--include", "modle.*")
    assert (ran.status, ran.out) == (2, "")
    assert "modle.*" in ran.err


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def make(): return missing", "NameError: name 'missing' is not defined"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("def make(): raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_errors_of_the_code_of_the_user_are_called_so(cli, prepared, code, told):
    (prepared / "bad.py").write_text(code)
    ran = cli("explain", STEP, "bad.py:make")
    words = " ".join(ran.err.replace("│", " ").split())
    assert ran.status == 2
    assert told in words
    assert "raised by the code that makes the state" in words
    assert "defect" not in words


def test_debug_shows_where_the_code_of_the_user_failed(cli, prepared):
    (prepared / "bad.py").write_text("def make(): return missing")
    with pytest.raises(Exception, match="missing") as raised:
        cli("explain", STEP, "bad.py:make", "--debug")
    assert isinstance(raised.value.__cause__, NameError)


def test_a_budget_that_is_too_small_is_refused_whatever_is_asked(cli, prepared):
    for options in ([], ["--finite"]):
        assert cli("stat", STEP, "--memory", "1", *options).status == 2


def test_what_was_rebuilt_is_shown_by_every_command(prepared, cli):
    step = "runs/a/step-00000200"
    [data] = [name for name in os.listdir(step) if name.startswith("data-")]
    spoil_table(Path(step, data))
    assert cli("repair", step, "--apply").status == 0

    verified = cli("verify", step)
    assert verified.status == 0
    assert "no damage found, but there are doubts" in verified.out
    assert cli("verify", step, "--json").json["reports"][0]["repairs"][0]["what"] == "columns"
    listed = cli("ls", "runs/a", "--json").json["places"][0]["entries"]
    assert [entry["repaired"] for entry in listed if entry["name"] == "step-00000200"] == ["columns"]
    assert [entry["repaired"] for entry in listed if entry["name"] == "step-00000300"] == [""]
    assert "columns rebuilt" in " ".join(cli("ls", step).out.split())
    assert "rebuilt by a repair" in " ".join(cli("show", step).out.split())
    assert cli("show", step, "--json").json["repairs"][0]["digests"] == "computed"
    assert "rebuilt by a repair" in " ".join(cli("stat", step).out.split())
