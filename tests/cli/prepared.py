"""A folder with small checkpoints of all formats, in which every example of the help of ``holdfast`` runs.

| Name | What it is |
|---|---|
| ``runs/a`` | a run: steps 100, 200 and 300, with the metric ``loss``; 300 is pinned |
| ``runs/b`` | another one, with step 100 |
| ``dcp`` | a checkpoint of stock ``torch.distributed.checkpoint`` |
| ``model.safetensors`` | a file |
| ``hf-model`` | a Hugging Face folder of two files, an index and a config.json |
| ``model.pt`` | a file of ``torch.save`` |
| ``damaged`` | a checkpoint without its columns |
| ``model.py`` | ``make_state()`` gives a state as that of the runs |
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as stock

import holdfast
from tests.native_files import spoil_table
from tests.torches import ALONE

MODEL = """
import torch


def make_state():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    return {"model": model, "step": 0}
"""


def state(step: int) -> dict:
    generator = torch.Generator().manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
    return {"model": model, "step": step}


def prepare(folder: Path) -> None:
    for run, steps in (("a", (100, 200, 300)), ("b", (100,))):
        with holdfast.CheckpointManager(folder / "runs" / run, every_steps=100) as manager:
            for step in steps:
                manager.save(step, state(step), metrics={"loss": 100 / step})
            manager.wait()
            if run == "a":
                manager.pin(300)
    weights = {key: tensor.clone() for key, tensor in state(200)["model"].state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stock says that it runs on one process
        stock.save({"model": weights, "step": 200}, checkpoint_id=folder / "dcp", **ALONE)
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    torch.save({"model": weights, "step": 200}, folder / "model.pt")
    _hugging_face(folder / "hf-model", weights)
    holdfast.save(state(100), folder / "damaged")
    for name in os.listdir(folder / "damaged"):
        if name.startswith("data-"):
            spoil_table(folder / "damaged" / name)
    (folder / "model.py").write_text(MODEL)


def _hugging_face(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    where: dict[str, str] = {}
    for number, layer in enumerate(("0", "1"), 1):
        part = {key: tensor for key, tensor in weights.items() if key.startswith(layer)}
        name = f"model-0000{number}-of-00002.safetensors"
        safetensors.torch.save_file(part, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(part, name)
    total = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "sequential"}')
