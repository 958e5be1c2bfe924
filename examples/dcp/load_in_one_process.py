"""Load what many processes saved into one, without a process group: in a notebook, for evaluation, to have a look.

    torchrun --nproc-per-node 2 examples/dcp/save_and_load.py FOLDER
    python examples/dcp/load_in_one_process.py FOLDER

A checkpoint knows nothing of the number of processes that will load it. Whole tensors are put together from the shards,
and only what the state asks for is read: here the model, but not its optimizer.
"""

import math
import os
import sys
import tempfile

import torch
from torch import nn

import holdfast.dcp as dcp


def show_contents(folder):
    """What a checkpoint holds is known from its index alone."""
    for key, stored in sorted(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.items()):
        if isinstance(stored, dcp.TensorStorageMetadata) and key.startswith("model."):
            print(f"  {key:16} {tuple(stored.size)!s:10} in {len(stored.chunks)} parts")


def load(folder):
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    state = {"model": model.state_dict(), "loss": math.nan}
    dcp.load(state, checkpoint_id=folder)
    return model, state["loss"]  # tensors were filled in place; values are new in the state


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(tempfile.gettempdir(), "save-and-load")
    show_contents(folder)
    model, loss_when_saved = load(folder)

    inputs = torch.linspace(-1, 1, 64 * 16).reshape(64, 16)
    with torch.no_grad():
        loss = (model(inputs) - inputs[:, :4].square()).square().mean().item()

    assert math.isclose(loss, loss_when_saved, rel_tol=1e-5), f"{loss} is not {loss_when_saved}"
    print(f"Loss when it was saved, on all processes: {loss_when_saved:.6f}; now, in one: {loss:.6f}")


if __name__ == "__main__":
    main()
