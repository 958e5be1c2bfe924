"""Load a safetensors file that somebody else wrote into a model that calls its parameters otherwise.

    python examples/load_elsewhere.py [FOLDER]

The file has three projections where the model has one, another prefix, and half precision. All of that is said in the
call; without it, nothing would be loaded and every difference reported.
"""

import os
import sys
import tempfile

import torch
from safetensors.torch import save_file
from torch import nn

import holdfast


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 8)


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
    path = os.path.join(folder, "published.safetensors")
    published = {f"encoder.{name}.weight": torch.randn(8, 8, dtype=torch.bfloat16) for name in ("q", "k", "v", "out")}
    save_file(published | {"encoder.out.bias": torch.randn(8, dtype=torch.bfloat16)}, path)
    model = nn.ModuleDict({"attention": Attention()})

    def join(ckpt, key):
        parts = [ckpt[f"encoder.{name}.weight"][:] for name in ("q", "k", "v")]
        return torch.cat(parts).float()

    try:
        holdfast.load(model, path)
    except holdfast.errors.StateMismatchError as error:
        print(f"as it is: {len(error.missing)} keys missing, {len(error.unexpected)} unexpected")

    report = holdfast.load(
        model, path, rename={"encoder": "attention"}, transform={"attention.qkv.weight": join}, cast=["attention.out.*"]
    )

    assert torch.equal(model["attention"].qkv.weight[8:16], published["encoder.k.weight"].float())
    assert torch.equal(model["attention"].out.weight, published["encoder.out.weight"].float())
    print("transformed:", ", ".join(report.transformed))
    print("cast:", ", ".join(report.cast))


if __name__ == "__main__":
    main()
