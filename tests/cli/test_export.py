from __future__ import annotations

import torch

import holdfast
from tests.tools.converting.formats import load_like_transformers


def test_a_run_becomes_a_folder_that_loaders_take(prepared, cli):
    ran = cli(
        "export",
        "runs/a/step-00000200",
        "new",
        "--max-file-size",
        "100",
        "--like",
        "hf-model",
        "--file",
        "hf-model/config.json",
    )
    assert ran.status == 0, ran.err
    assert "the model is 'model'" in ran.out
    found = load_like_transformers(prepared / "new")
    expected = load_like_transformers(prepared / "hf-model")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert (prepared / "new" / "config.json").exists()


def test_a_model_that_is_not_like_the_other_has_status_2(prepared, cli):
    ran = cli("export", "model.pt", "new", "--like", "hf-model", "--rename", "0=first", "--json")
    assert ran.status == 2
    assert "0.weight" in ran.json["error"]["missing"]
    assert not (prepared / "new").exists()


def test_the_help_speaks_of_the_names_of_the_model(prepared, cli):
    shown = " ".join(cli("export", "--help").out.split())
    assert "'model.*'" not in shown
    ran = cli("export", "dcp", "new", "--cast", "0.weight=float16", "--cast", "model.*=float64", "--json")
    assert ran.status == 0, ran.out
    assert ran.json["cast"] == {"0.weight": ["float32", "float16"]}
    assert ran.json["unused"] == {"cast": ["model.*"]}


def test_parts_patterns_and_memory(prepared, cli):
    ran = cli(
        "export", "dcp", "new", "--part", "model", "--include", "*.weight", "--memory", "1MB", "--no-check", "--json"
    )
    assert ran.status == 0, ran.out
    assert ran.json["checked"] is False
    assert all(key.endswith("weight") for key in holdfast.open("new"))
    assert cli("export", "dcp", "other", "--part", "modle").status == 2
