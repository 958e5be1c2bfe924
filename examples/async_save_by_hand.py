"""Save in the background without a manager: what may be done when, and how to know that a checkpoint is there.

    python examples/async_save_by_hand.py [FOLDER]

With `optimizers=` the call returns before the weights are copied. Copying goes on during forward and backward, and the
next step of the optimizer waits for what is left of it. Whoever changes weights in another way waits by hand.
"""

import os
import sys
import tempfile

import torch
from torch import nn

import holdfast


def main():
    folder = tempfile.mkdtemp(prefix="async-save-by-hand-", dir=sys.argv[1] if len(sys.argv) > 1 else None)
    torch.manual_seed(1)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    state = {"model": model, "optim": optimizer, "step": 0}
    saves, as_it_was = {}, {}

    for step in range(1, 9):
        train_step(model, optimizer)
        state["step"] = step
        if step % 2 == 0:
            as_it_was[step] = model[0].weight.detach().clone()
            saves[step] = holdfast.async_save(state, os.path.join(folder, f"step-{step}"), optimizers=optimizer)

    # No optimizer does this, so nothing but this line keeps it from changing what is being saved.
    saves[8].staged.result()
    with torch.no_grad():
        model[0].weight.mul_(0.5)

    for step, pending in saves.items():
        report = pending.result()  # committed: durable, complete, and found by holdfast.load. Raises if the save failed
        stored = holdfast.open(pending.path)["model.0.weight"][:]
        assert torch.equal(stored, as_it_was[step].cpu()), f"step {step} was torn"
        print(f"step {step}: {report.tensor_count} tensors, as they were when the save was called")

    pending = holdfast.async_save(state, os.path.join(folder, "by-a-writer-process"), writer="process")
    print("a writer process:", pending.result().tensor_count, "tensors; then", pending.progress().phase)


def train_step(model, optimizer):
    inputs = torch.rand(32, 256, device=model[0].weight.device)
    optimizer.zero_grad()
    (model(inputs) - inputs.square()).square().mean().backward()
    optimizer.step()


if __name__ == "__main__":
    main()
