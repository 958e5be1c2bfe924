"""A training checkpoint as a folder that loaders of Hugging Face models read: no model class, no GPU, little memory.

    python examples/export_to_hugging_face.py [FOLDER]

The same on the command line: `holdfast export run/step-00000020 model-hf --cast bfloat16 --max-file-size 2GB`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open

import holdfast

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))


torch.manual_seed(0)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(20):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
holdfast.save({"model": model, "optimizer": optimizer, "step": 20}, folder / "step-20", overwrite=True)
(folder / "config.json").write_text(json.dumps({"model_type": "two-layers"}))

# The model is found by its name in the state. Files are small here, so that there are several of them.
report = holdfast.export(
    folder / "step-20",
    folder / "model-hf",
    rename={"0": "encoder", "2": "head"},
    cast="bfloat16",
    max_file_size="2KB",
    files=[folder / "config.json"],
    overwrite=True,
)
print(f"Taken: '{report.part}', {report.tensors} tensors in {len(report.files) - 2} files, checked: {report.checked}")
print(f"Left out: {len(report.left_out)} keys, such as {report.left_out[-1]}")

# What a loader does: the index says which file holds which tensor.
index = json.loads((folder / "model-hf" / "model.safetensors.index.json").read_text())
weights = {}
for key, name in index["weight_map"].items():
    with safe_open(folder / "model-hf" / name, framework="pt") as file:
        weights[key] = file.get_tensor(key)
names = {"encoder": "0", "head": "2"}
loaded = make_model().to(torch.bfloat16)
loaded.load_state_dict({names[key.split(".")[0]] + "." + key.split(".")[1]: weights[key] for key in weights})

for mine, other in zip(model.parameters(), loaded.parameters(), strict=True):
    assert torch.equal(mine.detach().to(torch.bfloat16), other)
print("The folder holds the trained weights")
