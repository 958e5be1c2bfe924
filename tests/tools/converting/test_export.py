"""``holdfast.export``: a Hugging Face folder that loaders take, with the weights of the model and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast._stores.file_sink import FileSink
from holdfast.errors import StateMismatchError, UnknownKeyError
from tests.exact import assert_same
from tests.tools.converting.formats import load_like_transformers


class Net(torch.nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def save_training(path, tied=False):
    model = Net(tied)
    holdfast.save({"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 3}, path)
    return model


def save_sharded(path):
    """On every rank: a part of the rows or columns of each weight."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (4,))
    state = {
        key: distribute_tensor(tensor, mesh, [Shard(dim)]) if tensor.dim() > dim else tensor
        for dim in (0, 1)
        for key, tensor in {f"d{dim}.w": torch.randn(10, 7), f"d{dim}.b": torch.randn(5)}.items()
    }
    holdfast.save({"model": state, "optim": {"lr": 0.1}}, path)
    return {key: (value.full_tensor() if hasattr(value, "full_tensor") else value) for key, value in state.items()}


def test_a_loader_takes_the_folder_with_every_weight(tmp_path):
    model = save_training(tmp_path / "saved")
    report = holdfast.export(tmp_path / "saved", tmp_path / "hf", max_file_size=300)

    state = load_like_transformers(tmp_path / "hf")
    fresh = Net()
    fresh.load_state_dict(state, strict=True)
    assert_same(dict(fresh.state_dict()), dict(model.state_dict()))
    assert report.part == "model"
    assert set(report.left_out) == {key for key in holdfast.open(tmp_path / "saved") if not key.startswith("model.")}
    sizes = [(tmp_path / "hf" / name).stat().st_size for name in report.files]
    assert len(sizes) > 3
    assert report.bytes_written == sum(sizes)


def test_one_file_needs_no_index(tmp_path):
    save_training(tmp_path / "saved")
    report = holdfast.export(tmp_path / "saved", tmp_path / "hf")
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["model.safetensors"] == list(report.files)


def test_a_checkpoint_of_several_ranks_comes_together(ranks, tmp_path):
    expected = ranks(4).run(save_sharded, tmp_path / "saved")[0]
    holdfast.export(tmp_path / "saved", tmp_path / "hf", max_file_size="200B")
    assert_same(dict(sorted(load_like_transformers(tmp_path / "hf").items())), dict(sorted(expected.items())))


def test_tied_weights_are_there_under_every_name_unless_the_original_has_one_only(tmp_path):
    save_training(tmp_path / "saved", tied=True)
    holdfast.export(tmp_path / "saved", tmp_path / "both")
    both = load_like_transformers(tmp_path / "both")
    assert torch.equal(both["head.weight"], both["embed.weight"])

    original = {key: tensor.contiguous() for key, tensor in both.items() if key != "head.weight"}
    save_file(original, tmp_path / "original.safetensors")
    report = holdfast.export(tmp_path / "saved", tmp_path / "one", like=tmp_path / "original.safetensors")
    assert load_like_transformers(tmp_path / "one").keys() == original.keys()
    assert "model.head.weight" in report.left_out


def test_a_model_that_differs_from_the_original_is_not_written(tmp_path):
    model = save_training(tmp_path / "saved")
    other = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    other["extra"] = other.pop("norm.bias")
    other["head.weight"] = other["head.weight"][:5].contiguous()
    save_file(other, tmp_path / "other.safetensors")
    with pytest.raises(StateMismatchError) as raised:
        holdfast.export(tmp_path / "saved", tmp_path / "hf", like=tmp_path / "other.safetensors")
    assert raised.value.missing == ["extra"]
    assert raised.value.unexpected == ["norm.bias"]
    assert raised.value.shapes == {"head.weight": ((11, 6), (5, 6))}
    assert not (tmp_path / "hf").exists()

    holdfast.export(tmp_path / "saved", tmp_path / "hf", like=tmp_path / "saved")
    assert (tmp_path / "hf").is_dir()


@pytest.mark.parametrize(
    ("state", "part"),
    [
        ({"model": {"w": torch.ones(2)}, "optim": {"m": torch.ones(2)}}, "model"),
        ({"state_dict": {"w": torch.ones(2)}, "optimizer": {"m": torch.ones(2)}}, "state_dict"),
        ({"app": {"model": {"w": torch.ones(2)}, "optim": {"m": torch.ones(2)}}}, "app.model"),
        ({"model_state_dict": {"module.w": torch.ones(2)}, "epoch": 3}, "model_state_dict"),
        ({"w": torch.ones(2), "optimizer": {"m": torch.ones(2)}, "rng_state": torch.ones(3)}, ""),
        ({"_orig_mod.module.w": torch.ones(2)}, ""),
    ],
)
def test_the_model_is_found_by_its_name_and_loses_what_wrappers_add(tmp_path, state, part):
    torch.save(state, tmp_path / "saved.pt")
    report = holdfast.export(tmp_path / "saved.pt", tmp_path / "hf")
    assert report.part == part
    assert_same(load_like_transformers(tmp_path / "hf"), {"w": torch.ones(2)})


def test_names_that_begin_with_model_are_names_of_the_model_in_a_flat_file(tmp_path):
    save_file({"model.embed.weight": torch.ones(2), "lm_head.weight": torch.ones(3)}, tmp_path / "m.safetensors")
    holdfast.export(tmp_path / "m.safetensors", tmp_path / "hf")
    assert load_like_transformers(tmp_path / "hf").keys() == {"model.embed.weight", "lm_head.weight"}


