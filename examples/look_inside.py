"""List, slice and read a checkpoint: no process group, no model class, no pickle.

    python examples/look_inside.py [FOLDER]

Of a tensor only the blocks are read that hold the wanted elements. At the end the same is done by a Python that cannot
import torch.
"""

import os
import subprocess
import sys
import tempfile

import torch
from torch import nn

import holdfast

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import holdfast
weight = holdfast.open(sys.argv[1])["model.0.weight"]
print("without torch:", type(weight[0, :2]).__name__, weight[0, :2])
"""


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
    path = os.path.join(folder, "look-inside")
    model = nn.Sequential(nn.Linear(1000, 500), nn.ReLU(), nn.Linear(500, 2)).to(torch.bfloat16)
    holdfast.save({"model": model, "step": 7}, path, overwrite=True, metadata={"loss": 0.25})

    with holdfast.open(path) as ckpt:
        for key in ckpt:
            print(f"{key:16} {ckpt[key]}")
        print("loss:", ckpt.metadata["loss"])
        corner = ckpt["model.0.weight"][:2, :2]
        assert torch.equal(corner, model[0].weight[:2, :2])
        print("a corner of it:", list(corner.shape), corner.dtype)
        nested = ckpt.read("model.2")
        print("a part of it:", list(nested["model"]))
    print(subprocess.check_output([sys.executable, "-c", WITHOUT_TORCH, path], text=True), end="")


if __name__ == "__main__":
    main()
