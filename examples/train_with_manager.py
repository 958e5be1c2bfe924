"""A training loop that can be stopped and started again at any time.

    python examples/train_with_manager.py [FOLDER]

`train` is all that a program needs: the state names what has to survive, and the manager knows when to save, what to
keep and where to go on. It saves in the background, and once more when the block ends. Here it is called as by two
programs, of which the first one is stopped early.
"""

import os
import sys
import tempfile

import torch
from torch import nn

import holdfast


def train(root, total, seed):
    torch.manual_seed(seed)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 4)).to(device)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, T_max=50)
    data = Batches(device)
    losses = {}

    state = {"model": model, "optim": optim, "sched": sched, "data": data, "rng": holdfast.RngState()}
    with holdfast.CheckpointManager(root, every_steps=5, keep_last=2, keep=holdfast.keep.best(1, "loss")) as manager:
        restored = manager.restore(state)  # None on a fresh start
        for step in range(restored.step + 1 if restored else 1, total + 1):
            inputs = data.next()
            loss = (model(inputs) - inputs[:, :4].square()).square().mean()
            optim.zero_grad()
            loss.backward()
            optim.step()
            sched.step()
            losses[step] = loss.item()
            manager.maybe_save(step, state, metrics={"loss": loss})
            if manager.should_stop:  # the machine asked for it with SIGTERM, and the step is saved
                break
    return losses, [info.step for info in manager.steps()]


class Batches:
    """What a data loader is to a checkpoint: something with a position."""

    def __init__(self, device):
        self.device = device
        self.position = 0

    def next(self):
        self.position += 1
        batch = torch.rand(8, 16, generator=torch.Generator().manual_seed(self.position))
        return batch.to(self.device)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def main():
    folder = tempfile.mkdtemp(prefix="train-with-manager-", dir=sys.argv[1] if len(sys.argv) > 1 else None)

    uninterrupted, _ = train(os.path.join(folder, "one-go"), total=20, seed=1)
    stopped, kept = train(os.path.join(folder, "two-goes"), total=13, seed=1)
    print("Stopped after step 13, with checkpoints of", *kept)
    resumed, kept = train(os.path.join(folder, "two-goes"), total=20, seed=2)
    print(f"Went on with step {min(resumed)}; now there are", *kept)

    assert {**stopped, **resumed} == uninterrupted, "the losses are not those of a run without a break"
    print("Losses without a break:", *(f"{uninterrupted[step]:.6f}" for step in (14, 15, 20)))
    print("Losses with a break:   ", *(f"{resumed[step]:.6f}" for step in (14, 15, 20)))


if __name__ == "__main__":
    main()