def test_a_part_can_be_named_and_must_be_there(tmp_path):
    holdfast.save({"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}}, tmp_path / "saved")
    holdfast.export(tmp_path / "saved", tmp_path / "hf", part="ema")
    assert_same(load_like_transformers(tmp_path / "hf"), {"w": torch.zeros(2)})
    with pytest.raises(UnknownKeyError, match="ema"):
        holdfast.export(tmp_path / "saved", tmp_path / "other", part="emma")
    holdfast.export(tmp_path / "saved", tmp_path / "all", part="")
    assert load_like_transformers(tmp_path / "all").keys() == {"model.w", "ema.w"}


def test_patterns_renames_and_casts_are_about_names_of_the_model(tmp_path):
    model = save_training(tmp_path / "saved")
    report = holdfast.export(
        tmp_path / "saved",
        tmp_path / "hf",
        exclude="norm",
        rename={"layers": "transformer.h", "embed": "transformer.wte"},
        cast={"layers.1": "bfloat16", "head": "float16", "model.*": "float64"},
    )
    found = load_like_transformers(tmp_path / "hf")
    assert torch.equal(found["transformer.h.1.weight"], model.layers[1].weight.detach().to(torch.bfloat16))
    assert not any(key.startswith("norm") for key in found)
    assert report.renamed["model.embed.weight"] == "transformer.wte.weight"
    assert report.cast["head.weight"] == ("float32", "float16")
    assert found["transformer.h.0.weight"].dtype == torch.float32
    assert report.unused == {"cast": ["model.*"]}
    with pytest.raises(UnknownKeyError, match="its own names"):
        holdfast.export(tmp_path / "saved", tmp_path / "other", include="model.layers")


def test_files_are_put_beside_and_must_exist(tmp_path):
    save_training(tmp_path / "saved")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "net"}))
    report = holdfast.export(tmp_path / "saved", tmp_path / "hf", files=[tmp_path / "config.json"])
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"model_type": "net"}
    assert "config.json" in report.files
    with pytest.raises(FileNotFoundError):
        holdfast.export(tmp_path / "saved", tmp_path / "other", files=[tmp_path / "tokenizer.json"])


def test_files_never_take_the_place_of_weights_or_of_each_other(tmp_path):
    save_training(tmp_path / "saved")
    (tmp_path / "a").mkdir()
    for name in ("model.safetensors", "model.safetensors.index.json", "config.json", "a/config.json"):
        (tmp_path / name).write_text("{}")
    for names in (["model.safetensors"], ["model.safetensors.index.json"], ["config.json", "a/config.json"]):
        with pytest.raises(ValueError, match="beside the weights"):
            holdfast.export(tmp_path / "saved", tmp_path / "hf", files=[tmp_path / name for name in names], check=False)
    assert not (tmp_path / "hf").exists()


def test_files_are_durable_before_the_folder_gets_its_name(tmp_path):
    save_training(tmp_path / "saved")
    (tmp_path / "config.json").write_text("{}")
    synced = []
    finish = FileSink.finish
    with mock.patch.object(FileSink, "finish", lambda sink: (synced.append(Path(sink.path).name), finish(sink))):
        holdfast.export(tmp_path / "saved", tmp_path / "hf", files=[tmp_path / "config.json"])
    assert "config.json" in synced


def test_parts_of_a_model_may_be_called_almost_anything(tmp_path):
    names = ["resampler.proj.weight", "upscaler.w", "random_features.w", "downsampler.0.weight", "sampler.w", "rng.w"]
    state = {name: torch.ones(2) for name in [*names, "lm_head.weight", "scheduler.emb"]}
    save_file(state, tmp_path / "m.safetensors")
    holdfast.export(tmp_path / "m.safetensors", tmp_path / "hf")
    assert load_like_transformers(tmp_path / "hf").keys() == state.keys()

    nested = {"resampler": {"w": torch.ones(2)}, "head": torch.ones(3), "upsampler": {"w": torch.ones(1)}}
    training = ["optimizer", "critic_optim", "optimizer_states", "lr_scheduler", "rng_state", "grad_scaler", "sampler"]
    holdfast.save(
        nested | {name: {"x": torch.ones(4)} for name in training} | {"step": torch.ones(1)}, tmp_path / "saved"
    )
    report = holdfast.export(tmp_path / "saved", tmp_path / "nested")
    assert load_like_transformers(tmp_path / "nested").keys() == {"resampler.w", "head", "upsampler.w"}
    assert set(report.left_out) == {*(f"{name}.x" for name in training), "step"}


def test_people_see_in_short_what_was_renamed_and_left_out(tmp_path):
    save_training(tmp_path / "saved")
    report = holdfast.export(tmp_path / "saved", tmp_path / "hf", rename={"embed": "wte"}, exclude="layers")
    lines = str(report).splitlines()
    count = len(report.left_out)
    assert "  'model.' taken off 6 keys" in lines
    assert "  renamed: model.embed.weight → wte.weight" in lines
    assert f"  left out: {count} keys of optimizer, step, model" in lines
    assert len(report.to_json()["left_out"]) == count
    assert len(report.to_json()["renamed"]) == 7


@pytest.mark.parametrize("size", ["much", "-1GB", 0, "0", 1.5])
def test_sizes_that_make_no_sense_are_refused(tmp_path, size):
    with pytest.raises(ValueError, match="max_file_size"):
        holdfast.export(tmp_path, tmp_path / "hf", max_file_size=size)
