"""What ``verify`` says of a Hugging Face folder whose index does not agree with its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import holdfast
import holdfast.dcp
from holdfast._tools.inspecting.verify import verify
from holdfast._tools.repairing.repair import repair
from holdfast.dcp.hf_storage import HuggingFaceStorageWriter

INDEX = "model.safetensors.index.json"
FILES = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as Hugging Face's programs write it: two tensors per file."""
    folder = tmp_path / "model"
    folder.mkdir()
    where, total = {}, 0
    for number, name in enumerate(FILES):
        part = {f"layer.{number}.{key}": torch.full((5, 7 + number), float(number)) for key in ("a", "b")}
        save_file(part, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(part, name)
        total += sum(tensor.nbytes for tensor in part.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    report = verify(folder)
    assert (report.ok, report.doubts) == (True, ())
    return folder


def edit(folder: Path, change: Any) -> None:
    content = json.loads((folder / INDEX).read_text())
    change(content)
    (folder / INDEX).write_text(json.dumps(content))


def lose(*keys: str) -> Any:
    def change(content: dict[str, Any]) -> None:
        for key in keys:
            del content["weight_map"][key]

    return change


def set_total(total: Any) -> Any:
    def change(content: dict[str, Any]) -> None:
        content["metadata"]["total_size"] = total

    return change


def test_a_tensor_of_a_listed_file_that_the_index_has_lost_is_damage_of_the_index(model: Path) -> None:
    edit(model, lose("layer.1.b"))

    report = verify(model)

    [damage] = report.damage
    assert (damage.file, damage.keys) == (INDEX, ("layer.1.b",))
    assert FILES[1] in damage.problem
    assert "repair" in damage.problem
    assert verify(model, include="layer.0.*").ok
    assert not verify(model, exclude="layer.0.*").ok


def test_a_file_that_the_index_has_lost_is_damage_of_the_index(model: Path) -> None:
    edit(model, lose("layer.2.a", "layer.2.b"))

    [damage] = verify(model).damage

    assert (damage.file, damage.keys) == (INDEX, ("layer.2.a", "layer.2.b"))


def test_a_file_that_is_gone_from_the_index_and_from_the_folder_is_damage_if_the_sum_says_so(model: Path) -> None:
    edit(model, lose("layer.1.a", "layer.1.b"))
    (model / FILES[1]).unlink()

    [damage] = verify(model).damage

    assert damage.file == INDEX
    assert FILES[1] in damage.problem
    assert (damage.expected, damage.found) == ("960 bytes", "640 bytes")


def test_a_sum_that_does_not_agree_is_reported_with_both_numbers_and_is_no_damage_by_itself(model: Path) -> None:
    """Programs count tensors that share memory differently, and some copy the number from another dtype."""
    edit(model, set_total(8240))

    report = verify(model)

    assert report.ok
    [doubt] = report.doubts
    assert "8,240" in doubt
    assert "960" in doubt
    assert "intact" not in str(report).splitlines()[0]
    assert doubt in str(report)
    assert report.to_json()["doubts"] == [doubt]
    assert verify(model, include="layer.0.*").doubts == (doubt,)


@pytest.mark.parametrize("total", [960, 960.0, "960", None, "many", -1, True, [], float("nan")])
def test_sums_that_agree_or_are_none_are_no_doubt(model: Path, total: Any) -> None:
    edit(model, set_total(total))
    assert verify(model).doubts == ()
    edit(model, lambda content: content.pop("metadata"))
    assert verify(model).doubts == ()


def test_a_sum_that_holdfast_has_written_is_exact(tmp_path: Path) -> None:
    state = {"a": torch.ones(5), "b": torch.ones(3, 4, dtype=torch.bfloat16), "c": torch.ones(())}
    writer = HuggingFaceStorageWriter(str(tmp_path / "hf"), fqn_to_index_mapping={"a": 1, "b": 2, "c": 3})
    holdfast.dcp.save(state, storage_writer=writer)
    report = verify(tmp_path / "hf")
    assert (report.ok, report.doubts) == (True, ())

    edit(tmp_path / "hf", set_total(49))

    [damage] = verify(tmp_path / "hf").damage
    assert (damage.file, damage.expected, damage.found) == (INDEX, "49 bytes", "48 bytes")


def test_what_convert_writes_has_a_sum_that_agrees(tmp_path: Path) -> None:
    holdfast.save({"a": torch.ones(5), "b": torch.ones(3, dtype=torch.bfloat16), "t": torch.ones(())}, tmp_path / "c")
    holdfast.convert(tmp_path / "c", tmp_path / "model", to="safetensors", max_file_size=20)
    assert (tmp_path / "model" / INDEX).exists()
    report = verify(tmp_path / "model")
    assert (report.ok, report.doubts) == (True, ())


def test_files_of_another_number_of_files_and_other_models_are_no_damage(model: Path) -> None:
    save_file({"layer.9.a": torch.ones(3)}, model / "model-00001-of-00002.safetensors")
    save_file({"lora.a": torch.ones(3)}, model / "adapter_model.safetensors")
    (model / "model-00004-of-00003.safetensors").write_bytes(b"?")
    save_file({"layer.9.b": torch.ones(3)}, model / "shard-00001-model-00001-of-00003.safetensors")
    report = verify(model)
    assert (report.ok, report.doubts) == (True, ())


@pytest.mark.parametrize("lost", [("layer.1.b",), ("layer.2.a", "layer.2.b")])
def test_an_index_that_has_lost_tensors_is_rebuilt(model: Path, lost: tuple[str, ...]) -> None:
    before = json.loads((model / INDEX).read_text())
    edit(model, lose(*lost))

    [finding] = repair(model).findings
    assert finding.outcome == "can be repaired"
    assert repair(model, apply=True).ok

    assert json.loads((model / INDEX).read_text()) == before
    report = verify(model)
    assert (report.ok, report.doubts) == (True, ())
    assert repair(model).findings == ()
