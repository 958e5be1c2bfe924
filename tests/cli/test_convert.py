from __future__ import annotations

import torch

import holdfast


def test_a_checkpoint_is_converted_and_the_answer_says_what_was_done(prepared, cli):
    ran = cli(
        "convert", "dcp", "new", "--to", "native", "--rename", "model=net", "--cast", "*.weight=float16", "--json"
    )

    assert ran.status == 0, ran.err
    assert ran.json["to"] == "native"
    assert ran.json["checked"] is True
    assert ran.json["renamed"]["model.0.weight"] == "net.0.weight"
    assert ran.json["cast"]["net.0.weight"] == ["float32", "float16"]
    assert holdfast.open("new")["step"] == 200


def test_types_are_given_for_all_or_by_pattern(prepared, cli):
    assert cli("convert", "model.pt", "a", "--to", "native", "--cast", "bfloat16").status == 0
    assert (
        cli("convert", "model.pt", "b", "--to", "native", "--cast", "*.bias=float64", "--cast", "float16").status == 0
    )

    assert holdfast.open("a")["model.0.weight"].dtype == torch.bfloat16
    assert holdfast.open("b")["model.0.weight"].dtype == torch.float16
    assert holdfast.open("b")["model.0.bias"].dtype == torch.float64


def test_the_output_lists_what_was_left_out(prepared, cli):
    ran = cli("convert", "model.pt", "w.safetensors", "--to", "safetensors", "--only-tensors")
    assert ran.status == 0
    assert "left out: step" in ran.out
    assert "read back and compared" in ran.out


def test_what_cannot_be_done_has_status_2_and_changes_nothing(prepared, cli):
    values = cli("convert", "model.pt", "w.safetensors", "--to", "safetensors")
    assert values.status == 2
    assert "step" in values.err
    assert not (prepared / "w.safetensors").exists()

    exists = cli("convert", "dcp", "model.pt", "--to", "torch", "--json")
    assert exists.status == 2
    assert exists.json["error"]["type"] == "CheckpointExistsError"
    assert cli("convert", "dcp", "model.pt", "--to", "torch", "--overwrite").status == 0
    assert cli("convert", "dcp", "new", "--to", "onnx").status == 2
    assert cli("convert", "damaged", "new", "--to", "native").status == 2
    assert not (prepared / "new").exists()
