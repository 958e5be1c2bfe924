"""Fine-tune with low-rank adapters: checkpoints hold what is trained, and the base model stays where it is.

    python examples/lora_finetune.py [FOLDER]

The state has the parameters that require a gradient, by their names in the model, and the optimizer that knows no
others. Everything else comes from the checkpoint of the base model, which is read and never written again.
"""

import os
import sys
import tempfile

import torch
from torch import nn

import holdfast


class LowRank(nn.Module):
    """A linear layer that stays as it is, and two small matrices that learn what to add to it."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, inputs):
        return self.base(inputs) + inputs @ self.down.T @ self.up.T


def build_base():
    return nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))


def finetune(base, root, total, seed):
    torch.manual_seed(seed)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = build_base()
    holdfast.load({"model": model}, base)
    model[0], model[2] = LowRank(model[0], rank=4), LowRank(model[2], rank=4)
    model.to(device)

    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optim = torch.optim.AdamW(trained.values(), lr=0.01)
    state = {"adapter": trained, "optim": optim}
    with holdfast.CheckpointManager(
        root, every_steps=5, keep_last=2, save_options={"metadata": {"base": base}}
    ) as manager:
        restored = manager.restore(state)
        for step in range(restored.step + 1 if restored else 1, total + 1):
            inputs = torch.rand(8, 128, generator=torch.Generator().manual_seed(step)).to(device)
            loss = (model(inputs) - inputs.square()).square().mean()
            optim.zero_grad()
            loss.backward()
            optim.step()
            manager.maybe_save(step, state, metrics={"loss": loss})
    return model, manager.latest()


def main():
    folder = tempfile.mkdtemp(prefix="lora-finetune-", dir=sys.argv[1] if len(sys.argv) > 1 else None)
    base = os.path.join(folder, "base")
    torch.manual_seed(0)
    base_size = holdfast.save({"model": build_base()}, base).bytes_written

    in_one_go, _ = finetune(base, os.path.join(folder, "one-go"), total=20, seed=1)
    finetune(base, os.path.join(folder, "two-goes"), total=12, seed=1)
    resumed, latest = finetune(base, os.path.join(folder, "two-goes"), total=20, seed=2)

    for (name, one), other in zip(in_one_go.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), f"{name} differs"
    with holdfast.open(latest.path) as checkpoint:
        weights = [key for key in checkpoint if key.startswith("adapter.")]
    print("A checkpoint of the run has", ", ".join(weights))
    print(f"It takes {latest.nbytes / base_size:.0%} of the base model, with the state of the optimizer")


if __name__ == "__main__":
    main()
